"""Rules that keep a Hugging Face model on data ranks."""

from __future__ import annotations

from cdrmix.planning.layout import Combination
from cdrmix.planning.rule import OF_RANKS, Rule

# Why a Hugging Face model is split over no axis but data, by axis.
_HF_REASONS = {
    "tensor": "transformers' own tensor parallelism cannot be combined with DeepSpeed, for which "
    "it converts no weights",
    "pipeline": "its layers are transformers' and are not cut into stages",
    "sequence": "its attention reads all tokens of a sample on one rank",
    "expert": "its experts are ordinary parameters, and each rank computes all of them",
}
_TRANSFORMERS_SOURCE = "transformers 5.23 integrations/deepspeed.py"


def _whole_models() -> tuple[Rule, ...]:
    """Rules that keep a Hugging Face model on data ranks, one for each other axis."""

    def of_axis(axis: str, why: str) -> Rule:
        def applies(combination: Combination) -> bool:
            return combination.model.kind == "hf" and getattr(combination.degrees, axis) > 1

        def message(combination: Combination) -> str:
            return (
                f"parallel.{axis} = {getattr(combination.degrees, axis)} with model.kind = hf: "
                f"Hugging Face models run on data ranks, as {why}. Try parallel.{axis} = 1; "
                "ZeRO-2 and ZeRO-3 share out what does not fit"
            )

        source = _TRANSFORMERS_SOURCE if axis == "tensor" else OF_RANKS
        return Rule(f"hf-with-{axis}", applies, message, source)

    return tuple(of_axis(axis, why) for axis, why in _HF_REASONS.items())


WHOLE_MODELS = _whole_models()
