"""Hooks of runs on real ranks: their order, what they ask for, how they fail, what they keep."""

from __future__ import annotations

import gc
import json
import re
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from cdrmix.monitoring.metrics import deterministic_part
from cdrmix.monitoring.sinks import read_metrics
from tests.equal_runs import result_of
from tests.harness import RanksFailed, run_ranks
from tests.small_reasoning_run import arguments as both_stages
from tests.small_reasoning_run import start as start_both
from tests.small_run import STEPS, arguments, before_step, overrides, refused, start

# Between these two steps nothing is saved or evaluated.
QUIET = (6, 7)
SECONDS_TO_END = 10  # of all ranks, once a hook has failed on one of them
ALL_HOOKS = ("Noting", "Nothing", "Asking", "Measuring")
COLLECTIVES = ("all_reduce", "all_gather", "all_gather_object", "broadcast", "barrier")


def hook(name: str, *, called: str | None = None, on_error: str = "stop", **options: Any) -> dict:
    """Entry of the section `hooks`."""
    entry = {"use": f"tests.noting_hooks:{name}", "options": options, "on_error": on_error}
    return entry | ({"name": called} if called else {})


def with_hooks(*hooks: dict) -> list[str]:
    return overrides([f"hooks={json.dumps(hooks)}"])


def notes(run_dir: Path, rank: int, file: str = "noting") -> list[list[Any]]:
    lines = (run_dir / f"notes-{file}-{rank}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def kept_of(run_dir: Path, step: int) -> dict[str, Any]:
    """States of hooks in a checkpoint, as they are in its file."""
    return json.loads((run_dir / "checkpoints" / str(step) / "state.json").read_text())["hooks"]


def count_collectives(argv: list[str]) -> tuple[int, Counter[str]]:
    """What a rank does: exit code of a run, and collectives of a quiet step. While it trains, the
    garbage collector passes over what was there before."""
    frozen = gc.get_freeze_count()
    counts: Counter[str] = Counter()
    noted: list[Counter[str]] = []
    for name in COLLECTIVES:

        def counted(*args: Any, _name: str = name, _do: Any = None, **kwargs: Any) -> Any:
            counts[_name] += 1
            return _do(*args, **kwargs)

        do = getattr(torch.distributed, name)
        setattr(torch.distributed, name, lambda *a, _c=counted, _do=do, **k: _c(*a, _do=_do, **k))

    def note() -> None:
        assert gc.get_freeze_count() > frozen
        noted.append(counts.copy())

    for step in QUIET:
        before_step(step, note)
    code = start(argv)
    assert gc.get_freeze_count() == 0, "a second stage can free what the first has left"
    first, second = noted
    return code, second - first


# --- order -----------------------------------------------------------------------------------


def test_events_come_in_order_once_a_step_on_both_stages_of_a_pipeline(
    small_corpus: Path, run_dir: Path
) -> None:
    layout = ["parallel.pipeline=2", "training.micro_batch_size=2", "model.moe=null"]
    settings = [*layout, "checkpoint.every_steps=4"]  # a batch of 8: four micro-batches
    argv = arguments(small_corpus, run_dir, *overrides(settings), *with_hooks(hook("Noting")))
    assert run_ranks(start, 2, argv) == [0, 0]
    both = [notes(run_dir, rank) for rank in (0, 1)]
    assert both[0] == both[1]
    expected: list[list[Any]] = []
    for step in range(STEPS):
        expected += [["batch", step], ["backward_done", step], ["step", step + 1]]
        expected += [["evaluation", step + 1]] * (step + 1 == 4) + [["log", step + 1]]
    # A save ends beside the steps that follow it, at the same place on all ranks.
    (first, last) = [note for note in both[0] if note[0] == "checkpoint"]
    assert (first[2], last[2]) == (4, STEPS)
    order = [note[:2] for note in both[0] if note != first]
    end = [["checkpoint", STEPS], ["evaluation", STEPS], ["end", STEPS]]
    assert order == [["start", 0], *expected, *end]
    for event, step, *more in both[0]:
        if event == "batch":
            assert more == [["input_ids", "labels"]]
        if event == "step":
            assert more == [step, False]
        if event == "evaluation":
            assert {"eval/loss", "eval/perplexity"} <= set(more[1])


def test_events_of_both_stages_of_a_run_come_in_order(small_corpus: Path, run_dir: Path) -> None:
    shorter = [f"stage_b.training.{phase}_steps=1" for phase in ("memory", "adapter", "joint")]
    shorter += ["stage_b.training.policy_steps=1", "evaluation.reasoning_examples=1"]
    shorter += ["evaluation.reasoning_controls=false"]
    run_dir.parent.mkdir(exist_ok=True)
    argv = both_stages(small_corpus, run_dir, run_dir.parent, *overrides(shorter))
    assert run_ranks(start_both, 1, [*argv, *with_hooks(hook("Noting"))]) == [0]
    found = [note for note in notes(run_dir, 0) if note[0] != "checkpoint"]
    starts = [place for place, note in enumerate(found) if note[0] == "start"]
    assert [note[1:4] for note in found if note[0] == "start"] == [[0, "a", 2], [2, "b", 6]]
    of_stage_b = found[starts[1] + 1 :]
    in_step = ["batch", "backward_done", "step", "log"]
    assert [note[0] for note in of_stage_b] == [*(4 * in_step), "evaluation", "end"]
    assert [note[1] for note in of_stage_b[: 4 * 4 : 4]] == [2, 3, 4, 5]
    assert of_stage_b[0][2] == ["lessons"]
    assert all(name.startswith("reasoning/") for name in of_stage_b[-2][3])
    assert kept_of(run_dir, 6)["Noting"]["count"] == 6, "one hook, and one state, for both stages"


# --- what hooks leave as it is, and what they ask for ----------------------------------------


@pytest.fixture(scope="module")
def runs(
    small_corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, list[Counter[str]]]:
    """Run directories of a run without hooks and of one with four, and collectives of a step."""
    folder = tmp_path_factory.mktemp("hooks")
    asking = hook("Asking", save=5, evaluate=2)
    collectives = []
    measuring = hook("Measuring", steps=[0, 3]) | {"unsafe": True}
    all_hooks = [hook("Noting"), hook("Nothing"), asking, measuring]
    for name, hooks in (("plain", []), ("hooked", all_hooks)):
        argv = arguments(small_corpus, folder / name, *with_hooks(*hooks))
        outcomes = run_ranks(count_collectives, 2, argv)
        assert [code for code, _ in outcomes] == [0, 0]
        collectives += [counts for _, counts in outcomes]
    return folder / "plain", folder / "hooked", collectives


def test_a_run_with_hooks_is_bit_by_bit_the_one_without(runs: tuple[Path, Path, Any]) -> None:
    (lines, tensors), (hooked, hooked_tensors) = (result_of(each, STEPS) for each in runs[:2])
    asked_for = [line for line in hooked if "loss" not in line]
    assert [line["step"] for line in asked_for] == [0, 2]
    assert [line for line in hooked if "loss" in line] == lines
    assert tensors.keys() == hooked_tensors.keys()
    assert all(tensors[name].equal(hooked_tensors[name]) for name in tensors)
    plain = [set(line) for line in read_metrics(runs[0] / "metrics.jsonl")]
    assert not any(name.startswith(("plugin/", "hooks/")) for names in plain for name in names)
    state = json.loads((runs[0] / "checkpoints" / str(STEPS) / "state.json").read_text())
    assert "hooks" not in state


def test_a_step_has_no_collective_more_with_hooks(runs: tuple[Path, Path, Any]) -> None:
    plain, other_plain, hooked, other_hooked = runs[2]
    assert plain == other_plain == hooked == other_hooked
    assert plain["all_reduce"] > 0 and plain["all_gather_object"] > 0


def test_a_vote_of_rank_1_alone_saves_and_evaluates_on_both(runs: tuple[Path, Path, Any]) -> None:
    run_dir = runs[1]
    saved = run_dir / "checkpoints" / "5"
    assert {path.name for path in saved.glob("rank-*.json")} == {
        "rank-00000.json",
        "rank-00001.json",
    }
    for rank in (0, 1):
        found = notes(run_dir, rank)
        assert [note[2] for note in found if note[0] == "checkpoint"] == [3, 5, 6, 8]
        assert [note[2] for note in found if note[0] == "evaluation"] == [0, 2, 3, 4, STEPS, STEPS]
        logged = [place for place, note in enumerate(found) if note[:3] == ["log", 2, 2]]
        assert len(logged) == 2, "a line of its own for what was asked for"
        assert found[logged[1] + 1][0] in ("backward_done", "checkpoint"), "before the next step"


def test_numbers_and_time_of_hooks_are_in_the_metrics(runs: tuple[Path, Path, Any]) -> None:
    lines = [line for line in read_metrics(runs[1] / "metrics.jsonl") if "loss" in line]
    assert [line["plugin/Noting/count"] for line in lines] == list(range(1, STEPS + 1))
    assert {line["plugin/Noting/rank"] for line in lines} == {0}
    for line in lines:
        seconds = {name for name in line if name.startswith("hooks/")}
        assert seconds == {f"hooks/{each}/seconds" for each in ALL_HOOKS}
        assert 0 <= line["hooks/Nothing/seconds"] < line["hooks/Noting/seconds"] < 1
        assert not any("hooks/" in name or "plugin/" in name for name in deterministic_part(line))


def test_what_a_hook_measures_with_all_ranks_is_in_the_line_of_its_step(
    runs: tuple[Path, Path, Any],
) -> None:
    lines = read_metrics(runs[1] / "metrics.jsonl")
    measured = {line["step"]: line for line in lines if "plugin/Measuring/sum" in line}
    assert [*measured] == [0, 3, STEPS]
    assert [line["plugin/Measuring/is_last"] for line in measured.values()] == [0, 0, 1]
    assert len({line["plugin/Measuring/sum"] for line in measured.values()}) == 3
    assert measured.keys() - {0} < {line["step"] for line in lines if "loss" in line}
    told = [note for note in notes(runs[1], 1) if note[0] == "evaluation" and note[2] == 3]
    assert [*told[0][3]] == ["plugin/Measuring/is_last", "plugin/Measuring/sum"]


def test_saving_directly_on_one_rank_hangs_or_breaks_the_run(
    small_corpus: Path, run_dir: Path
) -> None:
    # The control of the vote.
    unsafe = hook("Saving") | {"unsafe": True}
    argv = arguments(small_corpus, run_dir, *with_hooks(unsafe))
    with pytest.raises(RanksFailed):
        assert run_ranks(start, 2, argv, timeout=15) == [0, 0], "a fault that ranks survived"


def test_a_stop_by_a_hook_saves_and_is_told_and_the_resumed_run_is_the_same(
    runs: tuple[Path, Path, Any],
    small_corpus: Path,
    run_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    launched = tmp_path / "launch"
    launched.mkdir()
    monkeypatch.setenv("CDRMIX_LAUNCH_FOLDER", str(launched))
    argv = arguments(small_corpus, run_dir)
    stopping = with_hooks(hook("Noting"), hook("Asking", stop=5, evaluate=2))
    assert run_ranks(start_launched, 2, [*argv, *stopping], str(launched)) == [75, 75]
    log = (run_dir / "train.log").read_text()
    assert "stopped by hook Asking: it is enough after step 5, which is saved. Go on with:" in log
    assert (launched / "enough").exists(), "what keeps a batch script from starting it again"
    assert [note[2] for note in notes(run_dir, 0) if note[0] == "end"] == ["stopped"]
    resumed = with_hooks(hook("Noting"), hook("Failing", called="new", file="new", time=99))
    assert run_ranks(start, 2, [*argv, *resumed, "--resume", "auto"]) == [0, 0]
    line = "hooks: new: not in this checkpoint, and begin anew; Asking: in it, and not in this run"
    assert (run_dir / "train.log").read_text().count(line) == 1
    for rank in (0, 1):
        (resume,) = [note for note in notes(run_dir, rank) if note[0] == "resume"]
        noise = sum(torch.full((3,), step, dtype=torch.float64).sqrt() for step in range(1, 6))
        assert resume == ["resume", 5, 5, 5, noise.tolist()]
    # Bit by bit, as text of the bytes.
    assert kept_of(run_dir, STEPS)["Noting"] == kept_of(runs[1], STEPS)["Noting"]
    steps = [note[2] for note in notes(run_dir, 0) if note[0] == "step"]
    assert steps == list(range(1, STEPS + 1))


def start_launched(argv: list[str], folder: str) -> int:
    """One rank as a batch script starts it."""
    import os

    os.environ["CDRMIX_LAUNCH_FOLDER"] = folder
    return start(argv)


def test_a_rewind_takes_the_state_of_hooks_back(small_corpus: Path, run_dir: Path) -> None:
    settings = ["checkpoint.every_steps=4", "health.non_finite.action=rollback"]
    argv = arguments(small_corpus, run_dir, *overrides(settings), *with_hooks(hook("Noting")))
    assert run_ranks(start_with_a_bad_step, 2, argv) == [0, 0]
    for rank in (0, 1):
        found = [note for note in notes(run_dir, rank) if note[0] in ("step", "rewind")]
        noise = sum(torch.full((3,), step, dtype=torch.float64).sqrt() for step in range(1, 5))
        assert [note[2] for note in found] == [1, 2, 3, 4, 5, 6, 4, 5, 6, 7, 8]
        assert found[6] == ["rewind", 4, 4, 4, noise.tolist()]
        told = [note[2] for note in notes(run_dir, rank) if note[0] == "backward_done"]
        assert told == [0, 1, 2, 3, 4, 4, 5, 6, 7], "none of the step that was skipped"
    assert kept_of(run_dir, STEPS)["Noting"]["count"] == STEPS


def start_with_a_bad_step(argv: list[str]) -> int:
    from cdrmix.data.loader import Loader
    from cdrmix.engines import training_step

    read, losses, bad = Loader.next, training_step.next_token_losses, [False]

    def note_and_read(loader: Loader) -> Any:
        bad[0] = loader.samples_consumed == 5 * 8
        return read(loader)

    def spoilt(*args: Any) -> Any:
        found = losses(*args)
        return type(found)(*(each * (float("inf") if bad[0] else 1.0) for each in found))

    Loader.next, training_step.next_token_losses = note_and_read, spoilt
    return start(argv)


# --- errors ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("event", "time"), [("start", 1), ("step", 3)])
def test_a_hook_that_fails_on_rank_1_alone_ends_all_ranks_with_one_message(
    event: str, time: int, small_corpus: Path, run_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    argv = arguments(small_corpus, run_dir)
    hooks = with_hooks(hook("Failing", event=event, time=time), hook("Noting"))
    shown = refused([*argv, *hooks], capfd, code=1)
    told = f"hook Failing (tests.noting_hooks:Failing): on_{event} failed on rank 1: ValueError: "
    assert f"error: {told}too much (noting_hooks.py, line " in shown
    log = (run_dir / "train.log").read_text()
    assert log.count("Traceback") == 1 and 'raise ValueError("too much")' in log
    for rank in (0, 1):
        (error,) = [note for note in notes(run_dir, rank) if note[0] == "error"]
        assert error[2] == "HookError" and error[3].startswith(told)
        # Both ranks have ended: nobody waits for a rank that is gone.
        noted = (run_dir / f"notes-noting-{rank}.jsonl").stat().st_mtime
        assert noted - time_of_traceback(log) < SECONDS_TO_END
    if event == "step":  # what was trained is worth keeping
        assert [note[0] for note in notes(run_dir, 1)][-2:] == ["checkpoint", "error"]
        assert (run_dir / "checkpoints" / "3").is_dir()


def time_of_traceback(log: str) -> float:
    """Seconds since the epoch of the line of a log that begins a traceback."""
    (line,) = re.findall(r"(.*)\nTraceback", log)
    return datetime.strptime(line.partition(",")[0], "%Y-%m-%d %H:%M:%S").timestamp()


def test_hooks_that_may_fail_are_switched_off_on_all_ranks(
    small_corpus: Path, run_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    events = ("start", "batch", "backward_done", "step", "evaluation", "log", "checkpoint", "end")
    hooks = [
        hook("Failing", called=event, on_error="warn", file=event, event=event, time=1, rank=n % 2)
        for n, event in enumerate(events)
    ]
    argv = arguments(small_corpus, run_dir, *with_hooks(*hooks))
    assert run_ranks(start, 2, argv) == [0, 0]
    shown = capfd.readouterr().out
    for n, event in enumerate(events):
        told = f"hook {event} (tests.noting_hooks:Failing): on_{event} failed on rank {n % 2}: "
        assert shown.count(told) == 1
        last, other = (notes(run_dir, rank, event)[-1] for rank in (n % 2, 1 - n % 2))
        assert last[0] == event, "called no more on its rank"
        assert 0 <= other[1] - last[1] <= 1, "nor on the other, from the next vote on"
    assert kept_of(run_dir, STEPS).keys() == {"end"}
