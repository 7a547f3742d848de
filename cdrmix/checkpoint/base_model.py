"""Folder of a Hugging Face model that a run begins with: its weights, their digest, and the small
files that a run keeps of it."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from cdrmix.checkpoint.files import FileRecord, digest, read_json, retried, write_json
from cdrmix.checkpoint.fragments import Box
from cdrmix.checkpoint.weight_folder import Piece, WeightFolder, read_sizes
from cdrmix.config.hugging_face import BASE_FOLDER, CONFIG_FILE
from cdrmix.config.model import ModelConfig
from cdrmix.config.resuming import SNAPSHOT
from cdrmix.config.safetensors_headers import RECORD_FILE, tensor_sizes, weight_files
from cdrmix.config.yaml_text import parse_yaml
from cdrmix.data.folders import new_folder
from cdrmix.errors import ConfigError, DataError, StateError

if TYPE_CHECKING:
    from cdrmix.hf.weights import NameMap

# What a model needs beside its weights; licences go where the model goes.
_SMALL_FILES = (
    CONFIG_FILE,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tiktoken.model",
    "chat_template.jinja",
    "chat_template.json",
    "LICENSE*",
    "NOTICE*",
)
REPLAY_FOLDER = "replay"  # in a run directory: text that its starting model has written
_COMPARED = 2**22  # elements at a time


class BaseWeights(WeightFolder):
    """Weights of a base under the names of transformers' parameters and saved buffers.

    Attributes:
        name_map: from these names to those in the files.
        family: model_type of the base.
        num_parameters: of the whole model, tied ones counted once.
    """

    def __init__(self, folder: Path, remote_code: Sequence[str] = ()) -> None:
        """Maps the names, and reads the headers of the files.

        Args:
            folder: of the base.
            remote_code: sha256 of its Python files that may run (hex).
        Raises:
            ConfigError: if the model cannot be made, or its weights are converted in a way that is
                not supported.
            DataError: if files are missing or damaged, or are of another model.
        """
        # transformers takes seconds to import, which runs of RWKX-V do not wait for
        from cdrmix.hf.weights import map_names, skeleton

        sizes = read_sizes(folder)
        model = skeleton(folder, remote_code)
        self.family: str = model.config.model_type
        self.num_parameters = sum(each.numel() for each in model.parameters())
        shapes = {name: size.shape for name, size in sizes.items()}
        self.name_map = map_names(model, shapes, place=folder)
        unread = {*self.name_map.dropped, *(other for other, _ in self.name_map.tied)}
        super().__init__(folder, pieces_of(self.name_map), ignored=unread, sizes=sizes)

    def __enter__(self) -> Self:
        """Gives itself."""
        return self

    def check_tied(self) -> None:
        """Raises DataError if a tied tensor is there under both names with different values, of
        which training would take one and transformers both."""
        for other, source in self.name_map.tied:
            values = self._mapped(other), self._mapped(source)
            for part in zip(*(each.split(_COMPARED) for each in values), strict=True):
                if not torch.equal(*part):
                    raise DataError(
                        f"{self.path}: {CONFIG_FILE} ties {other} to {source}, and their values "
                        "differ. Set tie_word_embeddings to false there, or remove one of them"
                    )


def pieces_of(names: NameMap) -> dict[str, list[Piece]]:
    """Tensors of the files that each parameter is made of, with their boxes in it."""
    return {
        name: [Piece(part.source, Box(part.offset, part.shape)) for part in parts]
        for name, parts in names.parts.items()
    }


def base_records(folder: Path, *, part: int = 0, parts: int = 1) -> dict[str, FileRecord]:
    """Size and sha256 of share number `part` of a base's config.json and weights, of `parts` with
    about as many bytes each. Raises DataError if a file is missing."""
    try:
        sizes = {
            name: (folder / name).stat().st_size for name in (CONFIG_FILE, *weight_files(folder))
        }
        share = sorted(sizes, key=lambda name: (-sizes[name], name))[part::parts]
        return {
            name: {
                "bytes": sizes[name],
                "sha256": retried(partial(digest, folder / name), folder / name),
            }
            for name in share
        }
    except OSError as error:
        raise DataError(f"{error.filename or folder}: cannot be read: {error.strerror}") from error


def digest_of_base(records: Mapping[str, FileRecord]) -> str:
    """sha256 over name, size and sha256 of each file of a base, hex."""
    lines = [f"{name} {each['bytes']} {each['sha256']}\n" for name, each in records.items()]
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()


def write_base_files(run_dir: Path, source: Path, digest_: str) -> None:
    """Copies the small files of a base into a run directory, whole or not at all.

    Those of the same base stay as they are, and those of another one are replaced.

    Args:
        run_dir: run directory, or folder of its copies.
        source: folder of the base, or `base` of another run directory.
        digest_: of the base, hex.
    Raises:
        OSError: if they cannot be read or written.
        StateError: if what a run keeps of its base is damaged.
    """
    out = run_dir / BASE_FOLDER
    if (out / RECORD_FILE).exists() and _holds_same(out, source, digest_):
        return
    replaced = out.with_name(f".{BASE_FOLDER}.replaced")
    with new_folder(out) as folder:
        for path in small_files(source):
            target = folder / path.relative_to(source)
            target.parent.mkdir(exist_ok=True, parents=True)
            shutil.copyfile(path, target)
        if (source / RECORD_FILE).exists():
            shutil.copyfile(source / RECORD_FILE, folder / RECORD_FILE)
        else:
            tensors = {
                name: {
                    "dtype": size.dtype,
                    "shape": size.shape,
                    "file": size.file,
                    "bytes": size.num_bytes,
                }
                for name, size in tensor_sizes(source).items()
            }
            write_json(folder / RECORD_FILE, {"digest": digest_, "tensors": tensors})
        if out.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            out.rename(replaced)
    shutil.rmtree(replaced, ignore_errors=True)


def _holds_same(out: Path, source: Path, digest_: str) -> bool:
    """True if what a run keeps in `out` is of the base in `source`, with this digest."""
    if (source / RECORD_FILE).exists():
        is_same = (out / RECORD_FILE).read_bytes() == (source / RECORD_FILE).read_bytes()
    else:
        is_same = recorded_digest(out) == digest_
    # The digest is of config.json and the weights.
    kept, there = (
        {path.relative_to(folder): path.read_bytes() for path in small_files(folder)}
        for folder in (out, source)
    )
    return is_same and kept == there


def small_files(folder: Path) -> list[Path]:
    """Files of a model beside its weights that a run keeps, sorted by name."""
    found = {path for pattern in _SMALL_FILES for path in folder.glob(pattern)}
    # The model's own code, if it has any; it runs by its digests alone.
    found.update(folder.rglob("*.py"))
    return sorted(path for path in found if path.is_file())


def recorded_digest(folder: Path) -> str:
    """Digest of the base of which `folder` is what a run keeps, hex. Raises StateError if it is
    missing or damaged."""
    path = folder / RECORD_FILE
    try:
        return str(read_json(path)["digest"])
    except OSError as error:
        raise StateError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise StateError(
            f"{path}: not what a run keeps of its base ({type(error).__name__}: {error}). Take it "
            "from a copy of the run directory"
        ) from error


def base_folder(model: ModelConfig, *run_dirs: Path | None) -> Path:
    """Folder with the config.json and small files of a run's base: kept by a run, else the base.

    Args:
        model: of a Hugging Face model.
        run_dirs: looked into before `model.path`, in this order.
    Raises:
        StateError: if none of them is there.
    """
    assert model.path is not None, "checked at construction"
    places = [run_dir / BASE_FOLDER for run_dir in run_dirs if run_dir is not None]
    places.append(Path(model.path))
    for place in places:
        if (place / CONFIG_FILE).is_file():
            return place
    raise StateError(
        f"{CONFIG_FILE} of the base model is in none of {', '.join(map(os.fspath, places))}. Bring "
        "back one of them, or set model.path to where the base is now"
    )


def run_of(checkpoint: Path) -> Path | None:
    """Run directory, or folder of copies, around a checkpoint; None for one that was moved out."""
    parent = checkpoint.resolve().parent
    if parent.name == "checkpoints":
        return parent.parent
    is_copy = any((parent / name).is_dir() for name in (BASE_FOLDER, REPLAY_FOLDER))
    return parent if is_copy else None


def recorded_base(state: Mapping[str, Any], checkpoint: Path) -> dict[str, Any]:
    """Folder and digest of the base of a run's adapters, from a checkpoint's state.json.

    Raises:
        StateError: if it tells none.
    """
    base = state.get("base")
    if not isinstance(base, dict) or not isinstance(base.get("digest"), str):
        raise StateError(
            f"{checkpoint / 'state.json'}: tells no digest of the base of its adapters. Give a "
            "checkpoint of a run with model.lora"
        )
    return base


def refuse_other_base(recorded: Mapping[str, Any], digest_: str, folder: Path) -> None:
    """Refuses a base that adapters were not trained on.

    Args:
        recorded: of the adapters, as `recorded_base` gives it.
        digest_: of the base in `folder`, hex.
    Raises:
        StateError: if their digests differ.
    """
    if recorded["digest"] != digest_:
        if os.path.abspath(folder) == recorded.get("folder"):
            raise StateError(
                f"{folder}: is not the base of these adapters: its weights or config.json changed "
                f"since they were trained, digest {digest_[:12]} now, {recorded['digest'][:12]} on "
                "record. Restore the folder, or give a copy of it as it was: as model.path of a "
                "run, as --base of `cdrmix export`, `evaluate` and `generate`"
            )
        raise StateError(
            f"{folder}: is not the base of these adapters: digest {digest_[:12]} here, "
            f"{recorded['digest'][:12]} of {recorded.get('folder', 'theirs')}. Give the "
            "folder that they were trained on: as model.path of a run, as --base of `cdrmix "
            "export`, `evaluate` and `generate`"
        )


def base_of_adapters(
    state: Mapping[str, Any],
    checkpoint: Path,
    remote_code: Sequence[str] = (),
    *,
    given: Path | None = None,
) -> BaseWeights:
    """Opens the weights that a run's adapters were trained on, by their digest.

    Args:
        state: content of the checkpoint's state.json.
        checkpoint: its folder.
        remote_code: sha256 of Python files of the base that may run (hex).
        given: folder of the base; None: where the run has read it, else where the run's own
            configuration has it, of a start that may have come after the checkpoint.
    Raises:
        StateError: if the base is not there, or another one is.
    """
    recorded = recorded_base(state, checkpoint)
    places = [given] if given is not None else [Path(str(recorded.get("folder")))]
    if given is None and (latest := _latest_base(checkpoint)) is not None:
        places.append(latest)
    folder = next((place for place in places if place.is_dir()), None)
    if folder is None:
        tried = " nor ".join(dict.fromkeys(map(os.fspath, places)))
        raise StateError(
            f"{checkpoint}: the base of its adapters is not in {tried}. Give its folder with "
            "--base DIR, or bring it back"
        )
    refuse_other_base(recorded, digest_of_base(base_records(folder)), folder)
    return BaseWeights(folder, remote_code)


def _latest_base(checkpoint: Path) -> Path | None:
    """Base in the configuration of the run around a checkpoint; None where none can be read."""
    run_dir = run_of(checkpoint)
    if run_dir is None:
        return None
    path = run_dir / SNAPSHOT
    try:
        folder = parse_yaml(path.read_text(encoding="utf-8"), place=str(path))["model"]["path"]
    except (OSError, ValueError, ConfigError, KeyError, TypeError):
        return None  # the message for a base that is not there says what to do
    return Path(folder) if isinstance(folder, str) else None
