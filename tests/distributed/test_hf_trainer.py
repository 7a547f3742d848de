"""The first steps of `make bench ARGS=hf_trainer`: our loop and transformers' Trainer agree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cdrmix.data.sample import ensure_sample
from cdrmix.monitoring.sinks import read_metrics
from tests.harness import run_ranks
from tests.small_run import start
from tools.benchmark.hf_trainer import CONFIG, make_base, settings, train_with_theirs

STEPS = 6  # of the warm-up, which is the same however long a run is
TOLERANCE = 1e-4  # nats per token
SIZES = [f"training.max_steps={STEPS}", "training.global_batch_size=4"]
SIZES += ["training.micro_batch_size=2", "training.sequence_length=64"]


def ours(base: Path, data: Path, run: Path, *more: str) -> list[float]:
    """Losses of our loop."""
    changes = [*settings(base, data), *SIZES, *more]
    words = [word for each in changes for word in ("--set", each)]
    assert start(["--config", CONFIG, *words, "--profile", "zero2", "--run-dir", str(run)]) == 0
    return [line["loss"] for line in read_metrics(run / "metrics.jsonl") if "loss" in line]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trainer") / "base"
    make_base(folder, ensure_sample(4096).absolute())
    return folder


def test_losses_are_those_of_the_trainer(base: Path, tmp_path: Path) -> None:
    data = ensure_sample(4096).absolute()
    run_ranks(train_with_theirs, 2, base, data, STEPS, tmp_path / "theirs.jsonl", SIZES)
    lines = (tmp_path / "theirs.jsonl").read_text(encoding="utf-8").splitlines()
    theirs = [json.loads(line)["loss"] for line in lines]

    def difference(name: str, *more: str) -> float:
        found = run_ranks(ours, 2, base, data, tmp_path / name, *more)[0]
        assert len(found) == STEPS
        return max(abs(one - other) for one, other in zip(found, theirs, strict=True))

    assert difference("equal") < TOLERANCE
    assert difference("other", "training.beta2=0.9") > TOLERANCE, "another optimizer is noticed"
