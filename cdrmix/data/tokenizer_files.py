"""The files of a tokenizer: copied into data sets, described in manifests, compared."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from cdrmix.data.foreign_tokenizer import ForeignTokenizer
from cdrmix.data.shards import Manifest, TokenizerInfo, read_regular, write_file
from cdrmix.data.special_tokens import CONFIG_FILES
from cdrmix.data.tokenizer import Choices, load_tokenizer
from cdrmix.data.tokenizer_base import (
    MAX_SIDE_BYTES,
    MAX_TOKENIZER_BYTES,
    ROLES_FILE,
    SIDE_FILES,
    TOKENIZER_FILE,
    SideFile,
)
from cdrmix.errors import DataError


def copy_tokenizer(source: Path, out: Path, choices: Choices | None = None) -> TokenizerInfo:
    """Writes the files of a tokenizer into an existing folder, byte for byte, and describes them.

    Of a foreign one, `tokenizer_roles.json` says what is decided about its special tokens, so that
    a copy of the folder is loaded without `choices`.

    Raises:
        DataError: if it cannot be loaded; nothing is written then.
    """
    tokenizer = load_tokenizer(source, choices)
    content = read_regular(source / TOKENIZER_FILE, MAX_TOKENIZER_BYTES)
    sides: dict[SideFile, bytes] = {}
    if isinstance(tokenizer, ForeignTokenizer):
        given = (name for name in SIDE_FILES if name != ROLES_FILE and (source / name).exists())
        sides |= {name: read_regular(source / name, MAX_SIDE_BYTES) for name in given}
        sides[ROLES_FILE] = f"{tokenizer.tokens.model_dump_json(indent=2)}\n".encode()
    file = write_file(out / TOKENIZER_FILE, content)
    for name in SIDE_FILES:
        (out / name).unlink(missing_ok=True)  # of an earlier build that did not end
    files = {name: write_file(out / name, side) for name, side in sides.items()}
    if not isinstance(tokenizer, ForeignTokenizer):
        # As all manifests so far have it: equal data sets keep their digest.
        return TokenizerInfo(
            file=TOKENIZER_FILE, sha256=file.sha256, num_tokens=tokenizer.vocab_size
        )
    return TokenizerInfo(
        file=TOKENIZER_FILE,
        sha256=file.sha256,
        num_tokens=tokenizer.vocab_size,
        kind="foreign",
        content_sha256=content_digest(content),
        document_prefix=tokenizer.document_prefix,
        pad_id=tokenizer.pad_id,
        files=files,
    )


def file_digests(folder: Path) -> dict[str, str]:
    """sha256 (hex) of each file of a folder that its tokenizer may depend on, by name."""
    paths = (folder / name for name in (TOKENIZER_FILE, ROLES_FILE, *CONFIG_FILES))
    return {
        path.name: hashlib.sha256(read_regular(path, MAX_TOKENIZER_BYTES)).hexdigest()
        for path in paths
        if path.exists()
    }


def content_digest(content: bytes) -> str:
    """sha256 (hex) of the parts of a tokenizer.json that decide the ids of a text.

    Equal for files that differ in their layout, in what they say about truncation, padding and
    post-processing, or in the form of merges, "a b" or ["a", "b"].
    """
    values = json.loads(content)
    model = {key: value for key, value in values["model"].items() if value not in (None, False, "")}
    if "merges" in model:
        model["merges"] = [
            merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]
        ]
    parts = {
        "model": model,
        "added_tokens": sorted(values.get("added_tokens") or [], key=lambda token: token["id"]),
        "normalizer": values.get("normalizer"),
        "pre_tokenizer": values.get("pre_tokenizer"),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def check_tokenizer(manifest: Manifest, folder: Path) -> None:
    """Checks that a data set was encoded with the tokenizer of a model's folder.

    The files may differ in parts that do not decide the ids, if the data set was built with a
    tokenizer that this package has not trained.

    Raises:
        DataError: with both digests if it is another one, or the folder has none that can be read.
    """
    path = folder / TOKENIZER_FILE
    ours = manifest.tokenizer
    try:
        content = read_regular(path, MAX_TOKENIZER_BYTES)
        digest = hashlib.sha256(content).hexdigest()
        if digest == ours.sha256:
            return
        theirs = content_digest(content)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}.") from error
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise DataError(
            f"{path}: not a tokenizer.json ({type(error).__name__}: {error}). Copy it again from "
            "where it is whole."
        ) from error
    if ours.content_sha256 is not None and theirs == ours.content_sha256:
        return
    raise DataError(
        "data.path: its tokens are of another tokenizer than the model's: sha256 "
        f"{ours.sha256[:12]} there, {digest[:12]} in {path}. Build the data set with "
        f"tokenizer.path: {folder} in its recipe (cdrmix data build)."
    )
