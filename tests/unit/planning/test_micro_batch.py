"""The search for the largest micro batch that fits, over made measurements."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cdrmix.config.load import load_config
from cdrmix.planning.cluster import processes
from cdrmix.planning.micro_batch import Fit, largest_that_fits, sizes_to_try, trial_plan
from cdrmix.planning.profile import choose
from tests.small_run import CONFIG

SIZES = [1, 2, 3, 4, 6, 8, 12, 24, 48, 96]


def line(fixed: int, of_sample: float) -> Callable[[int], int]:
    return lambda size: int(fixed + of_sample * size)


def search(measure: Callable[[int], int | None], limit: int, guess: int = 10) -> Fit:
    return largest_that_fits(SIZES, measure, limit_bytes=limit, sample_bytes=guess)


@pytest.mark.parametrize("limit", [119, 120, 129, 220, 221, 500, 1_500, 10_000])
@pytest.mark.parametrize("guess", [0, 10, 1_000])
def test_the_largest_that_fits_is_found_whatever_the_plan_guessed(limit: int, guess: int) -> None:
    measure = line(100, 10)
    found = search(measure, limit, guess)
    if guess <= 10:
        assert found.micro_batch_size == max(size for size in SIZES if measure(size) <= limit)
    assert found.fits
    assert found.tried[found.micro_batch_size] == measure(found.micro_batch_size)


def test_no_size_is_tried_that_is_expected_not_to_fit() -> None:
    found = search(line(100, 10), 225)
    assert (found.micro_batch_size, [*found.tried]) == (12, [1, 2, 12])


def test_a_line_that_bends_up_is_approached_from_both_sides() -> None:
    found = search(lambda size: 100 + 10 * size + size * size // 2, 200)
    assert found.micro_batch_size == 6  # 8 takes 212
    assert 8 in found.tried


def test_running_out_of_memory_ends_the_way_up() -> None:
    found = search(lambda size: None if size >= 8 else 100 + size, 10_000)
    assert found.micro_batch_size == 6
    assert None in found.tried.values()


def test_one_sample_that_does_not_fit_is_told() -> None:
    assert search(line(100, 10), 50) == Fit(1, {1: 110}, 50)
    assert not search(line(100, 10), 50).fits
    assert not search(lambda _: None, 50).fits


def test_sizes_keep_the_global_batch_and_a_pipeline_full() -> None:
    def sizes(*settings: str, below: int | None = None) -> list[int]:
        config = load_config(CONFIG, ["training.micro_batch_size=auto", *settings])
        return sizes_to_try(choose(config, processes(2)), below=below)

    assert sizes("parallel.pipeline=1", "parallel.tensor=1") == [1, 2, 4]
    assert sizes("parallel.pipeline=2", "model.moe=null") == [1, 2, 4]
    assert sizes("parallel.pipeline=1", "parallel.tensor=1", below=4) == [1, 2]
    assert sizes("parallel.pipeline=1", "parallel.tensor=1", below=1) == [1]


def test_a_trial_is_a_step_of_few_micro_steps_that_deepspeed_takes() -> None:
    config = load_config(
        CONFIG, ["training.micro_batch_size=auto", "training.global_batch_size=64"]
    )
    plan = choose(config, processes(2))
    trial = trial_plan(plan, 4)
    assert (trial.micro_batch_size, trial.gradient_accumulation_steps) == (4, 2)
    assert trial.deepspeed["train_batch_size"] == 4 * 2 * trial.degrees.data
    assert any("looked for at the start" in reason for reason in plan.reasons)
