"""Run directories as a live view meets them: begun, going on, stopped, lost, finished."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

from cdrmix.cluster.start_records import add_start_record
from cdrmix.cluster.starts import process_start_ticks
from cdrmix.monitoring.sinks import write_json_atomic

STEPS = 400
# Values of cdrmix-core-tiny that a view shows or compares.
CONFIG = """\
name: NAME
model: {hidden_size: 128, num_layers: 4, num_heads: 4, vocab_size: 4096}
training:
  max_steps: 400
  global_batch_size: 8
  sequence_length: 256
  learning_rate: 2.0e-3
  min_learning_rate: 2.0e-4
  warmup_steps: 40
data: {path: sample}
"""
DEAD = 2**22 + 1  # above the highest number of a process


class LiveRun:
    """A run directory that tests write as a run would."""

    def __init__(self, path: Path, *, name: str = "cdrmix-core-tiny") -> None:
        self.path = path
        self.path.mkdir(parents=True)
        (path / "config_snapshot.yaml").write_text(CONFIG.replace("NAME", json.dumps(name)))
        (path / "metrics.jsonl").touch()
        start = {"began": "2026-11-22T08:09:10+00:00", "stage": "a", "from_step": 0}
        add_start_record(path, start)
        self.hold()

    def hold(self, *, process: int | None = None, host: str | None = None) -> None:
        """The lock names a holder: this process, or another."""
        process = process or os.getpid()
        started = process_start_ticks(process) or "0"
        holder = {"host": host or socket.gethostname(), "process": process, "started": started}
        (self.path / ".lock").write_text(json.dumps(holder))

    def log(self, *steps: int, **values: float) -> None:
        """Lines of metrics.jsonl, of which the loss falls by a hundredth a step."""
        with (self.path / "metrics.jsonl").open("a") as file:
            for step in steps:
                figures = {"loss": 8 - step / 100, "tokens_per_second": 12_000.0, **values}
                line = {"step": step, **figures, "step_seconds": 0.5, "learning_rate": 1e-3}
                file.write(json.dumps(line) + "\n")

    def age(self, seconds: float, *names: str) -> None:
        """Files have changed so long ago; all of them without names."""
        then = time.time() - seconds
        for name in names or [path.name for path in self.path.iterdir()]:
            os.utime(self.path / name, (then, then))

    def save(self, step: int) -> None:
        """A checkpoint of a step."""
        (self.path / "checkpoints" / str(step)).mkdir(parents=True)
        write_json_atomic(self.path / "saves.json", {"step": step})

    def tell(self, level: str, text: str) -> None:
        """A line of train.log."""
        with (self.path / "train.log").open("a") as file:
            file.write(f"2026-11-22 08:09:10,123 {level} {text}\n")

    def finish(self) -> None:
        """The marker of the end."""
        write_json_atomic(self.path / "finished.json", {"step": STEPS, "stage": "a"})
