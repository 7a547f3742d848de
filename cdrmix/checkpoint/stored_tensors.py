"""Tensors of a folder of safetensors files, by the headers of the files. No torch: a start is
checked by these before it is made.

A folder has one `model.safetensors`, or shards and `model.safetensors.index.json`, which says in
which of them each tensor is. It may come from anywhere: names must not lead out of the folder.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from cdrmix.checkpoint.files import SAFETENSORS_TYPES, read_json, retried
from cdrmix.errors import StateError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_SHARD = re.compile(r"[\w.-]+\.safetensors", re.ASCII)
# The format's own limit; a length beyond it is damage.
_MAX_HEADER_BYTES = 100_000_000
_TYPES = {stored: name for name, stored in SAFETENSORS_TYPES.items()}


class StoredTensor(NamedTuple):
    """A tensor as the header of its file describes it."""

    file: str  # name in the folder
    dtype: str  # torch's name, such as `bfloat16`
    shape: tuple[int, ...]


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Reads name, file, type and shape of each tensor of a folder, and no values.

    Raises:
        StateError: if the folder holds no weights in safetensors, a file is missing, truncated or
            not one, a tensor is there twice or not where the index says, or its type is of no
            plain numbers.
        InfrastructureError: if the file system does not answer at present.
    """
    in_index = None if (folder / SINGLE_FILE).exists() else _index(folder)
    files = [SINGLE_FILE] if in_index is None else sorted(set(in_index.values()))
    found: dict[str, StoredTensor] = {}
    for file in files:
        for name, tensor in _in_file(folder / file).items():
            if name in found:
                raise StateError(
                    f"{folder}: {name} is in {found[name].file} and in {file}. Copy the folder "
                    "again, from one model"
                )
            found[name] = tensor
    for name, file in (in_index or {}).items():
        if name not in found or found[name].file != file:
            raise StateError(
                f"{folder / INDEX_FILE}: names {name} in {file}, which does not hold it. Copy the "
                "folder again, from one model"
            )
    return found


def _index(folder: Path) -> dict[str, str]:
    """File of each tensor, as the index of a folder of shards has it."""
    path = folder / INDEX_FILE
    try:
        content = read_json(path.resolve())  # a cache of downloads holds links to its files
        files = {str(name): str(file) for name, file in content["weight_map"].items()}
    except FileNotFoundError:
        raise _no_weights(folder) from None
    except OSError as error:
        raise StateError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StateError(
            f"{path}: not an index of shards ({type(error).__name__}: {error}). Copy it again"
        ) from error
    for file in files.values():
        if not _SHARD.fullmatch(file):
            raise StateError(
                f"{path}: names the file {file!r}, which is no safetensors file of this folder. "
                "Copy it again"
            )
    return files


def _no_weights(folder: Path) -> StateError:
    """Error of a folder without safetensors files."""
    if not folder.is_dir():
        return StateError(
            f"{folder}: there is no such folder. Give the folder of a model's weights"
        )
    endings = (".bin", ".pt", ".pth")
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in endings)
    if pickles:
        return StateError(
            f"{folder}: its weights are pickles ({pickles[0]}), which run code when they are read. "
            "Convert them to safetensors, with save_pretrained of transformers for example"
        )
    return StateError(
        f"{folder}: holds neither {SINGLE_FILE} nor {INDEX_FILE}. Give the folder of a model's "
        "weights in safetensors"
    )


def _in_file(path: Path) -> dict[str, StoredTensor]:
    """Tensors of one file."""

    def read() -> tuple[bytes, int]:
        if not path.is_file():  # a pipe would never end
            raise FileNotFoundError(2, "there is no such file", str(path))
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            return (file.read(length) if length <= _MAX_HEADER_BYTES else b""), size

    try:
        header, size = retried(read, path)
        content = json.loads(header)
        content.pop("__metadata__", None)
        tensors = {name: _entry(path, name, entry) for name, entry in content.items()}
        end = max((entry["data_offsets"][1] for entry in content.values()), default=0)
    except OSError as error:
        raise StateError(f"{path}: cannot be read: {error.strerror}. Copy it again") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise StateError(
            f"{path}: not a safetensors file, or truncated ({type(error).__name__}: {error}). Copy "
            "it again"
        ) from error
    if size != 8 + len(header) + end:
        raise StateError(
            f"{path}: {size:,} bytes, {8 + len(header) + end:,} were written. Copy it again"
        )
    return tensors


def _entry(path: Path, name: str, entry: dict[str, Any]) -> StoredTensor:
    shape = tuple(entry["shape"])
    start, end = entry["data_offsets"]
    if not all(isinstance(size, int) and size >= 0 for size in (*shape, start, end)):
        raise ValueError(f"{name}: its numbers are not sizes")
    if entry["dtype"] not in _TYPES:
        # Values of such a type mean something with scales alone that stand elsewhere.
        raise StateError(
            f"{path}: {name} is of type {entry['dtype']}, which is quantised or not of plain "
            f"numbers; read are {', '.join(_TYPES)}. Give the model in bfloat16 or float32"
        )
    return StoredTensor(path.name, _TYPES[entry["dtype"]], shape)
