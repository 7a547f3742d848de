"""The `objectives` section: weights of the parts of the training loss."""

from __future__ import annotations

import re

from pydantic import Field, model_validator

from cdrmix.config.model_parts import MtpConfig
from cdrmix.config.plugin import PluginConfig
from cdrmix.config.section import Section

# Of documents of the data, in the order in which they are told; each is a key below.
OF_TOKENS = ("text", "fim", "prompt", "thought", "answer")


# Names of other parts of the loss in metrics, beside those of further tokens.
_TAKEN = re.compile(r"text|fim|fim_middle|prompt|thought|answer|mtp_\d+")


class TermConfig(PluginConfig):
    """Term of the loss of yours."""

    weight: float = Field(1.0, ge=0, description="Factor on its mean in the loss (ratio).")
    name: str | None = Field(None, pattern=r"^[\w.-]{1,100}$")
    """Name in metrics, as objective/NAME/loss; null: that of the class."""

    @property
    def label(self) -> str:
        """Name given, or else that of the class."""
        return self.name or self.use.partition(":")[2]


class ObjectivesConfig(Section):
    """Weights of the parts of Stage A's loss; Stage B has its own, stage_b.losses. Each part is a
    mean over its own tokens of the global batch, so that a weight means the same whatever share of
    the batch has such tokens; a part without tokens in a step is left out of it."""

    text: float = Field(1.0, ge=0)
    """Next token in documents that are neither rearranged nor a chain of thought (ratio)."""
    fim: float = Field(1.0, ge=0)
    """Next token in documents rearranged for infilling, all of their parts (ratio)."""
    prompt: float = Field(0.0, ge=0, description="Question of a chain of thought (ratio).")
    thought: float = Field(1.0, ge=0)
    """Chain of thought without question and answer (ratio)."""
    answer: float = Field(1.0, ge=0)
    """Answer of a chain of thought, and end of the document (ratio)."""
    # Not strict: a list is what JSON has, such as a checkpoint's copy of the configuration.
    mtp: tuple[float, ...] | None = Field(None, strict=False)
    """Weight of each further token that model.mtp predicts, from the second on (ratio); null: 0.5,
    0.3, then 0.2 of independent heads, or 0.3 shared out evenly over deepseek depths."""
    late_mtp: tuple[float, ...] | None = Field(None, strict=False)
    """Weights in place of mtp from late_mtp_step on; null: they stay."""
    late_mtp_step: int | None = Field(None, ge=1)
    """First step with late_mtp (optimizer steps)."""
    z_loss: float = Field(0.0, ge=0)
    """Weight of the mean squared logarithm of the softmax's denominator, over tokens by their
    weights above (ratio), such as 1e-4; 0: none."""

    plugins: tuple[TermConfig, ...] = Field((), strict=False)
    """Terms of yours, each a mean over what it counts in the global batch."""

    @model_validator(mode="after")
    def _terms_have_names(self) -> ObjectivesConfig:
        names = [term.label for term in self.plugins]
        for name in names:
            if names.count(name) > 1 or _TAKEN.fullmatch(name):
                raise ValueError(
                    f"several parts of the loss are called {name}: give the one in plugins another "
                    "`name`"
                )
        return self

    @model_validator(mode="after")
    def _something_is_learned(self) -> ObjectivesConfig:
        for name in ("mtp", "late_mtp"):
            if any(weight < 0 for weight in getattr(self, name) or ()):
                raise ValueError(f"{name} has a weight below 0. Give 0 or more")
        if (self.late_mtp is None) != (self.late_mtp_step is None):
            raise ValueError("late_mtp and late_mtp_step belong together. Give both, or neither")
        if not any(getattr(self, name) for name in OF_TOKENS):
            raise ValueError(
                "text, fim, prompt, thought and answer are all 0: no next token is learned. Give "
                "one of them a weight"
            )
        return self

    def chosen(self) -> dict[str, float]:
        """Weights of tokens above 0 that were given, and not left at their defaults.

        Where all are given, as in the copy of a configuration, those that are no defaults.
        """
        fields = type(self).model_fields
        is_copy = self.model_fields_set >= fields.keys()
        weights = {name: float(getattr(self, name)) for name in OF_TOKENS}
        return {
            name: weight
            for name, weight in weights.items()
            if weight and name in self.model_fields_set
            if not is_copy or weight != fields[name].default
        }


_INDEPENDENT = (0.5, 0.3)  # weights of the second and the third token, then those of all others
_INDEPENDENT_LATER = 0.2
_DEEPSEEK = 0.3  # of all depths together


def further_weights(
    objectives: ObjectivesConfig | None, mtp: MtpConfig, step: int
) -> tuple[float, ...]:
    """Weights of the tokens 2 to n that `mtp` predicts, in the step after `step` steps."""
    if objectives is not None:
        late = objectives.late_mtp
        if late is not None and step + 1 >= (objectives.late_mtp_step or 0):
            return late
        if objectives.mtp is not None:
            return objectives.mtp
    further = mtp.num_tokens - 1
    if mtp.kind == "deepseek":
        return (_DEEPSEEK / further,) * further
    later = (_INDEPENDENT_LATER,) * further
    return (*_INDEPENDENT, *later)[:further]


def further_refused(
    objectives: ObjectivesConfig | None, mtp: MtpConfig | None, sequence_length: int
) -> str | None:
    """Tells what is wrong with the further tokens of a model and their weights; None: nothing."""
    for key in ("mtp", "late_mtp"):
        weights = None if objectives is None else getattr(objectives, key)
        if weights is None:
            continue
        if mtp is None:
            return (
                f"objectives.{key} weighs further tokens, and model.mtp is null. Try objectives."
                f"{key}=null, or give model.mtp"
            )
        if len(weights) != mtp.num_tokens - 1:
            return (
                f"objectives.{key} has {len(weights)} weights for the {mtp.num_tokens - 1} tokens "
                f"after the next one that model.mtp.num_tokens = {mtp.num_tokens} predicts. Give "
                "one for each"
            )
    if mtp is not None and mtp.num_tokens > sequence_length:
        return (
            f"model.mtp.num_tokens = {mtp.num_tokens} is more than training.sequence_length = "
            f"{sequence_length}: no position of a sample has a token so far ahead. Try model.mtp."
            f"num_tokens={sequence_length} or less"
        )
    return None


def further_in_stage_b(stage: str) -> str | None:
    """Tells why a reasoning variant cannot train `stage` with model.mtp; None: it can."""
    if stage == "a":
        return None
    return (
        f"training.stage = {stage} with model.mtp: Stage B trains the model without its further "
        "tokens, and its checkpoints would lack them. Train Stage A in a run of its own "
        "(training.stage = a), then Stage B with stage_b.run = that run, training.stage = b and "
        "model.mtp = null"
    )
