"""Profile of a window of steps on the chosen ranks, as a hook of the run.

Training is the same with and without: what is recorded is looked at, and changed nowhere.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function

from cdrmix import runtime
from cdrmix.config.profile import ProfileConfig
from cdrmix.errors import StateError
from cdrmix.hooks import Hook, RunView, StepFigures
from cdrmix.log import get_logger
from cdrmix.monitoring.sinks import write_json_atomic
from cdrmix.planning.counts import attended_tokens, count
from cdrmix.profiling import memory_snapshot, tables
from cdrmix.runtime.phases import watched_by

logger = get_logger(__name__)

FOLDER = "profile"


class Profiler(Hook):
    """Profiles the window of a configuration on this rank, in a stage that has steps of it.

    Where a run starts within the window, goes back to a step before its end, or ends in it, what is
    left of it or was done is profiled.
    """

    def __init__(
        self, settings: ProfileConfig, *, long_phase: Callable[[str], AbstractContextManager[None]]
    ) -> None:
        """`long_phase` makes a context that may last long, while other ranks wait for this one."""
        self._settings = settings
        self._long_phase = long_phase
        self._profile: profile | None = None
        self._activities: list[ProfilerActivity] = []
        self._watching = contextlib.ExitStack()
        self._has_history = False
        self._step = 0  # steps completed
        self._first = 0  # of the window that is profiled
        self._began = 0.0

    def on_start(self, run: RunView) -> None:
        """Begins, if this rank is a chosen one and steps of the window are to come."""
        self._run = run
        if run.rank in self._settings.ranks:
            self._begin(run.step)

    def on_step(self, step: int, measured: StepFigures) -> None:
        """Goes to the next step; behind the last of the window, writes what was found."""
        self._step = step
        if self._profile is None:
            return
        # The end of a stage evaluates, and is no part of a step.
        if step in (self._settings.steps[1], self._run.num_steps):
            self._end()
            return
        if step + 1 == self._first:
            self._has_history = self._settings.memory and memory_snapshot.begin_history()
            self._began = time.perf_counter()
        self._profile.step()

    def on_rewind(self, step: int) -> None:
        """Writes what there is, and begins anew before the steps that are done again."""
        self._end()
        if self._run.rank in self._settings.ranks:
            self._begin(step)

    def on_error(self, exception: BaseException) -> None:
        """Writes what there is, the step that failed included."""
        with contextlib.suppress(
            OSError, RuntimeError, StateError
        ):  # the error of the run is to be told
            self._end()

    def on_end(self, outcome: Literal["done", "stopped"]) -> None:
        """Writes what there is of a window that goes on behind the end."""
        self._end()

    def _begin(self, step: int) -> None:
        first, last = self._settings.steps
        self._step = step
        self._first = max(first, step + 1)
        if step >= last:
            logger.info("profile: steps %d to %d are done already", first, last)
            return
        runtime.quieten_tracer()
        settings = self._settings
        on_gpu = torch.cuda.is_initialized()
        self._activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu]
        self._profile = profile(
            activities=self._activities,
            # torch asks once before its first step has our number.
            schedule=lambda number: self._action(max(number, step + 1)),
            on_trace_ready=self._write,
            record_shapes=settings.shapes or not on_gpu,
            profile_memory=settings.memory and on_gpu,
            with_stack=settings.stacks,
            with_flops=settings.flops,
            experimental_config=torch._C._profiler._ExperimentalConfig(
                expose_kineto_event_metadata=True
            ),
        )
        self._profile.step_num = step + 1  # ProfilerStep#10 is then the tenth of the run
        self._profile.start()
        if self._first == step + 1:
            self._has_history = settings.memory and memory_snapshot.begin_history()
        self._began = time.perf_counter()
        self._watching.enter_context(watched_by(self._phase))

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Records a phase. Of an evaluation the time alone: it is no part of a step, and its many
        operations would hide those of the steps."""
        profiled = self._profile
        records = self._first <= self._step + 1
        with record_function(name):
            if profiled is None or name != "evaluation" or not records:
                yield
                return
            profiled.toggle_collection_dynamic(False, self._activities)
            try:
                yield
            finally:
                profiled.toggle_collection_dynamic(True, self._activities)

    def _action(self, step: int) -> ProfilerAction:
        """Action of torch's profiler in a step of the run."""
        last = self._settings.steps[1]
        if step == self._first - 1:  # starts the tracer, so that the first step is like others
            return ProfilerAction.WARMUP
        if step == last:
            return ProfilerAction.RECORD_AND_SAVE
        return ProfilerAction.RECORD if self._first <= step < last else ProfilerAction.NONE

    def _end(self) -> None:
        """Stops, which writes if the window has begun."""
        if self._profile is None:
            return
        profiled, self._profile = self._profile, None
        self._watching.close()
        try:
            profiled.stop()
        finally:
            if self._has_history:
                self._has_history = False
                memory_snapshot.end_history()

    def _write(self, profiled: profile) -> None:
        seconds = time.perf_counter() - self._began
        last = min(max(self._step, self._first), self._settings.steps[1])
        settings = self._settings
        folder = self._run.directory / FOLDER
        name = f"rank{self._run.rank}_steps_{self._first}-{last}"
        with self._long_phase("profiling"):
            folder.mkdir(exist_ok=True)
            written: dict[str, Any] = {"trace": None, "memory_snapshot": None}
            if settings.trace:
                # The ending by which TensorBoard's plugin knows a trace.
                written["trace"] = f"{name}.pt.trace.json.gz"
                profiled.export_chrome_trace(str(folder / written["trace"]))
            if self._has_history:
                written["memory_snapshot"] = f"{name}_memory.pickle"
                memory_snapshot.dump_snapshot(folder / written["memory_snapshot"])
            found = {
                "rank": self._run.rank,
                "steps": [self._first, last],
                "seconds": seconds,
                "device": profiled.use_device or "cpu",
                "phases": tables.phases(profiled),
                "kernels": tables.kernels(profiled, by_shape=settings.shapes),
                "communication": tables.communication(profiled),
                "flops": self._flops(profiled, last) if settings.flops else None,
                **written,
            }
            write_json_atomic(folder / f"{name}.json", found)
        logger.info("profile of steps %d to %d: %s", self._first, last, folder / f"{name}.json")

    def _flops(self, profiled: profile, last: int) -> dict[str, float]:
        """FLOPs of this rank in the window, counted and, in Stage A, planned: an equal share."""
        counted = {"counted": float(tables.flops(profiled))}
        if self._run.stage == "b":
            return counted
        config = self._run.config
        per_token = count(config.model, attended_tokens(config)).train_flops_per_token
        tokens = config.training.tokens_per_step * (last - self._first + 1)
        return {**counted, "planned": per_token * tokens / self._run.world_size}
