"""Pipeline stages: how blocks are cut into them, and what crosses their boundaries."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, pairwise

from cdrmix.config.model import ModelConfig
from cdrmix.planning.blocks.block_type import is_v_first_made
from cdrmix.planning.counts import flops_above_layers, forward_flops_by_layer


def stage_layers(model: ModelConfig, sequence_length: int, pipeline: int) -> list[range]:
    """Cuts the blocks into contiguous stages of about equal FLOPs, each with at least one block."""
    # A search asks for each of its layouts. The folder of a Hugging Face model may change.
    cut = _cut if model.kind == "rwkx" else _cut.__wrapped__
    return list(cut(model, sequence_length, pipeline))


@lru_cache(maxsize=64)
def _cut(model: ModelConfig, sequence_length: int, pipeline: int) -> tuple[range, ...]:
    flops = forward_flops_by_layer(model, sequence_length)
    above = flops_above_layers(model, sequence_length)  # computed by the last stage
    reached = list(accumulate(flops))
    share = (reached[-1] + above) / pipeline
    cuts = [0]
    for stage in range(1, pipeline):
        open_cuts = range(cuts[-1] + 1, len(flops) - (pipeline - stage) + 1)
        distances = {cut: abs(reached[cut - 1] - share * stage) for cut in open_cuts}
        cuts.append(min(distances, key=distances.__getitem__))
    return tuple(range(*pair) for pair in pairwise([*cuts, len(flops)]))


def stages_without_experts(model: ModelConfig, sequence_length: int, pipeline: int) -> list[int]:
    """Pipeline stages of RWKX-V without experts, if others have some."""
    if pipeline == 1 or len(model.moe_layers()) in (0, model.num_layers):
        return []
    stages = stage_layers(model, sequence_length, pipeline)
    return [n for n, layers in enumerate(stages) if not any(map(model.has_experts, layers))]


def boundary_values(model: ModelConfig, stages: list[range], tensor: int) -> list[int]:
    """Values per token that cross the boundary before each stage, and after the last one (0).

    They are the residual stream, and v_first behind the block that makes it, whose heads are split
    over `tensor` ranks.
    """
    width = model.hidden_size
    has_v_first = [is_v_first_made(model, stage.start) for stage in stages[1:]]
    return [0, *(width + created * width // tensor for created in has_v_first), 0]
