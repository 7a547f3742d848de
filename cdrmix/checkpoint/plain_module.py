"""Fills a plain module, with all of a model in this process, from a checkpoint or other weights."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from typing import Any

import torch

from cdrmix.checkpoint.checkpoint_file import CheckpointFile, check_names
from cdrmix.checkpoint.fragments import Box, Span
from cdrmix.checkpoint.weight_source import WeightSource, check_source

LogicalName = Callable[[str], str]  # the module's name of a parameter or buffer -> logical name
# True for the logical names of frozen parameters and buffers that no checkpoint holds.
Elsewhere = Callable[[str], bool]


def nowhere(_: str) -> bool:
    """Tells of every name that checkpoints hold it."""
    return False


def load_module(
    module: torch.nn.Module,
    checkpoint: CheckpointFile,
    logical_name: LogicalName = str,
    *,
    others: Container[str] = (),
    elsewhere: Elsewhere = nowhere,
) -> None:
    """Fills a plain module, with all experts in this process, from the float32 master weights, or
    from their average if `checkpoint` was opened for it. The module is on any device, of any float
    type, and read one tensor at a time. `logical_name`, `others` and `elsewhere` are as in
    `load_engine`. Raises StateError if names or shapes differ."""
    tensors = {logical_name(name): tensor for name, tensor, _ in saved_tensors(module)}
    tensors = {name: tensor for name, tensor in tensors.items() if not elsewhere(name)}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    check_names(checkpoint, shapes, others=others)
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(checkpoint.full(name, checkpoint.content_kind(name)))


def fill_module(
    module: torch.nn.Module,
    source: WeightSource,
    logical_name: LogicalName = str,
    *,
    fresh: Container[str] = (),
) -> None:
    """Fills a plain module with weights from elsewhere, one tensor at a time. Arguments are as in
    `load_weights`. Raises StateError if names or shapes differ."""
    tensors = {logical_name(name): tensor for name, tensor, _ in saved_tensors(module)}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    check_source(source, shapes, fresh=fresh)
    with torch.no_grad():
        for name in source.names():
            values = source.read(name, Span.whole(Box.whole(shapes[name])))
            tensors[name].copy_(values.view(shapes[name]))


def saved_tensors(module: torch.nn.Module) -> Iterator[tuple[str, Any, str]]:
    """Name, tensor and kind of each parameter, and of each buffer of a module's saved state."""
    yield from ((name, parameter, "param") for name, parameter in module.named_parameters())
    # named_buffers lists the others, too, which a module computes anew.
    saved = module.state_dict(keep_vars=True)
    yield from ((name, b, "buffer") for name, b in module.named_buffers() if name in saved)
