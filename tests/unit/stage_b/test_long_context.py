"""The table of reasoning tasks: its texts, its scores, and the files that it reads and writes."""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from cdrmix.cli import main
from cdrmix.errors import ConfigError, DataError
from cdrmix.evaluation.suite import Judged, Request, suite_of
from cdrmix.evaluation.trained import TrainedModel
from cdrmix.parallel.topology import ALONE
from cdrmix.reasoning.lessons import Lessons
from cdrmix.reasoning.memory_reader import MemoryReader
from cdrmix.reasoning.reading_environment import Grade
from cdrmix.reasoning.tasks import HELD_OUT, Example
from cdrmix.stage_b import long_context
from cdrmix.stage_b.long_context import (
    Evaluated,
    Row,
    TrainedReader,
    evaluate_reasoning,
    held_out_cells,
    score_examples,
    suite,
    with_held_out,
)
from tests.checkpoints import save_checkpoint, whole
from tests.unit.reasoning.own_rows import write_rows
from tests.unit.reasoning.small_reader import (
    small_config,
    small_lessons,
    tokenizer,
    trained_reader,
)


class Knowing:
    """Decodes every answer to the same words."""

    def __init__(self, words: str) -> None:
        self._words = words

    def __getattr__(self, name: str) -> object:
        return getattr(tokenizer(), name)

    def decode(self, ids: object) -> str:
        return self._words


def score_tasks(
    reader: MemoryReader, lessons: Lessons, tasks: Sequence[str], **lengths: Any
) -> list[Row]:
    return score_examples(reader, lessons, suite(lessons, tasks, **lengths)).rows


@pytest.fixture(scope="module")
def reader() -> MemoryReader:
    return trained_reader().reader


def test_rows_are_scores_of_both_on_unseen_texts(reader: MemoryReader) -> None:
    rows = score_tasks(
        reader, small_lessons(small_config()), ["logic"], length_ratios=(4, 6), num_examples=3
    )
    assert [(row.task, row.length_ratio, row.n) for row in rows] == [
        ("logic", 4, 3),
        ("logic", 6, 3),
    ]
    assert all(0 <= row.score <= 1 and 0 <= row.backbone_score <= 1 for row in rows)


def test_the_checker_of_the_reward_is_the_checker_of_the_score(reader: MemoryReader) -> None:
    lessons = dataclasses.replace(small_lessons(small_config()), tokenizer=Knowing("yes"))
    (row,) = score_tasks(reader, lessons, ["logic"], length_ratios=(4,), num_examples=20)
    held = [
        lessons.example("logic", f"{lessons.seed}/evaluation", number, 4).answers == ("yes",)
        for number in range(20)
    ]
    assert row.score == row.backbone_score == pytest.approx(sum(held) / 20)
    assert 0 < row.score < 1


def test_texts_of_another_seed_or_wording_are_others() -> None:
    def texts(**wishes: Any) -> set[str]:
        lessons = small_lessons(small_config())
        found = suite(lessons, ["logic"], length_ratios=(4,), num_examples=3, **wishes)
        return {example.text for example in found}

    standard = texts()
    assert len(standard) == 3 and texts(seed=0) == standard
    for others in (texts(seed=1), texts(wording=HELD_OUT), texts(seed=1, wording=HELD_OUT)):
        assert len(others) == 3 and not others & standard


def test_a_length_without_room_has_no_row(reader: MemoryReader) -> None:
    lessons = small_lessons(small_config())
    rows = score_tasks(reader, lessons, ["common_words"], length_ratios=(1,), num_examples=1)
    assert rows == []
    assert Evaluated(rows).table().endswith("no task fits")


