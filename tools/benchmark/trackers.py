"""Share of a run's time that trackers take: the tiny model with all three, and with none.

Pairs of runs of one rank, in turns and in changing order; the mean over the steps after the first
ones counts what a tracker does now and then, the median what it does in each step.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from cdrmix.data.sample import ensure_sample
from tests.launcher import launch
from tools.benchmark.timing import report

CONFIG = Path("model_configs/cdrmix-core-tiny.yaml")
STEPS = 200
SKIPPED = 10  # first steps, which allocate and compile
KINDS = {"none": [], "all": ["tensorboard", "wandb", "mlflow"]}


def measure(rounds: int) -> dict[str, Any]:
    """Mean and median seconds of a step by kind, [rounds], and whether the losses are equal."""
    ensure_sample(4096)
    means: dict[str, list[float]] = {kind: [] for kind in KINDS}
    medians: dict[str, list[float]] = {kind: [] for kind in KINDS}
    are_equal = True
    for turn in range(rounds):
        losses = {}
        for kind in list(KINDS)[:: 1 if turn % 2 == 0 else -1]:
            seconds, losses[kind] = run_once(KINDS[kind])
            means[kind].append(statistics.mean(seconds))
            medians[kind].append(statistics.median(seconds))
            print(f"{kind:5} {means[kind][-1]:.4f} {medians[kind][-1]:.4f}", file=sys.stderr)
        are_equal &= losses["none"] == losses["all"]
    return {
        "rounds": rounds,
        "steps": STEPS,
        "mean": means,
        "median": medians,
        "losses_are_equal": are_equal,
    }


def run_once(trackers: list[str]) -> tuple[list[float], list[float]]:
    """Seconds of each step but the first ones, and the losses, of one run."""
    with tempfile.TemporaryDirectory() as name:
        run_dir = Path(name) / "run"
        flags = ["--config", str(CONFIG), "--run-dir", str(run_dir), "--max-steps", str(STEPS)]
        changed = (
            f"monitoring.trackers={json.dumps(trackers)}",
            "evaluation.baselines=false",
            "monitoring.log_every_steps=1",
        )
        for each in changed:
            flags += ["--set", each]
        words: list[str | Path] = ["--log_level", "error", "launch/train.py", *flags]
        done = launch(words, nproc=1)
        assert done.returncode == 0, done.stderr
        lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if "step_seconds" in row]
    return [row["step_seconds"] for row in rows[SKIPPED:]], [row["loss"] for row in rows]


def show(result: dict[str, Any]) -> None:
    """Print the ratio of each pair."""
    for kind in ("mean", "median"):
        pairs = zip(result[kind]["all"], result[kind]["none"], strict=True)
        print(kind, *(f"{ours / bare:.3f}" for ours, bare in pairs))


def tracker_rows(result: dict[str, Any]) -> list[str]:
    """Ratio of a step's time with all trackers to that with none."""
    rows = [
        f"`cdrmix-core-tiny` on one rank, {result['steps']} steps a run, every step logged. Losses "
        f"{'are' if result['losses_are_equal'] else 'are NOT'} equal in every digit.",
        "",
        "| seconds of a step | none | TensorBoard, W&B, MLflow | ratio of each pair | median |",
        "|---|---|---|---|---|",
    ]
    for kind in ("mean", "median"):
        bare, ours = (result[kind][each] for each in ("none", "all"))
        ratios = [b / a for a, b in zip(bare, ours, strict=True)]
        rows.append(
            f"| {kind} | {statistics.median(bare):.4f} | {statistics.median(ours):.4f} | "
            f"{', '.join(f'{ratio:.3f}' for ratio in ratios)} | {statistics.median(ratios):.3f} |"
        )
    return rows


if __name__ == "__main__":
    report(measure, show, rounds=5, description=__doc__)
