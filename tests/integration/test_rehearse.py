"""`cdrmix rehearse` as a user starts it: real processes, collectives, checkpoints."""

import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cdrmix.config.load import load_config
from cdrmix.planning.cluster import make_cluster
from cdrmix.planning.comparison import compare
from cdrmix.planning.shrink import planned_stage_b, rehearsals, stage_b_rehearsal
from cdrmix.sessions import rehearse as rehearsal
from cdrmix.sessions.rehearse import Check, SmallRuns
from tests.harness import ROOT
from tests.small_run import overrides

CONFIG = ROOT / "model_configs" / "cdrmix-core-1b.yaml"
REASONING = ROOT / "model_configs" / "cdrmix-reason-1b.yaml"
# Two of the four phases: tests/distributed/test_stage_b.py goes through all of them.
FEWER_PHASES = ["stage_b.training.adapter_steps=0", "stage_b.training.joint_steps=0"]


def rehearse(*flags: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cdrmix.cli", "rehearse", *flags]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_both_stages_of_a_plan_are_rehearsed_and_leave_nothing(tmp_path: Path) -> None:
    cluster = ("--nodes", "1", "--gpus-per-node", "8", "--gpu", "a100-80")
    config = ["--config", str(REASONING), *overrides([*FEWER_PHASES, "parallel.expert=8"])]
    done = rehearse(*config, *cluster, "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["passed"]
    (layout,) = found["layouts"]
    assert layout["degrees"]["expert"] == layout["degrees"]["data"] == 2
    of_stage_b = {
        "goes on from its checkpoint": True,
        "equals one process": True,
        "goes on in one process": True,
    }
    assert {check["name"]: check["passed"] for check in layout["checks"]} == {
        "a second run": True,
        **of_stage_b,
    }
    planned = found["stage_b"]["planned"]
    assert planned["degrees"]["data"] == 8
    (layout,) = found["stage_b"]["layouts"]
    assert (layout["profile"], layout["degrees"]["data"]) == (planned["profile"], 2)
    assert {check["name"]: check["passed"] for check in layout["checks"]} == of_stage_b
    assert not list(tmp_path.iterdir())


def test_a_layout_that_trains_otherwise_fails_the_rehearsal(
    small_corpus: Path, tmp_path: Path
) -> None:
    config = load_config(CONFIG)
    made = compare(config, make_cluster(nodes=1, gpus_per_node=8, gpu="a100-80"))
    (small,) = rehearsals(config, made.plan)

    class Wrong(SmallRuns):
        def _alone(self):  # one process that clips otherwise stands for a wrong gradient norm
            right = super()._alone()
            training = right.training.model_copy(update={"gradient_clipping": 0.01})
            return right.model_copy(update={"training": training})

    model = small.config.model.model_copy(update={"vocab_size": 4096})
    config = small.config.model_copy(update={"model": model})
    small = replace(small, config=config)
    checks = {check.name: check for check in Wrong(tmp_path / "1", small_corpus, small).checks()}
    assert checks["goes on from its checkpoint"].passed
    assert not checks["equals one process"].passed


def test_a_rank_that_ends_with_a_fault_is_shown(tmp_path: Path) -> None:
    config = load_config(CONFIG)
    made = compare(config, make_cluster(nodes=1, gpus_per_node=8, gpu="a100-80"))
    (small,) = rehearsals(config, made.plan)
    (check,) = SmallRuns(tmp_path / "1", tmp_path / "no corpus", small).checks()
    assert check == Check("runs", None, 0.0, check.fault)
    assert "no corpus" in check.fault
    assert not check.passed


def train_with_gradients_of_rank_0_alone(*args: Any) -> int:
    """What one rank does; of what the other learns in Stage B nothing arrives."""
    from cdrmix.sessions import rehearse as rehearsal
    from cdrmix.stage_b import engine

    original = engine.in_order
    if os.environ["RANK"] != "0":
        engine.in_order = lambda engine, loss: original(engine, None)
    return rehearsal._train(*args)


def test_a_stage_b_that_loses_a_ranks_gradients_fails_the_rehearsal(
    small_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # one phase is enough to lose gradients in
    left_out = [f"stage_b.training.{phase}_steps=0" for phase in ("adapter", "joint", "policy")]
    config = load_config(REASONING, left_out)
    cluster = make_cluster(nodes=1, gpus_per_node=8, gpu="a100-80")
    pick = compare(config, cluster).plan
    planned = planned_stage_b(config, pick, cluster)
    assert planned is not None
    (small,) = rehearsals(config, pick)
    model = small.config.model.model_copy(update={"vocab_size": 4096})
    small = replace(small, config=small.config.model_copy(update={"model": model}))
    stage_a = SmallRuns(tmp_path / "1", small_corpus, small)
    stage_a._train(stage_a._config, "first")
    stage_b = stage_b_rehearsal(config, planned, small)
    monkeypatch.setattr(rehearsal, "_train", train_with_gradients_of_rank_0_alone)
    runs = SmallRuns(tmp_path / "2", small_corpus, stage_b, backbone=stage_a.first)
    resumed, alone = itertools.islice(runs.checks(), 2)
    assert (resumed.name, resumed.passed) == ("goes on from its checkpoint", True)
    assert (alone.name, alone.passed) == ("equals one process", False)
    assert alone.deviation is not None, "both ran to their end"
