"""Paired timing on one thread: variants take turns, so that a noisy neighbour meets all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping


def paired_cpu_seconds(
    variants: Mapping[str, Callable[[], object]], *, rounds: int, warmup: int = 1
) -> dict[str, list[float]]:
    """CPU seconds of each call, [rounds] per variant.

    Args:
        variants: name -> what to run; each is called once per round, in turn.
        rounds: measured rounds.
        warmup: calls of each variant before the first measured round.
    """
    for action in variants.values():
        for _ in range(warmup):
            action()
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, action in variants.items():
            began = time.process_time()
            action()
            seconds[name].append(time.process_time() - began)
    return seconds


def median_ratio(slower: list[float], faster: list[float]) -> float:
    """Median over the rounds of slower / faster, each taken in the same round."""
    return statistics.median(a / b for a, b in zip(slower, faster, strict=True))


def matmul_peak_flops(*, size: int = 1024, rounds: int = 9) -> float:
    """Best float32 matmul rate of this thread, FLOP per CPU second."""
    import torch  # the other benchmarks of data preparation do without it

    a, b = torch.randn(size, size), torch.randn(size, size)
    seconds = paired_cpu_seconds({"matmul": lambda: a @ b}, rounds=rounds, warmup=3)
    return 2 * size**3 / min(seconds["matmul"])
