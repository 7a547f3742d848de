"""Tasks as published, read from a path: right answers are taken for right, and faults are told."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cdrmix.errors import DataError
from cdrmix.evaluation.suite import Request, suite_of
from cdrmix.evaluation.suites.local_tasks import find_tasks
from cdrmix.evaluation.suites.zero_shot import run_tasks
from cdrmix.monitoring.suite_results import Row
from tests.published_tasks import write_published

TASKS = ["arc_challenge", "arc_easy", "boolq", "hellaswag", "lambada_openai", "mmlu_anatomy"]
TASKS += ["mmlu_astronomy", "openbookqa", "piqa", "winogrande"]


def oracle(is_right: Callable[[str, str], bool]) -> Any:
    """Model of the harness that finds right answers likely and all others unlikely."""
    from lm_eval.api.model import LM

    class Oracle(LM):
        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            found = [is_right(*request.args) for request in requests]
            return [
                (-1.0 if right else -9.0 - len(r.args[1]), right)
                for right, r in zip(found, requests, strict=True)
            ]

        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            return [-0.5 * len(request.args[0].encode()) for request in requests]

        def generate_until(self, requests: list[Any]) -> list[str]:
            return ["apple"] * len(requests)

    return Oracle()


def is_right(context: str, continuation: str) -> bool:
    """Tells if an answer is the one of `write_published`, in which right ones name an apple."""
    answer = continuation.strip()
    if answer in "ABCD":
        return f"\n{answer}. apple" in context
    if answer in ("yes", "no"):
        return ("apple" in context) == (answer == "yes")
    return "apple" in context + continuation


def rows_of(folder: Path, model: Any, limit: int | None = None) -> dict[tuple[str, str], Row]:
    found = run_tasks(model, find_tasks(folder), limit=limit, seed=0)
    return {(row.task, row.metric): row for row in found.rows}


def test_right_answers_of_published_files_are_right(tmp_path: Path) -> None:
    write_published(tmp_path)
    tasks = find_tasks(tmp_path)
    assert [task.name for task in tasks] == TASKS
    rows = rows_of(tmp_path, oracle(is_right))
    assert {task for task, _ in rows} == {*TASKS, "mmlu"}
    for (task, metric), row in rows.items():
        if metric in ("acc", "acc_norm"):
            assert (row.score, row.low, row.high) == (1, 1, 1), task
    assert rows["mmlu", "acc"].n == rows["mmlu_anatomy", "acc"].n + rows["mmlu_astronomy", "acc"].n
    assert rows["lambada_openai", "perplexity"].score == pytest.approx(2.718281828)
    # a control: what is wrong is taken for right
    wrong = rows_of(tmp_path, oracle(lambda *pair: not is_right(*pair)))
    assert all(row.score == 0 for (task, metric), row in wrong.items() if metric == "acc")
    few = rows_of(tmp_path, oracle(is_right), limit=1)
    assert {row.n for (task, _), row in few.items() if task != "mmlu"} == {1}


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_files_of_the_hub_are_read_too(form: str, tmp_path: Path) -> None:
    write_published(tmp_path / "mmlu", only="mmlu")
    with (tmp_path / "mmlu" / "data" / "test" / "anatomy_test.csv").open(newline="") as file:
        cells = list(csv.reader(file))
    rows = [
        {"question": q, "subject": "anatomy", "choices": options, "answer": "ABCD".index(letter)}
        for q, *options, letter in cells
    ]
    folder = tmp_path / "hub" / "mmlu"
    folder.mkdir(parents=True)
    if form == "jsonl":
        (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        import pyarrow as pa
        import pyarrow.parquet as parquet

        parquet.write_table(pa.Table.from_pylist(rows), folder / "test-00000-of-00001.parquet")
    [task] = find_tasks(tmp_path / "hub")
    csv_task = next(each for each in find_tasks(tmp_path / "mmlu") if each.name == task.name)
    assert task.rows == csv_task.rows


def definition(folder: Path, name: str, data: str, **values: Any) -> Path:
    """Writes a definition of lm-eval's as a user does."""
    path = folder / f"{name}.yaml"
    content = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": data}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{q}}",
        "doc_to_choice": "{{c}}",
        "doc_to_target": "a",
    } | values
    path.write_text("\n".join(f"{k}: {json.dumps(v)}" for k, v in content.items() if v is not None))
    return path


