"""Encodes documents into token shards, measures their n-grams, and decodes shards into tar files.

Encoding has two phases: per task first, then per split and domain over all tasks.
"""

from __future__ import annotations

import io
import itertools
import json
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cdrmix import runtime
from cdrmix.corpus.placing import REARRANGED, Stream, placement
from cdrmix.corpus.steps.minhash import mix
from cdrmix.corpus.task_run import Task, close_synced, read_documents
from cdrmix.data.document import FimConfig, draw_by_key, encoded, fields_of, rearranged, restored
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

SPLITS = ("train", "validation")
FIM_FILE = "fim.json"
# 64 MB as int64; the peak of counting n-grams is about six times that.
MAX_TOKENS = 2**23
_WINDOW_TOKENS = 2**14
_ORDERS = (1, 2, 3)


@lru_cache(maxsize=1)  # a worker encodes one task after another with the same tokenizer
def _cached_tokenizer(folder: Path) -> Tokenizer:
    # Each job has one core, and its neighbours the others.
    runtime.encode_on_one_core()
    return load_tokenizer(folder)


@dataclass(frozen=True)
class EncodeJob:
    """The documents of one task, to be encoded.

    Attributes:
        documents: result of the task's last pass.
        tokenizer: folder with tokenizer.json, and what a foreign one has beside it.
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
        """Returns True if the result exists."""
        return self.out.is_dir()


def run_encode(job: EncodeJob) -> None:
    """Encodes the documents of a task, unless the result exists.

    The result has for each split `<split>.bin` (tokens, with EOS after each document and in front
    what it begins with, such as BOS), `<split>.npy` (tokens and bytes of text of each document,
    [n, 2] int64) and, for chains of thought, the role of each token, `<split>.roles` (a byte each).
    Where documents are placed by a window, those for infilling are there in both orders: rearranged
    they are in `train.fim`, and `train.fim.npy`, of tasks with any, has their tokens ([n] int64, 0:
    not drawn). `fim.json` counts them.
    """
    if job.is_done():
        return
    tokenizer = _cached_tokenizer(job.tokenizer)
    # Little-endian on every machine: shards have one byte order.
    dtype = np.dtype(job.dtype).newbyteorder("<")

    def whole(tokens: list[int]) -> NDArray[Any]:
        return np.array([*tokenizer.document_prefix, *tokens, tokenizer.eos_id], dtype=dtype)

    has_roles = job.task.source.chain_of_thought is not None
    by_window = job.fim is not None and job.fim.window_tokens is not None
    counts: Counter[str] = Counter()
    with new_folder(job.out) as folder:
        files = {split: (folder / f"{split}.bin").open("wb") for split in SPLITS}
        role_files = {s: (folder / f"{s}.roles").open("wb") for s in SPLITS if has_roles}
        fim_file = (folder / "train.fim").open("wb")
        sizes: dict[str, list[tuple[int, int]]] = {split: [] for split in SPLITS}
        fim_sizes: list[int] = []
        for document in read_documents(job.documents, job.task):
            split = split_of(document.id, job.validation_share)
            tokens: list[int] | None = None
            if has_roles:
                tokens, roles = encoded(document.text, tokenizer)
                # BOS has the role of the prompt, EOS that of the answer.
                of_prefix = [roles[0]] * len(tokenizer.document_prefix)
                role_files[split].write(bytes([*of_prefix, *roles, roles[-1]]))
            elif job.fim is not None and split == "train":
                # The validation split is not rearranged: its loss has the same meaning in runs with
                # and without infilling.
                tokens = rearranged(document, job.fim, tokenizer, counts=counts)
                if by_window:
                    drawn = whole(tokens) if tokens is not None else whole([])[:0]
                    fim_file.write(drawn.tobytes())
                    fim_sizes.append(len(drawn))
                    tokens = None
            ids = whole(tokenizer.encode(document.text) if tokens is None else tokens)
            files[split].write(ids.tobytes())
            sizes[split].append((len(ids), len(document.text.encode())))
        for file in (*files.values(), *role_files.values(), fim_file):
            close_synced(file)
        for split in SPLITS:
            _save(folder / f"{split}.npy", np.array(sizes[split], dtype=np.int64).reshape(-1, 2))
        if fim_sizes:
            _save(folder / "train.fim.npy", np.array(fim_sizes, dtype=np.int64))
        write_file(folder / FIM_FILE, json.dumps(counts).encode())


def _save(path: Path, values: NDArray[Any]) -> None:
    with path.open("wb") as table:
        np.save(table, values)
        close_synced(table)


def split_of(document_id: str, validation_share: float) -> str:
    """Returns the split of a document, by hash of its id: the same in every build."""
    return "validation" if draw_by_key(document_id, "split") < validation_share else "train"


@dataclass(frozen=True)
class StreamJob:
    """All tokens of one split and domain, to be written as shards.

    Attributes:
        parts: (name of the source, result of `run_encode`) of each task, in corpus order.
        eos_id: token that ends each document.
        window_tokens: samples by which documents for infilling are placed; None: in corpus order.
        out: folder of the shards.
        result: JSON file that describes the shards; written after them.
    """

    parts: tuple[tuple[str, Path], ...]
    split: str
    domain: str
    dtype: Dtype
    eos_id: int
    max_tokens: int
    window_tokens: int | None
    out: Path
    result: Path

    @property
    def folders(self) -> tuple[Path, ...]:
        """Results of `run_encode`, in corpus order."""
        return tuple(folder for _, folder in self.parts)

    def is_done(self) -> bool:
        """Returns True if the result exists, and with it the shards."""
        return self.result.exists()


def encoded_tokens(streams: Iterable[StreamJob]) -> Counter[str]:
    """Returns the tokens of each source over all splits, EOS included, by its name."""
    tokens: Counter[str] = Counter()
    for stream in streams:
        for source, lengths in _lengths(stream):
            tokens[source] += int(lengths.sum())
    return tokens


def split_sizes(streams: Iterable[StreamJob]) -> dict[str, tuple[int, int]]:
    """Returns (documents, tokens) of each split; a document that shards cut counts once."""
    sizes = dict.fromkeys(SPLITS, (0, 0))
    for stream in streams:
        for _, lengths in _lengths(stream):
            documents, tokens = sizes[stream.split]
            sizes[stream.split] = documents + len(lengths), tokens + int(lengths.sum())
    return sizes


def _lengths(job: StreamJob) -> Iterator[tuple[str, NDArray[np.int64]]]:
    """Yields the source of each task of a stream, and the tokens of its documents."""
    if job.window_tokens is None:
        for source, folder in job.parts:
            yield source, np.load(folder / f"{job.split}.npy")[:, 0]
        return
    placed = placement(job.folders, job.split, job.window_tokens)
    for place, (source, _) in enumerate(job.parts):
        yield source, placed.lengths[placed.tasks == place]


def fim_counts(streams: Iterable[StreamJob]) -> dict[str, int]:
    """Returns what became of the training documents that were drawn for infilling, counted.

    Those `drawn`, those `rearranged`, `unparsed` ones, whose middle is of characters as they have
    no syntax tree, and by reason those that stayed as they are.
    """
    counts: Counter[str] = Counter()
    for stream in streams:
        if stream.split != "train":
            continue
        encoded: Counter[str] = Counter()
        for folder in stream.folders:
            encoded.update(json.loads((folder / FIM_FILE).read_bytes()))
        placed = Counter({REARRANGED: encoded["drawn"]})
        if stream.window_tokens is not None:
            placed = placement(stream.folders, stream.split, stream.window_tokens).counts
        counts += encoded + placed
    return dict(sorted(counts.items()))


def write_stream(job: StreamJob) -> None:
    """Writes the shards of a stream; the result has them, their sources and their n-grams.

    The lists `shards` and `sources` have an entry per shard; `ngrams` is `ngram_entropy`'s result.
    """
    # Source of each run of documents, and the pieces that shards have cut them into.
    pieces: list[tuple[str, int]] = []
    dtype = np.dtype(job.dtype).newbyteorder("<")
    stream_of = Stream(job.folders, job.split, dtype, job.window_tokens)

    def documents() -> Iterator[tuple[NDArray[Any], int]]:
        for entry in stream_of:
            tokens, text_bytes = stream_of.document(entry)
            yield tokens, text_bytes
            source = job.parts[entry.task][0]
            earlier = pieces.pop()[1] if pieces and pieces[-1][0] == source else 0
            pieces.append((source, earlier - (-len(tokens) // job.max_tokens)))

    shards = write_shards(
        job.out,
        documents(),
        split=job.split,
        domain=job.domain,
        dtype=job.dtype,
        max_tokens=job.max_tokens,
    )
    if any((folder / f"{job.split}.roles").exists() for _, folder in job.parts):
        # A domain may mix chains of thought with plain text, which has role 0.
        shards = write_roles(job.out, shards, stream_of.roles())
    # In the order of the documents, so that one queue of names tells the counts.
    names = itertools.chain.from_iterable(itertools.starmap(itertools.repeat, pieces))
    result: dict[str, Any] = {
        "shards": [shard.model_dump() for shard in shards],
        "sources": [Counter(itertools.islice(names, shard.documents)) for shard in shards],
        "ngrams": None,
    }
    if shards:
        stream = TokenStream(job.out, shards, job.dtype)
        num_tokens = sum(shard.tokens for shard in shards)
        result["ngrams"] = ngram_entropy(stream, num_tokens, job.eos_id)
    # Renamed into place: half a result would declare the shards complete.
    partial = job.result.with_suffix(".partial")
    write_file(partial, json.dumps(result).encode())
    partial.replace(job.result)


def write_roles(
    folder: Path, shards: Iterable[ShardInfo], roles: Iterable[NDArray[np.uint8]]
) -> list[ShardInfo]:
    """Writes the roles of all tokens of consecutive shards, one file beside each shard.

    Args:
        roles: of the tokens, in order, in pieces of any size.
    """
    # Pieces end at tasks, shards at a number of tokens: a piece may belong to two shards.
    pieces = (piece for piece in roles if len(piece))
    rest: NDArray[np.uint8] = np.zeros(0, dtype=np.uint8)
    with_roles = []
    for shard in shards:
        of_shard = []
        missing = shard.tokens
        while missing:
            rest = rest if len(rest) else next(pieces)
            of_shard.append(rest[:missing])
            rest = rest[missing:]
            missing -= len(of_shard[-1])
        file = write_pieces(folder / f"{shard.stem}.roles", of_shard)
        with_roles.append(shard.model_copy(update={"roles": file}))
    assert not len(rest) and next(pieces, None) is None, "as many roles as tokens"
    return with_roles


def ngram_entropy(
    stream: TokenStream, num_tokens: int, eos_id: int, *, max_tokens: int = MAX_TOKENS
) -> dict[str, Any]:
    """Measures the variety of a stream: the entropy of its n-grams, n = 1, 2 and 3.

    Counts exactly over a sample of bounded size: all tokens of a small domain, else windows spread
    evenly over it. The entropy of long n-grams is at most the logarithm of the sample, so compare
    domains by equal samples and take trigrams as a lower bound. N-grams that cross an EOS do not
    count.

    Returns:
        `tokens` of the sample (count), and by n as text: `entropy_bits` of an n-gram, and
        `distinct` n-grams (count).
    """
    # rows [windows, length]; n-grams do not go from one row to the next
    if num_tokens <= max_tokens:
        rows = stream.rows([0], num_tokens)
    else:
        length = min(_WINDOW_TOKENS, max_tokens)
        starts = np.linspace(0, num_tokens - length, max_tokens // length).astype(np.int64)
        rows = stream.rows(starts.tolist(), length)
    entropy_bits: dict[str, float] = {}
    distinct: dict[str, int] = {}
    for n in _ORDERS:
        length = max(0, rows.shape[1] - n + 1)
        # Hashes of 64 bits stand for n-grams: any two of 2^23 collide with a chance of 2e-6.
        keys = np.zeros((len(rows), length), dtype=np.uint64)
        inside = np.ones(keys.shape, dtype=bool)
        for place in range(n):
            tokens = rows[:, place : place + length]
            keys = mix(keys + tokens.astype(np.uint64) + np.uint64(1))
            if place < n - 1:
                inside &= tokens != eos_id
        counts = np.unique(keys[inside], return_counts=True)[1]
        total = max(1, int(counts.sum()))
        bits = np.log2(total) - float((counts * np.log2(counts)).sum()) / total
        entropy_bits[str(n)] = round(float(bits), 4)
        distinct[str(n)] = len(counts)
    return {"tokens": rows.size, "entropy_bits": entropy_bits, "distinct": distinct}


def export_tars(folder: Path, out: Path) -> int:
    """Writes the documents of a built folder as WebDataset tar files, one per shard.

    A document is `<shard>-<number>.txt` and `.json`, the latter with its split and domain. A
    document that was rearranged for infilling has its original order again, and a chain of thought
    is in `.json` only, as prompt, thought and answer. Equal folders give equal bytes. A source of
    type local reads the tar files again.

    Returns:
        Number of documents.
    Raises:
        DataError: if `folder` is not a whole built folder, or `out` exists or cannot be written.
    """
    if out.exists():
        raise DataError(f"{out}: exists already. Give another --out.")
    manifest = read_manifest(folder, given_as="DIR")
    # Damaged tokens would decode to text that looks right.
    verify_shards(folder, manifest)
    tokenizer = load_tokenizer(folder)
    num_documents = 0

    def add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
        # Time 0 and no owner, as TarInfo has them: equal folders give equal bytes.
        member = tarfile.TarInfo(name)
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))

    try:
        with new_folder(out) as new:
            documents = _documents(folder, manifest)
            for stem, of_shard in itertools.groupby(documents, lambda document: document[0].stem):
                path = new / f"{stem}.tar"
                with path.open("wb") as file, tarfile.open(fileobj=file, mode="w") as archive:
                    for shard, number, ids in of_shard:
                        key = f"{stem}-{number:08d}"
                        fields = {"split": shard.split, "domain": shard.domain}
                        parts = fields_of(ids, tokenizer)
                        if parts is None:
                            content = tokenizer.decode(restored(ids, tokenizer))
                            add(archive, f"{key}.txt", content.encode())
                        add(archive, f"{key}.json", json.dumps(fields | (parts or {})).encode())
                        num_documents += 1
    except OSError as error:
        raise DataError(f"{error.filename or out}: {error.strerror}.") from error
    return num_documents


def _documents(folder: Path, manifest: Manifest) -> Iterator[tuple[ShardInfo, int, list[int]]]:
    """Reads the documents of all shards; one that was cut at the end of a shard is whole again.

    Yields:
        The shard of the first token, the document's number there, and its tokens without EOS.
    """
    dtype = np.dtype(manifest.dtype).newbyteorder("<")
    current: tuple[ShardInfo, int, list[int]] | None = None
    for shard in manifest.shards:
        tokens = np.memmap(folder / f"{shard.stem}.bin", dtype=dtype, mode="r")
        end = 0
        for number, length in enumerate(read_lengths(folder, shard).tolist()):
            piece = tokens[end : end + length].tolist()
            end += length
            current = current or (shard, number, [])
            current[2].extend(piece)
            if piece[-1] == manifest.eos_id:
                del current[2][-1]
                yield current
                current = None  # a shard may end within a document: the next one continues it
    if current is not None:
        raise DataError(f"{folder}: its last document does not end with EOS. {REBUILD}")
