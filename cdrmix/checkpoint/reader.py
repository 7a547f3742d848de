"""Reading a checkpoint into any layout: by logical name, any block, any range, those bytes only."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Container
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from cdrmix.checkpoint.fragments import Block, Span, shared_runs
from cdrmix.checkpoint.index import span_of
from cdrmix.errors import StateError


class CheckpointReader:
    """One checkpoint folder that `cdrmix.checkpoint.store.find` has verified.

    Attributes:
        path: the folder.
        state: content of state.json: `step`, `world_size` and what the saver added.
    Raises:
        StateError: if the folder cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state: dict[str, Any] = self._json("state.json")
        self._tensors: dict[str, dict[str, Any]] = self._json("index.json")["tensors"]
        self._files = contextlib.ExitStack()
        self._opened: dict[str, Any] = {}

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the tensor files; tensors already read stay valid."""
        self._opened.clear()
        self._files.close()

    def names(self) -> list[str]:
        """Logical names of parameters and buffers."""
        return list(self._tensors)

    def kinds(self, name: str) -> list[str]:
        """What is there of `name`: `param`, `exp_avg`, `step`, ...; empty for an unknown name."""
        return list(self._tensors.get(name, {}))

    def content_kind(self, name: str) -> str:
        """`buffer` for a buffer, `param` for a parameter."""
        return "buffer" if "buffer" in self.kinds(name) else "param"

    def shape(self, name: str, kind: str = "param") -> tuple[int, ...]:
        """Logical, unsharded shape."""
        return tuple(self._entry(name, kind)["shape"])

    def rank_state(self, rank: int) -> dict[str, Any] | None:
        """What that rank alone had saved; None if the saving run had no such rank."""
        return self._json(f"rank-{rank:05d}.json") if rank < self.state["world_size"] else None

    def full(self, name: str, kind: str = "param") -> torch.Tensor:
        """The whole logical tensor, in its logical shape, on the CPU."""
        return self.read(name, kind).reshape(self.shape(name, kind))

    def read(
        self,
        name: str,
        kind: str = "param",
        *,
        block: Block | None = None,
        start: int = 0,
        numel: int | None = None,
    ) -> torch.Tensor:
        """Elements [start, start + numel) of a block of a logical tensor, assembled from fragments.

        Args:
            name: logical name.
            kind: one of `kinds(name)`.
            block: part of the logical tensor; None is all of it.
            start: first element, in the block's row-major order.
            numel: number of elements; None is up to the block's end.
        Returns:
            A new tensor on the CPU, [numel], in the saved dtype.
        Raises:
            StateError: if there is no such tensor, or its file cannot be read.
        """
        entry = self._entry(name, kind)
        block = block or Block.whole(entry["shape"])
        target = Span(block, start, block.numel - start if numel is None else numel)
        out = torch.empty(target.numel, dtype=getattr(torch, entry["dtype"]))
        filled = sum(self._copy_shared(fragment, target, out) for fragment in entry["fragments"])
        if filled != target.numel:
            raise StateError(
                f"{self.path}: {kind} of {name} has shape {tuple(entry['shape'])}, and "
                f"{target.numel - filled} of the {target.numel} elements asked for lie outside it"
            )
        return out

    def _copy_shared(self, fragment: dict[str, Any], target: Span, out: torch.Tensor) -> int:
        source_starts, target_starts, lengths = shared_runs(span_of(fragment), target)
        if not len(lengths):
            return 0
        first, end = int(source_starts[0]), int(source_starts[-1] + lengths[-1])
        # A view of the mapped file: only the pages of the runs are read.
        values = self._slice(fragment, first, end)
        runs = zip(
            (source_starts - first).tolist(), target_starts.tolist(), lengths.tolist(), strict=True
        )
        for source, destination, length in runs:
            out[destination : destination + length] = values[source : source + length]
        return int(lengths.sum())

    def _slice(self, fragment: dict[str, Any], first: int, end: int) -> torch.Tensor:
        path = self.path / fragment["file"]
        try:
            if fragment["file"] not in self._opened:
                opened = self._files.enter_context(safe_open(path, framework="pt"))
                self._opened[fragment["file"]] = opened
            return self._opened[fragment["file"]].get_slice(fragment["key"])[first:end]
        except (OSError, SafetensorError) as error:
            raise StateError(f"{path}: cannot be read: {error}") from error

    def _entry(self, name: str, kind: str) -> dict[str, Any]:
        try:
            return self._tensors[name][kind]
        except KeyError:
            raise StateError(f"{self.path}: holds no {kind} of {name!r}") from None

    def _json(self, name: str) -> dict[str, Any]:
        try:
            return json.loads((self.path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise StateError(f"{self.path / name}: cannot be read: {error}") from error


def check_names(
    reader: CheckpointReader, shapes: dict[str, tuple[int, ...]], *, others: Container[str] = ()
) -> None:
    """Raise StateError unless checkpoint and model have the same names with the same shapes.

    Args:
        reader: an open checkpoint.
        shapes: logical name -> logical shape of every parameter and persistent buffer.
        others: names in the checkpoint that need not be in the model.
    """
    saved = {name: reader.shape(name, reader.content_kind(name)) for name in reader.names()}
    problems = [f"{name}: not in the checkpoint" for name in shapes if name not in saved]
    problems += [
        f"{name}: not in the model" for name in saved if name not in shapes and name not in others
    ]
    problems += [
        f"{name}: {saved[name]} in the checkpoint, {shape} in the model"
        for name, shape in shapes.items()
        if name in saved and saved[name] != tuple(shape)
    ]
    if problems:
        shown = "\n".join(f"  {problem}" for problem in problems[:10])
        raise StateError(
            f"{reader.path}: holds another model ({len(problems)} differences):\n{shown}\nGive the "
            "model config that it was trained with, or start in a new run directory"
        )
