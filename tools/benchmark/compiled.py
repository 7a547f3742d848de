"""Training steps with compiled blocks and without, by inductor's C++ kernels on one thread.

The hybrids of `tools.benchmark.step`, in float32: forward, backward and AdamW. The first step
compiles. Beside them the bytes that blocks and loss of `cdrmix-core-1b` move, by count.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch._inductor.utils import fresh_cache

from tools.benchmark import block_bytes, step
from tools.benchmark.timing import median_ratio, paired_cpu_seconds, report


def measure(rounds: int) -> dict[str, Any]:
    """Medians of CPU time, paired ratios, seconds of the first compiled step; bytes by count."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    configs, _ = step.models()
    rows = []
    with fresh_cache():  # nothing is compiled already
        for name, config in configs.items():
            plain, joined = (step.ours(config, is_compiled=each) for each in (False, True))
            began = time.monotonic()
            joined()
            first_seconds = time.monotonic() - began
            seconds = paired_cpu_seconds({"plain": plain, "compiled": joined}, rounds=rounds)
            row: dict[str, Any] = {"model": name, "first_seconds": first_seconds}
            row |= {form: 1e3 * statistics.median(times) for form, times in seconds.items()}
            row["ratio"] = median_ratio(seconds["plain"], seconds["compiled"])
            rows.append(row)
    return {"rounds": rounds, "rows": rows, "moved": block_bytes.measure()}


def show(result: dict[str, Any]) -> None:
    """Print the rows."""
    for row in (*result["rows"], *result["moved"]["rows"], result["moved"]["loss"]):
        print(row)


if __name__ == "__main__":
    report(measure, show, rounds=7, description=__doc__)
