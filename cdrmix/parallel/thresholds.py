"""Thresholds of Mixture of Depths, moved once a step by the tokens of all data ranks."""

# L routed blocks, S statistics

from __future__ import annotations

import torch
import torch.distributed
from torch import Tensor, nn

from cdrmix.config.schema import Config
from cdrmix.models.mixture_of_depths import routed_blocks
from cdrmix.objectives.depth import depth_monitors
from cdrmix.parallel.topology import Topology


def threshold_rate(step: int, config: Config) -> float:
    """Rate of the step behind `step` steps, which falls linearly over the run."""
    mod = config.model.mod
    assert mod is not None, "a model without it has no thresholds"
    done = min(1.0, step / max(1, config.training.num_steps - 1))
    return mod.threshold_rate + done * (mod.final_threshold_rate - mod.threshold_rate)


@torch.no_grad()
def move_thresholds(
    model: nn.Module, config: Config, topology: Topology, *, step: int, is_skipped: bool = False
) -> None:
    """Moves the thresholds of this rank's routed blocks; collective over the data ranks.

    theta <- theta + rate (fraction - capacity) std(r), from the statistics that the step's
    micro-batches left in the routers, which are used up. `step` is the number of steps before.
    Under another mode, without routed blocks, and if DeepSpeed skipped the step, on all ranks
    alike, nothing is exchanged or moved.
    """
    routers = [block.depth_router for block in routed_blocks(model)]
    observed = [router.observed for router in routers if router.observed is not None]
    for router in routers:
        router.observed = None
    mod = config.model.mod
    if mod is None or mod.mode != "threshold" or not observed or is_skipped:
        return
    assert len(observed) == len(routers), "a step runs every block"
    found = depth_monitors(sum_over_data_ranks(torch.stack(observed), topology))
    steps = threshold_rate(step, config) * (found.fraction - mod.capacity) * found.score_deviation
    # of scores that are not finite nothing is learnt
    for router, moved in zip(routers, torch.nan_to_num(steps, 0.0, 0.0, 0.0), strict=True):
        router.threshold += moved.to(router.threshold.dtype)


def sum_over_data_ranks(statistics: Tensor, topology: Topology) -> Tensor:
    """Sums statistics, [L, S], over the data ranks, in place."""
    # tensor ranks hold the same tokens, and other stages other blocks
    if topology.data_group is not None:
        torch.distributed.all_reduce(statistics, group=topology.data_group)
    return statistics
