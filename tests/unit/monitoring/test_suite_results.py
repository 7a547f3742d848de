"""Results of suites: direction of their metrics, and their part of a report."""

import json
import shutil

import pytest

from cdrmix.monitoring.sinks import write_json_atomic
from cdrmix.monitoring.suite_results import Row, SuiteResult, better, lower_is_better, store_result
from tests.unit.monitoring.test_report import kinds_of_tables, make_run, report_of


@pytest.mark.parametrize(
    "metric",
    ["loss", "nats_per_token", "perplexity", "word_perplexity,none", "bits_per_byte"]
    + ["overflow_fraction", "brier_score", "ter", "truncated", "empty_share", "seconds"],
)
def test_losses_and_failures_are_better_lower(metric: str) -> None:
    assert lower_is_better(metric)


@pytest.mark.parametrize(
    "metric",
    ["acc", "acc_norm,none", "exact_match", "pass@10", "compile_rate", "routing_entropy_bits"]
    + ["tokens_per_second", "recall", "utilisation", "characters"],
)
def test_shares_of_what_is_right_are_better_higher(metric: str) -> None:
    assert not lower_is_better(metric)


def test_of_sizes_and_shares_of_experts_neither_end_is_better():
    assert better("parameters") is None and better("utilisation_max") is None
    assert (better("overflow"), better("entropy_bits")) == ("lower", "higher")


def result(step: int, score: float, *, weights: str = "trained") -> SuiteResult:
    rows = [Row("arc", "acc", score, score - 0.1, score + 0.1, 500)]
    return SuiteResult("zero-shot", rows, "run", step, weights)


def test_the_report_shows_the_newest_results_and_their_course(tmp_path):
    run = make_run(tmp_path / "run", num_steps=8)
    before = report_of(run)[0]
    assert "Suites of evaluations" not in before
    for each in (result(4, 0.25), result(8, 0.375), result(8, 0.5, weights="ema")):
        store_result(run, each)
    source, page = report_of(run)
    assert "zero-shot , after step 8" in page.text and "0.2750 to 0.4750 500" in page.text
    assert "zero-shot, average of the weights , after step 8" in page.text
    assert source.count("<svg") == before.count("<svg") + 1, "one row of several steps"
    assert len(page.ids) == len(set(page.ids))
    assert kinds_of_tables(source) == {"wide", "pairs", "heat", "counts"}
    (run / "evaluations" / "code-8.json").write_text("{")
    assert "code-8.json: is no result of a suite" in report_of(run)[1].text
    shutil.rmtree(run / "evaluations")
    assert report_of(run)[0] == before


def test_the_report_names_suites_that_failed_during_the_run(tmp_path):
    run = make_run(tmp_path / "run", num_steps=8)
    summary = json.loads((run / "metrics.json").read_text())
    results = {"code": {"step": 8, "failed": "PlanError: no sandbox"}}
    suites = {"share_of_time": 0.0625, "failures": {"code": 2}, "results": results}
    write_json_atomic(run / "metrics.json", summary | {"suites": suites})
    text = report_of(run)[1].text
    assert "code failed during the run, 2 times, the last time with: PlanError: no sandbox" in text
    assert "Suites between steps took 6.2% of the run's time." in text