def test_examples_without_room_give_way_to_the_next(
    reader: MemoryReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    def example(
        self: Lessons, task: str, seed: str, number: int, ratio: int, **wording: Any
    ) -> Example:
        tried.append(number)
        if number % 3 != 1:
            raise DataError("no room")
        return original(self, task, seed, number, ratio, **wording)

    original = Lessons.example
    monkeypatch.setattr(Lessons, "example", example)
    lessons = small_lessons(small_config())
    (row,) = score_tasks(reader, lessons, ["logic"], length_ratios=(4,), num_examples=2)
    assert (tried, row.n) == ([0, 1, 2, 3, 4], 2)
    tried.clear()
    monkeypatch.setattr("cdrmix.stage_b.long_context._TRIES_PER_EXAMPLE", 1)
    (row,) = score_tasks(reader, lessons, ["logic"], length_ratios=(4,), num_examples=3)
    assert (tried, row.n) == ([0, 1, 2], 1)


def test_an_unknown_task_is_no_misfit(reader: MemoryReader) -> None:
    lessons = small_lessons(small_config())
    with pytest.raises(DataError, match="'logik' is no reasoning task. Did you mean 'logic'"):
        score_tasks(reader, lessons, ["logik"], length_ratios=(4,), num_examples=1)


@pytest.fixture
def judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Judged:
    """Of a run whose reader knows one answer, and whose suite is short."""
    reader = trained_reader()
    lessons = dataclasses.replace(
        small_lessons(small_config(tasks=("logic",))), tokenizer=Knowing("yes")
    )

    def known(trained: TrainedModel, **_: Any) -> TrainedReader:
        return dataclasses.replace(reader, trained=trained, lessons=lessons)

    monkeypatch.setattr(long_context, "reader_of", known)
    monkeypatch.setattr(long_context, "LENGTH_RATIOS", (4, 6))
    (tmp_path / "checkpoints" / "1").mkdir(parents=True)
    return Judged(
        model=reader.trained.model,
        tokenizer=tokenizer(),
        config=reader.trained.config,
        topology=ALONE,
        max_length=64,
        batch_size=1,
        source=str(tmp_path),
        step=1,
        weights="trained",
        data=None,
    )


def evaluated(judged: Judged, **wishes: Any) -> dict[str, Any]:
    """What the suite prints for wishes of a request."""
    suite, request = suite_of("reasoning"), Request(**wishes)
    suite.check(request)
    shown: dict[str, Any] = json.loads(json.dumps(suite.measure(judged, request).as_json()))
    return shown


def test_tasks_of_a_file_are_scored_as_those_of_the_suite(judged: Judged) -> None:
    file = Path(judged.source) / "tasks.jsonl"
    shown = evaluated(judged, limit=5, options={"write_tasks": file})
    stored = Path(judged.source) / "reasoning.json"
    columns = ("task", "length_ratio", "score", "backbone_score", "n", "low", "high")
    rows = [{name: row[name] for name in columns} for row in shown["rows"]]
    assert json.loads(stored.read_text()) == {"rows": rows}
    stored.unlink()
    again = evaluated(judged, tasks=file)
    assert again["rows"] == shown["rows"]
    assert not stored.exists(), "the run's own table is not replaced"
    assert [(row["metric"], row["n"]) for row in shown["rows"]] == [
        ("score@4x", 5),
        ("score@6x", 5),
    ]
    for row in rows:
        assert 0 <= row["low"] < row["score"] < row["high"] <= 1
    assert any(line.startswith("score, backbone alone") for line in shown["notes"])


@pytest.mark.parametrize("wish", ["seed", "held_out_wording", "lengths"])
def test_the_runs_own_table_is_of_one_seed_wording_and_its_lengths(
    judged: Judged, wish: str
) -> None:
    folder = Path(judged.source)
    files = [folder / "standard.jsonl", folder / "others.jsonl"]
    standard = evaluated(judged, limit=2, options={"write_tasks": files[0]})
    stored = (folder / "reasoning.json").read_text()
    options: dict[str, Any] = {"write_tasks": files[1]}
    if wish == "seed":
        others = evaluated(judged, limit=2, seed=7, options=options)
    else:
        value = [7, 5] if wish == "lengths" else True
        others = evaluated(judged, limit=2, options=options | {wish: value})
    assert (folder / "reasoning.json").read_text() == stored
    told = [
        (shown["settings"]["text_seed"], shown["settings"]["held_out_wording"])
        for shown in (standard, others)
    ]
    assert told == [(0, False), (7 if wish == "seed" else 0, wish == "held_out_wording")]
    if wish == "lengths":
        assert [row["length_ratio"] for row in others["rows"]] == [5, 7]
    texts = [{json.loads(row)["text"] for row in file.read_text().splitlines()} for file in files]
    assert len(texts[0]) == len(texts[1]) == 4 and not texts[0] & texts[1]


def test_rows_are_told_also_where_they_cannot_be_stored(
    judged: Judged, caplog: pytest.LogCaptureFixture
) -> None:
    (Path(judged.source) / "reasoning.json").mkdir()  # which no file can replace
    assert len(evaluated(judged, limit=1)["rows"]) == 2
    assert "reasoning.json: cannot be written" in caplog.text


def test_rows_of_a_file_are_grouped_by_task_and_length(judged: Judged) -> None:
    row = {"text": "Is it so?", "question": "Is it?", "match": "all"}
    rows = [
        {"task": task, "length_ratio": ratio, "answers": [answer], **row}
        for task, ratio, answer in (
            ("mine", 1, "yes"),
            ("other", 1, "no"),
            ("mine", 3, "no"),
            ("mine", 1, "no"),
        )
    ]
    file = Path(judged.source) / "tasks.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    columns = ("task", "length_ratio", "score", "backbone_score", "n")
    found = [tuple(row[name] for name in columns) for row in evaluated(judged, tasks=file)["rows"]]
    assert found == [
        ("mine", 1, 0.5, 0.5, 2),
        ("other", 1, 0.0, 0.0, 1),
        ("mine", 3, 0.0, 0.0, 1),
    ]


def test_a_broken_row_of_a_file_ends_with_a_message(judged: Judged) -> None:
    file = Path(judged.source) / "tasks.jsonl"
    good = {"task": "a", "length_ratio": 1, "text": "b", "answers": ["c"], "match": "any"}
    rows = [good | {"question": "d?"}, good | {"question": "What is it? " * 20}]
    file.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(DataError, match="more than a window of 64 tokens has room for") as caught:
        evaluated(judged, tasks=file)
    assert str(caught.value).startswith(f"{file}:2: question takes ")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--suite", "reasoning", "--tasks", "a", "--examples", "3"], "--tasks reads every row"),
        (["--write-tasks", "a"], "--write-tasks goes with --suite reasoning"),
        (
            ["--suite", "reasoning", "--max-tokens", "9"],
            "--max-tokens goes with --suite perplexity",
        ),
    ],
)
def test_flags_that_would_do_nothing_are_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["evaluate", "run", *flags])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"options": {"accept_threshold": 0.5}}, "accept_threshold goes with branches"),
        ({"tasks": Path("/nowhere")}, "--tasks /nowhere is no file"),
        ({"tasks": Path(__file__), "limit": 3}, "--tasks reads every row of its file"),
        ({"tasks": Path(__file__), "seed": 1}, "--tasks reads every row of its file"),
    ],
)
def test_wishes_that_do_not_go_together_are_refused(wishes: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        suite_of("reasoning").check(Request(**wishes))


def test_reasoning_is_of_trained_weights_in_one_process(judged: Judged) -> None:
    degrees = dataclasses.replace(ALONE.degrees, data=2)
    spread = dataclasses.replace(ALONE, degrees=degrees)
    with pytest.raises(ConfigError, match="is measured in one process"):
        evaluated(dataclasses.replace(judged, topology=spread))
    with pytest.raises(ConfigError, match="without --weights"):
        evaluated(dataclasses.replace(judged, weights="ema"))


def test_branches_that_are_all_accepted_score_as_the_agent_alone() -> None:
    lessons = small_lessons(small_config())
    examples = suite(lessons, ["logic"], length_ratios=(4,), num_examples=3)
    alone = score_examples(trained_reader().reader, lessons, examples)
    reader = trained_reader(accept_threshold=-1e6).reader
    branched = score_examples(reader, lessons, examples, branches=True)
    assert (alone.accepted, branched.accepted) == (None, 1.0)
    assert branched.rows == alone.rows
    assert branched.table().endswith("; 100.0% of the decisions accepted a branch")
    assert json.loads(branched.as_json()) == {
        "rows": json.loads(alone.as_json())["rows"],
        "accepted_branches": 1.0,
    }


def test_acting_by_branches_does_not_ask_the_checker_and_leaves_the_runs_table(
    judged: Judged, monkeypatch: pytest.MonkeyPatch
) -> None:
    graded: list[int] = []

    def grade_by(examples: Sequence[Example], _: object) -> Grade:
        return lambda row, tokens: graded.append(row) or 0.5

    monkeypatch.setattr(long_context, "grade_by", grade_by)
    found = evaluated(judged, limit=2, options={"branches": True})
    assert 0 <= found["accepted_branches"] <= 1
    assert [row["score"] for row in found["rows"]] == [0.5, 0.5]
    # each text of each length: the reader's answer, and the backbone's alone
    assert len(graded) == 2 * 2 * 2
    assert not (Path(judged.source) / "reasoning.json").exists()


def test_the_table_has_a_line_per_task_and_the_json_its_rows() -> None:
    rows = [
        Row("logic", 1, 0.5, 0.25, 8),
        Row("logic", 4, 0.75, 0.0, 8),
        Row("look_up", 4, 1, 0, 8),
    ]
    assert Evaluated(rows).table().splitlines() == [
        "score, backbone alone               1x            4x",
        "logic                       0.50, 0.25    0.75, 0.00",
        "look_up                              -    1.00, 0.00",
        "8 texts each; lengths in windows",
    ]
    fewer = [rows[0], dataclasses.replace(rows[1], n=5)]
    assert Evaluated(fewer).table().endswith("\n5 to 8 texts each; lengths in windows")
    assert json.loads(Evaluated(rows).as_json())["rows"][0] == {
        "task": "logic",
        "length_ratio": 1,
        "score": 0.5,
        "backbone_score": 0.25,
        "n": 8,
        "low": None,
        "high": None,
    }


@pytest.fixture
def learned(tmp_path: Path) -> tuple[TrainedReader, Path]:
    """A reader whose checkpoint says that it learned from a file of tasks, and that file."""
    path = write_rows(tmp_path / "tasks.jsonl")
    config = small_config(task_file=str(path), tasks=("logic",))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    state = {"loader": {"task_file": digest}}
    one = [whole("weight", torch.zeros(1))]
    save_checkpoint(tmp_path, 1, one, state=state, rank_state={}, keep=1)
    (folder,) = (each for each in tmp_path.rglob("state.json"))
    folder = folder.parent
    reader = trained_reader()
    trained = dataclasses.replace(reader.trained, config=config, checkpoint=folder)
    return dataclasses.replace(reader, trained=trained, lessons=small_lessons(config)), path


def test_rows_held_out_are_scored_beside_the_tasks_of_ours(
    learned: tuple[TrainedReader, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_context, "LENGTH_RATIOS", (4,))
    with_rows = with_held_out(learned[0], data=None)
    own = with_rows.lessons.own
    assert own is not None and not set(own.train) & set(own.held_out)
    rows = evaluate_reasoning(with_rows, num_examples=3).rows
    assert [(row.task, row.length_ratio, row.n) for row in rows] == [
        ("logic", 4, 3),
        ("keys", 4, min(3, len(own.held_out))),
    ]


def test_a_row_named_as_a_task_of_ours_stays_apart(learned: tuple[TrainedReader, Path]) -> None:
    reader, _ = learned
    lessons = with_held_out(reader, data=None).lessons
    assert lessons.own is not None
    named = [dataclasses.replace(each, task="logic") for each in lessons.own.held_out]
    own = dataclasses.replace(lessons.own, held_out=tuple(named))
    ((example, *_),) = held_out_cells(dataclasses.replace(lessons, own=own), num_examples=2)
    assert example.task == "logic (task_file)"
    alone = lessons.training.model_copy(update={"task_file_share": 1.0})
    ((example, *_),) = held_out_cells(
        dataclasses.replace(lessons, own=own, training=alone), num_examples=2
    )
    assert example.task == "logic", "no task of ours was trained"


def test_another_file_than_the_run_learned_from_is_told_and_left_out(
    learned: tuple[TrainedReader, Path], caplog: pytest.LogCaptureFixture
) -> None:
    reader, path = learned
    path.write_text(path.read_text() + path.read_text().splitlines()[0])
    assert with_held_out(reader, data=None).lessons.own is None
    assert "is not the file that the run learned from: sha256" in caplog.text
    path.unlink()
    caplog.clear()
    assert with_held_out(reader, data=None).lessons.own is None
    assert "No such file" in caplog.text


def test_answers_longer_than_the_reader_says_are_told(
    learned: tuple[TrainedReader, Path], caplog: pytest.LogCaptureFixture
) -> None:
    reader, path = learned
    write_rows(path, 2, answers=["one two three four five six seven eight"], match="f1")
    evaluate_reasoning(reader, num_examples=1, file=path)
    assert "2 of 2 answers take more than the 14 tokens that this model says" in caplog.text
