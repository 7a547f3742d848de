"""Answers from texts longer than the window, and what became of their segments."""

import pytest
import torch

from cdrmix.cli import main
from cdrmix.errors import DataError
from cdrmix.reasoning.policy import Action
from cdrmix.stage_b.answering import answer_with
from tests.unit.reasoning.small_reader import trained_reader

TEXT = "The code of bami is 1234. It rained in lolo again. They spoke of dudu for an hour. " * 4


@pytest.mark.parametrize(
    ("favourite", "kind"),
    [
        (Action.CACHE_WRITE, "written"),
        (Action.SUMMARIZE, "summarised"),
        (Action.SPLICE_WINDOW, "dropped"),
    ],
)
def test_what_became_of_every_segment_is_told(favourite: Action, kind: str) -> None:
    reader = trained_reader(favourite=favourite)
    answered = answer_with(reader, TEXT, "What is the code of bami?")
    read = [
        event for event in answered.events if event.kind in ("written", "summarised", "dropped")
    ]
    assert "".join(event.text for event in read) == TEXT
    assert {event.kind for event in read} == {kind}
    assert len(answered.memory_lines().splitlines()) == len(answered.events)


def test_what_is_retrieved_was_written() -> None:
    reader = trained_reader(favourite=Action.CACHE_WRITE)
    with torch.no_grad():  # once writing is over, retrieve while there is room, then splice
        reader.reader.policy.feature_policy.bias[Action.RETRIEVE] = 5.0
        reader.reader.policy.feature_policy.weight[Action.SPLICE_WINDOW, 2] = 50.0
    events = answer_with(reader, TEXT, "What is the code of bami?").events
    written = {event.text for event in events if event.kind == "written"}
    retrieved = [event.text for event in events if event.kind == "retrieved"]
    assert retrieved and set(retrieved) <= written


@pytest.mark.parametrize(("threshold", "kind"), [(-1e6, "written"), (1e6, "dropped")])
def test_branches_decide_what_becomes_of_a_text(threshold: float, kind: str) -> None:
    reader = trained_reader(favourite=Action.CACHE_WRITE, accept_threshold=threshold)
    answered = answer_with(reader, TEXT, "What is the code of bami?", branches=True)
    read = [event.kind for event in answered.events if event.kind in ("written", "dropped")]
    assert set(read) == {kind}
    assert answered.accepted is not None
    accepted, decisions = answered.accepted
    assert accepted == (decisions if threshold < 0 else 0)
    last = answered.memory_lines().splitlines()[-1]
    assert last == f"branches    {accepted} of {decisions} decisions accepted one"


def test_a_question_must_be_asked_and_leave_room() -> None:
    reader = trained_reader()
    with pytest.raises(DataError, match="takes a text and a question"):
        answer_with(reader, TEXT, "")
    with pytest.raises(DataError, match="takes a text and a question"):
        answer_with(reader, "", "What?")
    with pytest.raises(DataError, match="more than a window of 64 tokens has room for"):
        answer_with(reader, TEXT, "What is the code of bami? " * 10)


def test_flags_of_memory_are_refused_without_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "run", "--question", "Why?"])
    assert "go with --memory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate", "run", "--branches"], "go with --memory"),
        (["evaluate", "run", "--branches"], "--branches goes with --suite reasoning"),
        (
            ["evaluate", "run", "--suite", "reasoning", "--accept-threshold", "-0.1"],
            "--accept-threshold goes with --branches",
        ),
        (
            ["generate", "run", "--memory", "--branches", "--accept-threshold", "nan"],
            "given nan, allowed is a number",
        ),
    ],
)
def test_flags_of_branches_that_would_do_nothing_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(words)
    assert message in capsys.readouterr().err
