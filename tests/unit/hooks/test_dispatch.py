"""Hooks of one process: order, what they return, how they fail and what they cost."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from cdrmix.config.load import load_config
from cdrmix.errors import ConfigError, DataError, HookError, StateError
from cdrmix.hooks import Hook, RunView, StepFigures, Wishes
from cdrmix.hooks.called import NamedHook
from cdrmix.hooks.dispatch import Hooks
from cdrmix.hooks.state import from_json, to_json
from tests.conftest import TINY

STEP = StepFigures(0.5, 0.1, is_skipped=False)


def started(*hooks: NamedHook, state: Mapping[str, Any] | None = None) -> Hooks:
    """Hooks of a run at step 4."""
    made = Hooks(hooks)
    made.start(view(), state=state)
    return made


def view() -> RunView:
    place = {"rank": 0, "world_size": 1, "num_steps": 8, "step": 4}
    return RunView(directory=Path(), config=load_config(TINY), stage="a", engine="engine", **place)


class Calls(Hook):
    """Notes its calls in one list of all."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls

    def on_start(self, run: RunView) -> None:
        self.run = run

    def on_step(self, step: int, measured: StepFigures) -> None:
        self.calls.append(f"{self.name} {step} {self.run.step} {self.run.engine}")


def test_hooks_are_called_by_priority_then_as_listed_and_see_the_step() -> None:
    calls: list[str] = []
    names: Iterable[tuple[str, int]] = [("a", 1), ("b", 0), ("c", 1), ("d", -1)]
    hooks = started(
        *(NamedHook(name, Calls(name, calls), order, unsafe=name == "c") for name, order in names)
    )
    hooks.step_done(5, STEP)
    assert calls == ["d 5 5 None", "b 5 5 None", "a 5 5 None", "c 5 5 engine"]


class Batches(Hook):
    def __init__(self, change: Any) -> None:
        self.change = change

    def on_batch(self, batch: Mapping[str, Any]) -> Any:
        return self.change(dict(batch))


BATCH = {"input_ids": torch.zeros(2, 3, 4, dtype=torch.int64), "labels": torch.ones(2, 3, 4)}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda batch: batch | {"labels": torch.ones(2, 3, 5)}, r"labels of float32 \[2, 3, 5\]"),
        (lambda batch: batch | {"labels": torch.ones(2, 3, 4).double()}, "labels of float64"),
        (lambda batch: {"labels": batch["labels"]}, r"returned \['labels'\], and the batch is"),
        (lambda batch: 3, "returned int, and the batch is"),
    ],
)
def test_another_batch_must_be_of_the_same_kind(change: Any, told: str) -> None:
    hooks = started(NamedHook("changing", Batches(change)))
    assert hooks.batch(BATCH) is BATCH
    with pytest.raises(
        ConfigError, match=f"^hook changing .*: on_batch failed on rank 0: .*{told}"
    ):
        hooks.check()


def test_another_batch_takes_the_place_of_the_first() -> None:
    other = torch.full((2, 3, 4), 7, dtype=torch.int64)
    hooks = started(NamedHook("changing", Batches(lambda batch: batch | {"input_ids": other})))
    batch = hooks.batch(BATCH)
    assert batch["input_ids"] is other and batch["labels"] is BATCH["labels"]
    lessons = started(NamedHook("same", Batches(lambda batch: {"lessons": batch["lessons"][::-1]})))
    assert lessons.batch([1, 2]) == [2, 1]


def test_a_hook_that_changes_batches_is_not_switched_off() -> None:
    changed = iter([dict(BATCH), None])
    hooks = started(NamedHook("changing", Batches(lambda _: next(changed)), on_error="warn"))
    hooks.batch(BATCH)
    hooks.batch(BATCH)
    assert hooks.agreed() is None
    hooks.batch(BATCH)  # StopIteration: on other ranks it may have changed this one
    ending = hooks.agreed()
    assert ending is not None and "on_batch failed on rank 0: StopIteration" in str(ending.error)


class Logs(Hook):
    def __init__(self, added: Any) -> None:
        self.added = added

    def on_log(self, step: int, record: Mapping[str, float]) -> Any:
        return self.added


def test_numbers_join_a_line_under_the_name_of_the_hook() -> None:
    hooks = started(
        NamedHook("one", Logs({"a/b": torch.tensor(2.5), "n": True})), NamedHook("none", Logs(None))
    )
    line = hooks.log(5, {"step": 5})
    assert line == {"step": 5, "plugin/one/a%2Fb": 2.5, "plugin/one/n": 1}
    assert started().log(5, {"step": 5}) == {"step": 5}
    ours = started(NamedHook("cdrmix:ours", Logs({"tracker/dropped": 3})))
    assert ours.log(5, {"step": 5}) == {"step": 5, "tracker/dropped": 3}
    wrong = started(NamedHook("wrong", Logs({"a": "text"})))
    wrong.log(5, {"step": 5})
    with pytest.raises(ConfigError, match=r"on_log returned 'a': 'text', which is no number"):
        wrong.check()


