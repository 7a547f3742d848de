"""Reads a saved checkpoint into any layout. Tensors are addressed by logical name; any block and
any range of it can be read, and only those bytes are."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Container
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open

from cdrmix.checkpoint.files import SAFETENSORS_TYPES, plain_file, read_json, retried
from cdrmix.checkpoint.fragments import Box, Span, shared_runs, span_of
from cdrmix.errors import StateError
from cdrmix.optimizers.average import AVERAGE

# An index may come from anywhere: its file names must not lead out of the checkpoint's folder.
_TENSOR_FILE = re.compile(r"rank-[0-9]{5,9}\.safetensors")
# Values of the trained parameters: as trained, or their average.
Weights = Literal["trained", "ema"]
# Also the list of allowed types: an index names a type as text, which is never evaluated.
_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in SAFETENSORS_TYPES}


class CheckpointFile(contextlib.AbstractContextManager["CheckpointFile"]):
    """A checkpoint folder that `cdrmix.checkpoint.store.find_newest` has verified.

    `weights` says which values of the trained parameters `content_kind` names: those trained, or
    `ema`, their average. Raises StateError if it cannot be read, is no checkpoint of this package
    or holds no average that is asked for, and InfrastructureError if the file system does not
    answer at present.
    """

    def __init__(self, path: Path, *, weights: Weights = "trained") -> None:
        self.path = path
        self.weights = weights
        # `step`, `world_size` and the entries of the saving run.
        self.state: dict[str, Any] = self._json("state.json")
        self._tensors: dict[str, dict[str, Any]] = self._json("index.json").get("tensors", {})
        try:
            for name, kinds in self._tensors.items():
                for kind, entry in kinds.items():
                    label = f"{kind} of {name!r}"
                    if entry["dtype"] not in _DTYPES:
                        raise ValueError(f"{label}: dtype {entry['dtype']!r}")
                    for fragment in entry["fragments"]:
                        if not _TENSOR_FILE.fullmatch(fragment["file"]):
                            raise ValueError(f"{label}: file {fragment['file']!r}")
                        # Before any is used: a negative start or size would address other elements.
                        sizes = [*entry["shape"], fragment["start"], fragment["numel"]]
                        sizes += [*fragment["block_offset"], *fragment["block_shape"]]
                        if not all(isinstance(size, int) and size >= 0 for size in sizes):
                            raise ValueError(f"{label}: its numbers are not sizes")
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise StateError(
                f"{path / 'index.json'}: not the index of a checkpoint ({error}). Give a "
                "checkpoint that this package has saved"
            ) from error
        if weights == "ema" and not self.has_average:
            why = "its run had no training.ema_decay, or had taken no step with it"
            if self.state.get("stage") == "b":
                why = (
                    "Stage B keeps none. The last checkpoint of Stage A may have one: give its step"
                )
            raise StateError(
                f"{path}: holds no average of the weights: {why}. Or give --weights trained"
            )
        # Tensor files stay open: each opening parses a header of all their tensors.
        self._files = contextlib.ExitStack()
        self._opened: dict[str, Any] = {}

    def __exit__(self, *_: object) -> None:
        """Closes the tensor files; tensors already read stay valid."""
        self._opened.clear()
        self._files.close()

    def names(self) -> list[str]:
        """Logical names of parameters and buffers."""
        return list(self._tensors)

    def kinds(self, name: str) -> list[str]:
        """Kinds saved under `name`: `param`, `exp_avg`, `step`, ...; empty for an unknown name."""
        return list(self._tensors.get(name, {}))

    def content_kind(self, name: str) -> str:
        """Kind that holds the content: `buffer` of a buffer, `param` of a parameter, or `ema` where
        the average is asked for; of what is not trained there is none."""
        kinds = self.kinds(name)
        if self.weights == "ema" and AVERAGE in kinds:
            return AVERAGE
        return "buffer" if "buffer" in kinds else "param"

    @cached_property
    def has_average(self) -> bool:
        """True if an average of the weights is saved beside them."""
        return any(AVERAGE in kinds for kinds in self._tensors.values())

    def shape(self, name: str, kind: str = "param") -> tuple[int, ...]:
        """Logical, unsharded shape."""
        return tuple(self._entry(name, kind)["shape"])

    def rank_state(self, rank: int) -> dict[str, Any] | None:
        """State that `rank` alone saved; None if the saving run had no such rank."""
        # By the saved number of ranks, not by the file's presence: a missing file is an error.
        return self._json(f"rank-{rank:05d}.json") if rank < self.state["world_size"] else None

    def full(self, name: str, kind: str = "param") -> torch.Tensor:
        """Whole logical tensor, in its logical shape, on the CPU."""
        return self.read(name, kind).reshape(self.shape(name, kind))

    def read(self, name: str, kind: str = "param", span: Span | None = None) -> torch.Tensor:
        """Span of a logical tensor, or all of it, as a new tensor on the CPU, [span.numel], of the
        saved dtype. Raises StateError if there is no such tensor, or its file cannot be read."""
        entry = self._entry(name, kind)
        target = span or Span.whole(Box.whole(entry["shape"]))
        out = torch.empty(target.numel, dtype=_DTYPES[entry["dtype"]])
        filled = 0
        for fragment in entry["fragments"]:
            sources, destinations, lengths = shared_runs(span_of(fragment), target)
            if not len(lengths):
                continue
            first = int(sources[0])
            # A view of the mapped file: only the pages of the runs are read.
            path = self.path / fragment["file"]
            end = int(sources[-1] + lengths[-1])
            try:
                values = retried(partial(self._slice, fragment, first, end), path)
            except (OSError, SafetensorError) as error:
                raise StateError(f"{path}: cannot be read: {error}") from error
            runs = (sources - first).tolist(), destinations.tolist(), lengths.tolist()
            for source, destination, length in zip(*runs, strict=True):
                out[destination : destination + length] = values[source : source + length]
            filled += int(lengths.sum())
        # A save has verified that fragments cover the tensor, but an index may come from anywhere:
        # what no fragment fills would be uninitialised memory.
        if filled != target.numel:
            raise StateError(
                f"{self.path}: {kind} of {name} has shape {tuple(entry['shape'])}, and "
                f"{target.numel - filled} of the {target.numel} elements asked for lie outside it"
            )
        return out

    def open_files(self) -> None:
        """Opens all tensor files, which `read` otherwise does as it comes to them. What stays of an
        opened file then lies between the tensors being read, and keeps the heap from shrinking by
        one of these per file. Raises as `read` does."""
        fragments = {
            fragment["file"]: fragment
            for kinds in self._tensors.values()
            for entry in kinds.values()
            for fragment in entry["fragments"]
        }
        for name, fragment in fragments.items():
            path = self.path / name
            try:
                retried(partial(self._slice, fragment, 0, 0), path)
            except (OSError, SafetensorError) as error:
                raise StateError(f"{path}: cannot be read: {error}") from error

    def _slice(self, fragment: dict[str, Any], first: int, end: int) -> torch.Tensor:
        """Elements [first, end) of a fragment's span, as a view of its mapped file."""
        name = fragment["file"]
        # Opened at the first read: a rank needs the files of few others.
        if name not in self._opened:
            path = plain_file(self.path / name)
            try:
                self._opened[name] = self._files.enter_context(safe_open(path, framework="pt"))
            # torch maps it as if to write, which Linux limits; a limit of the process meets both
            # safetensors' mapping, as a MemoryError, and torch's
            except (RuntimeError, MemoryError) as error:
                raise StateError(
                    f"{path}: cannot be mapped ({error}). A file may not be larger than memory and "
                    "swap together: use a machine with more. `ulimit -v` tells the limit of the "
                    "process"
                ) from error
        return self._opened[name].get_slice(fragment["key"])[first:end]

    def _entry(self, name: str, kind: str) -> dict[str, Any]:
        try:
            return self._tensors[name][kind]
        except KeyError:
            raise StateError(f"{self.path}: holds no {kind} of {name!r}") from None

    def _json(self, name: str) -> dict[str, Any]:
        try:
            content = read_json(self.path / name)
        except (OSError, ValueError) as error:
            raise StateError(f"{self.path / name}: cannot be read: {error}") from error
        if not isinstance(content, dict):
            raise StateError(f"{self.path / name}: holds no JSON object")
        return content


def check_names(
    checkpoint: CheckpointFile, shapes: dict[str, tuple[int, ...]], *, others: Container[str] = ()
) -> None:
    """Raises StateError unless checkpoint and model have the same names with the same logical
    shapes, but for `others` in the checkpoint, which need not be in the model."""
    saved = {
        name: checkpoint.shape(name, checkpoint.content_kind(name)) for name in checkpoint.names()
    }
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
        # A model of another size differs in each of its thousands of names.
        listed = "\n".join(f"  {problem}" for problem in problems[:10])
        raise StateError(
            f"{checkpoint.path}: holds another model ({len(problems)} differences):\n{listed}\n"
            "Give the model config that it was trained with, or start in a new run directory"
        )
