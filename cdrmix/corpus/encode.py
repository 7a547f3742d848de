"""Entropy of token n-grams: how varied a domain's tokens are, in bounded memory.

Counted exactly over a sample of bounded size: all tokens of a small domain, else windows spread
evenly over it. No count exceeds the sample, so the entropy of long n-grams is at most its
logarithm: compare domains by equal samples, and look at trigrams as a lower bound.

From documents to token shards: per task first, then per split and domain over all tasks.

Token shards to texts in WebDataset's tar files, for other trainers and other tokenizers.
"""

from __future__ import annotations

import io
import itertools
import json
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cdrmix.corpus.build_tasks import Task
from cdrmix.corpus.steps.minhash import mix
from cdrmix.corpus.task_run import close_synced, read_documents
from cdrmix.data.document import (
    Document,
    FimConfig,
    draw_by_key,
    encoded,
    fields_of,
    rearranged,
    restored,
)
from cdrmix.data.folders import new_folder
from cdrmix.data.shards import (
    REBUILD,
    Dtype,
    Manifest,
    ShardInfo,
    read_lengths,
    read_manifest,
    verify_shards,
    write_file,
    write_pieces,
    write_shards,
)
from cdrmix.data.token_dataset import TokenStream
from cdrmix.data.tokenizer import Tokenizer, load_tokenizer
from cdrmix.errors import DataError

MAX_TOKENS = 2**23  # 64 MB as int64; the peak is about six times that
_WINDOW_TOKENS = 2**14
_ORDERS = (1, 2, 3)


def ngram_entropy(
    stream: TokenStream, num_tokens: int, eos_id: int, *, max_tokens: int = MAX_TOKENS
) -> dict[str, Any]:
    """Entropy of the n-grams of a stream, n = 1, 2 and 3; those that cross an EOS are left out.

    Args:
        num_tokens: tokens in the stream.
        max_tokens: most tokens looked at.
    Returns:
        `tokens` looked at (count), and by n as text: `entropy_bits` of an n-gram, and `distinct`
        n-grams (count).
    """
    rows = _sample(stream, num_tokens, max_tokens)
    entropy_bits: dict[str, float] = {}
    distinct: dict[str, int] = {}
    for n in _ORDERS:
        counts = _counts(rows, n, eos_id)
        total = max(1, int(counts.sum()))
        bits = np.log2(total) - float((counts * np.log2(counts)).sum()) / total
        entropy_bits[str(n)], distinct[str(n)] = round(float(bits), 4), len(counts)
    return {"tokens": rows.size, "entropy_bits": entropy_bits, "distinct": distinct}


def _sample(stream: TokenStream, num_tokens: int, max_tokens: int) -> NDArray[np.int64]:
    """Tokens [windows, length]; n-grams do not go from one row to the next."""
    if num_tokens <= max_tokens:
        return stream.rows([0], num_tokens)
    length = min(_WINDOW_TOKENS, max_tokens)
    starts = np.linspace(0, num_tokens - length, max_tokens // length).astype(np.int64)
    return stream.rows(starts.tolist(), length)


def _counts(rows: NDArray[np.int64], n: int, eos_id: int) -> NDArray[np.int64]:
    """How often each distinct n-gram occurs.

    N-grams are told apart by 64 bits: of 2^23, any two share them with a chance of 2e-6.
    """
    length = max(0, rows.shape[1] - n + 1)
    keys = np.zeros((len(rows), length), dtype=np.uint64)
    inside = np.ones(keys.shape, dtype=bool)
    for place in range(n):
        tokens = rows[:, place : place + length]
        keys = mix(keys + tokens.astype(np.uint64) + np.uint64(1))
        if place < n - 1:
            inside &= tokens != eos_id
    return np.unique(keys[inside], return_counts=True)[1]


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
    return "validation" if draw_by_key(document_id, "split") < validation_share else "train"


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
        own = []
        missing = shard.tokens
        while missing:
            rest = rest if len(rest) else next(pieces)
            own.append(rest[:missing])
            rest = rest[missing:]
            missing = missing - len(own[-1])
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
    source = ""
    left = 0
    for shard in shards:
        counts: dict[str, int] = {}
        missing = shard.documents
        while missing:
            while not left:
                source, left = next(queue)
            taken = min(left, missing)
            counts[source] = counts.get(source, 0) + taken
            left = left - taken
            missing = missing - taken
        yield counts


class _Text(NamedTuple):
    """A document: the shard that it begins in, its number there, and its tokens without EOS."""

    shard: ShardInfo
    number: int
    ids: list[int]


def export_tars(folder: Path, out: Path) -> int:
    """Write the documents of a built folder, a tar file per shard.

    A document is `<shard>-<number>.txt` and `.json`, the latter with its split and domain; one that
    was rearranged for infilling is in its own order again, and a chain of thought is in `.json`
    alone, as prompt, thought and answer. Equal folders give equal bytes. A source of type local
    reads the tar files again.

    Args:
        folder: of token shards; it is verified first.
        out: folder to make.
    Returns:
        Documents written.
    Raises:
        DataError: if `folder` is not a whole built folder, or `out` exists or cannot be written.
    """
    if out.exists():
        raise DataError(f"{out}: exists already. Give another --out.")
    manifest = read_manifest(folder)
    verify_shards(folder, manifest)
    tokenizer = load_tokenizer(folder)
    num_documents = 0
    try:
        with new_folder(out) as new:
            for stem, texts in itertools.groupby(
                _documents(folder, manifest), lambda text: text.shard.stem
            ):
                num_documents += _write_tar(new / f"{stem}.tar", texts, tokenizer)
    except OSError as error:
        raise DataError(f"{error.filename or out}: {error.strerror}.") from error
    return num_documents


def _documents(folder: Path, manifest: Manifest) -> Iterator[_Text]:
    """The documents of all shards; those that were cut at the end of one are whole again."""
    begun: _Text | None = None
    for shard in manifest.shards:
        lengths = read_lengths(folder, shard)
        dtype = np.dtype(manifest.dtype).newbyteorder("<")
        tokens = np.memmap(folder / f"{shard.stem}.bin", dtype=dtype, mode="r")
        end = 0
        for number, length in enumerate(lengths.tolist()):
            piece = tokens[end : end + length].tolist()
            end += length
            begun = begun or _Text(shard, number, [])
            begun.ids.extend(piece)
            if piece[-1] == manifest.eos_id:
                del begun.ids[-1]
                yield begun
                begun = None
    if begun is not None:
        raise DataError(f"{folder}: its last document does not end with EOS. {REBUILD}")


def _write_tar(path: Path, texts: Iterator[_Text], tokenizer: Tokenizer) -> int:
    num_documents = 0
    with path.open("wb") as file, tarfile.open(fileobj=file, mode="w") as archive:
        for text in texts:
            key = f"{text.shard.stem}-{text.number:08d}"
            fields = {"split": text.shard.split, "domain": text.shard.domain}
            parts = fields_of(text.ids, tokenizer)
            if parts is None:
                content = tokenizer.decode(restored(text.ids, tokenizer))
                _add(archive, f"{key}.txt", content.encode())
            _add(archive, f"{key}.json", json.dumps(fields | (parts or {})).encode())
            num_documents += 1
    return num_documents


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)  # its time is 0, its owner nobody in particular
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))
