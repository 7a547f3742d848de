"""Section `cpt`: continual pre-training of a model that was trained before, on other data."""

from __future__ import annotations

from fractions import Fraction
from typing import Literal

from pydantic import Field, field_validator, model_validator

from cdrmix.config.section import Section

# Text in place of a folder: the starting model writes its own replay.
SELF: Literal["self"] = "self"
# Grain of the share of replay, as of the shares of a mixture.
MOST_SAMPLES_OF_SHARE = 10_000


def _folder(path: str) -> str:
    if not path or "://" in path:
        raise ValueError(f"{path!r} is no folder. Copy the data set to where all ranks can read it")
    return path


class ReplayConfig(Section):
    """Old data among the new, so that less of them is forgotten."""

    fraction: float = Field(0.1, ge=0, lt=1)
    """Share of the samples that are replay (ratio), exact to one sample in any stretch of them; 0:
    none, but what of `source` is forgotten is measured."""
    source: str
    """Folder of token shards with old data, built with the tokenizer of data.path; 'self': text
    that the starting model writes before the first step."""
    self_tokens: int = Field(1_000_000, ge=1)
    """Text that the model writes with source = self (tokens), into `replay` in the run
    directory."""
    self_document_tokens: int | None = Field(None, ge=2)
    """Longest document of it (tokens); null: training.sequence_length."""

    @field_validator("fraction")
    @classmethod
    def _is_not_too_small(cls, fraction: float) -> float:
        if 0 < fraction < 1 / MOST_SAMPLES_OF_SHARE:
            raise ValueError(f"{fraction} is below {1 / MOST_SAMPLES_OF_SHARE}. Try 0.01, or 0")
        return fraction

    @field_validator("source")
    @classmethod
    def _is_here(cls, source: str) -> str:
        return _folder(source)

    @property
    def share(self) -> Fraction:
        """Nearest ratio of two numbers up to 10,000, by which the samples are counted."""
        return Fraction(self.fraction).limit_denominator(MOST_SAMPLES_OF_SHARE)


class ForgettingConfig(Section):
    """Held-out loss on old and new data, from before the first step on."""

    # Not strict: a list is what JSON has, such as a checkpoint's copy of the configuration.
    data: tuple[str, ...] | None = Field(None, min_length=1, strict=False)
    """Folders of token shards with old data, of which the validation splits are read; null: the
    source of the replay, where it is a folder."""
    every_steps: int | None = Field(None, ge=1)
    """Optimizer steps between measurements; null: evaluation.every_steps."""
    tokens: int = Field(100_000, ge=1)
    """Held-out text that is read of each folder, the same each time, at most (tokens)."""
    stop_above: float | None = Field(None, gt=0)
    """Forgetting of any folder beyond which the run is saved and stopped with exit code 2 (nats per
    token); null: none stops it."""

    @field_validator("data")
    @classmethod
    def _are_different(cls, data: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if data is not None and len({*data}) < len(data):
            raise ValueError("a folder is given twice. Give each once")
        return data and tuple(map(_folder, data))


class CptConfig(Section):
    """Continual pre-training of a model on new data (data.path): replay of old data, and a measure
    of what is forgotten."""

    replay: ReplayConfig | None = None
    """Old data among the new; null: none."""
    forgetting: ForgettingConfig = ForgettingConfig()

    @model_validator(mode="after")
    def _limit_has_data(self) -> CptConfig:
        if self.forgetting.stop_above is not None and not self.old_data:
            raise ValueError(
                f"forgetting.stop_above = {self.forgetting.stop_above} needs old data to measure. "
                "Give forgetting.data"
            )
        return self

    @property
    def old_data(self) -> tuple[str, ...]:
        """Folders whose forgetting is measured."""
        if self.forgetting.data is not None:
            return self.forgetting.data
        is_folder = self.replay is not None and self.replay.source != SELF
        return (self.replay.source,) if self.replay is not None and is_folder else ()

    @property
    def replays(self) -> bool:
        """True where a share of the samples is old data."""
        return self.replay is not None and self.replay.fraction > 0

    @property
    def writes_replay(self) -> bool:
        """True where the starting model writes that share itself."""
        return self.replay is not None and self.replays and self.replay.source == SELF
