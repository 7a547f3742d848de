"""Order of a stream's documents, in which no window cuts one that is rearranged for infilling.

Training cuts the stream of a domain into samples of T tokens; a rearranged document that lies in
two of them teaches to write a middle without what is around it. Here documents are placed one after
the other, as they come, and a rearranged one waits until the sample has room for all of it. Nothing
is padded and nothing is written twice: every document is in the stream once, so that the samples,
their order and the batches are made as of any other stream.
"""

# n documents, T tokens of a window

from __future__ import annotations

from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

# Documents that wait at a time. Of more, the room of a sample would hardly be used better, and a
# document would move further from its neighbours.
_MOST_WAITING = 256
# Open at a time: a document waits while those of a few later tasks are placed.
_OPEN_TASKS = 8

# Outcomes of documents that were drawn for infilling.
REARRANGED = "rearranged"
TOO_LONG = "longer than the window"
NO_ROOM = "no room in a window"


def place(
    plain: Sequence[int], rearranged: Sequence[int], window: int
) -> tuple[list[tuple[int, bool]], Counter[str]]:
    """Places documents in a stream that is cut into samples of `window` tokens.

    A rearranged document takes the place where it fits; of those that fit, the longest. One that is
    longer than a sample, or has waited too long, is written in its own order, as text that may be
    cut like any other.

    Args:
        plain: tokens of each document in its own order, [n].
        rearranged: tokens of each in the order for infilling, [n]; 0 for one that was not drawn.
    Returns:
        (document, whether rearranged) in the order of the stream; and the outcomes of those drawn.
    """
    order: list[tuple[int, bool]] = []
    counts: Counter[str] = Counter()
    waiting: list[tuple[int, int]] = []  # (tokens, document), sorted
    position = 0

    def put(document: int, *, is_rearranged: bool) -> None:
        nonlocal position
        order.append((document, is_rearranged))
        position += rearranged[document] if is_rearranged else plain[document]

    def put_what_fits() -> None:
        # A sample has one token more than it is apart from the next: the last one's label.
        while (found := bisect_right(waiting, window + 1 - position % window, key=_tokens)) > 0:
            put(waiting.pop(found - 1)[1], is_rearranged=True)
            counts[REARRANGED] += 1

    def give_up(place: int) -> None:
        put(waiting.pop(place)[1], is_rearranged=False)
        counts[NO_ROOM] += 1

    for document, length in enumerate(rearranged):
        if 0 < length <= window + 1:
            insort(waiting, (length, document))
        else:
            if length:
                counts[TOO_LONG] += 1
            put(document, is_rearranged=False)
        put_what_fits()
        if len(waiting) > _MOST_WAITING:  # the oldest: lengths are then not judged differently
            give_up(min(range(len(waiting)), key=lambda place: waiting[place][1]))
            put_what_fits()
    while waiting:
        give_up(-1)
        put_what_fits()
    return order, counts


def _tokens(entry: tuple[int, int]) -> int:
    return entry[0]


class Placement(NamedTuple):
    """Documents of several tasks in the order of their stream."""

    tasks: NDArray[np.int64]  # [n], place of each document's task
    documents: NDArray[np.int64]  # [n], its number in the task
    is_rearranged: NDArray[np.bool_]  # [n]
    lengths: NDArray[np.int64]  # [n], tokens
    counts: Counter[str]  # outcomes of the documents that were drawn


@lru_cache(maxsize=16)  # streams of a build, each of which is asked for its sizes too
def placement(folders: tuple[Path, ...], split: str, window: int) -> Placement:
    """Places the documents of tasks that were encoded in both orders, for a window of T tokens.

    `folders` are those of `cdrmix.corpus.encode.run_encode`, in corpus order.
    """
    plain = [np.load(folder / f"{split}.npy")[:, 0] for folder in folders]
    rearranged = [
        _rearranged_lengths(folder, split, len(lengths))
        for folder, lengths in zip(folders, plain, strict=True)
    ]
    both = (np.concatenate([np.zeros(0, np.int64), *each]) for each in (plain, rearranged))
    all_plain, all_rearranged = both
    order, counts = place(all_plain.tolist(), all_rearranged.tolist(), window)
    numbers, flags = np.array(order, dtype=np.int64).reshape(-1, 2).T
    ends = np.cumsum([len(lengths) for lengths in plain])
    tasks = np.searchsorted(ends, numbers, side="right")
    begins = np.concatenate([[0], ends])
    is_rearranged = flags.astype(np.bool_)
    lengths = np.where(is_rearranged, all_rearranged[numbers], all_plain[numbers])
    return Placement(tasks, numbers - begins[tasks], is_rearranged, lengths, counts)


