"""Resident memory of a run of the smallest model over 2,000 steps: what each step leaves behind.

    python -m tools.benchmark.leak [--steps 2000] [--json]

The whole of `launch/train.py` runs, on one rank, in a process of its own; a hook looks at the
memory. A second run keeps 4 KiB of every step, which must be noticed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil
from pydantic import BaseModel

from cdrmix.hooks import Hook, RunView, StepFigures

ROOT = Path(__file__).resolve().parents[2]
PLANTED_BYTES = 4096
# Most that a step may leave behind. Four runs had 240 to 1,640: the allocator grows by some hundred
# KiB at a time, ever more seldom.
MOST_BYTES = 2048
_EVERY_STEPS = 5
SMALLEST = (
    *("model.num_layers=2", "model.hidden_size=32", "model.num_heads=1", "model.moe=null"),
    *("model.transformer_fraction=0.5", "model.ffn_hidden_size=64"),
    *("training.sequence_length=32", "training.global_batch_size=2", "training.warmup_steps=2"),
    *("checkpoint.every_steps=null", "evaluation.every_steps=null", "evaluation.baselines=false"),
    *("evaluation.final_tokens=100", "evaluation.sample_tokens=1", "monitoring.log_every_steps=10"),
)


class Resident(Hook):
    """Writes resident memory over the steps of a run into resident.json."""

    class Options(BaseModel):
        """Bytes that each step leaves behind, as a control."""

        planted_bytes: int = 0

    def __init__(self, options: Options) -> None:
        self._planted_bytes = options.planted_bytes
        self._kept: list[bytes] = []
        self._process = psutil.Process()
        self._sizes: list[tuple[int, int]] = []

    def on_start(self, run: RunView) -> None:
        """Finds where to write."""
        self._folder = run.directory

    def on_step(self, step: int, measured: StepFigures) -> None:
        """Looks at the memory, and leaks what is planted."""
        if self._planted_bytes:
            self._kept.append(os.urandom(self._planted_bytes))
        if step % _EVERY_STEPS == 0:
            self._sizes.append((step, self._process.memory_info().rss))

    def on_end(self, outcome: Literal["done", "stopped"]) -> None:
        """Writes."""
        (self._folder / "resident.json").write_text(json.dumps(self._sizes))


def settings(steps: int, *, planted_bytes: int) -> list[str]:
    """Settings of such a run, as PATH=VALUE."""
    hook = {"use": "tools.benchmark.leak:Resident", "options": {"planted_bytes": planted_bytes}}
    return [*SMALLEST, f"training.max_steps={steps}", f"hooks={json.dumps([hook])}"]


def bytes_per_step(sizes: list[tuple[int, int]]) -> float:
    """Growth of resident memory (bytes per step) behind the first half, in which buffers reach
    their sizes: the median slope over pairs of samples half of the rest apart, which jumps of
    single steps do not move."""
    steps, resident = np.array(sizes[len(sizes) // 2 :], dtype=np.float64).T
    half = len(steps) // 2
    slopes = (resident[half:] - resident[: len(resident) - half]) / (
        steps[half:] - steps[: len(steps) - half]
    )
    return float(np.median(slopes))


def measure(steps: int, *, planted_bytes: int = 0) -> dict[str, float]:
    """Trains in a process of its own; growth per step, and memory at the end (bytes)."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        flags = [w for s in settings(steps, planted_bytes=planted_bytes) for w in ("--set", s)]
        config = ["--config", "model_configs/cdrmix-core-tiny.yaml", "--run-dir", str(run_dir)]
        subprocess.run(
            ["env", f"PYTHONPATH={ROOT}", "DS_ACCELERATOR=cpu", "OMP_NUM_THREADS=1"]
            + [sys.executable, "launch/train.py", *config, *flags],
            cwd=ROOT,
            check=True,
            capture_output=True,
        )
        sizes = json.loads((run_dir / "resident.json").read_text())
    return {"bytes_per_step": bytes_per_step(sizes), "resident_bytes": sizes[-1][1]}


def leak_rows(result: dict[str, Any]) -> list[str]:
    """Growth of resident memory in a run."""
    rows = [
        f"{result['steps']:,} steps of the smallest model by `launch/train.py`, one rank; the "
        f"control keeps {result['planted_bytes']:,} bytes of every step.",
        "",
        "| run | bytes that a step leaves | demanded | MiB at the end |",
        "|---|---|---|---|",
    ]
    demanded = {"plain": f"less than {MOST_BYTES:,}", "planted": f"more than {MOST_BYTES:,}"}
    for name, demand in demanded.items():
        found = result[name]
        growth, size = found["bytes_per_step"], found["resident_bytes"] / 2**20
        rows.append(f"| {name} | {growth:,.0f} | {demand} | {size:,.0f} |")
    return rows


def main(arguments: list[str]) -> int:
    """Measures both runs; returns an exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=2_000)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, help="not used: a run shows the course of its steps")
    args = parser.parse_args(arguments)
    result: dict[str, Any] = {
        "steps": args.steps,
        "planted_bytes": PLANTED_BYTES,
        "plain": measure(args.steps),
        "planted": measure(args.steps, planted_bytes=PLANTED_BYTES),
    }
    if args.json:
        print(json.dumps({**result, "rounds": 1}))
    else:
        for name in ("plain", "planted"):
            print(f"{name}: {result[name]['bytes_per_step']:,.0f} bytes a step")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
