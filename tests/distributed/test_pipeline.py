"""A run on pipeline stages: what a user gets is what one process gives, and so it resumes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cdrmix.monitoring.sinks import read_metrics
from tests.distributed.test_resume import train
from tests.equal_runs import assert_equal_runs
from tests.harness import run_ranks
from tests.layouts import Case, deviation, reference, trained
from tests.small_run import STEPS, arguments, overrides

# Four blocks, so that four stages have one each.
FOUR_BLOCKS = ("model.num_layers=4", "model.transformer_fraction=0.25")
# Ranks, and settings that give all layouts the same two micro-steps.
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one process": (1, ("training.micro_batch_size=4",)),
    "two stages": (2, ("training.micro_batch_size=4", "parallel.pipeline=2")),
    "four stages": (4, ("training.micro_batch_size=4", "parallel.pipeline=4")),
    "two data ranks": (2, ("training.micro_batch_size=2",)),
    "two stages of two ranks": (
        4,
        ("training.micro_batch_size=2", "parallel.pipeline=2", "parallel.expert=2"),
    ),
}
TOLERANCE = 1e-5


def run(layout: str, corpus: Path, run_dir: Path, *fault: Any, resume: bool = False) -> list[int]:
    """Exit codes of the ranks of a run in a layout."""
    world, settings = LAYOUTS[layout]
    argv = [*arguments(corpus, run_dir), *overrides([*FOUR_BLOCKS, *settings])]
    return run_ranks(train, world, [*argv, "--resume", "auto"] if resume else argv, *fault)


def lines(run_dir: Path) -> list[dict[str, float]]:
    """What was logged and no layout may change; overflow is measured by a rank's own capacity."""
    measured = ("loss", "grad_norm", "eval/loss", "moe/load_balance_loss", "moe/z_loss",
                "moe/routing_entropy_bits")  # fmt: skip
    return [
        {key: line[key] for key in measured if key in line}
        for line in read_metrics(run_dir / "metrics.jsonl")
    ]


@pytest.fixture(scope="module")
def uninterrupted(
    small_corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Run directory of an uninterrupted run in a layout."""
    done: dict[str, Path] = {}

    def get(layout: str) -> Path:
        if layout not in done:
            run_dir = tmp_path_factory.mktemp("uninterrupted") / "run"
            assert set(run(layout, small_corpus, run_dir)) == {0}
            done[layout] = run_dir
        return done[layout]

    return get


@pytest.mark.parametrize("layout", ["two stages", "four stages", "two stages of two ranks"])
def test_stages_log_evaluate_and_generate_what_one_process_does(
    layout: str, uninterrupted: Callable[[str], Path]
) -> None:
    found, expected = uninterrupted(layout), uninterrupted("one process")
    assert len(lines(found)) == len(lines(expected))
    for line, alone in zip(lines(found), lines(expected), strict=True):
        assert line == pytest.approx(alone, rel=TOLERANCE)
    ends = [json.loads((run_dir / "metrics.json").read_text()) for run_dir in (found, expected)]
    evaluated, alone = (end["evaluation"] for end in ends)
    assert evaluated["loss"] == pytest.approx(alone["loss"], rel=TOLERANCE)
    assert [layer["utilisation"] for layer in evaluated["layers"]] == [
        pytest.approx(layer["utilisation"], abs=2e-3) for layer in alone["layers"]
    ]
    assert ends[0]["samples"] == ends[1]["samples"]


def test_bf16_takes_every_gradient_of_the_tied_embedding() -> None:
    bf16 = {"precision": "bf16"}
    case = Case(pipeline=2, accumulation=2, profile="pipeline", optimizer="sgd", training=bf16)
    found, expected = trained(case), reference(case.in_one_process())
    # without the head's part the norm is a quarter less
    assert deviation(found.norms, expected.norms) < 0.01
    assert deviation(found.losses, expected.losses) < 1e-3


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_stage_stops_all_and_the_resumed_run_is_the_uninterrupted_one(
    rank: int, small_corpus: Path, run_dir: Path, uninterrupted: Callable[[str], Path]
) -> None:
    assert run("two stages", small_corpus, run_dir, "TERM", 4, rank) == [75, 75]
    assert (run_dir / "checkpoints" / "latest").read_text() == "5\n"
    assert run("two stages", small_corpus, run_dir, resume=True) == [0, 0]
    assert_equal_runs(run_dir, uninterrupted("two stages"), steps=STEPS)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("two stages", "one process"),
        ("one process", "four stages"),
        ("four stages", "two data ranks"),
        ("two data ranks", "two stages of two ranks"),
        ("two stages of two ranks", "two stages"),
    ],
)
def test_a_run_goes_on_at_another_layout_with_the_same_losses(
    before: str,
    after: str,
    small_corpus: Path,
    run_dir: Path,
    uninterrupted: Callable[[str], Path],
) -> None:
    assert set(run(before, small_corpus, run_dir, "TERM", 3, 0)) == {75}
    assert set(run(after, small_corpus, run_dir, resume=True)) == {0}
    expected = lines(uninterrupted("one process"))
    for line, alone in zip(lines(run_dir), expected, strict=True):
        assert line == pytest.approx(alone, rel=TOLERANCE)
