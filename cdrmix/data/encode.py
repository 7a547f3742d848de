"""From documents to token shards: per task first, then per split and domain over all tasks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cdrmix.data.chain_of_thought import encoded
from cdrmix.data.document import Document, draw
from cdrmix.data.fim import FimConfig, rearranged
from cdrmix.data.folders import new_folder
from cdrmix.data.ngrams import ngram_entropy
from cdrmix.data.shards import Dtype, ShardInfo, write_file, write_pieces, write_shards
from cdrmix.data.stage import close_synced, read_documents
from cdrmix.data.tasks import Task
from cdrmix.data.token_dataset import TokenStream
from cdrmix.data.tokenizer import Tokenizer, load_tokenizer

SPLITS = ("train", "validation")


@dataclass(frozen=True)
class EncodeJob:
    """Documents of one task on their way to tokens.

    Attributes:
        documents: result of the task's last stage.
        tokenizer: folder with tokenizer.json.
        fim: which training documents are rearranged for infilling; None: none is.
        out: folder of the result.
    """

    task: Task
    documents: Path
    tokenizer: Path
    dtype: Dtype
    validation_share: float
    fim: FimConfig | None
    out: Path

    def is_done(self) -> bool:
        """Whether the result is there."""
        return self.out.is_dir()


def run_encode(job: EncodeJob) -> None:
    """Encode a task's documents, unless that is done.

    The result has for each split `<split>.bin` (tokens, EOS after each document), `<split>.npy`
    (tokens and bytes of text of each document, [n, 2] int64) and, of chains of thought, the role of
    each token, `<split>.roles` (a byte each).
    """
    if job.is_done():
        return
    tokenizer = _tokenizer(job.tokenizer)
    dtype = np.dtype(job.dtype).newbyteorder("<")
    with new_folder(job.out) as folder:
        files = {split: (folder / f"{split}.bin").open("wb") for split in SPLITS}
        has_roles = job.task.source.chain_of_thought is not None
        role_files = {s: _roles_file(folder, s).open("wb") for s in SPLITS if has_roles}
        sizes: dict[str, list[tuple[int, int]]] = {split: [] for split in SPLITS}
        for document in read_documents(job.documents, job.task):
            split = split_of(document.id, job.validation_share)
            if has_roles:
                tokens, roles = encoded(document.text, tokenizer)
                role_files[split].write(bytes([*roles, roles[-1]]))  # EOS has that of the answer
            else:
                # What is held out stays as it is: its loss means the same whatever was done.
                tokens = _encode(document, tokenizer, job.fim if split == "train" else None)
            ids = np.array([*tokens, tokenizer.eos_id], dtype=dtype)
            files[split].write(ids.tobytes())
            sizes[split].append((len(ids), len(document.text.encode())))
        for file in (*files.values(), *role_files.values()):
            close_synced(file)
        for split in SPLITS:
            with (folder / f"{split}.npy").open("wb") as table:
                np.save(table, np.array(sizes[split], dtype=np.int64).reshape(-1, 2))
                close_synced(table)


def _encode(document: Document, tokenizer: Tokenizer, fim: FimConfig | None) -> list[int]:
    ids = rearranged(document, fim, tokenizer) if fim else None
    return tokenizer.encode(document.text) if ids is None else ids


def split_of(document_id: str, validation_share: float) -> str:
    """Split of a document, by hash of its id: the same in every build."""
    return "validation" if draw(document_id, "split") < validation_share else "train"


@lru_cache(maxsize=1)
def _tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


@dataclass(frozen=True)
class StreamJob:
    """All tokens of one split and domain, on their way to shards.

    Attributes:
        parts: (name of the source, result of `run_encode`) of each task, in corpus order.
        eos_id: token that ends each document.
        out: folder of the shards.
        result: file that says what was written.
    """

    parts: tuple[tuple[str, Path], ...]
    split: str
    domain: str
    dtype: Dtype
    eos_id: int
    max_tokens: int
    out: Path
    result: Path

    def is_done(self) -> bool:
        """Whether the result is there, and with it the shards."""
        return self.result.exists()


def write_stream(job: StreamJob) -> None:
    """Write the shards of a stream, which sources each has documents from, and the entropy of its
    n-grams."""
    pieces: list[tuple[str, int]] = []  # (source, pieces that its documents were cut into)

    def documents() -> Iterator[tuple[NDArray[Any], int]]:
        for source, folder in job.parts:
            num_pieces = 0
            for ids, text_bytes in _encoded(folder, job.split, job.dtype):
                num_pieces += -(-len(ids) // job.max_tokens)
                yield ids, text_bytes
            pieces.append((source, num_pieces))

    shards = write_shards(
        job.out,
        documents(),
        split=job.split,
        domain=job.domain,
        dtype=job.dtype,
        max_tokens=job.max_tokens,
    )
    if any(_roles_file(folder, job.split).exists() for _, folder in job.parts):
        shards = write_roles(job.out, shards, _all_roles(job))
    result: dict[str, Any] = {
        "shards": [shard.model_dump() for shard in shards],
        "sources": [dict(counts) for counts in _shared_out(pieces, shards)],
        "ngrams": None,
    }
    if shards:
        stream = TokenStream(job.out, shards, job.dtype)
        num_tokens = sum(shard.tokens for shard in shards)
        result["ngrams"] = ngram_entropy(stream, num_tokens, job.eos_id)
    partial = job.result.with_suffix(".partial")
    write_file(partial, json.dumps(result).encode())
    partial.replace(job.result)


def read_stream(job: StreamJob) -> list[tuple[ShardInfo, dict[str, int]]]:
    """The shards of a finished job, each with its documents by source."""
    result = json.loads(job.result.read_bytes())
    shards = [ShardInfo.model_validate(shard) for shard in result["shards"]]
    return list(zip(shards, result["sources"], strict=True))


def read_ngrams(job: StreamJob) -> dict[str, Any] | None:
    """What `ngram_entropy` found in the shards of a finished job; None where there are none."""
    found: dict[str, Any] | None = json.loads(job.result.read_bytes())["ngrams"]
    return found


def _roles_file(folder: Path, split: str) -> Path:
    return folder / f"{split}.roles"


def _all_roles(job: StreamJob) -> Iterator[NDArray[np.uint8]]:
    """The role of every token of a stream, in order; 0 where a task has no others."""
    for _, folder in job.parts:
        num_tokens = int(np.load(folder / f"{job.split}.npy")[:, 0].sum())
        file = _roles_file(folder, job.split)
        if num_tokens and file.exists():
            yield np.memmap(file, dtype=np.uint8, mode="r")
        else:
            yield np.zeros(num_tokens, dtype=np.uint8)


def write_roles(
    folder: Path, shards: Iterable[ShardInfo], roles: Iterable[NDArray[np.uint8]]
) -> list[ShardInfo]:
    """Write the roles of all tokens of shards that follow each other, beside them.

    Args:
        roles: of the tokens, in order, in pieces of any size.
    Returns:
        The shards, with their files of roles.
    """
    pieces = (piece for piece in roles if len(piece))
    rest: NDArray[np.uint8] = np.zeros(0, dtype=np.uint8)
    written = []
    for shard in shards:
        own, missing = [], shard.tokens
        while missing:
            rest = rest if len(rest) else next(pieces)
            own.append(rest[:missing])
            rest, missing = rest[missing:], missing - len(own[-1])
        file = write_pieces(folder / f"{shard.stem}.roles", own)
        written.append(shard.model_copy(update={"roles": file}))
    assert not len(rest) and next(pieces, None) is None, "as many roles as tokens"
    return written


def _encoded(folder: Path, split: str, dtype: Dtype) -> Iterator[tuple[NDArray[Any], int]]:
    """Tokens and bytes of text of each document of a result, in order."""
    sizes = np.load(folder / f"{split}.npy")
    if not len(sizes):
        return
    tokens = np.memmap(folder / f"{split}.bin", dtype=np.dtype(dtype).newbyteorder("<"), mode="r")
    start = 0
    for length, text_bytes in sizes.tolist():
        yield tokens[start : start + length], text_bytes
        start += length


def _shared_out(
    pieces: Iterable[tuple[str, int]], shards: Iterable[ShardInfo]
) -> Iterator[dict[str, int]]:
    """How many of each shard's documents are from which source."""
    queue = iter(pieces)
    source, left = "", 0
    for shard in shards:
        counts: dict[str, int] = {}
        missing = shard.documents
        while missing:
            while not left:
                source, left = next(queue)
            taken = min(left, missing)
            counts[source] = counts.get(source, 0) + taken
            left, missing = left - taken, missing - taken
        yield counts
