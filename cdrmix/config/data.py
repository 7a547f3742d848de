"""The `data` section: shards, order, mixture, weights of tokens."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from cdrmix.config.section import Section


class MixturePhase(Section):
    """One phase of a mixture. Without a length it lasts to the end of training."""

    weights: dict[str, float] | None = Field(
        None,
        description="Weight of each domain, relative; a domain that is left out is not read. Left "
        "out altogether: the number of samples in each domain.",
    )
    tokens: int | None = Field(None, ge=1, description="Length (tokens), rounded up to samples.")
    samples: int | None = Field(None, ge=1, description="Length (samples); instead of tokens.")
    change: Literal["step", "linear", "cosine"] = Field(
        "step",
        description="step: the weights hold from the first sample. linear, cosine: they are "
        "reached at the end of the phase, starting from those of the phase before.",
    )

    @model_validator(mode="after")
    def _one_length(self) -> MixturePhase:
        if self.tokens is not None and self.samples is not None:
            raise ValueError("give tokens or samples, not both")
        return self


class MixtureConfig(Section):
    """Shares of the domains of the training data, phase by phase."""

    temperature: float = Field(
        1.0,
        gt=0,
        description="Shares are weights to the power of 1 / temperature: above 1, small domains "
        "are seen more often (ratio).",
    )
    phases: tuple[MixturePhase, ...] = Field(
        (MixturePhase(),),
        min_length=1,
        strict=False,  # a list is what JSON has: a checkpoint's copy of the configuration
        description="In order; the last goes on after its end.",
    )


class TokenWeights(Section):
    """Weights of tokens in the training loss, a weighted mean, by what they are part of (ratio)."""

    text: float = Field(1.0, ge=0, description="Documents that are no chain of thought.")
    prompt: float = Field(0.0, ge=0, description="What a chain of thought is asked.")
    thought: float = Field(1.0, ge=0, description="The way to its answer.")
    answer: float = Field(1.0, ge=0, description="Its answer, with the end of the document.")


class DataConfig(Section):
    """Source of the token shards, and the order in which samples are taken."""

    path: str = Field(
        description="Folder of token shards, the URL of one (file, http, https, or what fsspec "
        "knows), or 'sample': built on first use from the text that ships with Python."
    )
    recipe: str | None = Field(
        None,
        description="Name of the data recipe that is made for this model, a file of "
        "model_configs/data without its suffix; a folder built by another one is trained on with a "
        "warning. null: any.",
    )
    cache_folder: str = Field(
        "data/cache", description="Where shards of a URL are copied to; a disk of each machine."
    )
    cache_bytes: int = Field(
        2**37, ge=1, description="Most that these copies take up, per data set (bytes)."
    )
    order: Literal["shuffled", "windowed", "sequential"] = Field(
        "shuffled",
        description="shuffled: a keyed permutation of each epoch's samples. windowed: windows of "
        "them are permuted, and the samples in each, so that few shards are read at a time.",
    )
    window_samples: int = Field(
        65_536, ge=1, description="Samples that are shuffled together where order = windowed."
    )
    verify: Literal["digest", "size"] = Field(
        "digest",
        description="Check of the shards before training: sha256 of every shard, spread over the "
        "ranks, or file sizes only.",
    )
    prefetch_batches: int = Field(
        2,
        ge=0,
        description="Batches that a thread reads ahead; 0: each is read when it is needed.",
    )
    mixture: MixtureConfig | None = Field(
        None,
        description="Shares of the domains; null: those of the recipe that the folder was built "
        "by, or, where it has none, all samples of the split once per epoch.",
    )
    token_weights: TokenWeights | None = Field(
        None, description="Weights of tokens in the training loss; null: all alike."
    )
    segment_documents: bool = Field(
        False,
        description="Keep the documents of a sample apart: neither attention nor recurrent state "
        "crosses from one to the next, and the first token of a document is not predicted.",
    )
