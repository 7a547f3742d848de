"""What the training loop measures of itself."""

import sys
import time
from pathlib import Path

import pytest

from cdrmix.checkpoint import store
from cdrmix.monitoring.metrics import deterministic_part
from cdrmix.monitoring.sinks import read_metrics
from tests.harness import run_ranks
from tests.small_run import arguments, overrides, start

WAIT_SECONDS = 0.3


def start_on_a_slow_disk(argv: list[str]) -> int:
    from cdrmix.data.loader import Loader

    read = Loader.next

    def read_slowly(loader: Loader) -> dict:
        time.sleep(WAIT_SECONDS)
        return read(loader)

    Loader.next = read_slowly
    return start(argv)


def test_throughput_counts_the_time_that_a_step_waits_for_its_data(
    small_corpus: Path, run_dir: Path
) -> None:
    argv = arguments(small_corpus, run_dir, "--max-steps", "2")
    assert run_ranks(start_on_a_slow_disk, 1, argv) == [0]
    for line in read_metrics(run_dir / "metrics.jsonl"):
        assert line["step_seconds"] > WAIT_SECONDS
        assert line["tokens_per_second"] < 8 * 64 / WAIT_SECONDS


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["health.non_finite.action=stop"], "not finite"),
        (["health.non_finite.max_consecutive=2"], "not finite, 3 steps in a row"),
    ],
)
def test_a_diverged_run_stops_at_that_step_and_keeps_its_last_good_checkpoint(
    settings: list[str],
    told: str,
    small_corpus: Path,
    run_dir: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    wild = ["--set", "training.learning_rate=1e30", "--set", "training.warmup_steps=0"]
    quiet = ["--set", "monitoring.log_every_steps=8", "--set", "checkpoint.every_steps=1"]
    argv = arguments(
        *(small_corpus, run_dir, *wild, *quiet),
        *overrides(["evaluation.every_steps=null", *settings]),
    )
    assert run_ranks(start, 2, argv) == [2, 2]
    shown = capfd.readouterr().out
    assert shown.count("error: ") == 1
    assert f"the gradients are {told}: the run has diverged and was stopped" in shown
    found = store.find_newest(run_dir)
    assert found is not None
    assert f"The newest checkpoint is that of step {found.step}" in shown
    assert found.step < 8, "stopped before the next logged step"


def modules_of_stage_b(argv: list[str]) -> list[str]:
    """Modules of Stage B that a whole run has imported."""
    assert start(argv) == 0
    packages = ("cdrmix.stage_b", "cdrmix.reasoning")
    return [
        name
        for name in sys.modules
        if name.startswith(packages) or (name.startswith("cdrmix.") and "stage_b" in name)
    ]


def test_a_run_of_stage_a_alone_imports_no_module_of_stage_b(
    small_corpus: Path, run_dir: Path
) -> None:
    argv = arguments(small_corpus, run_dir, "--max-steps", "1")
    assert run_ranks(modules_of_stage_b, 1, argv) == [[]]


def test_the_loss_is_the_mean_of_its_tokens_whatever_they_weigh_together(
    small_corpus: Path, tmp_path: Path
) -> None:
    def lines_of(*given: str, num_ranks: int = 2) -> list[dict[str, float]]:
        run_dir = tmp_path / str(given)
        argv = arguments(small_corpus, run_dir, "--max-steps", "2", *given)
        assert run_ranks(start, num_ranks, argv) == num_ranks * [0]
        return [deterministic_part(line) for line in read_metrics(run_dir / "metrics.jsonl")]

    plain = lines_of()
    doubled = lines_of("--set", "data.token_weights.text=2")
    assert doubled == plain, "twice the nats of twice the tokens: a power of two"
    parts = lines_of("--set", "objectives.text=1")
    of_text = [(line.pop("objective/text/loss"), line.pop("objective/total")) for line in parts]
    assert parts == plain, "text alone, counted in a vector of kinds"
    assert of_text == [(line["loss"], line["loss"]) for line in plain]
    nothing = lines_of("--set", "data.token_weights.text=0", num_ranks=1)
    assert [line["loss"] for line in nothing] == [0.0, 0.0], "not 0 / 0"
