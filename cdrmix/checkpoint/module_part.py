"""Fills this rank's part of a model in any layout from weights elsewhere, without an engine.

An engine's masters are read by `engine_state`; a model that is judged and not trained has none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch import Tensor, nn

from cdrmix import runtime
from cdrmix.checkpoint.fragments import Box, Span
from cdrmix.checkpoint.plain_module import LogicalName, saved_tensors
from cdrmix.checkpoint.weight_source import WeightSource, check_source
from cdrmix.parallel.tensor import shard_of
from cdrmix.parallel.topology import Topology


class _Held(NamedTuple):
    """A parameter or buffer of this rank, and the part of its logical tensor that it holds."""

    shape: tuple[int, ...]  # logical
    span: Span
    values: Tensor  # [span.numel], or of any shape with as many elements


def fill_part(
    module: nn.Module,
    source: WeightSource,
    topology: Topology,
    logical_name: LogicalName = str,
    *,
    absent: Callable[[str], bool] = lambda _: False,
) -> None:
    """Reads weights into this rank's part of a model, in place; collective.

    Args:
        module: as `build_model` makes it: cut over tensor ranks and stages, its experts over expert
            groups, partitioned by ZeRO-3, or whole; in any float type.
        source: the weights.
        topology: of this rank.
        logical_name: of the module's names.
        absent: tells of a logical name that `source` need not have.
    Raises:
        StateError, DataError: on every rank, if names or shapes differ, or any of them could not
            read its part.
    """
    held = {
        logical_name(name): _held(tensor, topology) for name, tensor, _ in saved_tensors(module)
    }
    shapes = {name: each.shape for name, each in held.items()}
    if topology.pipeline_group is not None:  # a stage has a part of the names
        parts: list[Any] = [None] * topology.degrees.pipeline
        torch.distributed.all_gather_object(parts, shapes, group=topology.pipeline_group)
        shapes = {name: shape for part in parts for name, shape in part.items()}
    fresh = set(filter(absent, shapes))
    runtime.together(lambda: check_source(source, shapes, fresh=fresh))
    there = set(source.names())

    def read() -> None:
        for name, each in held.items():
            if name in there:
                values = source.read(name, each.span)
                each.values.copy_(values.reshape(each.values.shape))

    with torch.no_grad():
        runtime.together(read)


def _held(tensor: Any, topology: Topology) -> _Held:
    """Part of a logical tensor that this rank's parameter or buffer is."""
    values = tensor.detach()
    # ZeRO-3 leaves an empty tensor of a parameter, and its shape in `ds_shape`.
    local = tuple(getattr(tensor, "ds_shape", tensor.shape))
    shape, block = local, Box.whole(local)
    if not getattr(tensor, "allreduce", True):  # experts, by their global number
        rank = topology.expert_rank
        shape = (topology.degrees.expert * local[0], *local[1:])
        block = Box((rank * local[0], *(0 for _ in local[1:])), local)
    elif shard := shard_of(tensor):
        shape, block = shard.logical_shape, Box(shard.offset, local)
    if not hasattr(tensor, "ds_tensor"):
        return _Held(shape, Span.whole(block), values)
    start, numel = zero3_share(tensor)
    return _Held(shape, Span(block, start, numel), tensor.ds_tensor.detach().narrow(0, 0, numel))


def zero3_share(parameter: Any) -> tuple[int, int]:
    """Start and number of this rank's elements of a partitioned parameter, without padding."""
    size = parameter.ds_tensor.ds_numel
    total = parameter.ds_numel
    # The last ranks of a small parameter may hold padding alone: their share is empty.
    start = min(parameter.ds_zero_partition_rank * size, total)
    return start, min(size, total - start)
