"""Cost of faults: the tiny model under `cdrmix launch`, one rank killed in every 200 steps.

A checkpoint each 10 steps. The steps of the kills are random, with the number of the round as seed;
the figures are the run's own, from metrics.json.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from cdrmix.cluster.starts import read_starts
from cdrmix.data.sample import ensure_sample
from tests.cluster.supervised_launch import SupervisedLaunch
from tests.small_run import overrides
from tools.benchmark.timing import report

CONFIG = Path("model_configs/cdrmix-core-tiny.yaml")
STEPS = 400
STEPS_PER_KILL = 200
RANKS = 2
SETTINGS = (
    "checkpoint.every_steps=10",
    "evaluation.every_steps=null",
    "evaluation.baselines=false",
    "monitoring.log_every_steps=1",
)


def measure(rounds: int) -> dict[str, Any]:
    """Goodput of one run per round, and seconds from each loss to the first step after it."""
    ensure_sample(4096)
    return {
        "rounds": rounds,
        "steps": STEPS,
        "steps_per_kill": STEPS_PER_KILL,
        "runs": [run_with_kills(seed) for seed in range(rounds)],
    }


def run_with_kills(seed: int) -> dict[str, Any]:
    """Goodput of a run to its end, with the steps at which a rank was killed."""
    generator = random.Random(seed)
    kills = [
        begin + generator.randrange(STEPS_PER_KILL) for begin in range(1, STEPS, STEPS_PER_KILL)
    ]
    with tempfile.TemporaryDirectory() as name:
        run_dir = Path(name) / "run"
        flags = ["--nproc", str(RANKS), "--config", str(CONFIG), *overrides(SETTINGS)]
        flags += ["--set", f"training.max_steps={STEPS}"]
        with SupervisedLaunch(run_dir, flags) as run:
            for step in kills:
                run.wait_until(partial(has_done, run_dir, step), timeout=600)
                run.rank_process(generator.randrange(RANKS)).kill()
                run.wait_until(partial(has_gone_back, run_dir, step), timeout=600)
            assert run.wait(timeout=600) == 0, run.output
        starts = read_starts(run_dir)
        summary = json.loads((run_dir / "metrics.json").read_text(encoding="utf-8"))
    assert len(starts) == len(kills) + 1, starts
    return {
        "killed_at": [start.step for start in starts[:-1]],
        "resumed_at": [start.resumed_at for start in starts[1:]],
        "goodput": summary["goodput"],
        "start_up": summary["start_up"],
    }


def has_done(run_dir: Path, step: int) -> bool:
    """True once a step has been logged."""
    path = run_dir / "metrics.jsonl"
    return path.exists() and path.read_bytes().count(b"\n") >= step


def has_gone_back(run_dir: Path, step: int) -> bool:
    """True once the next start has cut the metrics back to its checkpoint."""
    return not has_done(run_dir, step)


def show(result: dict[str, Any]) -> None:
    """Print a line per run."""
    for run in result["runs"]:
        print(f"killed at {run['killed_at']}, resumed at {run['resumed_at']}: {run['goodput']}")
    shares = [run["goodput"]["share_of_steps"] for run in result["runs"]]
    print(f"productive steps of all: {statistics.median(shares):.1%}")


if __name__ == "__main__":
    report(measure, show, rounds=1, description=__doc__)
