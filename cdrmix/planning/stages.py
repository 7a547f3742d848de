"""Blocks of each pipeline stage, and values that cross the stage boundaries."""

from __future__ import annotations

from itertools import accumulate, pairwise

from cdrmix.config.model import ModelConfig
from cdrmix.planning.counts import forward_flops_by_layer, head_flops
from cdrmix.planning.layout import Degrees


def stage_layers(model: ModelConfig, sequence_length: int, pipeline: int) -> list[range]:
    """Blocks of each stage, contiguous and at least one, so that FLOPs are spread evenly.

    Args:
        model: dimensions.
        sequence_length: tokens of a sample, on which the FLOPs of attention depend.
        pipeline: stages, at most as many as there are blocks.
    """
    flops = forward_flops_by_layer(model, sequence_length)
    return _even_cuts(flops, head_flops(model), pipeline)


def border_values(model: ModelConfig, stages: list[range], degrees: Degrees) -> list[int]:
    """Values of a token that cross the border before each stage, and after the last one: of its
    residual stream, and of v_first once it is made. At the ends there is no border.

    Args:
        model: dimensions.
        stages: blocks of each stage.
        degrees: whose tensor ranks share out the heads of v_first.
    """
    kinds, width = model.layer_kinds(), model.hidden_size
    made = ["rwkv" in kinds[: stage.start] for stage in stages[1:]]
    return [0, *(width + there * width // degrees.tensor for there in made), 0]


def _even_cuts(flops: list[int], head: int, pipeline: int) -> list[range]:
    """Contiguous blocks for each stage, each stage with one at least; the last has the head too."""
    reached = list(accumulate(flops))
    share = (reached[-1] + head) / pipeline
    cuts = [0]
    for stage in range(1, pipeline):
        left = range(cuts[-1] + 1, len(flops) - (pipeline - stage) + 1)
        cuts.append(min(left, key=lambda cut: abs(reached[cut - 1] - share * stage)))  # noqa: B023
    cuts.append(len(flops))
    return [range(*pair) for pair in pairwise(cuts)]