def _rearranged_lengths(folder: Path, split: str, num_documents: int) -> NDArray[np.int64]:
    file = folder / f"{split}.fim.npy"
    # Chains of thought are not rearranged.
    return np.load(file) if file.exists() else np.zeros(num_documents, np.int64)


class EncodedTask:
    """Documents of one split of a task, as `cdrmix.corpus.encode.run_encode` has written them."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype[Any]) -> None:
        table = np.load(folder / f"{split}.npy")
        self.lengths, self._text_bytes = table.T  # of each document, tokens and bytes
        self._tokens = _pieces(folder / f"{split}.bin", self.lengths, dtype)
        self._rearranged: _Pieces | None = None
        if (sizes := folder / f"{split}.fim.npy").exists():
            self._rearranged = _pieces(folder / f"{split}.fim", np.load(sizes), dtype)
        self._roles: _Pieces | None = None
        if (file := folder / f"{split}.roles").exists():
            self._roles = _pieces(file, self.lengths, np.dtype(np.uint8))

    def document(self, number: int, *, is_rearranged: bool) -> tuple[NDArray[Any], int]:
        """Tokens of a document in one of its orders, and the bytes of its text."""
        pieces = self._tokens
        if is_rearranged:
            assert self._rearranged is not None, "encoded for a window"
            pieces = self._rearranged
        return pieces.piece(number), int(self._text_bytes[number])

    def roles(self, number: int, *, is_rearranged: bool) -> NDArray[np.uint8]:
        """Role of each of these tokens; 0 where the task has no chains of thought."""
        if self._roles is not None:
            return self._roles.piece(number)
        return np.zeros(len(self.document(number, is_rearranged=is_rearranged)[0]), np.uint8)


class _Pieces(NamedTuple):
    values: NDArray[Any]  # of all documents
    ends: NDArray[np.int64]

    def piece(self, number: int) -> NDArray[Any]:
        return self.values[self.ends[number - 1] if number else 0 : self.ends[number]]


def _pieces(file: Path, lengths: NDArray[np.int64], dtype: np.dtype[Any]) -> _Pieces:
    ends = np.cumsum(lengths)
    # An empty file cannot be mapped into memory.
    is_empty = not len(ends) or not ends[-1]
    values = np.zeros(0, dtype) if is_empty else np.memmap(file, dtype=dtype, mode="r")
    return _Pieces(values, ends)


class Entry(NamedTuple):
    """A document at its place in a stream."""

    task: int  # place of its task
    number: int  # of the document in the task
    is_rearranged: bool


class Stream:
    """Documents of one split and domain, in the order in which they are written.

    Args:
        folders: of the encoded tasks, in corpus order.
        window: tokens of the samples that they are placed in; None: in corpus order.
    """

    def __init__(
        self, folders: tuple[Path, ...], split: str, dtype: np.dtype[Any], window: int | None
    ) -> None:
        self._folders = folders
        self._split = split
        self._window = window
        self._open = lru_cache(maxsize=_OPEN_TASKS)(
            lambda task: EncodedTask(folders[task], split, dtype)
        )

    def __iter__(self) -> Iterator[Entry]:
        """Yields the place of each document."""
        if self._window is None:
            for task in range(len(self._folders)):
                for number in range(len(self._open(task).lengths)):
                    yield Entry(task, number, False)
            return
        placed = placement(self._folders, self._split, self._window)
        columns = (placed.tasks.tolist(), placed.documents.tolist(), placed.is_rearranged.tolist())
        yield from map(Entry, *columns)

    def document(self, entry: Entry) -> tuple[NDArray[Any], int]:
        """Tokens of a document, and the bytes of its text."""
        return self._open(entry.task).document(entry.number, is_rearranged=entry.is_rearranged)

    def roles(self) -> Iterator[NDArray[np.uint8]]:
        """Yields the roles of the tokens, document by document."""
        for entry in self:
            yield self._open(entry.task).roles(entry.number, is_rearranged=entry.is_rearranged)