def data_of(path: Path) -> None:
    rows = [
        {"q": f"fruit {i}", "c": ["pear", "apple"], "a": 1, "t": "ab " * i} for i in range(1, 9)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_definitions_of_ones_own_have_intervals(tmp_path: Path) -> None:
    data_of(tmp_path / "rows.jsonl")
    definition(tmp_path, "choices", "rows.jsonl", num_fewshot=None)
    texts = {"doc_to_text": "", "doc_to_target": "{{t}}", "doc_to_choice": None}
    definition(tmp_path, "texts", "rows.jsonl", output_type="loglikelihood_rolling", **texts)
    answers = {"output_type": "generate_until", "doc_to_choice": None, "doc_to_target": "{{c[1]}}"}
    definition(
        tmp_path,
        "answers",
        "rows.jsonl",
        **answers,
        generation_kwargs={"until": ["\n"]},
        metric_list=[{"metric": "exact_match"}],
    )
    # of every other question the wrong answer is the likely one
    half = oracle(lambda q, answer: ("apple" in answer) == (int(q.split()[-1]) % 2 == 0))
    rows = rows_of(tmp_path, half)
    acc = rows["choices", "acc"]
    assert acc.score == 0.5 and acc.n == 8
    assert acc.low is not None and acc.high is not None and 0 < acc.low < 0.5 < acc.high < 1
    assert rows["answers", "exact_match"].score == 1
    bits = rows["texts", "bits_per_byte"]
    assert bits.score == pytest.approx(0.5 / 0.6931471805599453)
    assert bits.low == pytest.approx(bits.score) == bits.high
    words = rows["texts", "word_perplexity"]
    assert words.low is not None and words.high is not None
    assert words.low <= words.score <= words.high


def test_the_suite_comes_with_a_task_and_is_checked_without_torch() -> None:
    code = (
        "import sys; from cdrmix.evaluation.suite import Request, suite_of;"
        "suite_of('zero-shot').check(Request()); assert 'torch' not in sys.modules;"
        "assert 'lm_eval' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    [task] = find_tasks(None)
    assert task.name == "python_choices"
    lines = Path(task.data_files["test"]).read_text().splitlines()
    assert len(lines) == 100
    for line in map(json.loads, lines):
        right = line["text"] + line["choices"][line["answer"]]
        others = [
            line["text"] + each for i, each in enumerate(line["choices"]) if i != line["answer"]
        ]
        if line["kind"] != "name":  # wrong names are Python, too
            assert _is_begun(right), right
            assert not any(map(_is_begun, others)), line


def _is_begun(text: str) -> bool:
    """Tells if a text is the beginning of a Python program."""
    for rest in ("", "    pass\n", "except ValueError:\n    pass\n"):
        try:
            compile(text + rest, "<choice>", "exec")
        except SyntaxError:
            continue
        return True
    return False


def test_examples_before_a_question_are_drawn_by_the_seed(tmp_path: Path) -> None:
    data_of(tmp_path / "rows.jsonl")
    definition(tmp_path, "shots", "rows.jsonl", num_fewshot=2, fewshot_split="test")
    contexts: list[list[str]] = []

    def noted(context: str, _: str) -> bool:
        contexts[-1].append(context)
        return True

    for seed in (0, 0, 1):
        contexts.append([])
        found = run_tasks(oracle(noted), find_tasks(tmp_path), limit=3, seed=seed)
        assert found.tasks["shots"]["num_fewshot"] == 2
    assert contexts[0] == contexts[1] != contexts[2]
    assert all(context.count("fruit") == 3 for context in contexts[0])


def refused(folder: Path, *parts: str) -> None:
    with pytest.raises(DataError) as caught:
        suite_of("zero-shot").check(Request(tasks=folder))
    for part in parts:
        assert part in str(caught.value), caught.value
    assert caught.value.exit_code == 2


def test_what_is_missing_is_listed(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "nowhere: not found", "lambada_openai: lambada_test.jsonl")
    refused(tmp_path, "holds no task", "mmlu: SUBJECT_test.csv", "NAME.yaml")
    definition(tmp_path, "hellaswag", "x", dataset_path="Rowan/hellaswag")
    definition(tmp_path, "mine", "far/away.jsonl")
    refused(
        *(tmp_path, "data of 2 of 2 tasks are not here", "mine (mine.yaml): put far/away.jsonl"),
        *("hellaswag (hellaswag.yaml): reads the data set Rowan/hellaswag of the hub",),
        "or hellaswag_val.jsonl in place of hellaswag.yaml",
    )


def test_two_tasks_of_one_name_are_refused(tmp_path: Path) -> None:
    write_published(tmp_path, only="piqa")
    data_of(tmp_path / "rows.jsonl")
    definition(tmp_path, "piqa", "rows.jsonl")
    refused(tmp_path, "its task is called piqa, and so is that of", "piqa.yaml")
    (tmp_path / "piqa.yaml").unlink()
    write_published(tmp_path / "again", only="piqa")
    refused(tmp_path, "piqa: stands twice among the tasks", "Leave one there")


@pytest.mark.parametrize(
    ("name", "line", "parts"),
    [
        ("lambada_test.jsonl", {"words": "a b"}, ["row 1: has no field 'text'", "lambada_openai"]),
        ("hellaswag_val.jsonl", {"endings": ["a"], "label": 3}, ["'label' is 3, and not one of"]),
        ("ARC-Easy-Test.jsonl", {"question": {"stem": "s"}}, ["no field 'question.choices'"]),
        ("piqa_valid.jsonl", {"goal": "g"}, ["no field 'label'", "put piqa_valid-labels.lst"]),
        ("winogrande_dev.jsonl", {"sentence": "s", "option1": "a", "option2": "b", "answer": "1"},
         ["no '_' for the options"]),
        ("boolq_dev.jsonl", {"passage": "p", "question": "q", "answer": "yes"},
         ["'answer' is of type str, and not bool or int"]),
        ("obqa_test.jsonl", {"question_stem": 3}, ["'question_stem' is of type int"]),
        ("mmlu_test.jsonl", {"question": "q", "choices": ["a"], "answer": 0}, ["has 1 texts"]),
        ("mmlu_test.jsonl", {"question": "q", "choices": list("abcd"), "answer": 0},
         ["names no subject of MMLU"]),
        ("mmlu_test.jsonl", {"question": "q", "choices": list("abcd"), "answer": 0,
         "subject": "alchemy"}, ["lm-eval knows no task mmlu_alchemy"]),
        ("lambada_test.jsonl", "{", ["cannot be read (ValueError: line 1: "]),
        ("lambada_test.jsonl", "3", ["line 1 is no JSON object"]),
        ("anatomy_test.csv", "a,b,c", ["row 1 has 3 cells, and not 6"]),
        ("mine.yaml", "dataset_path: json", ["mine.yaml: has no field `task`"]),
        ("mine.yaml", "task: [", ["mine.yaml: cannot be read as a task of lm-eval"]),
        ("mine.yaml", "task: mine\ndoc_to_text: a", ["task mine has no field `doc_to_target`"]),
        ("mine.yaml", "include: mine.yaml", ["Leave one out"]),
        ("piqa_and_boolq_dev.jsonl", "{}", ["may be of piqa or boolq by its name"]),
    ],
)  # fmt: skip
def test_a_faulty_file_is_named(name: str, line: Any, parts: list[str], tmp_path: Path) -> None:
    text = line if isinstance(line, str) else json.dumps(line)
    (tmp_path / name).write_text(text + "\n")
    refused(tmp_path, name, *parts)


def test_labels_are_as_many_as_rows(tmp_path: Path) -> None:
    write_published(tmp_path, only="piqa")
    [path] = tmp_path.rglob("*.lst")
    path.write_text("0\n")
    refused(tmp_path, "valid-labels.lst: has 1 labels for 2 rows of valid.jsonl")


def test_templates_that_ask_for_other_fields_are_told(tmp_path: Path) -> None:
    data_of(tmp_path / "rows.jsonl")
    definition(tmp_path, "mine", "rows.jsonl", doc_to_text="{{question}}")
    with pytest.raises(DataError, match="task mine cannot be made: UndefinedError: 'question' is"):
        rows_of(tmp_path, oracle(is_right))
