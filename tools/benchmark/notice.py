"""Time until a run notices that a rank was killed or stopped, and until it trains again.

One run of two ranks under `cdrmix launch`, small and without an end: rank 1 is killed and stopped
in turns, and each time the run starts again. Noticed is what train.log says, with its own time.
"""

from __future__ import annotations

import re
import signal
import statistics
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from cdrmix.data.sample import ensure_sample
from tests.cluster.supervised_launch import SupervisedLaunch
from tests.small_run import arguments, overrides
from tools.benchmark.timing import report

DEADLINE_SECONDS = 20
FAULTS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
SETTINGS = (
    "checkpoint.every_steps=10",
    "evaluation.every_steps=null",
    f"supervision.deadline_seconds={DEADLINE_SECONDS}",
    "training.max_steps=1000000",
)


def measure(rounds: int) -> dict[str, Any]:
    """Seconds to the notice and to the next step, [rounds] by fault."""
    folder = ensure_sample(4096)
    result: dict[str, Any] = {"rounds": rounds, "deadline_seconds": DEADLINE_SECONDS}
    seconds: dict[str, list[dict[str, float]]] = {name: [] for name in FAULTS}
    with tempfile.TemporaryDirectory() as name:
        run_dir = Path(name) / "run"
        flags = ["--nproc", "2", "--max-restarts", str(2 * rounds)]
        flags += arguments(folder, None, *overrides(SETTINGS))
        with SupervisedLaunch(run_dir, flags) as run:
            for _ in range(rounds):
                for fault, number in FAULTS.items():
                    seconds[fault].append(cost_of(run, run_dir, number))
            run.signal(signal.SIGTERM)
            assert run.wait() == 75, run.output
    return result | {"seconds": seconds}


def cost_of(run: SupervisedLaunch, run_dir: Path, number: int) -> dict[str, float]:
    """Seconds from a signal to rank 1 until the log says so, and until a step is done again."""
    metrics = run_dir / "metrics.jsonl"
    log = run_dir / "train.log"
    run.wait_until(metrics.exists)
    begin = metrics.stat().st_mtime
    run.wait_until(lambda: metrics.stat().st_mtime > begin + 1)
    known = len(errors(log))
    began = time.time()
    run.rank_process(1).send_signal(number)
    run.wait_until(lambda: len(errors(log)) > known)
    noticed = errors(log)[known]
    run.wait_until(lambda: metrics.stat().st_mtime > noticed + 1)
    return {"notice": noticed - began, "restart": metrics.stat().st_mtime - noticed}


def errors(log: Path) -> list[float]:
    """When the log tells of a rank that is lost, seconds of the clock."""
    found = re.findall(r"^(\S+ \S+) ERROR error: rank", log.read_text(), re.MULTILINE)
    return [datetime.fromisoformat(when.replace(",", ".")).timestamp() for when in found]


def show(result: dict[str, Any]) -> None:
    """Print medians and the worst."""
    for fault, costs in result["seconds"].items():
        for what in ("notice", "restart"):
            seconds = [cost[what] for cost in costs]
            print(f"{fault}: {what} {statistics.median(seconds):.1f} s, at most {max(seconds):.1f}")


if __name__ == "__main__":
    report(measure, show, rounds=3, description=__doc__)
