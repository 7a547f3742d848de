"""Rivals and controls: what each may look at, and what it is scored by."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence

import pytest
import torch

from cdrmix.models.attention import AttentionState
from cdrmix.reasoning.carried_state import carry, without_cache
from cdrmix.reasoning.memory_reader import MemoryReader
from cdrmix.reasoning.policy import Action
from cdrmix.reasoning.segments import Texts, window_tokens
from cdrmix.reasoning.shared_words import words_of
from cdrmix.reasoning.tasks import Example, score
from cdrmix.stage_b.controls import (
    CONTROLS,
    Answers,
    Controls,
    by_shared_words,
    summary,
    wilson_interval,
)
from cdrmix.stage_b.long_context import score_examples, suite
from cdrmix.stage_b.reasoning_suite import _details
from tests.unit.reasoning.small_reader import small_config, small_lessons, small_reader, tokenizer

BUDGET = 5


@pytest.fixture(scope="module")
def reader() -> MemoryReader:
    config = small_config()
    reader = small_reader(config)
    policy = reader.config.policy.model_copy(update={"step_budget": BUDGET})
    reader.config = reader.config.model_copy(update={"policy": policy})
    return reader


@pytest.fixture(scope="module")
def examples() -> list[Example]:
    lessons = small_lessons(small_config())
    return suite(lessons, ["needle_keys"], length_ratios=(4,), num_examples=3)


class Asked:
    """A reader's controls whose windows and answers are noted; every answer is empty."""

    def __init__(self, reader: MemoryReader, examples: Sequence[Example]) -> None:
        lessons = small_lessons(small_config())
        segments = [lessons.segments(each.text) for each in examples]
        self.texts: Texts = lessons.texts(segments, [each.question for each in examples])
        self.windows: list[list[int]] = []
        self.slots: list[bool] = []
        self.plastic: list[object] = []
        self._reader = reader
        with torch.no_grad():
            reading = reader.read(self.texts)
        graded = lambda row, tokens: score(examples[row], tokenizer().decode(tokens))  # noqa: E731
        self.controls = Controls(reader, lessons, examples, self.texts, reading, 0.5, graded)

    def ask(self, column: str, monkeypatch: pytest.MonkeyPatch) -> Answers | None:
        def answer(windows, *, slots, plastic):
            for row, length in zip(windows.tokens.tolist(), windows.lengths.tolist(), strict=True):
                self.windows.append(row[:length])
            self.slots.append(slots is not None)
            self.plastic.append(plastic)
            return [[] for _ in windows.lengths]

        monkeypatch.setattr(self._reader, "answer", answer)
        return self.controls.answers(column)


def test_the_state_that_is_carried_is_that_of_one_pass_without_attention() -> None:
    """With recurrent layers alone, windows are one sequence."""
    config = small_config()
    config = config.model_copy(
        update={"model": config.model.model_copy(update={"transformer_fraction": 0.0})}
    )
    backbone = small_reader(config).backbone
    assert not any(kind == "transformer" for kind in config.model.layer_kinds())
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, 512, (n,), generator=draw).tolist() for n in (5, 16, 17, 40, 5)]
    with torch.no_grad():
        carried = carry(backbone, rows, window_tokens=16)
        for place, row in enumerate(rows):
            whole = backbone(torch.tensor([row]), return_state=True).state
            for ours, theirs in zip(carried, whole, strict=True):
                torch.testing.assert_close(ours.mixer.wkv[place], theirs.mixer.wkv[0])
                torch.testing.assert_close(ours.mixer.last[place], theirs.mixer.last[0])


def test_no_key_of_an_earlier_window_is_kept(reader: MemoryReader) -> None:
    tokens = torch.arange(8).unsqueeze(0)
    with torch.no_grad():
        after = without_cache(reader.backbone(tokens, return_state=True).state)
        (kept,) = [each.mixer for each in after if isinstance(each.mixer, AttentionState)]
        assert kept.keys.shape[2] == kept.values.shape[2] == 0
        # and the next window is computed as one with these recurrent states
        reader.backbone(tokens, state=after, return_state=True)


