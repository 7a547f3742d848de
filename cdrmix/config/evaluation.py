"""The `evaluation` section: held-out loss, samples and suites."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from cdrmix.config.plugin import NameOrPlugin, label_of
from cdrmix.config.section import Section

SUITE_NAMES = ("perplexity", "zero-shot", "code", "infill", "reasoning", "routing")
# One of these, or package.module:Name of a user's suite.
SuiteName = Annotated[str, NameOrPlugin(SUITE_NAMES)]


class SuiteConfig(Section):
    """One suite of evaluations during training."""

    name: SuiteName
    """Name of the suite, or class of one of yours, each once in the list."""
    every_steps: int | None = Field(None, ge=1)
    """Optimizer steps between its evaluations; null: at the end of the run alone."""
    tasks: str | None = None
    """Folder or file of its tasks; null: those that come with it."""
    limit: int | None = Field(100, ge=1)
    """Most examples of each task (count); null: all."""
    seed: int = Field(0, ge=0, description="Of what it draws; apart from training.seed.")
    options: dict[str, str | int | float] = {}
    """Options of the suite, such as `samples: 5` of code: those of `cdrmix evaluate --option`."""

    @property
    def label(self) -> str:
        """Name in results and metrics, and in evaluation.best_by."""
        return label_of(self.name)


class EvaluationConfig(Section):
    """Evaluation on held-out data. In a run it reads at most 7 % of the tokens trained on since the
    last one, which takes less than 5 % of the run's time; at the end it reads `final_tokens`. With
    training.ema_decay it measures the average of the weights too: in a run on half of those tokens,
    each read twice."""

    every_steps: int | None = Field(500, ge=1, description="Optimizer steps between evaluations.")
    final_tokens: int = Field(1_000_000, ge=1)
    """Held-out text that is read at the end, at most (tokens)."""
    sample_prompt: str = "def"
    """Text that the generated sample continues; without a blank at its end."""
    sample_tokens: int = Field(64, ge=0, description="Tokens generated at each evaluation.")
    sample_temperature: float = Field(0.8, ge=0)
    """Temperature of the sample (ratio); 0: the likeliest token."""
    reasoning_examples: int = Field(32, ge=0)
    """Texts of each task and length at the end of Stage B, each with and without memory (count)."""
    reasoning_controls: bool = False
    """Have rivals and controls answer the same texts (evaluate --suite reasoning --controls)."""
    baselines: bool = False
    """Compare at the end with a smoothed unigram and bigram model of the training tokens. For small
    vocabularies."""
    # Not strict: a list is what JSON has, such as a checkpoint's copy of the configuration.
    suites: tuple[SuiteConfig, ...] = Field((), strict=False)
    """Suites that judge the model during training."""
    suites_share: float = Field(0.1, gt=0, le=1)
    """Largest share of the run's time that suites between steps may take (ratio); one that would
    take more waits, and the log says so. The suites at the end count for nothing here."""
    best_by: str = "loss"
    """Measure of the best checkpoint: loss, the held-out one, or SUITE/TASK/METRIC of a row of a
    suite above. The highest score is the best, but of losses, nats, perplexities, bits per byte,
    overflow and shares of failures the lowest. A step with the best row so far is saved too."""
    execute_code: bool = False
    """Run the programs that a model writes, for the suite `code`, in a sandbox."""
    sandbox: Literal["kernel", "bwrap"] = "kernel"
    """Sandbox of those programs: rules of the Linux kernel, or bubblewrap, which has to be
    installed."""

    @property
    def best_suite(self) -> str | None:
        """Suite that `best_by` names; None: the held-out loss decides."""
        return None if self.best_by == "loss" else self.best_by.partition("/")[0]

    @field_validator("suites")
    @classmethod
    def _each_once(cls, value: tuple[SuiteConfig, ...]) -> tuple[SuiteConfig, ...]:
        names = [each.label for each in value]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"{', '.join(twice)}: named twice. Name each suite once")
        return value

    @field_validator("best_by")
    @classmethod
    def _loss_or_a_row(cls, value: str) -> str:
        if value != "loss" and value.count("/") < 2:
            raise ValueError(f"{value!r} is neither loss nor SUITE/TASK/METRIC")
        return value
