"""Episodic memory: segments of text under keys, searched by inner product.

Segments are proposed, and become entries at the next commit. Beyond the capacity the entries of
least utility give way. Everything is deterministic: equal calls in equal order give equal entries,
scores and files. `FaissCache` searches many entries faster, with the same scores.
"""

# B queries, S key dimensions, n entries, k entries for a query

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cdrmix.config.reasoning import EvictionConfig
from cdrmix.errors import ConfigError

# Above this cosine two keys count as the same, and the entry takes the newer segment's text.
DUPLICATE_COSINE = 0.95
# Below this cosine an entry is unrelated to the query.
LEAST_SCORE = 0.2


@dataclass(frozen=True)
class Entry:
    """Segment of a text."""

    tokens: tuple[int, ...]  # its token ids
    offset: int  # tokens of the text before it
    source: str  # name of the text
    score: float  # worth of keeping it, 0 to 1
    id: int = -1  # rises with every new entry; -1 before the commit
    last_used: int = 0  # step at which it was written, refreshed or read last
    num_reads: int = 0  # times that it was read


class SearchResult(NamedTuple):
    """Places of entries for each query, best first, until the next commit."""

    places: Tensor  # [B, k] int64; -1 where fewer entries reach the least score
    scores: Tensor  # cosines, [B, k]; 0 there


class Committed(NamedTuple):
    """Ids of the entries that a commit changed."""

    added: list[int]
    refreshed: list[int]
    evicted: list[int]


