"""Hooks that tests configure as tests.noting_hooks:NAME. Each rank notes in a file of its own."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel

from cdrmix.hooks import Hook, RunView, StepFigures


class Noting(Hook):
    """Notes each event, with the step that its view tells, in notes-FILE-RANK.jsonl of the run."""

    class Options(BaseModel):
        file: str = "noting"
        folder: str | None = None  # default: the run directory

    def __init__(self, options: Options) -> None:
        self.options = options
        self.count = 0
        self.noise = torch.zeros(3, dtype=torch.float64)

    def note(self, event: str, *more: Any) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps([event, self.run.step, *more]) + "\n")

    def on_start(self, run: RunView) -> None:
        self.run = run
        folder = Path(self.options.folder or run.directory)
        self.file = folder / f"notes-{self.options.file}-{run.rank}.jsonl"
        self.note("start", run.stage, run.num_steps, run.engine is not None)

    def on_batch(self, batch: Mapping[str, Any]) -> None:
        self.note("batch", sorted(batch))

    def on_backward_done(self, step: int) -> None:
        self.note("backward_done", step)

    def on_step(self, step: int, measured: StepFigures) -> None:
        assert measured.seconds > 0
        self.count += 1
        # Any float, in all of its bits.
        self.noise += torch.full((3,), step, dtype=torch.float64).sqrt()
        self.note("step", step, measured.is_skipped)

    def on_evaluation(self, step: int, results: Mapping[str, float]) -> None:
        self.note("evaluation", step, sorted(results))

    def on_log(self, step: int, record: Mapping[str, float]) -> dict[str, float]:
        self.note("log", step, sorted(record))
        return {"count": self.count, "rank": int(os.environ["RANK"])}

    def on_checkpoint(self, step: int, folder: Path) -> None:
        assert (folder / "state.json").exists(), "it has its name"
        self.note("checkpoint", step)

    def on_resume(self, step: int) -> None:
        self.note("resume", step, self.count, self.noise.tolist())

    def on_rewind(self, step: int) -> None:
        self.note("rewind", step, self.count, self.noise.tolist())

    def on_error(self, exception: BaseException) -> None:
        self.note("error", type(exception).__name__, str(exception))

    def on_end(self, outcome: Literal["done", "stopped"]) -> None:
        self.note("end", outcome)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "noise": self.noise}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        self.noise = state["noise"]


class Nothing(Hook):
    """A hook with no event."""


class Measuring(Hook):
    """Measures the weights of all ranks before the first step and behind some."""

    collective = True

    class Options(BaseModel):
        steps: list[int]

    def __init__(self, options: Options) -> None:
        self.steps = options.steps

    def on_start(self, run: RunView) -> None:
        self.run = run

    def measures_at(self, step: int, is_last: bool) -> bool:
        return step in self.steps or is_last

    def on_measure(self, step: int) -> dict[str, float]:
        weights = next(self.run.engine.module.parameters())
        total = weights.detach().double().sum()
        torch.distributed.all_reduce(total)
        return {"sum": float(total), "is_last": step == self.run.num_steps}


class Asking(Hook):
    """Asks for things on one rank, each behind a step."""

    class Options(BaseModel):
        rank: int = 1
        save: int | None = None
        evaluate: int | None = None
        stop: int | None = None

    def __init__(self, options: Options) -> None:
        self.options = options

    def on_start(self, run: RunView) -> None:
        self.run = run

    def on_step(self, step: int, measured: StepFigures) -> None:
        if self.run.rank == self.options.rank:
            if step == self.options.save:
                self.run.request.save()
            if step == self.options.evaluate:
                self.run.request.evaluate()
            if step == self.options.stop:
                self.run.request.stop("it is enough")


class Resting(Hook):
    """Lets each step take so long, so that a run that waits for something leaves others the CPU."""

    class Options(BaseModel):
        seconds: float = 0.0
        saved_step: int | None = None  # behind its checkpoint alone

    def __init__(self, options: Options) -> None:
        self.options = options

    def on_step(self, step: int, measured: StepFigures) -> None:
        if self.options.saved_step is None:
            time.sleep(self.options.seconds)

    def on_checkpoint(self, step: int, folder: Path) -> None:
        if step == self.options.saved_step:
            time.sleep(self.options.seconds)


class Failing(Noting):
    """Raises in an event of one rank, the `time`-th there, after it has noted it."""

    class Options(Noting.Options):
        file: str = "failing"
        event: str = "step"
        rank: int = 1
        time: int = 3

    options: Options
    times = 0

    def note(self, event: str, *more: Any) -> None:
        super().note(event, *more)
        if event == self.options.event and self.run.rank == self.options.rank:
            self.times += 1
            if self.times == self.options.time:
                raise ValueError("too much")


class NotingImports(Hook):
    """Notes the modules that the rank has imported by its first step, in imports-RANK.json."""

    def on_start(self, run: RunView) -> None:
        self.run = run

    def on_step(self, step: int, measured: StepFigures) -> None:
        file = self.run.directory / f"imports-{self.run.rank}.json"
        if not file.exists():
            file.write_text(json.dumps(sorted(name for name in sys.modules if sys.modules[name])))


class Saving(Hook):
    """Saves directly, on rank 1 alone."""

    def on_start(self, run: RunView) -> None:
        self.run = run

    def on_step(self, step: int, measured: StepFigures) -> None:
        if self.run.rank == 1 and step == 2:
            self.run.engine.save_checkpoint(str(self.run.directory / "direct"))
