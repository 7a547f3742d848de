"""Episodic memory: segments of text under keys, searched by inner product.

Segments are proposed, and become durable when they are accepted; what is rolled back was never
there. Where the capacity is reached, the segment of least use gives way. Everything is
deterministic: equal calls in equal order give equal entries, scores and files.

FAISS beside the exact search: quicker over many entries, rebuilt from the keys whenever asked.

The cache is never saved and never the truth: it holds what the index's keys say, and ids, ties and
scores that are given back come from the index itself.
"""

# B queries, S key dimensions, n entries, k entries found

# B queries, S key dimensions, n entries

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cdrmix.config.reasoning import EvictionConfig
from cdrmix.errors import ConfigError

# Above this cosine two keys are one: the entry takes the newer segment's text.
DUPLICATE_COSINE = 0.95
# Below this cosine an entry is not about the query.
LEAST_SCORE = 0.2


@dataclass(frozen=True)
class Entry:
    """One segment.

    Attributes:
        tokens: its token ids.
        offset: where it began (tokens from the start of the text).
        source: what text it is from.
        score: how much it was worth when it was accepted, 0 to 1.
        id: rises with every new entry; -1 before it is accepted.
        last_used: step at which it was written, refreshed or read last.
        num_reads: how often it was read.
    """

    tokens: tuple[int, ...]
    offset: int
    source: str
    score: float
    id: int = -1
    last_used: int = 0
    num_reads: int = 0


class SearchResult(NamedTuple):
    """Entries for each query, best first.

    Attributes:
        ids: [B, k] int64; -1 where fewer entries reach the least score.
        scores: cosines, [B, k]; 0 there.
    """

    ids: Tensor
    scores: Tensor


class Committed(NamedTuple):
    """What a commit did, by entry id."""

    added: list[int]
    refreshed: list[int]
    evicted: list[int]


