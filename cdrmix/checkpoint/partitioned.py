"""Where DeepSpeed's ZeRO-3 keeps a rank's share of each parameter (0.19.8, runtime/zero/stage3.py).

Each parameter is cut by itself: of W ranks, rank r holds elements [r * n, (r + 1) * n) of its
row-major order, n = ceil(elements / W), and what lies beyond the end is padding. The float32
masters of the shares stand one after another in the flat tensor of a sub-group, which is an
optimizer's parameter group or, of a large one, a part.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch


class PartitionShare(NamedTuple):
    """This rank's elements [start, start + numel) of a parameter, none of them padding."""

    start: int
    numel: int


def share(parameter: torch.Tensor) -> PartitionShare:
    """This rank's share of a partitioned parameter; empty where there is only padding."""
    partitioned: Any = parameter
    size = partitioned.ds_tensor.ds_numel
    total = partitioned.ds_numel
    start = min(partitioned.ds_zero_partition_rank * size, total)
    return PartitionShare(start, min(size, total - start))


def held(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's share itself, flat, padding included, in the type of the weights."""
    partitioned: Any = parameter
    return partitioned.ds_tensor


def sub_groups(optimizer: Any) -> Iterator[tuple[torch.nn.Parameter, list[torch.nn.Parameter]]]:
    """Flat float32 master of each sub-group, and its parameters."""
    yield from zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True)


def offset(optimizer: Any, parameter: torch.Tensor) -> int:
    """Where a trained parameter's share starts in the master of its sub-group."""
    return int(optimizer.grad_position[optimizer.get_param_id(parameter)][1])


def step_each(optimizer: Any) -> None:
    """A step of the optimizer inside, which holds the master of one sub-group at a time."""
    for number in range(len(optimizer.fp16_groups)):
        optimizer._optimizer_step(number)


def refresh_weights(optimizer: Any) -> None:
    """Make the weights in use those of the masters, as after a step; collective."""
    optimizer.parameter_offload.partition_all_parameters()
    for number in range(len(optimizer.fp16_groups)):
        optimizer._reassign_or_swap_out_partitioned_parameters(number)
    persistent = optimizer.persistent_parameters  # small ones, which are kept whole
    if persistent:
        persistent[0].all_gather(persistent)
