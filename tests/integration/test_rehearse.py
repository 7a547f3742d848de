"""`cdrmix rehearse` as a user starts it: real processes, collectives, checkpoints."""

import json
import os
import subprocess
import sys
from pathlib import Path

from cdrmix.config.load import load_config
from cdrmix.engines.rehearsal_runs import Check, SmallRuns
from cdrmix.planning.cluster import make_cluster
from cdrmix.planning.plan import plan
from cdrmix.planning.rehearsal import rehearsals
from tests.harness import ROOT

CONFIG = ROOT / "model_configs" / "cdrmix-core-1b.yaml"


def rehearse(*flags: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cdrmix.cli", "rehearse", "--config", str(CONFIG), *flags]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_a_plan_of_one_node_is_rehearsed_and_leaves_nothing(tmp_path: Path) -> None:
    cluster = ("--nodes", "1", "--gpus-per-node", "8", "--gpu", "a100-80")
    done = rehearse(*cluster, "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["passed"]
    (layout,) = found["layouts"]
    assert layout["degrees"]["expert"] == layout["degrees"]["data"] == 2
    assert {check["name"]: check["passed"] for check in layout["checks"]} == {
        "a second run": True,
        "goes on from its checkpoint": True,
        "equals one process": True,
        "goes on in one process": True,
    }
    assert not list(tmp_path.iterdir())


def test_a_layout_that_trains_otherwise_fails_the_rehearsal(
    small_corpus: Path, tmp_path: Path
) -> None:
    config = load_config(CONFIG)
    made = plan(config, make_cluster(nodes=1, gpus_per_node=8, gpu="a100-80"))
    (small,) = rehearsals(config, made.pick)

    class Wrong(SmallRuns):
        def _alone(self):  # one process that clips otherwise stands for a wrong gradient norm
            right = super()._alone()
            training = right.training.model_copy(update={"gradient_clipping": 0.01})
            return right.model_copy(update={"training": training})

    model = small.config.model.model_copy(update={"vocab_size": 4096})
    config = small.config.model_copy(update={"model": model})
    small = type(small)(config, small.profile, small.degrees)
    checks = {check.name: check for check in Wrong(tmp_path / "1", small_corpus, small).checks()}
    assert checks["goes on from its checkpoint"].passed
    assert not checks["equals one process"].passed


def test_a_rank_that_ends_with_a_fault_is_shown(tmp_path: Path) -> None:
    config = load_config(CONFIG)
    made = plan(config, make_cluster(nodes=1, gpus_per_node=8, gpu="a100-80"))
    (small,) = rehearsals(config, made.pick)
    (check,) = SmallRuns(tmp_path / "1", tmp_path / "no corpus", small).checks()
    assert check == Check("runs", None, 0.0, check.fault)
    assert "no corpus" in check.fault
    assert not check.passed
