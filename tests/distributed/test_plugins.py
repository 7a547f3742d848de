"""Blocks, schedules, optimizers and terms of a user's on real ranks: equal to one process, saved,
resumed, evaluated, and refused where they cannot be exported."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cdrmix.checkpoint.checkpoint_file import CheckpointFile
from cdrmix.cli import main
from cdrmix.cluster.start_records import read_start_records
from cdrmix.monitoring.metrics import deterministic_part
from cdrmix.monitoring.sinks import read_metrics
from tests import layouts, refused_plugins
from tests.harness import ROOT, Outcome, RanksFailed, run_ranks
from tests.layouts import TOLERANCE, Case, Trained, deviation, distance
from tests.small_run import STEPS, arguments, before_step, overrides, start

OURS = "tests.plugins:"
TERMS = [
    {"use": f"{OURS}Length", "weight": 0.5},
    {"use": f"{OURS}Confidence", "weight": 0.1, "name": "bold"},
]
# All four kinds at once: a block with options, between blocks of ours.
CASE = Case(
    data=2,
    accumulation=2,
    profile="zero2",
    moe=False,
    objectives=True,
    model={
        "mixers": ["rwkv", f"{OURS}Window*2", "transformer"],
        "mixer_options": {f"{OURS}Window": {"tokens": 3}},
    },
    training={
        "schedule": f"{OURS}Waves",
        "schedule_options": {"period_steps": 4},
        "learning_rate": 0.05,
    },
    settings={"kind": f"{OURS}HeavyBall"},
)


def train(case: Case) -> tuple[list[float], list[float], list[Any], list[Any]]:
    """What a rank does: `layouts.train` with terms in the loss."""
    from cdrmix.engines import combination

    layouts.OBJECTIVES["plugins"] = TERMS
    if case.broken == "mean of a rank":
        exact = combination.own_counts

        def local(batch: dict[str, Any], config: Any) -> list[float]:
            half = {name: each[: len(each) // 2] for name, each in batch.items()}
            return [2 * count for count in exact(half, config)]

        combination.own_counts = local
    # For this file's own fault, which `layouts.plant` does not know.
    return layouts.train(replace(case, broken=""))


def trained(case: Case) -> Trained:
    ranks = run_ranks(train, case.world_size, case, timeout=120)
    losses, norms, *_ = ranks[0]
    return Trained(losses, norms, layouts._whole([rank[2] for rank in ranks]), {})


@functools.cache
def reference() -> Trained:
    return trained(CASE.in_one_process())


@pytest.mark.parametrize(
    "case",
    [
        CASE,
        replace(CASE, data=1, pipeline=2, profile="pipeline"),
        replace(CASE, accumulation=1, profile="zero3"),
    ],
    ids=["data 2, ZeRO-2", "pipeline 2", "data 2, ZeRO-3"],
)
def test_equals_one_process(case: Case) -> None:
    found = trained(case)
    assert min(found.norms) > 0.5, "clipping must be active"
    assert deviation(found.losses, reference().losses) < TOLERANCE
    assert deviation(found.norms, reference().norms) < TOLERANCE
    assert distance(found.parameters, reference().parameters) < TOLERANCE


def test_a_count_of_a_rank_alone_would_be_noticed() -> None:
    found = trained(replace(CASE, broken="mean of a rank"))
    assert deviation(found.norms, reference().norms) > 10 * TOLERANCE


def start_with_broken(argv: list[str], name: str) -> int:
    """What a rank of a run does: a term breaks on rank 1 in the fourth step, while the checkpoint
    of the third is written."""
    from cdrmix.checkpoint import folder

    write = folder.write_share

    def write_late(*args: Any, **kwargs: Any) -> Any:
        time.sleep(2.0)
        return write(*args, **kwargs)

    folder.write_share = write_late
    if os.environ["RANK"] == "1":
        before_step(3, lambda: setattr(getattr(refused_plugins, name), "is_broken", True))
    return start(argv)


def broken_run(data: Path, run_dir: Path, name: str) -> tuple[list[Outcome], str]:
    """How both ranks end, and what rank 1 wrote if a rank did not end by itself."""
    settings = [
        f"objectives.plugins=[{{use: 'tests.refused_plugins:{name}'}}]",
        "checkpoint.background=true",
    ]
    argv = arguments(data, run_dir, *overrides(settings))
    try:
        codes = run_ranks(start_with_broken, 2, argv, name, timeout=60)
    except RanksFailed as failed:
        return [*failed.outcomes], failed.outcomes[1].output
    return [Outcome("result", code) for code in codes], ""


def test_a_count_that_is_no_number_on_a_rank_alone_is_told_and_the_state_saved(
    small_corpus: Path, run_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    outcomes, _ = broken_run(small_corpus, run_dir, "Miscounts")
    assert [(each.kind, each.value) for each in outcomes] == [("result", 2)] * 2
    told = capfd.readouterr().out
    message = "error: [rank 1] objectives.plugins: tests.refused_plugins:Miscounts counts [nan"
    assert told.count("error: ") == told.count(message) == 1
    assert (run_dir / "checkpoints" / "4").is_dir()


def test_a_term_that_fails_within_a_step_of_a_rank_alone_ends_the_others(
    small_corpus: Path, run_dir: Path
) -> None:
    outcomes, told = broken_run(small_corpus, run_dir, "Vector")
    message = "error: [rank 1] objectives.plugins: tests.refused_plugins:Vector: `total` returns no"
    assert message in told
    # The head ends rank 0, long before the time limit.
    assert (outcomes[0].kind, outcomes[0].value) == ("signalled", "SIGKILL")


def start_with(argv: list[str], folder: str, stopped_before: int | None) -> int:
    """What a rank of a run does, whose plug-ins are in a folder."""
    sys.path.append(folder)
    if stopped_before is not None:
        before_step(stopped_before, lambda: os.kill(os.getpid(), signal.SIGTERM))
    return start(argv)


def steps_of(run_dir: Path) -> list[dict[str, float]]:
    return [deterministic_part(line) for line in read_metrics(run_dir / "metrics.jsonl")]


def check_resumed(cut: Path, whole: Path) -> None:
    """A run that went on with changed code equals the whole one, and has told of the change."""
    assert steps_of(cut) == steps_of(whole)
    assert len(steps_of(cut)) == STEPS
    assert all(line["objective/Length/loss"] > 0 for line in steps_of(cut))
    rates = [line["learning_rate"] for line in steps_of(cut)]
    assert rates[:4] == pytest.approx(rates[4:]) and rates[0] == 0.05 > min(rates)
    with CheckpointFile(cut / "checkpoints" / str(STEPS)) as reader:
        name = "blocks.0.mixer.value.weight"
        assert set(reader.kinds(name)) == {"param", "velocity", "step"}
    first, second = read_start_records(cut)
    assert first["plugins"].keys() == {
        f"my_plugins:{name}" for name in ("Window", "Waves", "HeavyBall", "Length")
    }
    assert first["plugins"].keys() == second["plugins"].keys() and first != second
    log = (cut / "train.log").read_text()
    assert log.count("warning: since the start before the code of my_plugins:Window, ") == 1
    assert "the code of" not in (whole / "train.log").read_text()


def test_a_run_is_resumed_evaluated_and_not_exported(
    tmp_path: Path,
    small_corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    code = tmp_path / "my_plugins.py"
    text = (ROOT / "tests" / "plugins.py").read_text()
    code.write_text(text.replace(OURS, "my_plugins:"))
    settings = overrides(
        [
            "model.mixers=['my_plugins:Window', rwkv]",
            "model.transformer_fraction=0.25",
            "model.moe=null",
            "training.schedule=my_plugins:Waves",
            "training.schedule_options={period_steps: 4}",
            "training.learning_rate=0.05",
            "optimizer.kind=my_plugins:HeavyBall",
            "objectives.plugins=[{use: my_plugins:Length, weight: 0.5}]",
            "evaluation.every_steps=null",
        ]
    )
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert run_ranks(
        start_with, 2, arguments(small_corpus, whole, *settings), str(tmp_path), None
    ) == [0, 0]
    given = arguments(small_corpus, cut, *settings)
    assert run_ranks(start_with, 2, given, str(tmp_path), 4) == [75, 75]
    code.write_text(code.read_text() + "\n# changed\n")
    resumed = ["--run-dir", str(cut), "--resume", "auto"]
    strict = [*resumed, *overrides(["changed_plugins=refuse"])]
    capfd.readouterr()
    assert run_ranks(start_with, 2, strict, str(tmp_path), None) == [2, 2]
    told = capfd.readouterr().out
    assert "error: changed_plugins = refuse: since the start before the code of my_plug" in told
    resumed += overrides(["changed_plugins=warn"])
    assert run_ranks(start_with, 2, resumed, str(tmp_path), None) == [0, 0]

    check_resumed(cut, whole)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["evaluate", str(whole), "--suite", "perplexity", "--limit", "2"]) == 0
    assert main(["export", str(whole), "--out", str(tmp_path / "export")]) == 2
    assert "my_plugins:Window" in capfd.readouterr().err
    assert not (tmp_path / "export").exists()
    shutil.rmtree(tmp_path)
