"""Paired timing on one thread: variants take turns, so that a noisy neighbour meets all of them.

And what benchmarks have in common as commands.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any


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

    a = torch.randn(size, size)
    b = torch.randn(size, size)
    seconds = paired_cpu_seconds({"matmul": lambda: a @ b}, rounds=rounds, warmup=3)
    return 2 * size**3 / min(seconds["matmul"])


def report(
    measure: Callable[[int], dict[str, Any]],
    show: Callable[[dict[str, Any]], None],
    *,
    rounds: int,
    description: str | None,
) -> None:
    """Runs a benchmark as a command: measures and prints the result.

    Args:
        measure: --rounds -> result, of plain values.
        show: prints it for people; with --json, it is one line of JSON instead.
        rounds: by default.
        description: for --help.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = measure(args.rounds)
    if args.json:
        print(json.dumps(result))
    else:
        show(result)
