"""FAISS as a cache: the same answers as the exact search."""

import sys

import pytest
import torch
from torch.nn import functional as F

from cdrmix.errors import ConfigError
from cdrmix.reasoning.episodic_index import EpisodicIndex, FaissCache

SIZE = 16


def filled(count: int) -> EpisodicIndex:
    index = EpisodicIndex(key_size=SIZE, max_tokens=10**6, encoder="", tokenizer="")
    for key in F.normalize(torch.randn(count, SIZE), dim=-1):
        index.propose(key, (1,), offset=0, source="text", score=0.0)
    index.commit(step=0)
    return index


def test_without_faiss_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ConfigError, match=r"pip install 'cdrmix\[faiss\]'"):
        FaissCache(filled(1))


def test_it_answers_as_the_exact_search() -> None:
    pytest.importorskip("faiss", reason="faiss-cpu is not installed ([faiss] extra)")
    index = filled(300)
    queries = F.normalize(torch.randn(8, SIZE), dim=-1)
    for _ in range(2):
        cache = FaissCache(index)
        exact, cached = index.search(queries, top_k=4), cache.search(queries, top_k=4)
        assert torch.equal(exact.places, cached.places)
        torch.testing.assert_close(exact.scores, cached.scores)
        index.propose(queries[0], (2,), offset=0, source="text", score=0.0)
        index.commit(step=1)
    assert FaissCache(index).search(queries[:1], top_k=1).places.item() == 300
    assert FaissCache(filled(0)).search(queries, top_k=4).places.shape == (8, 0)