class EpisodicIndex:
    """Entries in the order of their ids, and proposals beside them.

    Args:
        key_size: S.
        max_tokens: capacity (tokens of all entries together).
        encoder: digest of the encoder that makes keys and queries.
        tokenizer: digest of the tokenizer that gives the segments' ids.
        eviction: how the entries that leave are chosen.
    """

    def __init__(
        self,
        *,
        key_size: int,
        max_tokens: int,
        encoder: str,
        tokenizer: str,
        eviction: EvictionConfig | None = None,
    ) -> None:
        self.max_tokens = max_tokens
        self.encoder = encoder
        self.tokenizer = tokenizer
        self._eviction = eviction or EvictionConfig()
        self.entries: list[Entry] = []
        self._rows = torch.zeros(0, key_size)  # room for keys, doubled when it is used up
        self.next_id = 0
        self.version = 0  # rises whenever keys change, for caches of them
        self._pending: list[tuple[Tensor, Entry]] = []

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def keys(self) -> Tensor:
        """Unit vectors of all entries, [n, S]; valid until the next commit."""
        return self._rows[: len(self.entries)]

    @property
    def num_tokens(self) -> int:
        """Tokens of all entries."""
        return sum(len(entry.tokens) for entry in self.entries)

    @property
    def num_pending(self) -> int:
        """Segments proposed and not yet accepted."""
        return len(self._pending)

    def propose(
        self, key: Tensor, tokens: Sequence[int], *, offset: int, source: str, score: float
    ) -> None:
        """Put a segment forward; it cannot be found before it is accepted.

        Args:
            key: unit vector, [S].
            tokens: of the segment; at least one, and no more than the capacity.
            offset: where it begins (tokens from the start of the text).
            source: what text it is from.
            score: how much it is worth keeping, 0 to 1.
        Raises:
            ValueError: if the key is no finite unit vector of S numbers, or the segment too long.
        """
        key = key.detach().float().cpu()
        if key.shape != self._rows.shape[1:]:
            raise ValueError(
                f"a key of shape {list(key.shape)}, keys here are {list(self._rows.shape[1:])}"
            )
        if not math.isclose(float(key.norm()), 1.0, abs_tol=1e-3):
            raise ValueError(f"a key of length {float(key.norm()):g}; keys are unit vectors")
        if not 1 <= len(tokens) <= self.max_tokens:
            raise ValueError(f"a segment of {len(tokens)} tokens; 1 to {self.max_tokens} fit")
        entry = Entry(tuple(int(token) for token in tokens), offset, source, score)
        self._pending.append((key, entry))

    def rollback(self) -> None:
        """Forget what was proposed."""
        self._pending.clear()

    def commit(self, *, step: int) -> Committed:
        """Accept what was proposed, in its order; then make room.

        Args:
            step: now, for the age of entries.
        """
        done = Committed([], [], [])
        for key, entry in self._pending:
            near = self._duplicate_of(key)
            if near is None:
                self._append(key, dataclasses.replace(entry, id=self.next_id, last_used=step))
                done.added.append(self.next_id)
                self.next_id += 1
            else:
                self._refresh(near, key, entry, step)
                done.refreshed.append(self.entries[near].id)
        if self._pending:
            self.version += 1
        self._pending.clear()
        new = {*done.added, *done.refreshed}
        done.evicted.extend(self._make_room(step, new))
        return done

    def search(self, queries: Tensor, *, top_k: int) -> SearchResult:
        """The accepted entries nearest to each query, exactly; ties go to the older entry.

        Args:
            queries: unit vectors, [B, S].
            top_k: k.
        """
        scores = queries.detach().float().cpu() @ self.keys.transpose(0, 1)  # [B, n]
        rows = [best_of(row, top_k) for row in scores]
        return self.found([row.tolist() for row in rows], scores)

    def restore(self, keys: Tensor, entries: Sequence[Entry], *, next_id: int) -> None:
        """Take the place of what is held: keys [n, S] and their entries, in the order of ids."""
        assert len(keys) == len(entries), "one key per entry"
        self._rows, self.entries, self.next_id = keys, list(entries), next_id
        self.version += 1

    def found(self, rows: Sequence[Sequence[int]], scores: Tensor) -> SearchResult:
        """Rows of entries, best first, as ids and scores; those below the least score are left out.

        Args:
            rows: of each query, as many as wanted.
            scores: of each query with every entry, [B, n].
        """
        width = max((len(row) for row in rows), default=0)
        ids = torch.full((len(rows), width), -1, dtype=torch.int64)
        values = torch.zeros(len(rows), width)
        for place, row in enumerate(rows):
            for rank, entry in enumerate(row):
                if scores[place, entry] >= LEAST_SCORE:
                    ids[place, rank] = self.entries[entry].id
                    values[place, rank] = scores[place, entry]
        return SearchResult(ids, values)

    def touch(self, ids: Tensor, *, step: int) -> None:
        """Note that entries were read and used; `search` by itself changes nothing.

        Args:
            ids: of entries, any shape; -1 is passed over.
            step: now.
        """
        read = set(ids.flatten().tolist()) - {-1}
        self.entries = [
            dataclasses.replace(entry, num_reads=entry.num_reads + 1, last_used=step)
            if entry.id in read
            else entry
            for entry in self.entries
        ]

    def entry(self, id: int) -> Entry:
        """The entry of an id.

        Raises:
            KeyError: if it was never there, or was evicted.
        """
        place = bisect.bisect_left(self.entries, id, key=lambda entry: entry.id)
        if place == len(self.entries) or self.entries[place].id != id:
            raise KeyError(f"no entry {id}")
        return self.entries[place]

    def utility(self, *, step: int) -> Tensor:
        """Worth of keeping each entry, by its score, recency and reads; [n]."""
        weights = self._eviction
        scores = _scaled(torch.tensor([entry.score for entry in self.entries]))
        ages = torch.tensor([step - entry.last_used for entry in self.entries], dtype=torch.float64)
        reads = torch.tensor([math.log1p(entry.num_reads) for entry in self.entries])
        most = max(float(reads.max()), 1e-9) if len(reads) else 1.0
        recency = 0.5 ** (ages / weights.half_life_actions)
        worth = weights.score_weight * scores + weights.recency_weight * recency
        return worth + weights.reads_weight * reads / most

    def _duplicate_of(self, key: Tensor) -> int | None:
        if not self.entries:
            return None
        cosines = self.keys @ key
        nearest = int(cosines.argmax())
        return nearest if float(cosines[nearest]) > DUPLICATE_COSINE else None

    def _append(self, key: Tensor, entry: Entry) -> None:
        if len(self.entries) == len(self._rows):
            more = torch.zeros(max(len(self._rows), 64), self._rows.shape[1])
            self._rows = torch.cat([self._rows, more])
        self._rows[len(self.entries)] = key
        self.entries.append(entry)

    def _refresh(self, row: int, key: Tensor, entry: Entry, step: int) -> None:
        old = self.entries[row]
        self._rows[row] = key
        self.entries[row] = dataclasses.replace(
            entry,
            id=old.id,
            score=max(old.score, entry.score),
            last_used=step,
            num_reads=old.num_reads,
        )

    def _make_room(self, step: int, new: set[int]) -> list[int]:
        """Evict what is of least utility, ties by age and new entries last, until the rest fits."""
        excess = self.num_tokens - self.max_tokens
        if excess <= 0:
            return []
        by_utility = torch.sort(self.utility(step=step), stable=True).indices.tolist()
        order = sorted(by_utility, key=lambda row: self.entries[row].id in new)
        evicted: set[int] = set()
        for row in order:
            if excess <= 0:
                break
            evicted.add(row)
            excess -= len(self.entries[row].tokens)
        kept = [row for row in range(len(self.entries)) if row not in evicted]
        gone = [self.entries[row].id for row in sorted(evicted)]
        self._rows = self._rows[kept]
        self.entries = [self.entries[row] for row in kept]
        self.version += 1
        return gone