def test_whole_sees_the_text_and_state_the_question_alone(
    reader: MemoryReader, examples: list[Example], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked(reader, examples)
    found = asked.ask("whole", monkeypatch)
    assert found is not None and found.operations is None and found.scores == [0.0] * 3
    for window, example in zip(asked.windows, examples, strict=True):
        ids = tokenizer().encode(example.text)
        assert window[1 : 1 + len(ids)] == ids
    assert asked.plastic == [None] and asked.slots == [False]
    asked = Asked(reader, examples)
    asked.ask("state", monkeypatch)
    wanted = [window_tokens([], question, reader.marks) for question in asked.texts.questions]
    assert [tuple(window) for window in asked.windows] == wanted
    (before,) = asked.plastic
    assert before.blocks is not None and not before.layers


def test_the_oracle_has_its_evidence_in_the_window(
    reader: MemoryReader, examples: list[Example], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked(reader, examples)
    assert asked.ask("oracle", monkeypatch) is not None
    for window, example in zip(asked.windows, examples, strict=True):
        text = tokenizer().decode(window)
        assert all(line in text for line in example.evidence)
    without = [dataclasses.replace(each, evidence=()) for each in examples]
    assert Asked(reader, without).ask("oracle", monkeypatch) is None


def test_shared_words_follow_hops_and_leave_common_words_out() -> None:
    texts = ("", "", "Let b = a.", "Let x = y.", "", "Let a be 1234.", "", "Nobody asked.")
    segments = [words_of(text) for text in texts]
    question = words_of("Which hold 1234? Let")
    assert by_shared_words(segments, question, rounds=3, top_k=1)[:2] == [5, 2]
    assert by_shared_words(segments, words_of("nowhere"), rounds=3, top_k=1) == []
    assert 7 not in by_shared_words(segments, question, rounds=9, top_k=2)


@pytest.fixture
def retrieving(reader: MemoryReader) -> Iterator[MemoryReader]:
    """The reader, whose agent retrieves whenever that is legal."""
    with torch.no_grad():
        reader.policy.feature_policy.bias[Action.RETRIEVE] = 10.0
        yield reader
        reader.policy.feature_policy.bias[Action.RETRIEVE] = 0.0


@pytest.mark.parametrize("column", ["all", "all-once"])
def test_all_writes_what_the_budget_allows_and_keeps_an_operation(
    column: str,
    retrieving: MemoryReader,
    examples: list[Example],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader = retrieving
    asked = Asked(reader, examples)
    assert int(asked.texts.num_segments.min()) > BUDGET
    found = asked.ask(column, monkeypatch)
    assert found is not None and found.operations == [BUDGET] * 3
    # the last operation fetched something: each window holds a segment beside its question
    for window, question in zip(asked.windows, asked.texts.questions, strict=True):
        assert len(window) > len(question) + 2


def test_once_fetches_once_and_the_others_as_long_as_they_may(
    retrieving: MemoryReader, examples: list[Example], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = retrieving.config.policy.model_copy(update={"step_budget": 64})
    config = retrieving.config.model_copy(update={"policy": policy})
    monkeypatch.setattr(retrieving, "config", config)
    asked = Asked(retrieving, examples)
    written = asked.texts.num_segments.tolist()
    once = asked.ask("all-once", monkeypatch)
    assert once is not None and once.operations == [count + 1 for count in written]
    most = asked.ask("all", monkeypatch)
    assert most is not None and most.operations is not None
    assert all(many > count + 1 for many, count in zip(most.operations, written, strict=True))
    held = {}
    for column in ("words", "words-once"):
        asked = Asked(retrieving, examples)
        asked.ask(column, monkeypatch)
        held[column] = [window.count(retrieving.marks.memory) for window in asked.windows]
    assert held["words-once"] == [2] * 3  # the segment's mark and the question's
    assert all(count > 2 for count in held["words"])


def test_what_a_control_leaves_out_is_left_out(
    reader: MemoryReader, examples: list[Example], monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.no_grad():
        reader.policy.feature_policy.bias[Action.CACHE_WRITE] = 10.0
    try:
        asked = Asked(reader, examples)
        written = asked.ask("-slots", monkeypatch)
        assert written is not None and written.operations == [BUDGET] * 3
        assert asked.slots == [False]
        asked = Asked(reader, examples)
        asked.ask("-plastic", monkeypatch)
        assert asked.plastic == [None] and asked.slots == [True]
        asked = Asked(reader, examples)
        silent = asked.ask("-write", monkeypatch)
        assert silent is not None and silent.operations == [0] * 3
    finally:
        with torch.no_grad():
            reader.policy.feature_policy.bias[Action.CACHE_WRITE] = 0.0


def test_random_actions_are_drawn_from_a_seed(
    reader: MemoryReader, examples: list[Example], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Asked(reader, examples).ask("random", monkeypatch)
    again = Asked(reader, examples).ask("random", monkeypatch)
    assert first is not None and again is not None
    assert first.operations == again.operations
    assert len(set(first.operations or [])) > 1 or sum(first.operations or []) > 0


@pytest.mark.parametrize(
    ("mean", "count", "low", "high"),
    # the values of Brown, Cai and DasGupta's formula, computed by hand
    [(0.5, 100, 0.4038, 0.5962), (1.0, 32, 0.8928, 1.0), (0.0, 32, 0.0, 0.1072)],
)
def test_intervals_are_wilsons(mean: float, count: int, low: float, high: float) -> None:
    assert wilson_interval(mean, count) == pytest.approx((low, high), abs=1e-4)


def test_a_column_is_charged_for_the_reading_that_it_uses() -> None:
    score = summary([Answers([1.0, 0.0], [3, 5], 2.0), Answers([1.0], [1], 1.0)])
    assert (score.score, score.n) == (pytest.approx(2 / 3), 3)
    assert (score.operations, score.seconds) == (3.0, 1.0)
    assert summary([Answers([1.0], None, 1.0)]).operations is None


def test_a_table_has_all_columns_and_the_agents(
    reader: MemoryReader, examples: list[Example]
) -> None:
    lessons = small_lessons(small_config())
    evaluated = score_examples(reader, lessons, examples, controls=True)
    (row,) = evaluated.rows
    assert row.controls is not None and list(row.controls) == ["agent", *CONTROLS]
    assert row.controls["agent"].score == row.score
    table = evaluated.table()
    assert all(f"\n  {name} " in table for name in ("agent", *CONTROLS))
    (told,) = json.loads(evaluated.as_json())["rows"]
    assert told["controls"]["whole"]["n"] == 3
    (told,) = _details(evaluated)["controls"]
    assert (told["task"], told["length_ratio"]) == ("needle_keys", 4)
    assert list(told["columns"]) == ["agent", *CONTROLS]
    plain = score_examples(reader, lessons, examples)
    assert _details(plain) == {}
    assert "controls" not in json.loads(plain.as_json())["rows"][0]
    assert plain.rows[0].score == row.score
