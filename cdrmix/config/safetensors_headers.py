"""Headers of the safetensors files of a Hugging Face model: names, shapes and element types; no
torch, and not a byte of the weights is read.

A file begins with the length of its header (8 bytes, little endian) and the header, JSON: for each
tensor its type, shape and range of bytes in the rest of the file.
"""

from __future__ import annotations

import json
import math
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cdrmix.errors import DataError

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Among the small files of a base that a run keeps: its digest, and names, types and shapes of the
# tensors in its files.
RECORD_FILE = "weights.json"
# The format's own limit; a length beyond it is damage.
_MAX_HEADER_BYTES = 100_000_000
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
# Bits of an element by the type's name in safetensors.
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}


@dataclass(frozen=True)
class TensorSize:
    """Tensor of a safetensors file."""

    shape: tuple[int, ...]
    dtype: str  # safetensors' name: F32, BF16, ...
    file: str  # name of the file in the folder
    num_bytes: int


def tensor_sizes(folder: Path) -> dict[str, TensorSize]:
    """Sizes of all tensors of a model's folder by their names there, in the order of the files.

    The folder may be what a run keeps of its base, which tells the sizes and holds no weights.

    Raises:
        DataError: if the folder holds no safetensors files, its index and files disagree, or a file
            is damaged or cut off, by its size. One that cannot be read has an OSError as its cause.
    """
    if (folder / RECORD_FILE).is_file():
        return _recorded(folder / RECORD_FILE)
    sizes: dict[str, TensorSize] = {}
    for file in weight_files(folder):
        for name, size in read_header(folder / file).items():
            if name in sizes:
                raise DataError(
                    f"{folder / file}: holds {name}, which {sizes[name].file} holds too. Give the "
                    "folder of one model, without files of another"
                )
            sizes[name] = size
    _check_index(folder, sizes)
    return sizes


def weight_files(folder: Path) -> list[str]:
    """Names of the safetensors files of a model: the one file, or all of its index, in order.

    Raises:
        DataError: if there is none of both, or files of the index are missing.
    """
    # In the order of transformers: a whole file counts before an index.
    if (folder / WEIGHTS_FILE).is_file():
        return [WEIGHTS_FILE]
    files = sorted(set(_weight_map(folder).values()))
    if not files:
        raise _no_weights(folder)
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        raise DataError(
            f"{folder}: {_some(missing)} of {INDEX_FILE} is not there ({len(missing)} of "
            f"{len(files)} files missing). Copy the whole folder again"
        )
    return files


def read_header(path: Path) -> dict[str, TensorSize]:
    """Sizes of the tensors of one safetensors file, whose own size must be that of its header.

    Raises:
        DataError: if it cannot be read, is no such file, or is cut off.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ValueError("it is not a regular file")
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(_MAX_HEADER_BYTES, status.st_size - 8):
                raise ValueError(
                    f"a header of {length:,} bytes does not fit into {status.st_size:,} bytes"
                )
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        sizes, end = _sizes(header, path.name)
        if status.st_size != 8 + length + end:
            raise ValueError(
                f"it has {status.st_size:,} bytes, and its header tells {8 + length + end:,}"
            )
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{path}: cut off, or no safetensors file ({error}). Copy it again"
        ) from error
    return sizes


def _sizes(header: dict[str, Any], file: str) -> tuple[dict[str, TensorSize], int]:
    """Sizes of a header's tensors, in the order of their bytes, and the end of the last one."""
    sizes = {}
    position = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        shape, (start, end) = tuple(entry["shape"]), entry["data_offsets"]
        if not all(type(number) is int and number >= 0 for number in (*shape, start, end)):
            raise ValueError(f"the numbers of {name!r} are not sizes")
        num_bytes, rest = divmod(math.prod(shape) * _BITS[entry["dtype"]], 8)
        # The format allows no gaps and no overlaps.
        if rest or start != position or end - start != num_bytes:
            raise ValueError(f"the bytes of {name!r} are not those of its shape")
        sizes[name] = TensorSize(shape, entry["dtype"], file, num_bytes)
        position = end
    return sizes, position


def _recorded(path: Path) -> dict[str, TensorSize]:
    """Sizes from the record of a run's base."""
    try:
        return {
            str(name): TensorSize(
                tuple(map(int, each["shape"])), str(each["dtype"]), str(each["file"]), each["bytes"]
            )
            for name, each in json.loads(path.read_bytes())["tensors"].items()
        }
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{path}: not what a run keeps of its base ({type(error).__name__}: {error}). Take it "
            "from a copy of the run directory"
        ) from error


def _weight_map(folder: Path) -> dict[str, str]:
    """File of each tensor by an index; empty without one. Raises DataError if it is damaged."""
    path = folder / INDEX_FILE
    if not path.is_file():  # a pipe would never end
        return {}
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
        for name, file in weight_map.items():
            # An index may come from anywhere: its file names must not lead out of the folder.
            if not isinstance(file, str) or file != Path(file).name or file in ("", ".", ".."):
                raise ValueError(f"the file of {name!r} is {file!r}")
        return dict(weight_map)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DataError(f"{path}: not the index of a model ({error}). Copy it again") from error


def _check_index(folder: Path, sizes: dict[str, TensorSize]) -> None:
    """Raises DataError where an index names other tensors than its files hold."""
    if (folder / WEIGHTS_FILE).is_file():
        return
    weight_map = _weight_map(folder)
    for name in {**weight_map, **sizes}:
        held = sizes[name].file if name in sizes else "no file"
        if weight_map.get(name, "no file") != held:
            raise DataError(
                f"{folder}: {held} holds {name}, and {INDEX_FILE} names "
                f"{weight_map.get(name, 'no file')} for it. Copy the whole folder again"
            )


def _no_weights(folder: Path) -> DataError:
    """Error for a folder without safetensors files, which may have weights of another kind."""
    if not folder.is_dir():
        return DataError(f"{folder}: no such folder. Give the folder of a Hugging Face model")
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        return DataError(
            f"{folder}: its weights are pickles ({_some(pickles)}), which may run any code when "
            "they are read. Convert them on a machine that trusts them: "
            "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW) writes safetensors"
        )
    return DataError(
        f"{folder}: holds neither {WEIGHTS_FILE} nor {INDEX_FILE}. Give the folder of a Hugging "
        "Face model with its weights"
    )


def _some(names: list[str]) -> str:
    """The first of several names, and the number of the others."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