class Raises(Hook):
    def __init__(self, error: Exception) -> None:
        self.error, self.calls, self.told = error, 0, 0

    def on_step(self, step: int, measured: StepFigures) -> None:
        self.calls += 1
        raise self.error

    def on_error(self, exception: BaseException) -> None:
        self.told += 1


def test_a_hook_that_raised_is_called_no_more_until_the_run_ends() -> None:
    failing, calls = Raises(KeyError("no such key")), list[str]()
    hooks = started(NamedHook("failing", failing), NamedHook("other", Calls("other", calls)))
    with pytest.raises(HookError) as caught, hooks.told_of_errors():  # noqa: PT012
        hooks.step_done(5, STEP)
        hooks.step_done(6, STEP)
        votes = hooks.votes(Wishes())
        assert votes == [0, 1, 0]
        _, ending = hooks.heed(votes)
        assert ending is not None and ending.is_state_good
        raise ending.error
    assert str(caught.value) == (
        "hook failing (tests.unit.hooks.test_dispatch:Raises): on_step failed on rank 0: "
        f"KeyError: 'no such key' (test_dispatch.py, line {line_of_raise()})"
    )
    assert caught.value.exit_code == 1
    assert (failing.calls, failing.told, len(calls)) == (1, 1, 2)


def line_of_raise() -> int:
    text = Path(__file__).read_text(encoding="utf-8").split("\n")
    return 1 + text.index("        raise self.error")


def test_an_error_of_the_users_keeps_its_kind_and_an_interrupt_passes() -> None:
    hooks = started(NamedHook("data", Raises(DataError("no file")), unsafe=True))
    hooks.step_done(5, STEP)
    _, ending = hooks.heed(hooks.votes(Wishes()))
    assert ending is not None and not ending.is_state_good, "what is unsafe may have changed it"
    assert type(ending.error) is DataError and str(ending.error).endswith("on rank 0: no file")
    interrupted = started(NamedHook("human", Raises(KeyboardInterrupt())))  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        interrupted.step_done(5, STEP)


def test_a_hook_that_may_fail_is_switched_off_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failing = Raises(ValueError("no"))
    hooks = started(NamedHook("failing", failing, on_error="warn"))
    with caplog.at_level(logging.INFO, "cdrmix"):
        for step in (5, 6, 7):
            hooks.step_done(step, STEP)
            assert hooks.heed(hooks.votes(Wishes())) == (False, None)
    warnings = [each.message for each in caplog.records if each.levelno == logging.WARNING]
    assert len(warnings) == 1 and "It is off from here on, on all ranks" in warnings[0]
    tracebacks = [each.message for each in caplog.records if "Traceback" in each.message]
    assert len(tracebacks) == 1 and "raise self.error" in tracebacks[0]
    assert "dispatch.py" not in tracebacks[0].replace("test_dispatch.py", ""), "none of ours"
    assert failing.calls == 1
    assert hooks.state_dict() == {}


def test_an_error_of_a_collective_hook_is_raised_where_it_is() -> None:
    class Collective(Raises):
        collective = True

    hooks = started(NamedHook("own", Collective(StateError("on all ranks alike"))))
    with pytest.raises(StateError, match="^on all ranks alike$"):
        hooks.step_done(5, STEP)


def test_an_error_in_on_error_hides_no_error(caplog: pytest.LogCaptureFixture) -> None:
    class Worse(Hook):
        def on_error(self, exception: BaseException) -> None:
            raise ValueError("worse")

    hooks = started(NamedHook("worse", Worse()))
    with pytest.raises(DataError, match="first"), hooks.told_of_errors():
        raise DataError("first")
    assert "on_error failed on rank 0: ValueError: worse" in caplog.text
    with pytest.raises(SystemExit), hooks.told_of_errors():
        raise SystemExit(75)  # of a signal


def test_wishes_of_all_hooks_are_one_and_a_stop_stays() -> None:
    class Asks(Hook):
        def on_start(self, run: RunView) -> None:
            self.run = run

    asking, silent = Asks(), Asks()
    hooks = started(NamedHook("silent", silent), NamedHook("asking", asking))
    assert hooks.take_wishes() == Wishes()
    asking.run.request.save()
    asking.run.request.stop("the loss is low")
    assert hooks.take_wishes() == Wishes(True, False, "hook asking: the loss is low")
    assert hooks.take_wishes() == Wishes(False, False, "hook asking: the loss is low")
    silent.run.request.evaluate()
    assert hooks.votes(hooks.take_wishes()) == [1, 0, 0]
    assert started().votes(Wishes()) == [], "no hooks, no numbers in the collective"


