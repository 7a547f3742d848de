"""A micro-batch that does not fit: the next start takes half of it, and the run is the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cdrmix.monitoring.sinks import read_metrics
from tests.distributed.test_supervision import run_with_fault
from tests.harness import RanksFailed, run_ranks
from tests.small_run import STEPS, arguments, overrides, start

DENSE = ("model.moe=null", "training.micro_batch_size=2", "evaluation.every_steps=null")
MESSAGE = "CUDA out of memory. Tried to allocate 2.00 GiB."


def run_out_of_memory() -> None:
    """Have this rank's next second micro-step fail in its forward pass, as torch says it."""
    from cdrmix.models.backbone import Backbone

    forward, calls = Backbone.forward, 0

    def fail_the_second(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise torch.OutOfMemoryError(MESSAGE)
        return forward(*args, **kwargs)

    Backbone.forward = fail_the_second  # type: ignore[method-assign]


def start_short_of_memory(argv: list[str]) -> int:
    run_out_of_memory()
    return start(argv)


def run_out_of_main_memory() -> None:
    """As `run_out_of_memory`, by asking torch's allocator on CPUs for what no host has."""
    from cdrmix.models.backbone import Backbone

    def fail(*args: Any, **kwargs: Any) -> Any:
        torch.empty(2**60, dtype=torch.uint8)

    Backbone.forward = fail  # type: ignore[method-assign]


def start_short_of_main_memory(argv: list[str]) -> int:
    run_out_of_main_memory()
    return start(argv)


def losses(run_dir: Path) -> list[float]:
    lines = read_metrics(run_dir / "metrics.jsonl")
    assert [line["step"] for line in lines] == [*range(1, STEPS + 1)]
    assert [line["tokens_seen"] for line in lines] == [64 * 8 * n for n in range(1, STEPS + 1)]
    return [line["loss"] for line in lines]


def test_one_rank_short_of_memory_ends_all_and_the_next_start_takes_half(
    small_corpus: Path, tmp_path: Path
) -> None:
    short, plenty = tmp_path / "short", tmp_path / "plenty"
    folder = tmp_path / "launch"
    folder.mkdir()
    settings = [word for setting in DENSE for word in ("--set", setting)]
    found = run_with_fault(small_corpus, short, run_out_of_memory, folder, *settings)
    assert 0 not in found.ends
    assert found.outcome["exit_code"] == 1, "cdrmix launch starts it again"
    assert "rank 1 on" in found.outcome["reason"], "not the one that waited for it"
    assert "ended with exit code 1 and the others did not follow" in found.outcome["reason"]
    told = "rank 1 ran out of memory after step 5 with micro batches of 2 samples. The next start"
    assert found.log.count(told) == 1
    note = json.loads((short / "out_of_memory_2.json").read_text())
    peaks = note.pop("peak_bytes_by_phase")
    assert min(peaks.values()) > 2**20
    assert "forward" in peaks
    assert [*peaks.values()] == sorted(peaks.values(), reverse=True)
    assert note == {"micro_batch_size": 2, "step": 5, "rank": 1, "error": MESSAGE}

    argv = arguments(small_corpus, short, *settings)
    assert run_ranks(start, 2, [*argv, "--resume", "auto"]) == [0, 0]
    plan = json.loads((short / "plan.json").read_text())
    assert (plan["micro_batch_size"], plan["gradient_accumulation_steps"]) == (1, 4)
    assert "micro batch 1 instead, accumulation 4: 2 ran out of memory" in plan["reasons"][-1]
    assert run_ranks(start, 2, arguments(small_corpus, plenty, *settings)) == [0, 0]
    assert losses(short) == pytest.approx(losses(plenty), rel=1e-5)
    assert not (plenty / "out_of_memory_2.json").exists()


def test_what_did_not_fit_once_is_not_tried_again(small_corpus: Path, run_dir: Path) -> None:
    settings = [*DENSE, "training.micro_batch_size=4", "checkpoint.every_steps=1"]
    argv = arguments(small_corpus, run_dir, *overrides(settings), "--max-steps", "2")
    with pytest.raises(RanksFailed) as first:
        run_ranks(start_short_of_memory, 1, argv)
    assert [outcome.value for outcome in first.value.outcomes] == [1]
    with pytest.raises(RanksFailed):
        run_ranks(start_short_of_memory, 1, [*argv, "--resume", "auto"])
    assert run_ranks(start, 1, [*argv, "--resume", "auto"]) == [0]
    assert run_ranks(start, 1, [*argv, "--resume", "auto", "--max-steps", "3"]) == [0]
    assert json.loads((run_dir / "plan.json").read_text())["micro_batch_size"] == 1
    assert sorted(path.name for path in run_dir.glob("out_of_memory*")) == [
        "out_of_memory_2.json",
        "out_of_memory_4.json",
    ]


def test_one_sample_that_does_not_fit_is_an_error_with_advice(
    small_corpus: Path, run_dir: Path
) -> None:
    settings = [*DENSE, "training.micro_batch_size=1"]
    argv = arguments(small_corpus, run_dir, *overrides(settings))
    for _ in range(2):  # it is said again by each start
        with pytest.raises(RanksFailed) as caught:
            run_ranks(start_short_of_memory, 1, [*argv, "--resume", "auto"])
        (outcome,) = caught.value.outcomes
        assert (outcome.kind, outcome.value) == ("exited", 2)
        assert "ran out of memory after step 0 with micro batches of one sample" in outcome.output
        assert "`cdrmix plan`" in outcome.output
        assert "Traceback" not in outcome.output


def test_main_memory_that_runs_out_is_noted_as_well(small_corpus: Path, run_dir: Path) -> None:
    argv = arguments(small_corpus, run_dir, *overrides(DENSE), "--max-steps", "1")
    with pytest.raises(RanksFailed) as caught:
        run_ranks(start_short_of_main_memory, 1, argv)
    assert (
        "ran out of memory after step 0 with micro batches of 2" in caught.value.outcomes[0].output
    )
    note = json.loads((run_dir / "out_of_memory_2.json").read_text())
    assert "DefaultCPUAllocator: can't allocate memory" in note["error"]
    assert {"data", "forward"} <= {*note["peak_bytes_by_phase"]}
