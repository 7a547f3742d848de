"""Episodic memory across texts: entries of a saved index, as episodes of reading see them.

A segment that the agent writes becomes an entry once its text is over: until then, and if anything
fails, the folder stays as it was.
"""

# N episodes, E entries, M segments written, K key dimensions, k entries for a query

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from cdrmix.data.folders import locked
from cdrmix.errors import ConfigError, StateError
from cdrmix.log import get_logger
from cdrmix.reasoning.episodic_index import (
    DUPLICATE_COSINE,
    EpisodicIndex,
    FaissCache,
    SearchResult,
)
from cdrmix.reasoning.episodic_store import has_index, load_index, save_index
from cdrmix.reasoning.memory_reader import MemoryReader
from cdrmix.reasoning.segments import Texts
from cdrmix.reasoning.working_memory import weights_digest

logger = get_logger(__name__)

# Parameters that keys depend on beside the backbone's, which `plastic` includes. Slots and agent
# are not among them: an index stays valid while the policy alone is trained.
_KEY_PARTS = ("plastic.", "retrieval.")


@dataclass(frozen=True)
class Earlier:
    """Entries of an index as segments that stand before those of a text.

    Segments are numbered by the entries' places, so the index must not change meanwhile.

    Attributes:
        index: holds E entries.
        search: exact search, or that of a cache: (queries, top_k=) -> entries.
    """

    index: EpisodicIndex
    search: Callable[..., SearchResult]

    def __len__(self) -> int:
        return len(self.index)

    def before(self, texts: Texts) -> Texts:
        """Returns the texts with all entries before each, as segments 0 to E - 1."""
        return texts.behind([entry.tokens for entry in self.index.entries])

    def source(self, place: int) -> str:
        """Name of the text that an entry is from."""
        return self.index.entries[place].source

    def find(
        self, queries: Tensor, written: Tensor, is_written: Tensor, *, count: int
    ) -> tuple[Tensor, Tensor]:
        """Finds the entries nearest to each query, without those that the text has replaced.

        Args:
            queries: unit vectors, [N, K].
            written: keys of the segments written from this text, [N, M, K].
            is_written: False for empty places, [N, M].
            count: most entries for each query.
        Returns:
            Places of entries, -1 where fewer are near enough, and cosines, [N, k] each.
        """
        result = self.search(queries, top_k=count)
        ids = torch.tensor([entry.id for entry in self.index.entries])
        # ids rise from entry to entry, so the place of an id is found by bisection
        places = torch.searchsorted(ids, result.ids.clamp(min=0))
        keys = self.index.keys[places].to(queries.device)  # [N, k, K]
        # the commit after this text would refresh such an entry: its old text no longer holds
        alike = (keys @ written.transpose(1, 2)).masked_fill(~is_written.unsqueeze(1), -1.0)
        stale = (alike > DUPLICATE_COSINE).any(2)
        valid = (result.ids >= 0).to(queries.device) & ~stale
        return torch.where(valid, places.to(queries.device), -1), result.scores.to(queries.device)


def make_earlier(index: EpisodicIndex, *, faiss: bool) -> Earlier:
    """Wraps an index with its exact search, or with FAISS.

    Raises:
        ConfigError: if FAISS is asked for and not installed.
    """
    return Earlier(index, FaissCache(index).search if faiss else index.search)


class Writing(NamedTuple):
    """Segment that the agent wrote; `score` is the probability with which it did, key is [K]."""

    key: Tensor
    tokens: list[int]
    offset: int
    score: float


class Kept(NamedTuple):
    """Changes of an index by a text.

    Attributes:
        num_added: new entries.
        refreshed: new tokens of entries from before the text.
        evicted: tokens of entries that gave way.
    """

    num_added: int
    refreshed: list[tuple[int, ...]]
    evicted: list[tuple[int, ...]]


def keep(
    index: EpisodicIndex,
    written: list[Writing],
    *,
    read: list[int],
    num_steps: int,
    source: str,
) -> Kept:
    """Commits the segments that the agent wrote, and notes which entries it read.

    Args:
        index: is changed.
        written: in the order of the text.
        read: places of entries that stood in the window.
        num_steps: actions of the episode, by which entries age.
        source: name of the text.
    """
    # the index has no clock of its own: time is the actions of all texts together
    now = max((entry.last_used for entry in index.entries), default=0) + num_steps
    # before the commit, which may evict what was read and move the places of the others
    index.touch(torch.tensor([index.entries[place].id for place in read]), step=now)
    before = {entry.id: entry.tokens for entry in index.entries}
    for each in written:
        index.propose(each.key, each.tokens, offset=each.offset, source=source, score=each.score)
    commit = index.commit(step=now)
    # a text may refresh the same entry twice, and also its own new entries, which are no news.
    # Only old entries can be evicted: new ones go last, and a text writes no more than fits.
    refreshed = [id for id in dict.fromkeys(commit.refreshed) if id in before]
    return Kept(
        len(commit.added),
        [index.entry(id).tokens for id in refreshed],
        [before[id] for id in commit.evicted],
    )


@contextlib.contextmanager
def opened(
    folder: Path, reader: MemoryReader, *, tokenizer: str, make: bool
) -> Iterator[EpisodicIndex]:
    """Opens the index of a folder, and saves it at the end if it changed.

    Other processes wait for their turn meanwhile.

    Args:
        folder: of this index alone.
        reader: its encoder makes the keys.
        tokenizer: digest of the tokenizer of the entries.
        make: start an empty index where there is none.
    Raises:
        StateError: if there is none and none is to be made, it is damaged, of another encoder, key
            size or tokenizer, or the folder cannot be used.
        ConfigError: if the reader's capacity does not hold a segment.
    """
    memory = reader.config.memory
    if memory.max_tokens < reader.segment_tokens:
        raise ConfigError(
            f"{folder}: stage_b.memory.max_tokens = {memory.max_tokens} of the model has no room "
            f"for a segment of {reader.segment_tokens} tokens. Try a model with a larger one"
        )
    if not make and not has_index(folder):
        raise StateError(
            f"{folder}: no episodic memory was saved here. Read a text into it first: give "
            "--prompt or --file"
        )
    encoder = weights_digest(
        (name, tensor) for name, tensor in reader.named_parameters() if name.startswith(_KEY_PARTS)
    )
    with contextlib.ExitStack() as stack:
        # not around the yield: a fault of the caller's own files is not one of this folder
        with _disk_faults(folder):
            stack.enter_context(_alone(folder))
            is_saved = has_index(folder)
            open_index = partial(load_index, folder) if is_saved else EpisodicIndex
            index = open_index(
                encoder=encoder,
                tokenizer=tokenizer,
                key_size=memory.summary_dim,
                max_tokens=memory.max_tokens,
                eviction=memory.eviction,
            )
        before = list(index.entries) if is_saved else None
        yield index
        if index.entries != before:
            with _disk_faults(folder):
                save_index(index, folder)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Holds the folder's lock: a second process would save over the entries of the first."""
    lock = folder / ".lock"
    # first without blocking, so that a wait is announced
    with locked(lock, blocking=False) as is_held:
        if is_held:
            yield
            return
    logger.info("%s: another process uses it; waiting", folder)
    with locked(lock, blocking=True):
        yield


@contextlib.contextmanager
def _disk_faults(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StateError(
            f"{folder}: cannot be used: {error.strerror}. Give a folder that can be written to"
        ) from None
