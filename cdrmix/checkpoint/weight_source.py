"""Weights that an engine may take from elsewhere: by logical name, and part by part."""

from __future__ import annotations

from collections.abc import Container, Mapping
from pathlib import Path
from typing import Protocol

from torch import Tensor

from cdrmix.checkpoint.checkpoint_file import CheckpointFile
from cdrmix.checkpoint.fragments import Span, is_stage_b
from cdrmix.errors import StateError

_NAMED = 10  # a model of another size differs in each of its thousands of names


class WeightSource(Protocol):
    """Weights of a model under logical names, in their logical, unsharded shapes.

    Methods raise StateError, of a folder of safetensors DataError, if the weights cannot be read,
    and InfrastructureError if the file system does not answer at present.
    """

    path: Path  # for messages

    def names(self) -> list[str]:
        """Logical names of all parameters and persistent buffers."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Logical shape of one of them."""

    def read(self, name: str, span: Span) -> Tensor:
        """Reads a span of it, [span.numel], of any type, on the CPU."""


class CheckpointWeights(WeightSource):
    """Weights of a checkpoint: float32 masters and buffers, of Stage B those of the backbone."""

    def __init__(self, checkpoint: CheckpointFile) -> None:
        self.path = checkpoint.path
        self._checkpoint = checkpoint

    def names(self) -> list[str]:
        """Logical names of the parameters and buffers of the backbone."""
        return [name for name in self._checkpoint.names() if not is_stage_b(name)]

    def shape(self, name: str) -> tuple[int, ...]:
        """Logical shape."""
        return self._checkpoint.shape(name, self._checkpoint.content_kind(name))

    def read(self, name: str, span: Span) -> Tensor:
        """Reads a span, [span.numel]: float32 of a parameter, a buffer in its own type."""
        return self._checkpoint.read(name, self._checkpoint.content_kind(name), span)


class LeftOut(WeightSource):
    """Weights of a source without some of its names."""

    def __init__(self, source: WeightSource, names: Container[str]) -> None:
        self.path = source.path
        self._source = source
        self._left_out = names

    def names(self) -> list[str]:
        """Logical names of the others."""
        return [name for name in self._source.names() if name not in self._left_out]

    def shape(self, name: str) -> tuple[int, ...]:
        """Logical shape."""
        return self._source.shape(name)

    def read(self, name: str, span: Span) -> Tensor:
        """Reads a span, [span.numel]."""
        return self._source.read(name, span)


def check_source(
    source: WeightSource,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    fresh: Container[str] = (),
) -> None:
    """Raises StateError unless source and model have the same names with the same logical shapes,
    but for `fresh` in the model, which the source need not have."""
    there = {name: source.shape(name) for name in source.names()}
    problems = [f"{name}: missing" for name in shapes if name not in there and name not in fresh]
    problems += [f"{name}: not in the model" for name in there if name not in shapes]
    problems += [
        f"{name}: {there[name]} there, {tuple(shape)} in the model"
        for name, shape in shapes.items()
        if name in there and there[name] != tuple(shape)
    ]
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems[:_NAMED])
        raise StateError(
            f"{source.path}: holds the weights of another model ({len(problems)} differences):\n"
            f"{listed}\nGive weights of the configured model, or configure theirs"
        )
