"""Published training runs by the plan's time model: errors, what is fitted, and where it would
fail."""

import statistics
from dataclasses import replace

import pytest

from cdrmix.planning.cluster import PRESETS
from tools.benchmark.public_runs import (
    Run,
    errors,
    fit,
    kind_of,
    predict,
    published,
    read_record,
)

RECORD = read_record()
HELD = [run for run in RECORD.runs if run.held]
KEPT_OUT = [run for run in HELD if not run.fitted]


def sizes(runs: list[Run], efficiency: float | None = None) -> list[float]:
    return [abs(error) for _, error in errors(RECORD, runs, efficiency)]


def test_runs_that_nothing_is_fitted_on_are_met() -> None:
    assert len(HELD) >= 12 and len(KEPT_OUT) >= 6
    assert statistics.median(sizes(KEPT_OUT)) <= 0.15
    assert max(sizes(KEPT_OUT)) <= 0.35
    assert statistics.median(sizes(HELD)) <= 0.15
    assert max(sizes(HELD)) <= 0.35


def test_the_record_has_both_kinds_of_models_on_three_devices_and_many_sizes() -> None:
    assert {run.device for run in HELD} >= {"a100", "h100", "h200"}
    assert min(run.gpus for run in HELD) == 8 and max(run.gpus for run in HELD) == 1024
    experts = [run for run in HELD if RECORD.models[run.model].experts]
    assert len(experts) >= 6 and all(not run.fitted for run in experts)
    assert all(run.source in RECORD.sources for run in RECORD.runs)


@pytest.mark.parametrize(("kind", "preset"), [("a100", "a100-80"), ("hopper", "h100-80"),
                                              ("hopper", "h200-141")])  # fmt: skip
def test_the_presets_have_what_the_fit_gives(kind: str, preset: str) -> None:
    assert PRESETS[preset].efficiency == fit(RECORD, kind)
    assert any(run.fitted and kind_of(run) == kind for run in RECORD.runs)


def test_another_efficiency_would_not_meet_them() -> None:
    hopper = [run for run in KEPT_OUT if kind_of(run) == "hopper"]
    assert statistics.median(sizes(hopper, 0.7)) > 0.25


@pytest.mark.parametrize(
    ("model", "params"),
    [("llama3-8b", 8.03e9), ("llama3-70b", 70.6e9), ("llama3-405b", 405.9e9), ("mpt-7b", 6.86e9),
     ("mixtral-8x7b", 46.7e9), ("qwen3-30b-a3b", 30.5e9), ("qwen3-235b-a22b", 235.1e9),
     ("gpt-oss-20b", 20.9e9), ("gpt-oss-120b", 116.8e9), ("deepseek-v3", 671e9),
     ("nemotron-3-nano", 31.6e9), ("rwkv-7-7b", 7.2e9), ("gpt-175b", 175e9)],
)  # fmt: skip
def test_a_model_is_of_the_size_that_its_makers_state(model: str, params: float) -> None:
    sized = RECORD.models[model]
    ends = (1 if sized.tied else 2) * sized.width * sized.vocab
    counted = sized.mixer_elements() + sized.dense_elements() + sized.expert_elements() + ends
    assert counted == pytest.approx(params, rel=0.03)


def test_what_a_run_leaves_out_makes_it_faster() -> None:
    run = next(run for run in HELD if run.model == "llama3-70b" and run.tensor == 8)
    as_it_is = predict(run, RECORD)
    assert predict(replace(run, again=0.0), RECORD) > as_it_is
    assert predict(replace(run, overlaps=True), RECORD) > as_it_is
    assert predict(replace(run, fp8=False), RECORD) < as_it_is
    assert predict(replace(run, fused=False), RECORD) < as_it_is
    piped = next(run for run in HELD if run.parts == 2)
    assert predict(replace(piped, parts=1), RECORD) < predict(piped, RECORD)


def test_a_published_share_of_the_peak_becomes_tokens() -> None:
    run = next(run for run in HELD if run.model == "gpt-175b")
    # 13.75 s for 64 samples of 2,048 tokens on 64 GPUs, by the same table
    assert published(run, RECORD) == pytest.approx(64 * 2048 / 13.75 / 64, rel=0.03)
