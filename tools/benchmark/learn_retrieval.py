"""Episodic memory learns to find a segment by what it says, not by what all segments share.

Key and query of a segment are its content plus loud noise of their own in 24 of 128 dimensions, as
hidden states carry position and topic. Cosines of the raw vectors find next to nothing; encoders
trained with InfoNCE should find the segment among the first four, of 1,024 and of ten times more.
Beside it: latency of one query by the number of entries, exact and through FAISS.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from cdrmix.errors import ConfigError
from cdrmix.reasoning.episodic_index import Entry, EpisodicIndex, FaissCache
from cdrmix.reasoning.working_memory import RetrievalEncoder
from tools.benchmark.timing import paired_cpu_seconds, report

HIDDEN = 128
KEY_SIZE = 64
LOUD_DIMENSIONS = 24
LOUDNESS = 6.0
NUM_ENTRIES = 1024
NUM_DISTRACTORS = 9216
TOP_K = 4
BATCH_SIZE = 256
LEARNING_RATE = 3e-3
# rows of the latency table: entries, key size
SIZES = ((1024, 512), (4096, 512), (16_384, 512), (32_768, 640), (131_072, 768))


def segments(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Hidden states on the side of the keys and of the queries, each [n, D]."""
    content = torch.randn(count, HIDDEN, generator=generator)
    sides = []
    for _ in range(2):
        noise = 0.5 * torch.randn(count, HIDDEN, generator=generator)
        noise[:, :LOUD_DIMENSIONS] += LOUDNESS * torch.randn(
            count, LOUD_DIMENSIONS, generator=generator
        )
        sides.append(content + noise)
    return sides[0], sides[1]


def info_nce(queries: Tensor, keys: Tensor, *, temperature: float) -> Tensor:
    """InfoNCE in both directions with the batch's other pairs as negatives, summed over pairs.

    Source: van den Oord et al., 1807.03748, in both directions as in CLIP (2103.00020).
    """
    scores = queries @ keys.transpose(0, 1) / temperature  # [n, n]
    partners = torch.arange(len(queries))
    there = F.cross_entropy(scores, partners, reduction="sum")
    back = F.cross_entropy(scores.transpose(0, 1), partners, reduction="sum")
    return (there + back) / 2


def train(steps: int, *, seed: int) -> RetrievalEncoder:
    """An encoder after `steps` batches."""
    encoder = RetrievalEncoder(HIDDEN, KEY_SIZE)
    encoder.initialize(seed=seed)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=LEARNING_RATE, weight_decay=0)
    for _ in range(steps):
        for_keys, for_queries = segments(BATCH_SIZE, generator)
        loss = info_nce(
            encoder.query(for_queries), encoder.key(for_keys.unsqueeze(1)), temperature=0.07
        )
        optimizer.zero_grad()
        (loss / BATCH_SIZE).backward()
        optimizer.step()
    return encoder


def recall(keys: Tensor, queries: Tensor) -> float:
    """Share of queries whose own key, of the same row, is among the first four of an index."""
    index = EpisodicIndex(key_size=keys.shape[1], max_tokens=len(keys), encoder="", tokenizer="")
    for key in keys:
        index.propose(key, (0,), offset=0, source="", score=0.0)
    added = index.commit(step=0).added
    assert len(added) == len(keys), "no two segments are alike"
    places = index.search(queries, top_k=TOP_K).places
    return float((places == torch.arange(len(queries)).unsqueeze(1)).any(1).float().mean())


def learn(seed: int, *, steps: int, num_distractors: int = NUM_DISTRACTORS) -> dict[str, float]:
    """Recall at 4 of the trained encoder, among distractors, untrained, and of raw cosines."""
    trained, untrained = (train(count, seed=seed) for count in (steps, 0))
    for_keys, for_queries = segments(
        NUM_ENTRIES + num_distractors, torch.Generator().manual_seed(10_000 + seed)
    )
    near = for_keys[:NUM_ENTRIES]
    asked = for_queries[:NUM_ENTRIES]
    with torch.no_grad():
        return {
            "trained": recall(trained.key(near.unsqueeze(1)), trained.query(asked)),
            "among distractors": recall(trained.key(for_keys.unsqueeze(1)), trained.query(asked)),
            "untrained": recall(untrained.key(near.unsqueeze(1)), untrained.query(asked)),
            "raw": recall(F.normalize(near, dim=-1), F.normalize(asked, dim=-1)),
        }


def latency(num_entries: int, key_size: int, *, rounds: int) -> dict[str, float | None]:
    """Median milliseconds of one query, by kind of search; None where FAISS is not installed."""
    generator = torch.Generator().manual_seed(0)
    keys = F.normalize(torch.randn(num_entries, key_size, generator=generator), dim=-1)
    index = EpisodicIndex(key_size=key_size, max_tokens=num_entries, encoder="", tokenizer="")
    entries = [Entry((0,), place, "", 0.0, id=place) for place in range(num_entries)]
    index.restore(keys, entries, next_id=num_entries)
    query = keys[:1]
    searches: dict[str, Callable[[], object]] = {"exact": lambda: index.search(query, top_k=TOP_K)}
    with contextlib.suppress(ConfigError):
        cache = FaissCache(index)
        searches["faiss"] = lambda: cache.search(query, top_k=TOP_K)
    seconds = paired_cpu_seconds(searches, rounds=rounds, warmup=2)
    found = {name: 1e3 * statistics.median(times) for name, times in seconds.items()}
    return {"exact": found["exact"], "faiss": found.get("faiss")}


def measure(rounds: int) -> dict[str, Any]:
    """Recall that three seeds learn, and latencies."""
    torch.set_num_threads(1)
    learned = []
    for seed in range(3):
        began = time.process_time()
        row = learn(seed, steps=400)
        learned.append({"seed": seed, **row, "seconds": time.process_time() - began})
    sizes = [
        {"entries": entries, "key_size": key_size, **latency(entries, key_size, rounds=rounds)}
        for entries, key_size in SIZES
    ]
    return {"rounds": rounds, "learned": learned, "latency": sizes}


def show(result: dict[str, Any]) -> None:
    """Print the rows."""
    for row in [*result["learned"], *result["latency"]]:
        print(row)


if __name__ == "__main__":
    report(measure, show, rounds=15, description=__doc__)
