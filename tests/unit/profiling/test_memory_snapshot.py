"""Order of the calls by which a profile leaves a snapshot. There is no GPU here: torch's functions
for it are replaced by a recorder, and what they write is not looked at."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

from cdrmix.config.profile import ProfileConfig
from cdrmix.engines import out_of_memory
from cdrmix.hooks import RunView, StepFigures
from cdrmix.profiling import profiler, tables

FIGURES = StepFigures(0.1, 0.0, False)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls of torch's functions on CUDA's memory, in order."""
    noted: list[Any] = []

    def record_history(enabled: str | None = "all", **arguments: Any) -> None:
        noted.append(("history", enabled, *arguments.values()))

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record_history)
    monkeypatch.setattr(
        torch.cuda.memory, "_dump_snapshot", lambda path: noted.append(("dump", Path(path).name))
    )
    return noted


class Traced:
    """Takes the place of torch's profiler, which would ask for a GPU's tracer."""

    use_device = "cuda"

    def __init__(self, *, schedule: Any, on_trace_ready: Any, **_: Any) -> None:
        self.step_num = 0
        self.write = on_trace_ready
        self.action = lambda: schedule(self.step_num).name

    def start(self) -> None:
        pass

    def step(self) -> None:
        self.step_num += 1

    def stop(self) -> None:
        if self.action().startswith("RECORD"):
            self.write(self)


@pytest.fixture
def profiled(
    calls: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> profiler.Profiler:
    """A profiler at the start of a run, of steps 2 and 3."""
    monkeypatch.setattr(profiler, "profile", Traced)
    for name in ("phases", "kernels", "communication"):
        monkeypatch.setattr(tables, name, lambda *_, **__: [])
    settings = ProfileConfig(steps=(2, 3), trace=False, flops=False)
    hook = profiler.Profiler(settings, long_phase=lambda name: contextlib.nullcontext())
    config: Any = None
    hook.on_start(RunView(tmp_path, config, "a", 0, 1, num_steps=9, step=0))
    return hook


def test_the_history_is_that_of_the_window(profiled: profiler.Profiler, calls: list[Any]) -> None:
    assert calls == []
    profiled.on_step(1, FIGURES)
    assert calls == [("history", "all", 100_000)]
    profiled.on_step(2, FIGURES)
    profiled.on_step(3, FIGURES)
    profiled.on_end("done")
    assert calls[1:] == [("dump", "rank0_steps_2-3_memory.pickle"), ("history", None)]


def test_an_error_in_the_window_leaves_what_led_to_it(
    profiled: profiler.Profiler, calls: list[Any], tmp_path: Path
) -> None:
    profiled.on_step(1, FIGURES)
    profiled.on_step(2, FIGURES)
    profiled.on_error(torch.OutOfMemoryError("CUDA out of memory."))
    assert calls[1:] == [("dump", "rank0_steps_2-2_memory.pickle"), ("history", None)]
    out_of_memory._leave_snapshot(tmp_path / "out_of_memory_rank0.pickle")
    assert calls[3:] == [("dump", "out_of_memory_rank0.pickle")]


def test_a_snapshot_that_cannot_be_written_hides_no_error(
    calls: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(path: str) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", fail)
    out_of_memory._leave_snapshot(tmp_path / "out_of_memory_rank0.pickle")
    assert "cannot be written: no space left" in caplog.text


def test_a_run_that_goes_back_profiles_the_steps_that_it_does_again(
    profiled: profiler.Profiler, calls: list[Any], tmp_path: Path
) -> None:
    for step in (1, 2):
        profiled.on_step(step, FIGURES)
    profiled.on_rewind(0)
    for step in (1, 2, 3):
        profiled.on_step(step, FIGURES)
    profiled.on_rewind(2)  # behind the window, and into it
    profiled.on_step(3, FIGURES)
    names = sorted(path.name for path in (tmp_path / "profile").iterdir())
    assert names == [f"rank0_steps_{steps}.json" for steps in ("2-2", "2-3", "3-3")]
    assert [call for call in calls if call[0] == "history"] == [
        *[("history", "all", 100_000), ("history", None)] * 3
    ]


def test_a_rank_that_is_not_chosen_and_a_window_that_is_over_record_nothing(
    profiled: profiler.Profiler, calls: list[Any], tmp_path: Path
) -> None:
    config: Any = None
    for rank, step in ((1, 0), (0, 3)):
        profiled.on_end("done")
        profiled.on_start(RunView(tmp_path, config, "a", rank, 2, num_steps=9, step=step))
        for done in range(step, 9):
            profiled.on_step(done + 1, FIGURES)
    assert calls == []
    assert not (tmp_path / "profile").exists()
