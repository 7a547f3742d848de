"""Weights of a folder of safetensors files, mapped to logical names; only what is asked for is
read."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Mapping, Sequence
from functools import partial, reduce
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cdrmix.checkpoint.files import SAFETENSORS_TYPES, retried
from cdrmix.checkpoint.fragments import Box, Span, shared_runs
from cdrmix.checkpoint.weight_source import WeightSource
from cdrmix.config.safetensors_headers import TensorSize, tensor_sizes
from cdrmix.errors import DataError

TYPES = {stored: getattr(torch, name) for name, stored in SAFETENSORS_TYPES.items()}
"""Types that are read, by their names in safetensors."""


class Piece(NamedTuple):
    """A tensor of the files and the box of the logical tensor that it fills, in row-major order.

    Their shapes are alike but for dimensions of size 1: a tensor [F, D] may fill [1, F, D].
    """

    source: str
    box: Box


class WeightFolder(WeightSource, contextlib.AbstractContextManager["WeightFolder"]):
    """Weights in `model.safetensors`, or in shards with `model.safetensors.index.json`."""

    def __init__(
        self,
        path: Path,
        pieces: Mapping[str, Sequence[Piece]],
        *,
        ignored: Container[str] = (),
        sizes: Mapping[str, TensorSize] | None = None,
    ) -> None:
        """Compares the pieces with the headers of the files.

        Args:
            path: the folder.
            pieces: of each logical name, boxes that fill its tensor without overlap.
            ignored: names of tensors in the files that no piece needs to take.
            sizes: of the tensors, as `read_sizes` gives them; None: they are read here.
        Raises:
            DataError: naming it, if a tensor is missing, unexpected, quantised or of another shape
                than its box; otherwise as `read_sizes`.
        """
        self.path = path
        self._stored = read_sizes(path) if sizes is None else sizes
        self._pieces = {name: tuple(each) for name, each in pieces.items()}
        self._check(ignored)
        self._shapes = {name: self._filled(name) for name in self._pieces}
        # Files stay open: each opening parses a header of all their tensors.
        self._files = contextlib.ExitStack()
        self._opened: dict[str, Any] = {}

    @classmethod
    def of_whole(cls, path: Path, *, prefix: str = "") -> WeightFolder:
        """Opens a folder whose tensors are whole, their names logical ones after a `prefix`."""
        sizes = read_sizes(path)
        pieces = {
            name.removeprefix(prefix): (Piece(name, Box.whole(stored.shape)),)
            for name, stored in sizes.items()
        }
        return cls(path, pieces, sizes=sizes)

    def __exit__(self, *_: object) -> None:
        """Closes the files; tensors already read stay valid."""
        self._opened.clear()
        self._files.close()

    def names(self) -> list[str]:
        """Logical names, as given."""
        return list(self._pieces)

    def shape(self, name: str) -> tuple[int, ...]:
        """Logical shape, which the pieces fill."""
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        """Type of the read values: that which holds those of all pieces."""
        types = (TYPES[self._stored[each.source].dtype] for each in self._pieces[name])
        return reduce(torch.promote_types, types)

    def read(self, name: str, span: Span) -> Tensor:
        """Reads a span of a logical tensor, [span.numel], in the type of the files."""
        out = torch.empty(span.numel, dtype=self.dtype(name))
        filled = 0
        for piece in self._pieces[name]:
            sources, destinations, lengths = shared_runs(Span.whole(piece.box), span)
            if not len(lengths):
                continue
            file = self.path / self._stored[piece.source].file
            try:
                values = retried(partial(self._mapped, piece.source), file)
            except (OSError, SafetensorError, RuntimeError) as error:
                raise DataError(f"{file}: {piece.source} cannot be read: {error}") from error
            runs = sources.tolist(), destinations.tolist(), lengths.tolist()
            for source, destination, length in zip(*runs, strict=True):
                out[destination : destination + length] = values[source : source + length]
            filled += int(lengths.sum())
        if filled != span.numel:  # the rest would be uninitialised memory
            raise DataError(
                f"{self.path}: {name} has shape {self.shape(name)}, and {span.numel - filled} of "
                f"the {span.numel} elements asked for lie outside it"
            )
        return out

    def _mapped(self, source: str) -> Tensor:
        """All elements of a tensor of the files, [numel], as a view of its mapped file: only the
        pages that are touched are read."""
        name = self._stored[source].file
        if name not in self._opened:
            path = self.path / name
            self._opened[name] = self._files.enter_context(safe_open(path, framework="pt"))
        values: Tensor = self._opened[name].get_tensor(source)
        return values.reshape(-1)

    def _check(self, ignored: Container[str]) -> None:
        """Raises DataError unless files and pieces name the same tensors, with the same sizes."""
        taken = [(name, piece) for name, pieces in self._pieces.items() for piece in pieces]
        sources = {piece.source for _, piece in taken}
        for name in sorted(sources & self._stored.keys()):
            if self._stored[name].dtype not in TYPES:
                # Values of such a type mean something with scales alone that stand elsewhere.
                raise DataError(
                    f"{self.path / self._stored[name].file}: {name} is of type "
                    f"{self._stored[name].dtype}, which is quantised or not of plain numbers; read "
                    f"are {', '.join(TYPES)}. Give the model in bfloat16 or float32"
                )
        problems = [
            f"{piece.source}: missing, {name} is made of it"
            for name, piece in taken
            if piece.source not in self._stored
        ]
        problems += [
            f"{name}: unexpected, of no use to the model"
            for name in self._stored
            if name not in sources and name not in ignored
        ]
        for name, piece in taken:
            if piece.source in self._stored:
                shape = self._stored[piece.source].shape
                if _without_ones(shape) != _without_ones(piece.box.shape):
                    expected = f"{piece.box.shape} in {name}"
                    problems.append(f"{piece.source}: has shape {shape}, and fills {expected}")
        if problems:
            listed = "\n".join(f"  {problem}" for problem in problems[:10])
            raise DataError(
                f"{self.path}: its tensors are not those of the model ({len(problems)} "
                f"differences):\n{listed}\nCopy the folder again, or give the one of this model"
            )

    def _filled(self, name: str) -> tuple[int, ...]:
        """Shape that the pieces of a tensor fill; DataError if they overlap or leave a gap."""
        boxes = [piece.box for piece in self._pieces[name]]
        ends = [[a + size for a, size in zip(b.offset, b.shape, strict=True)] for b in boxes]
        shape = tuple(map(max, zip(*ends, strict=True)))
        whole = Box.whole(shape)
        open_ones: list[Box] = []
        overlap = False
        # In the order of the first dimension: each is compared with those alone that reach to it.
        for box in sorted(boxes, key=lambda each: each.offset) if len(boxes) > 1 else ():
            open_ones = [one for one in open_ones if one.offset[0] + one.shape[0] > box.offset[0]]
            overlap = overlap or any(one.bounds_shared_with(box) for one in open_ones)
            open_ones.append(box)
        if overlap or sum(box.numel for box in boxes) != whole.numel:
            raise DataError(
                f"{self.path}: the tensors for {name} {'overlap' if overlap else 'leave a gap'} in "
                f"its shape {shape}. Give a folder with all tensors of the model"
            )
        return shape


def read_sizes(folder: Path) -> dict[str, TensorSize]:
    """Sizes of a folder's tensors, read as by `retried`. Raises as it and `tensor_sizes` do."""
    return retried(partial(tensor_sizes, folder), folder)


def _without_ones(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size != 1]