def best_of(scores: Tensor, count: int) -> Tensor:
    """Places of the highest scores, best first, ties by the lowest place: [n] -> [<= count]."""
    count = min(count, len(scores))
    if count == 0:
        return torch.empty(0, dtype=torch.int64)
    # topk may give any of equal scores; a stable sort of all is slower than finding the least
    least = torch.topk(scores, count).values[-1]
    places = torch.nonzero(scores >= least).squeeze(1)
    order = torch.sort(scores[places], descending=True, stable=True).indices
    return places[order][:count]


def _scaled(values: Tensor) -> Tensor:
    """Values mapped to 0..1; zeros where all are equal."""
    if len(values) == 0 or values.max() == values.min():
        return torch.zeros_like(values)
    return (values - values.min()) / (values.max() - values.min())


# From here on the exact search of one query takes more than about 10 ms on one core.
_CLUSTERED_FROM = 8192
_NUM_CLUSTERS = 128
_NUM_PROBES = 8


class FaissCache:
    """Searches an index through FAISS: all keys up to 8,191 of them, the nearest clusters beyond.

    Args:
        index: what to search; changes of it are noticed.
    Raises:
        ConfigError: if FAISS is not installed.
    """

    def __init__(self, index: EpisodicIndex) -> None:
        try:
            import faiss
        except ImportError:
            raise ConfigError(
                "the FAISS cache of episodic memory needs the package faiss-cpu. "
                "Try: pip install 'cdrmix[faiss]', or the exact search, which needs nothing"
            ) from None
        self._faiss: Any = faiss
        self._index = index
        self._built: tuple[int, Any] | None = None

    def search(self, queries: Tensor, *, top_k: int) -> SearchResult:
        """As `EpisodicIndex.search`; beyond 8,191 entries it may miss some.

        Args:
            queries: unit vectors, [B, S].
            top_k: k.
        """
        if not len(self._index):
            return self._index.search(queries, top_k=top_k)
        built = self._rebuilt()
        asked = queries.detach().float().cpu().contiguous()
        _, rows = built.search(asked.numpy(), min(top_k, len(self._index)))
        exact = asked.new_zeros(len(asked), len(self._index))
        ordered = []
        for place, row in enumerate(rows.tolist()):
            found = sorted(entry for entry in row if entry >= 0)
            exact[place, found] = self._index.keys[found] @ asked[place]
            ordered.append(sorted(found, key=lambda entry: (-float(exact[place, entry]), entry)))
        return self._index.found(ordered, exact)

    def _rebuilt(self) -> Any:
        if self._built is None or self._built[0] != self._index.version:
            self._built = (self._index.version, self._build())
        return self._built[1]

    def _build(self) -> Any:
        keys = self._index.keys.contiguous().numpy()
        clustered = len(keys) >= _CLUSTERED_FROM
        layout = f"IVF{_NUM_CLUSTERS},Flat" if clustered else "Flat"
        built = self._faiss.index_factory(keys.shape[1], layout, self._faiss.METRIC_INNER_PRODUCT)
        built.train(keys)
        if clustered:
            built.nprobe = _NUM_PROBES
        built.add(keys)
        return built
