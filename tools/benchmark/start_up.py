"""From the command to the first step, by parts: `deepspeed launch/train.py` on the tiny model.

Two ranks on CPUs; the parts are those that the run itself writes to metrics.json.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from cdrmix.data.sample import ensure_sample
from tests.launcher import launch
from tools.benchmark.timing import report

CONFIG = Path("model_configs/cdrmix-core-tiny.yaml")


def measure(rounds: int) -> dict[str, Any]:
    """Seconds of each part, [rounds] by name, in order."""
    ensure_sample(4096)
    seconds: dict[str, list[float]] = {}
    for _ in range(rounds):
        for part, value in start_once().items():
            seconds.setdefault(part, []).append(value)
    return {"rounds": rounds, "seconds": seconds}


def start_once() -> dict[str, float]:
    """Parts of one start, in seconds."""
    with tempfile.TemporaryDirectory() as name:
        run_dir = Path(name) / "run"
        flags = ["--config", str(CONFIG), "--run-dir", str(run_dir), "--max-steps", "1"]
        flags += ["--set", "evaluation.baselines=false", "--set", "evaluation.sample_tokens=1"]
        words: list[str | Path] = ["--log_level", "error", "launch/train.py", *flags]
        done = launch(words, nproc=2)
        assert done.returncode == 0, done.stderr
        return json.loads((run_dir / "metrics.json").read_text(encoding="utf-8"))["start_up"]


def show(result: dict[str, Any]) -> None:
    """Print medians by part."""
    for part, seconds in result["seconds"].items():
        print(f"{part:24} {statistics.median(seconds):6.2f}")


if __name__ == "__main__":
    report(measure, show, rounds=5, description=__doc__)
