"""Opening a run of 100,000 logged steps: `cdrmix watch --once`, and the pages of `cdrmix serve`.

Wall time from the command, CPU time, which neighbours on the machine do not change, and peak
resident memory of the process.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil

from cdrmix.monitoring.sinks import write_json_atomic
from tests.live_run import LiveRun
from tools.benchmark.timing import report

STEPS = 100_000
EVALUATED_EVERY = 500
COMMAND = [sys.executable, "-m", "cdrmix.cli"]
# Name of a measure, and what it is; the pages of the server in the order in which they are asked.
PAGES = {
    "serve: table of runs, from the command": "/",
    "serve: page of the run, first time": "/run/long",
    "serve: page of the run, again": "/run/long",
    "serve: its figures alone": "/run/long?part=status",
}


def measure(rounds: int) -> dict[str, Any]:
    """Seconds, CPU seconds and peak bytes, [rounds] by what is opened."""
    result: dict[str, Any] = {"rounds": rounds, "steps": STEPS, "costs": {}}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        run = LiveRun(root / "long")
        write_lines(run)
        result["file_bytes"] = (run.path / "metrics.jsonl").stat().st_size
        for _ in range(rounds):
            costs = {"watch --once": watch_once(run.path), **serve_pages(root)}
            for what, cost in costs.items():
                result["costs"].setdefault(what, []).append(cost)
    return result


def write_lines(run: LiveRun) -> None:
    """100,000 steps with a run's usual metrics, some of them noisy."""
    for step in range(1, STEPS + 1):
        noise = (step * 2_654_435_761 % 2**32) / 2**32
        run.log(
            step,
            loss=3 + 5 / (1 + step / 2_000) + 0.1 * noise,
            grad_norm=0.5 + noise,
            tokens_seen=step * 2_048,
            memory_peak_bytes=2**30 + step,
            **{
                "moe/overflow_fraction": 0.02 + 0.01 * noise,
                "moe/routing_entropy_bits": 2.9 + 0.05 * noise,
                "moe/load_balance_loss": 1 + 0.02 * noise,
                "moe/z_loss": 4 + noise,
            },
        )
        if step % EVALUATED_EVERY == 0:
            run.log(step, **{"eval/loss": 3.1 + 5 / (1 + step / 2_000)})
    write_json_atomic(run.path / "health.json", {"skipped_steps": 0, "events": []})


def watch_once(path: Path) -> dict[str, float]:
    """Cost of the command."""
    began = time.perf_counter()
    process = subprocess.Popen([*COMMAND, "watch", "--once", str(path)], stdout=subprocess.DEVNULL)
    _, code, usage = os.wait4(process.pid, 0)
    process.returncode = code
    assert code == 0
    return {
        "seconds": time.perf_counter() - began,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "peak_bytes": usage.ru_maxrss * 1024,
    }


def serve_pages(root: Path) -> dict[str, dict[str, float]]:
    """Cost of each page until it has come; its memory is the server's peak up to then."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [*COMMAND, "serve", str(root), "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        address = re.search(r"http://[\d.:]+", process.stdout.readline())
        assert address is not None
        costs: dict[str, dict[str, float]] = {}
        server = psutil.Process(process.pid)
        spent = 0.0
        for what, target in PAGES.items():
            with urllib.request.urlopen(address[0] + target) as answer:
                answer.read()
            now = sum(server.cpu_times()[:2])
            costs[what] = {
                "seconds": time.perf_counter() - began,
                "cpu_seconds": now - spent,
                "peak_bytes": peak_bytes(process.pid),
            }
            began, spent = time.perf_counter(), now
        return costs
    finally:
        process.kill()
        process.communicate()


def peak_bytes(process: int) -> int:
    """Peak resident memory of a living process."""
    status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) for line in status.splitlines() if "VmHWM" in line) * 1024


def live_rows(result: dict[str, Any]) -> list[str]:
    """Lines of the page."""
    rows = [
        f"A run of {result['steps']:,} logged steps, a metrics.jsonl of "
        f"{result['file_bytes'] / 1e6:.0f} MB. Times of pages are from request to last byte but "
        "for the first; memory is the server's peak up to then. Demanded: 2 s and 200 MB.",
        "",
        "| opened | CPU seconds, median | seconds, least | median | peak MB, at most |",
        "|---|---|---|---|---|",
    ]
    for what, costs in result["costs"].items():
        cpu, seconds, peaks = (
            [cost[name] for cost in costs] for name in ("cpu_seconds", "seconds", "peak_bytes")
        )
        rows.append(
            f"| {what} | {statistics.median(cpu):.2f} | {min(seconds):.2f} "
            f"| {statistics.median(seconds):.2f} | {max(peaks) / 1e6:.0f} |"
        )
    return rows


def show(result: dict[str, Any]) -> None:
    """Print the lines of the page."""
    print("\n".join(live_rows(result)))


if __name__ == "__main__":
    report(measure, show, rounds=5, description=__doc__)