TENSORS = {
    "bits": torch.tensor([float("nan"), -0.0, 1e-45, float("inf")]),
    "rounded": torch.randn(3, 2, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "number": torch.tensor(2**40),
    "flags": torch.tensor([[True], [False]]),
    "nothing": torch.zeros(0, 4),
    "view": torch.arange(6).reshape(2, 3).T,
}


def test_a_state_comes_back_bit_by_bit() -> None:
    state = {"n": 3, "x": 0.1, "name": "ä", "list": [1, None, {"t": TENSORS["rounded"]}], **TENSORS}
    back = from_json(json.loads(json.dumps(to_json(state))))
    assert (back["n"], back["x"], back["name"]) == (3, 0.1, "ä")
    assert back["list"][2]["t"].equal(TENSORS["rounded"])
    for name, tensor in TENSORS.items():
        assert (back[name].dtype, back[name].shape) == (tensor.dtype, tensor.shape)
        both = (each.contiguous().reshape(-1).view(torch.uint8) for each in (back[name], tensor))
        assert next(both).equal(next(both)), name


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ([1], "returned list, not a dict"),
        ({"a": [{"b": object()}]}, r"state_dict\(\)\['a'\]\[0\]\['b'\] is of type object"),
        ({1: 2}, "1 is no name"),
        ({"large": torch.zeros(2**23)}, "MiB as text, and 22 are kept at most"),
    ],
)
def test_a_state_that_a_checkpoint_cannot_keep_is_refused(state: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        to_json(state)


@pytest.mark.parametrize(
    "damaged",
    [
        {"tensor:float32,2": "AAAA"},
        {"tensor:float32,-1": ""},
        {"tensor:load": ""},
        {"tensor:float32,2": 3},
        {"tensor:float32,x": "AAAA"},
    ],
)
def test_a_damaged_state_is_a_state_error(damaged: Any) -> None:
    with pytest.raises(StateError, match="state of a hook"):
        from_json({"a": damaged})


class Counting(Hook):
    def __init__(self) -> None:
        self.count = 0

    def on_step(self, step: int, measured: StepFigures) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def test_hooks_that_came_or_went_since_a_checkpoint_are_told_in_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = started(NamedHook("kept", Counting()), NamedHook("gone", Counting()))
    before.step_done(5, STEP)
    kept, new = Counting(), Counting()
    with caplog.at_level(logging.INFO, "cdrmix"):
        started(
            *(NamedHook("kept", kept), NamedHook("new", new)),
            NamedHook("cdrmix:ours", Counting()),
            state=before.state_dict(),
        )
    assert (kept.count, new.count) == (1, 0)
    assert caplog.messages == [
        "hooks: new: not in this checkpoint, and begin anew; gone: in it, and not in this run"
    ]


def test_the_first_stage_of_a_process_goes_on_with_the_state_of_the_stage_before() -> None:
    before = started(NamedHook("a", Counting()))
    before.step_done(5, STEP)
    counting = Counting()
    hooks = Hooks([NamedHook("a", counting)])
    hooks.inherit(before.state_dict())
    hooks.start(view(), state=None)
    assert counting.count == 1
    hooks.step_done(6, STEP)
    hooks.inherit(before.state_dict())
    hooks.start(view(), state=None)
    assert counting.count == 2, "it has gone through both stages itself"


def test_a_slow_hook_is_warned_of_once_behind_the_first_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hooks = started(NamedHook("slow", Counting()), NamedHook("quick", Counting()))
    for _ in range(3):
        figures = hooks.timed([0.21, 0.001], num_steps=10, step_seconds=1.0)
        assert figures == pytest.approx({"hooks/slow/seconds": 0.021, "hooks/quick/seconds": 1e-4})
        assert len(caplog.records) == min(1, hooks._num_lines - 1)
    assert "hook slow takes 21.0 ms a step, 2.1 % of its 1000 ms" in caplog.text


def test_an_event_of_two_hooks_costs_microseconds() -> None:
    hooks = started(NamedHook("a", Counting()), NamedHook("b", Counting()))
    least = float("inf")
    for _ in range(5):
        began = time.process_time()
        for step in range(2000):
            hooks.step_done(step, STEP)
        least = min(least, (time.process_time() - began) / 2000)
    print(f"{1e6 * least:.2f} us")
    assert least < 50e-6, "10 on a machine with nothing else to do"
