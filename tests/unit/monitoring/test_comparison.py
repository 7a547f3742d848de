"""Models side by side: rows, marks and reasons, pages, and what a user gets wrong."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from cdrmix import cli
from cdrmix.errors import TrainingError
from cdrmix.monitoring.comparison import compare
from cdrmix.monitoring.comparison_page import write_comparison
from cdrmix.monitoring.sinks import write_json_atomic
from cdrmix.monitoring.suite_results import Row, SuiteResult, store_result
from tests.unit.monitoring.test_report import Page, kinds_of_tables, make_run

SETTINGS: dict[str, Any] = {
    "seed": 0,
    "window": 64,
    "prefix_token": "<eos>",
    "tasks": {"arc": "a" * 64, "lambada": "b" * 64},
    "tokenizer": "c" * 64,
    "batch_size": 4,
}


def result(
    score: float = 0.3,
    *,
    step: int | None = 40,
    suite: str = "zero-shot",
    weights: str = "trained",
    source: str = "model",
    **settings: Any,
) -> SuiteResult:
    rows = [
        Row("arc", "acc", score, score - 0.05, score + 0.05, 100),
        Row("lambada", "perplexity", 100 * score, 90 * score, 110 * score, 50),
        Row("lambada", "bits_per_byte", score, None, None, 50),
    ]
    return SuiteResult(suite, rows, source, step, weights, SETTINGS | settings)


def run_of(folder: Path, *results: SuiteResult) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for each in results:
        store_result(folder, each)
    return folder


def rows_of(*sources: Path) -> dict[tuple[str, str], Any]:
    return {(row.task, row.metric): row for row in compare(sources).rows}


def test_the_best_score_is_marked_by_the_direction_of_its_metric(tmp_path):
    low = run_of(tmp_path / "low", result(0.3))
    high = run_of(tmp_path / "high", result(0.5))
    rows = rows_of(low, high)
    assert rows["arc", "acc"].best == (1,) and rows["arc", "acc"].is_clear
    assert rows["lambada", "perplexity"].best == (0,)
    assert rows["lambada", "bits_per_byte"].best == (0,)
    lines = compare([low, high]).table().split("\n")
    arc = next(line for line in lines if "arc acc" in line)
    assert re.search(r"0\.3000  \(0\.2500 to 0\.3500\) +0\.5000\* \(0\.4500 to 0\.5500\)$", arc)


def test_a_best_score_whose_interval_meets_another_is_told_apart(tmp_path):
    runs = [run_of(tmp_path / name, result(s)) for name, s in (("a", 0.3), ("b", 0.38))]
    compared = compare(runs)
    assert compared.rows[0].best == (1,) and not compared.rows[0].is_clear
    assert "0.3800~ (" in compared.table()
    assert "~ best, and its interval meets that of another model" in compared.table()


def test_equal_scores_have_no_best_one_and_a_nan_is_none(tmp_path):
    runs = [run_of(tmp_path / name, result(0.3)) for name in "ab"]
    assert rows_of(*runs)["arc", "acc"].best == ()
    runs.append(run_of(tmp_path / "c", result(float("nan"))))
    assert rows_of(*runs)["arc", "acc"].best == ()
    runs.append(run_of(tmp_path / "d", result(0.2)))
    assert rows_of(*runs)["arc", "acc"].best == (0, 1)


@pytest.mark.parametrize(
    ("changed", "tasks"),
    [
        ({"seed": 1}, {"arc", "lambada"}),
        ({"window": 128}, {"arc", "lambada"}),
        ({"prefix_token": "<bos>"}, {"arc", "lambada"}),
        ({"tasks": {"arc": "d" * 64, "lambada": "b" * 64}}, {"arc"}),
        ({"batch_size": 8}, set()),
    ],
)
def test_other_settings_are_not_comparable_and_the_reason_is_told(tmp_path, changed, tasks):
    runs = [run_of(tmp_path / "a", result(0.3)), run_of(tmp_path / "b", result(0.5, **changed))]
    compared = compare(runs)
    assert {row.task for row in compared.rows if row.why_not} == tasks
    assert all(row.best == () for row in compared.rows if row.why_not)
    for reason in compared.reasons:
        assert reason.startswith(next(iter(changed)).replace("_", " "))
        assert " in a" in reason and " in b" in reason
        assert f"[1] not comparable: {reason}" in compared.table()


def test_another_tokenizer_concerns_what_is_measured_by_token_alone(tmp_path):
    other = {"tokenizer": "e" * 64, "prefix_token": "<s>"}
    for suite in ("perplexity", "zero-shot"):
        run_of(tmp_path / "a", result(suite=suite))
        run_of(tmp_path / "b", result(suite=suite, **other))
    rows = {
        (row.suite, row.metric): row.why_not
        for row in compare([tmp_path / "a", tmp_path / "b"]).rows
    }
    why_not = rows.pop(("perplexity", "perplexity"))
    assert why_not == "tokenizer cccccccccccc in a, eeeeeeeeeeee in b"
    assert len(rows) == 5 and not any(rows.values())


def test_a_limit_counts_where_it_left_something_out(tmp_path):
    for name, n in (("a", 100), ("b", 100), ("c", 60)):
        rows = [Row("arc", "acc", 0.5, None, None, n)]
        settings = {"limit": None if name == "a" else n, "data": f"/{name}"}
        run_of(tmp_path / name, SuiteResult("zero-shot", rows, step=1, settings=settings))
    assert compare([tmp_path / "a", tmp_path / "b"]).reasons == []
    reasons = compare([tmp_path / "a", tmp_path / "c"]).reasons
    assert reasons == ["limit 60 in c, none in a"]


def test_settings_of_samples_and_documents_concern_their_own_rows(tmp_path):
    names = ("packed", "packed:code", "documents")
    rows = [Row(task, "bits_per_byte", 0.5, None, None, 9) for task in names]
    packed = {"samples": 9, "sequence_length": 64}
    settings = {"window": 64, "packed": packed, "state": "carried"}
    run_of(tmp_path / "a", SuiteResult("perplexity", rows, step=1, settings=settings))
    other = settings | {"window": 32, "state": "reset"}
    run_of(tmp_path / "b", SuiteResult("perplexity", rows, step=1, settings=other))
    longer = settings | {"packed": packed | {"sequence_length": 128}}
    run_of(tmp_path / "c", SuiteResult("perplexity", rows, step=1, settings=longer))

    def reasons(rival: str) -> dict[str, str]:
        found = compare([tmp_path / "a", tmp_path / rival]).rows
        return {row.task: row.why_not for row in found if row.why_not}

    assert reasons("b") == {"documents": "window 32 in b, 64 in a"}
    of_packed = "packed sequence_length 128 in c, 64 in a".replace("_", " ")
    assert reasons("c") == {"packed": of_packed, "packed:code": of_packed}


def test_a_group_depends_on_its_tasks_and_a_part_on_its_set(tmp_path):
    for name, digest in (("a", "x"), ("b", "y")):
        names = ("mmlu", "mmlu_law", "arc", "set", "set grade 1")
        rows = [Row(task, "acc", 0.5, None, None, 9) for task in names]
        tasks = {"mmlu_law": digest, "arc": "z", "set": digest}
        run_of(tmp_path / name, SuiteResult("zero-shot", rows, step=1, settings={"tasks": tasks}))
    compared = compare([tmp_path / "a", tmp_path / "b"])
    assert [row.task for row in compared.rows if row.why_not] == [
        *("mmlu", "mmlu_law", "set", "set grade 1"),
    ]


def test_the_newest_step_counts_and_the_average_is_a_model_of_its_own(tmp_path):
    run = run_of(tmp_path / "a", result(0.1, step=20), result(0.3), result(0.2, weights="ema"))
    compared = compare([run])
    assert [model.label for model in compared.models] == ["a", "a (ema)"]
    assert [cell.score for cell in compared.rows[0].cells] == [0.3, 0.2]


def test_files_of_one_model_are_one_column_and_a_row_that_is_lacking_has_a_dash(tmp_path):
    run = run_of(tmp_path / "a", result())
    for suite in ("zero-shot", "code"):
        each = result(0.6, suite=suite, source="/models/llama", step=None)
        write_json_atomic(tmp_path / f"{suite}.json", each.as_json())
    compared = compare([run, tmp_path / "zero-shot.json", tmp_path / "code.json"])
    write_comparison(tmp_path / "page.html", compared)
    assert (tmp_path / "page.html").read_text(encoding="utf-8").count("<svg") == 3, "of one suite"
    assert [model.label for model in compared.models] == ["a", "llama"]
    assert [row.cells[0] is None for row in compared.rows] == [True] * 3 + [False] * 3
    assert re.search(r"\n  arc acc +– +0\.6000  ", compared.table())


def test_labels_of_equal_names_take_their_folders_and_then_numbers(tmp_path):
    runs = [run_of(tmp_path / name / "tiny", result()) for name in ("one", "two")]
    labels = [model.label for model in compare([*runs, runs[1]]).models]
    assert labels == ["one/tiny", "two/tiny", "two/tiny #2"]


def test_figures_of_runs_stand_below_and_sizes_have_no_best_one(tmp_path):
    runs = [make_run(tmp_path / name, num_steps=steps) for name, steps in (("a", 8), ("b", 16))]
    summary = json.loads((runs[1] / "metrics.json").read_text())
    summary["evaluation"] |= {"loss": 3.0}
    write_json_atomic(runs[1] / "metrics.json", summary)
    run_of(runs[0], result())
    rows = compare(runs).rows
    assert [row.suite for row in rows] == ["zero-shot"] * 3 + ["run"] * 8
    found = {(row.task, row.metric): row for row in rows}
    assert found["held-out", "loss"].best == (1,)
    assert len(compare([runs[0], run_of(tmp_path / "c", result())], ["run"]).rows) == 8
    tokens = found["training", "tokens_seen"]
    assert [cell.score for cell in tokens.cells] == [16384, 32768] and tokens.best == ()
    assert [cell.score for cell in found["model", "parameters"].cells] == [2_893_056] * 2
    (runs[1] / "starts").mkdir()
    start = {"data": {"digest": "f" * 64, "tokenizer_sha256": "g"}}
    write_json_atomic(runs[1] / "starts" / "0001.json", start)
    held_out = {row.metric: row.why_not for row in compare(runs).rows if row.task == "held-out"}
    assert "data digest ffffffffffff in b" in held_out["bits_per_byte"]
    assert "tokenizer" in held_out["loss"] and "tokenizer" not in held_out["bits_per_byte"]


def test_a_narrow_terminal_has_the_models_below_each_other(tmp_path):
    runs = [run_of(tmp_path / name, result()) for name in "abc"]
    lines = compare(runs).table(60).split("\n")
    assert max(map(len, lines)) <= 60
    assert sum("arc acc" in line for line in lines) == 3
    assert sum("arc acc" in line for line in compare(runs).table().split("\n")) == 1


def test_the_json_has_a_cell_for_each_run_and_no_bare_nan(tmp_path, capsys):
    runs = [run_of(tmp_path / "a", result()), run_of(tmp_path / "b", result(float("nan")))]
    assert cli.main(["compare", *map(str, runs), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert [run["label"] for run in printed["runs"]] == ["a", "b"]
    first = printed["rows"][0]
    assert (first["suite"], first["task"], first["metric"]) == ("zero-shot", "arc", "acc")
    assert first["better"] == "higher" and first["comparable"]
    assert first["cells"][0] == {"score": 0.3, "low": 0.25, "high": 0.35, "n": 100, "best": False}
    assert first["cells"][1]["score"] == "NaN"


def test_the_page_is_self_contained_and_draws_each_metric(tmp_path, capsys):
    runs = [run_of(tmp_path / "<a>", result()), run_of(tmp_path / "b", result(0.6, seed=1))]
    out = tmp_path / "page.html"
    assert cli.main(["compare", *map(str, runs), "--out", str(out)]) == 0
    assert capsys.readouterr().out.endswith(f"\n{out}\n")
    source = out.read_text(encoding="utf-8")
    page = Page(source)
    assert len(page.ids) == len(set(page.ids)) and "script" not in page.tags
    assert all(link.startswith("#") and link[1:] in page.ids for link in page.links)
    assert source.count("<svg") == 3 and kinds_of_tables(source) == {"pairs", "counts"}
    assert "<a>" in page.text and "arc acc, lambada perplexity, lambada bits_per_byte" in page.text
    assert "not comparable: seed 0 in <a>, 1 in b" in page.text
    write_comparison(tmp_path / "again.html", compare(runs))
    assert (tmp_path / "again.html").read_text(encoding="utf-8") == source


def test_a_page_of_many_tasks_says_how_many_it_draws(tmp_path):
    rows = [Row(f"task {n}", "acc", n / 100, None, None, 10) for n in range(60)]
    runs = [run_of(tmp_path / name, SuiteResult("zero-shot", rows, step=1)) for name in "ab"]
    write_comparison(tmp_path / "page.html", compare(runs))
    text = Page((tmp_path / "page.html").read_text(encoding="utf-8")).text
    assert "the first 16 of 60 tasks" in text and "0.5900" in text


def test_a_model_without_results_of_a_suite_that_is_asked_for_has_dashes(tmp_path, capsys):
    runs = [run_of(tmp_path / "a", result()), run_of(tmp_path / "b", result(suite="code"))]
    rows = compare(runs, ["code"]).rows
    assert [row.suite for row in rows] == ["code"] * 3
    assert all(row.cells[0] is None and row.cells[1] is not None for row in rows)
    assert rows == [row for row in compare(runs).rows if row.suite == "code"]
    assert cli.main(["compare", *map(str, runs), "--suite", "code"]) == 0
    assert sum("–" in line for line in capsys.readouterr().out.splitlines()) == 3


def wrong_of(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    """The one message of `cdrmix compare`, which ends with code 2."""
    assert cli.main(["compare", *map(str, words)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("error: ") == 1
    return " ".join(captured.err.split())


def test_what_a_user_gets_wrong_is_one_message(tmp_path, capsys):
    run = run_of(tmp_path / "a", result())
    empty = run_of(tmp_path / "empty")
    assert "holds no results, neither metrics.json nor" in wrong_of(capsys, run, empty)
    assert f"{tmp_path / 'none'}: not found. Give run" in wrong_of(capsys, run, tmp_path / "none")
    other = run_of(tmp_path / "b", result(suite="code"))
    wrong = wrong_of(capsys, run, other, "--suite", "cod")
    assert "none of these holds results of it; they hold code, zero-shot" in wrong
    wrong = wrong_of(capsys, run, other, "--suite", "run")
    assert "they hold code, zero-shot. A run has them at its end" in wrong
    wrong = wrong_of(capsys, run, "--out", tmp_path / "none" / "page.html")
    assert "its folder does not exist" in wrong


@pytest.mark.parametrize("text", ["{", "[]", '{"suite": "code"}', '{"rows": [{"score": "x"}]}'])
def test_a_damaged_file_is_one_message(tmp_path, capsys, text):
    run = run_of(tmp_path / "a", result())
    for path in (tmp_path / "result.json", run / "evaluations" / "code-1.json"):
        path.write_text(text)
        assert f"{path}: is no result of a suite" in wrong_of(capsys, run, path)
        path.unlink()
    (run / "metrics.json").write_text(text[:1])
    assert f"{run / 'metrics.json'}: cannot be read" in wrong_of(capsys, run)


def test_rows_are_read_as_they_were_stored(tmp_path):
    stored = result(float("inf"))
    with pytest.raises(TrainingError, match="is no result"):
        compare([Path(__file__)])
    run = run_of(tmp_path / "a", stored)
    assert [cell for row in compare([run]).rows for cell in row.cells] == stored.rows
