"""Share of a run's time that trackers and hooks take, healthy and failing ones, beside none.

Runs of the tiny model on one rank, in turns and in changing order; the mean over the steps after
the first ones counts what a tracker does now and then, the median what it does in each step. A run
without a network is held against one with it, both with all trackers.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from cdrmix.data.sample import ensure_sample
from cdrmix.hooks import Hook, RunView, StepFigures
from tests.harness import ROOT
from tests.launcher import NO_NETWORK, launch
from tools.benchmark.timing import report

CONFIG = Path("model_configs/cdrmix-core-tiny.yaml")
STEPS = 120
SKIPPED = 10  # first steps, which allocate and compile
OURS = ["tensorboard", "wandb", "mlflow"]
FAILING = [f"tests.trackers:{name}" for name in ("Raises", "Blocks", "OnFullDisk")]
HOOK = {"use": "tools.benchmark.trackers:Idle", "name": "idle"}
# By kind: trackers, hooks, and what starts the launcher.
KINDS: dict[str, tuple[list[str], list[dict[str, str]], tuple[str, ...]]] = {
    "none": ([], [], ()),
    "all": (OURS, [], ()),
    "failing": (FAILING, [], ()),
    "offline": (OURS, [], NO_NETWORK),
    "hooks": ([], [HOOK], ()),
}
# What each is, and the kind that it is held against.
ROWS = {
    "all": ("TensorBoard, W&B and MLflow", "none"),
    "failing": ("one that raises, one that blocks, one on a full disk", "none"),
    "offline": ("TensorBoard, W&B and MLflow, without a network", "all"),
    "hooks": ("a hook that does nothing in each event of a step", "none"),
}


class Idle(Hook):
    """Has all events of a step and does nothing in them."""

    def on_start(self, run: RunView) -> None:
        """Keeps the view."""
        self.run = run

    def on_batch(self, batch: Mapping[str, Any]) -> None:
        """Changes nothing."""

    def on_backward_done(self, step: int) -> None:
        """Looks at nothing."""

    def on_step(self, step: int, measured: StepFigures) -> None:
        """Asks for nothing."""

    def on_log(self, step: int, record: Mapping[str, float]) -> None:
        """Adds nothing."""

    def on_end(self, outcome: Literal["done", "stopped"]) -> None:
        """Lets go of the view."""
        del self.run


def measure(rounds: int) -> dict[str, Any]:
    """Mean and median seconds of a step by kind, [rounds], and whether the losses are equal."""
    ensure_sample(4096)
    means: dict[str, list[float]] = {kind: [] for kind in KINDS}
    medians: dict[str, list[float]] = {kind: [] for kind in KINDS}
    are_equal = True
    for turn in range(rounds):
        losses = {}
        for kind in list(KINDS)[:: 1 if turn % 2 == 0 else -1]:
            seconds, losses[kind] = run_once(kind)
            means[kind].append(statistics.mean(seconds))
            medians[kind].append(statistics.median(seconds))
            print(f"{kind:8} {means[kind][-1]:.4f} {medians[kind][-1]:.4f}", file=sys.stderr)
        are_equal &= all(each == losses["none"] for each in losses.values())
    return {
        "rounds": rounds,
        "steps": STEPS,
        "mean": means,
        "median": medians,
        "losses_are_equal": are_equal,
    }


def run_once(kind: str) -> tuple[list[float], list[float]]:
    """Seconds of each step but the first ones, and the losses, of one run."""
    trackers, hooks, prefix = KINDS[kind]
    with tempfile.TemporaryDirectory() as name:
        run_dir = Path(name) / "run"
        flags = ["--config", str(CONFIG), "--run-dir", str(run_dir), "--max-steps", str(STEPS)]
        changed = (
            f"monitoring.trackers={json.dumps(trackers)}",
            f"hooks={json.dumps(hooks)}",
            "evaluation.baselines=false",
            "monitoring.log_every_steps=1",
        )
        for each in changed:
            flags += ["--set", each]
        words: list[str | Path] = ["--log_level", "error", "launch/train.py", *flags]
        # Trackers and the hook are modules of the checkout.
        done = launch(words, nproc=1, env={"PYTHONPATH": str(ROOT)}, prefix=prefix)
        assert done.returncode == 0, done.stderr
        lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if "step_seconds" in row]
    return [row["step_seconds"] for row in rows[SKIPPED:]], [row["loss"] for row in rows]


def show(result: dict[str, Any]) -> None:
    """Print the ratio of each pair."""
    for kind, (_, peer) in ROWS.items():
        for how in ("mean", "median"):
            ratios = _ratios(result[how], kind, peer)
            print(kind, how, *(f"{ratio:.3f}" for ratio in ratios))


def _ratios(seconds: dict[str, list[float]], kind: str, peer: str) -> list[float]:
    return [b / a for a, b in zip(seconds[peer], seconds[kind], strict=True)]


def tracker_rows(result: dict[str, Any]) -> list[str]:
    """Ratio of a step's time with trackers or hooks to that without."""
    rows = [
        f"`cdrmix-core-tiny` on one rank, {result['steps']} steps a run, every step logged; "
        f"{statistics.median(result['median']['none']):.4f} s a step with neither trackers nor "
        "hooks. The run without a network is held against that with one. Losses "
        f"{'are' if result['losses_are_equal'] else 'are NOT'} equal in every digit.",
        "",
        "| trackers and hooks | mean of a step, ratio of each pair | median | median of a step, "
        "ratio of each pair | median |",
        "|---|---|---|---|---|",
    ]
    for kind, (title, peer) in ROWS.items():
        cells = [title]
        for how in ("mean", "median"):
            ratios = _ratios(result[how], kind, peer)
            listed = ", ".join(f"{ratio:.3f}" for ratio in ratios)
            cells += [listed, f"{statistics.median(ratios):.3f}"]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


if __name__ == "__main__":
    report(measure, show, rounds=5, description=__doc__)
