"""What earlier texts left in episodic memory: a folder that outlives them, and how episodes of
reading find what it holds.

A segment that an agent writes becomes an entry once its text is over: until then, and if anything
fails, the folder stays as it was.
"""

# N episodes, E entries, M segments written, L segments, K key dimensions, k entries found

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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

# What keys depend on: working memory and agent are not among it.
_KEY_PARTS = ("plastic.", "retrieval.")


@dataclass(frozen=True)
class Earlier:
    """Entries of an index as segments that stand before those of a text; it must not change.

    Attributes:
        index: holds E of them.
        search: its exact search, or that of a cache: (queries, top_k=) -> entries.
    """

    index: EpisodicIndex
    search: Callable[..., SearchResult]

    def __len__(self) -> int:
        return len(self.index)

    def before(self, texts: Texts) -> Texts:
        """The texts with all entries before each, as segments 0 to E - 1."""
        return texts.behind([entry.tokens for entry in self.index.entries])

    def source(self, place: int) -> str:
        """The text that an entry is from."""
        return self.index.entries[place].source

    def find(
        self, queries: Tensor, written: Tensor, is_written: Tensor, *, count: int
    ) -> tuple[Tensor, Tensor]:
        """Entries nearest to each query, but for those that were written anew.

        Args:
            queries: unit vectors, [N, K].
            written: keys of what was written since, [N, M, K].
            is_written: which of them there are, [N, M].
            count: most entries for each query.
        Returns:
            Their places, -1 where fewer are near enough, and cosines, [N, k] each.
        """
        found = self.search(queries, top_k=count)
        ids = torch.tensor([entry.id for entry in self.index.entries])
        places = torch.searchsorted(ids, found.ids.clamp(min=0))
        keys = self.index.keys[places].to(queries.device)  # [N, k, K]
        alike = (keys @ written.transpose(1, 2)).masked_fill(~is_written.unsqueeze(1), -1.0)
        stale = (alike > DUPLICATE_COSINE).any(2)
        there = (found.ids >= 0).to(queries.device) & ~stale
        return torch.where(there, places.to(queries.device), -1), found.scores.to(queries.device)


def make_earlier(index: EpisodicIndex, *, faiss: bool) -> Earlier:
    """What is in an index, found by exact search or through FAISS.

    Raises:
        ConfigError: if FAISS is asked for and not installed.
    """
    return Earlier(index, FaissCache(index).search if faiss else index.search)


class Writing(NamedTuple):
    """A segment that an agent wrote: key [K], tokens, where it began (tokens from the start of the
    text), and how sure the agent was of writing it, 0 to 1."""

    key: Tensor
    tokens: list[int]
    offset: int
    score: float


class Kept(NamedTuple):
    """What became of an index once a text was over: counts of entries, and texts as tokens.

    Attributes:
        num_added: new entries.
        refreshed: tokens that took the place of what an entry from before the text said.
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
    """Accept what an agent wrote, and note which entries it read.

    Args:
        index: takes it in.
        written: in the order of the text.
        read: places of entries that stood in the window.
        num_steps: actions that the agent took: entries age by them.
        source: what text it is from.
    """
    now = max((entry.last_used for entry in index.entries), default=0) + num_steps
    index.touch(torch.tensor([index.entries[place].id for place in read]), step=now)
    before = {entry.id: entry.tokens for entry in index.entries}
    for each in written:
        index.propose(each.key, each.tokens, offset=each.offset, source=source, score=each.score)
    done = index.commit(step=now)
    # what is new gives way last, and a text writes no more than there is room for
    refreshed = [id for id in dict.fromkeys(done.refreshed) if id in before]
    return Kept(
        len(done.added),
        [index.entry(id).tokens for id in refreshed],
        [before[id] for id in done.evicted],
    )


@contextlib.contextmanager
def opened(
    folder: Path, reader: MemoryReader, *, tokenizer: str, make: bool
) -> Iterator[EpisodicIndex]:
    """The index of a folder, saved at the end if it changed; others wait for their turn meanwhile.

    Args:
        folder: of this index alone.
        reader: whose keys it holds.
        tokenizer: digest of the tokenizer whose ids it holds.
        make: start an empty one where there is none.
    Raises:
        StateError: if there is none and none is to be made, it is damaged, of another encoder, key
            size or tokenizer, or the folder cannot be used.
        ConfigError: if the reader's capacity does not hold a segment.
    """
    most = reader.config.memory.max_tokens
    if most < reader.segment_tokens:
        raise ConfigError(
            f"{folder}: stage_b.memory.max_tokens = {most} of the model has no room for a segment "
            f"of {reader.segment_tokens} tokens. Try a model with a larger one"
        )
    encoder = weights_digest(
        (name, tensor) for name, tensor in reader.named_parameters() if name.startswith(_KEY_PARTS)
    )
    size = reader.config.memory.summary_dim
    eviction = reader.config.memory.eviction
    if not make and not has_index(folder):
        raise StateError(
            f"{folder}: no episodic memory was saved here. Read a text into it first: give "
            "--prompt or --file"
        )
    with contextlib.ExitStack() as stack:
        with _disk_faults(folder):
            stack.enter_context(_alone(folder))
            if has_index(folder):
                index = load_index(
                    folder,
                    encoder=encoder,
                    tokenizer=tokenizer,
                    key_size=size,
                    max_tokens=most,
                    eviction=eviction,
                )
            else:
                index = EpisodicIndex(
                    key_size=size,
                    max_tokens=most,
                    encoder=encoder,
                    tokenizer=tokenizer,
                    eviction=eviction,
                )
        before = list(index.entries) if has_index(folder) else None
        yield index
        if index.entries != before:
            with _disk_faults(folder):
                save_index(index, folder)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the folder; who comes second would save over what the first has written."""
    lock = folder / ".lock"
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