class EpisodicIndex:
    """Entries in the order of their ids, and proposed segments.

    Args:
        key_size: S.
        max_tokens: capacity (tokens of all entries together).
        encoder: digest of the encoder that makes keys and queries.
        tokenizer: digest of the tokenizer of the segments.
        eviction: weights of an entry's utility.
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
        self.key_size = key_size
        self.max_tokens = max_tokens
        self.encoder = encoder
        self.tokenizer = tokenizer
        self._eviction = eviction or EvictionConfig()
        self.entries: list[Entry] = []
        # grown by doubling: to append to a tensor of exact size would copy it at every write
        self._rows = torch.zeros(0, key_size)
        self.next_id = 0
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

    def propose(
        self, key: Tensor, tokens: Sequence[int], *, offset: int, source: str, score: float
    ) -> None:
        """Puts a segment forward under its key, [S]; searches do not see it before a commit.

        Args:
            key: unit vector.
            tokens, offset, source, score: as of `Entry`.
        Raises:
            ValueError: if the key is no finite unit vector [S], or the segment empty or too long.
        """
        key = key.detach().float().cpu()
        if key.shape != (self.key_size,):
            raise ValueError(f"a key of shape {list(key.shape)}, keys here are [{self.key_size}]")
        if not math.isclose(float(key.norm()), 1.0, abs_tol=1e-3):
            raise ValueError(f"a key of length {float(key.norm()):g}; keys are unit vectors")
        # a longer one would evict everything and still not fit
        if not 1 <= len(tokens) <= self.max_tokens:
            raise ValueError(f"a segment of {len(tokens)} tokens; 1 to {self.max_tokens} fit")
        entry = Entry(tuple(int(token) for token in tokens), offset, source, score)
        self._pending.append((key, entry))

    def commit(self, *, step: int) -> Committed:
        """Accepts proposed segments in their order at a time, then evicts beyond the capacity."""
        changes = Committed([], [], [])
        for key, entry in self._pending:
            # one by one, as a segment may repeat another of the same commit
            cosines = self.keys @ key
            row = int(cosines.argmax()) if self.entries else -1
            if row >= 0 and float(cosines[row]) > DUPLICATE_COSINE:
                old = self.entries[row]
                score = max(old.score, entry.score)
                self._rows[row] = key
                self.entries[row] = replace(
                    entry, id=old.id, score=score, last_used=step, num_reads=old.num_reads
                )
                changes.refreshed.append(old.id)
                continue
            if len(self.entries) == len(self._rows):
                more = torch.zeros(max(len(self._rows), 64), self.key_size)
                self._rows = torch.cat([self._rows, more])
            self._rows[len(self.entries)] = key
            self.entries.append(replace(entry, id=self.next_id, last_used=step))
            changes.added.append(self.next_id)
            self.next_id += 1
        self._pending.clear()
        # only after all are in: capacity may be exceeded by a part of the commit
        excess = self.num_tokens - self.max_tokens
        if excess <= 0:
            return changes
        # least utility first, older ones of equals first, and what this commit changed last
        new = {*changes.added, *changes.refreshed}
        order = torch.sort(self.utility(step=step), stable=True).indices.tolist()
        order.sort(key=lambda row: self.entries[row].id in new)
        sizes = [len(self.entries[row].tokens) for row in order]
        count = 1 + sum(size < excess for size in itertools.accumulate(sizes))
        evicted = sorted(order[:count])
        changes.evicted.extend(self.entries[row].id for row in evicted)
        rest = sorted(order[count:])
        self._rows = self._rows[rest]
        self.entries = [self.entries[row] for row in rest]
        return changes

    def search(self, queries: Tensor, *, top_k: int) -> SearchResult:
        """Finds the k entries nearest to each query [B, S], exactly; ties go to the older one."""
        scores = queries.detach().float().cpu() @ self.keys.transpose(0, 1)  # [B, n]
        return _near_enough(torch.stack([best_of(row, top_k) for row in scores]), scores)

    def restore(self, keys: Tensor, entries: Sequence[Entry], *, next_id: int) -> None:
        """Replaces all entries and their keys [n, S], in the order of ids."""
        assert len(keys) == len(entries), "one key per entry"
        self._rows = keys
        self.entries = list(entries)
        self.next_id = next_id

    def touch(self, places: Iterable[int], *, step: int) -> None:
        """Counts a read of entries; a search alone is none, as its result may not be used."""
        for place in set(places):
            entry = self.entries[place]
            self.entries[place] = replace(entry, num_reads=entry.num_reads + 1, last_used=step)

    def utility(self, *, step: int) -> Tensor:
        """Computes the worth of keeping each entry, from its score, recency and reads; [n]."""
        weights = self._eviction
        scores = torch.tensor([entry.score for entry in self.entries])
        # scores are the agent's probabilities, often within a narrow range: spread over 0 to 1 they
        # count beside recency and reads
        spread = scores.max() - scores.min()
        scores = (scores - scores.min()) / spread if spread > 0 else torch.zeros_like(scores)
        # float64, as a float32 sum would lose the recency after some 20 half-lives
        ages = torch.tensor([step - entry.last_used for entry in self.entries], dtype=torch.float64)
        reads = torch.tensor([math.log1p(entry.num_reads) for entry in self.entries])
        most = max(float(reads.max()), 1e-9)
        recency = 0.5 ** (ages / weights.half_life_actions)
        worth = weights.score_weight * scores + weights.recency_weight * recency
        return worth + weights.reads_weight * reads / most


def best_of(scores: Tensor, count: int) -> Tensor:
    """Returns the places of the highest scores, ties by the lowest place: [n] -> [<= count]."""
    count = min(count, len(scores))
    if count == 0:
        return torch.empty(0, dtype=torch.int64)
    # topk gives any of equal scores, and a stable sort of all is slower: topk finds the least score
    # that counts, and the stable sort takes only those from there on
    least = torch.topk(scores, count).values[-1]
    places = torch.nonzero(scores >= least).squeeze(1)
    order = torch.sort(scores[places], descending=True, stable=True).indices
    return places[order][:count]


def _near_enough(places: Tensor, scores: Tensor) -> SearchResult:
    """Leaves out places [B, k] below `LEAST_SCORE`; scores are those of all entries, [B, n]."""
    cosines = scores.gather(1, places.clamp(min=0))
    near = (places >= 0) & (cosines >= LEAST_SCORE)
    return SearchResult(torch.where(near, places, -1), torch.where(near, cosines, 0.0))


# From here on the exact search of one query takes more than about 10 ms on one core.
_CLUSTERED_FROM = 8192
_NUM_CLUSTERS = 128
_NUM_PROBES = 8


class FaissCache:
    """Search of an index by FAISS: all keys up to 8,191 entries, the nearest clusters beyond.

    The index must not change from the first search on.

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

    @functools.cached_property
    def _built(self) -> Any:
        keys = self._index.keys.contiguous().numpy()
        clustered = len(keys) >= _CLUSTERED_FROM
        layout = f"IVF{_NUM_CLUSTERS},Flat" if clustered else "Flat"
        metric = self._faiss.METRIC_INNER_PRODUCT
        cache = self._faiss.index_factory(keys.shape[1], layout, metric)
        cache.train(keys)
        if clustered:
            cache.nprobe = _NUM_PROBES
        cache.add(keys)
        return cache

    def search(self, queries: Tensor, *, top_k: int) -> SearchResult:
        """Searches as `EpisodicIndex.search`; beyond 8,191 entries it may miss some."""
        keys = self._index.keys
        if not len(keys):
            return self._index.search(queries, top_k=top_k)
        asked = queries.detach().float().cpu().contiguous()
        _, rows = self._built.search(asked.numpy(), min(top_k, len(keys)))
        # FAISS sums in another order: scores are computed anew, and ties put in the order of age,
        # so that a result does not depend on whether the cache is used
        scores = asked.new_zeros(len(asked), len(keys))
        nearest = torch.full(rows.shape, -1)
        for query, row in enumerate(rows.tolist()):
            places = sorted(place for place in row if place >= 0)
            scores[query, places] = keys[places] @ asked[query]
            places = sorted(places, key=lambda place: -float(scores[query, place]))
            nearest[query, : len(places)] = torch.tensor(places)
        return _near_enough(nearest, scores)
