"""FAISS beside the exact search: quicker over many entries, rebuilt from the keys whenever asked.

The cache is never saved and never the truth: it holds what the index's keys say, and ids, ties and
scores that are given back come from the index itself.
"""

# B queries, S key dimensions, n entries

from __future__ import annotations

from typing import Any

from torch import Tensor

from cdrmix.errors import ConfigError
from cdrmix.reasoning.episodic_index import EpisodicIndex, Found

# From here on the exact search of one query takes more than about 10 ms on one core.
_CLUSTERED_FROM = 8192
_NUM_CLUSTERS, _NUM_PROBES = 128, 8


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

    def search(self, queries: Tensor, *, top_k: int) -> Found:
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
