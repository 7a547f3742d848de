"""Decisions of the batch script, run by bash beside programs that play SLURM's part."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from cdrmix.cluster.slurm import Batch, Request, make_batch, write_script
from cdrmix.config.load import load_config, snapshot_yaml
from cdrmix.errors import ConfigError
from tests.conftest import TINY
from tests.harness import ROOT

REASONING = ROOT / "model_configs" / "cdrmix-reason-tiny.yaml"
# Ends as the test says, with its checkpoint; shows the variables that it was started with.
SRUN = """#!/bin/bash
read -r code step latest enough <"$PLAYED/next"
[ -n "$enough" ] && touch "$CDRMIX_LAUNCH_FOLDER/enough"
mkdir -p "$RUN/checkpoints"
echo "$latest" >"$RUN/checkpoints/latest"
echo "{\\"exit_code\\": $code, \\"reason\\": \\"\\", \\"step\\": $step}" \
    >"$CDRMIX_LAUNCH_FOLDER/outcome.json"
printf '%s\\n' "$TOKEN" "$FROM_FLAG" "$MASTER_PORT" >"$PLAYED/variables"
exit "$code"
"""
# Requeueing ends the job.
SCONTROL = """#!/bin/bash
[ "$1" = show ] && echo n1 && exit
echo requeued >"$PLAYED/decision"
kill -KILL $PPID
"""
SCANCEL = """#!/bin/bash
echo "cancelled $*" >"$PLAYED/decision"
"""


class Played:
    """A job of a batch script, started again and again."""

    def __init__(self, folder: Path, batch: Batch) -> None:
        self.run_dir, self._folder, self._restarts = batch.run_dir, folder, 0
        self._script = write_script(batch)
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("scancel", SCANCEL)):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)

    def start(self, code: int, *, step: int, latest: int, enough: str = "") -> str:
        """What becomes of a start that ends so: requeued, cancelled or its exit code."""
        (self._folder / "next").write_text(f"{code} {step} {latest} {enough}\n")
        decision = self._folder / "decision"
        decision.unlink(missing_ok=True)
        environment = {
            **os.environ,
            "PATH": f"{self._folder}:{os.environ['PATH']}",
            "PLAYED": str(self._folder),
            "RUN": str(self.run_dir),
            "SLURM_JOB_ID": "7",
            "SLURM_ARRAY_JOB_ID": "7",
            "SLURM_RESTART_COUNT": str(self._restarts),
            "SLURM_JOB_NODELIST": "n1",
        }
        done = subprocess.run(
            ["bash", self._script], env=environment, capture_output=True, text=True, check=False
        )
        self._restarts += 1
        if decision.exists():
            return decision.read_text().strip()
        return f"{done.returncode} {done.stdout}{done.stderr}"

    @property
    def variables(self) -> list[str]:
        """TOKEN, FROM_FLAG and MASTER_PORT of the last start."""
        return (self._folder / "variables").read_text().splitlines()


def batch(run_dir: Path, config: Path = TINY, **changes: object) -> Batch:
    values: dict[str, object] = {
        "config": config,
        "run_dir": run_dir,
        "nodes": 1,
        "ranks_per_node": 1,
        "on_cpu": True,
        "time_limit": "1:00:00",
        "max_restarts": 1,
    }
    return make_batch(Request(**(values | changes)))  # type: ignore[arg-type]


def test_what_may_pass_is_requeued_and_what_may_not_is_not(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    job = Played(tmp_path / "bin", batch(tmp_path / "run"))
    assert job.start(2, step=0, latest=0).startswith("2 "), "an error of the user's at first"
    assert job.start(69, step=0, latest=0) == "requeued", "a port that was taken"
    port = job.variables[2]
    assert job.start(69, step=0, latest=0).startswith("69 "), "twice in a row, one is allowed"
    assert job.variables[2] != port
    assert job.start(1, step=12, latest=10) == "requeued", "lost, but with a newer checkpoint"
    assert job.start(2, step=10, latest=10).startswith("2 "), "one too many in a row"
    (job.run_dir / "launch" / "lost-7").unlink()
    assert job.start(3, step=0, latest=10) == "requeued", (
        "before the first step, after a good start"
    )
    assert job.start(2, step=14, latest=20).startswith("2 "), "in training, such as health's stop"
    assert job.start(75, step=25, latest=25) == "requeued", "stopped by SLURM, and saved"
    assert job.start(75, step=30, latest=30, enough="yes").startswith("75 "), "stopped by a hook"
    assert job.start(1, step=35, latest=35, enough="yes") == "requeued", "lost after all"


def test_the_end_of_stage_a_is_not_the_end_of_a_reasoning_run(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    job = Played(tmp_path / "bin", batch(tmp_path / "run", REASONING))
    (job.run_dir / "metrics.json").write_text(json.dumps({"steps": 10**6}))
    assert job.start(1, step=5, latest=5) == "requeued"
    marker = job.run_dir / "finished.json"
    marker.write_text(json.dumps({"step": 10**6, "stage": "a", "finished": "2026-01-01"}))
    assert job.start(75, step=6, latest=6) == "requeued"
    marker.write_text(json.dumps({"step": 10**6, "stage": "b", "finished": "2026-01-01"}))
    assert "the run is at its end" in job.start(1, step=0, latest=0)


def test_a_core_run_is_at_its_end_where_nothing_more_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    asked = batch(tmp_path / "run", overrides=("training.max_steps=50",), chain=2)
    job = Played(tmp_path / "bin", asked)
    summary = job.run_dir / "metrics.json"
    summary.write_text(json.dumps({"steps": 50}))
    assert "at its end" in job.start(1, step=0, latest=0), "of an earlier version"
    summary.write_text(json.dumps({"steps": 40}))
    assert job.start(2, step=0, latest=0) == "cancelled --state=PENDING 7"
    assert job.start(75, step=45, latest=45, enough="yes") == "cancelled --state=PENDING 7"
    assert job.start(75, step=48, latest=48).startswith("75 "), "the next job goes on"
    marker = job.run_dir / "finished.json"
    marker.write_text(json.dumps({"step": 50, "stage": "a", "finished": "2026-01-01"}))
    assert "at its end" in job.start(1, step=0, latest=0)


def test_a_resumed_run_is_at_its_end_by_its_own_configuration(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    run_dir = tmp_path / "run"
    config = tmp_path / "config.yaml"
    config.write_text(TINY.read_text())
    job = Played(tmp_path / "bin", batch(run_dir, config))
    own = load_config(TINY, ["training.max_steps=50"])
    (run_dir / "config_snapshot.yaml").write_text(snapshot_yaml(own))
    assert job.start(1, step=5, latest=5) == "requeued"
    marker = run_dir / "finished.json"
    marker.write_text(json.dumps({"step": 50, "stage": "a", "finished": "2026-01-01"}))
    assert "at its end" in job.start(1, step=0, latest=0), "the file asks for 500 steps"
    with pytest.raises(ConfigError, match="the run is at its end"):
        batch(run_dir, config)  # a new script, and nothing more asked
    more = Played(tmp_path / "bin", batch(run_dir, config, overrides=("training.max_steps=60",)))
    assert more.start(1, step=0, latest=0) == "requeued"


def test_values_of_variables_stand_in_no_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    config = tmp_path / "config.yaml"
    values = TINY.read_text() + "\nlaunch:\n  environment:\n    TOKEN: 'in $(touch x) file'\n"
    config.write_text(values)
    overrides = ("launch.environment.FROM_FLAG=it's; touch x",)
    made = batch(tmp_path / "run", config, overrides=overrides)
    job = Played(tmp_path / "bin", made)
    monkeypatch.chdir(tmp_path)
    assert job.start(0, step=9, latest=9).startswith("0 ")
    assert job.variables[:2] == ["in $(touch x) file", "it's; touch x"]
    text = (made.run_dir / "job.sbatch").read_text()
    assert "touch x" not in text
    assert "in $(" not in text
    assert (made.run_dir / "job.environment").stat().st_mode & 0o777 == 0o600
    assert not (tmp_path / "x").exists() and not (ROOT / "x").exists()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"time_limit": "1:00\n#SBATCH --uid=0"}, "--time"),
        ({"options": ("partition=a\ntouch x",)}, "--option"),
        ({"options": ("wrap touch x",)}, "--option"),
        ({"overrides": ('name="a\\ntouch x"',)}, "is no name"),
        ({"overrides": ("data.path=https://me:hunter2@host/set",)}, "would hold this password"),
        ({"run_dir": Path("/tmp/a\nb")}, "control characters"),
        ({"run_dir": Path("/tmp/a%j")}, "SLURM replaces %"),
    ],
)
def test_what_would_be_more_than_a_line_of_the_script_is_refused(
    changes: dict[str, object], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=problem) as error:
        batch(**({"run_dir": tmp_path / "run"} | changes))  # type: ignore[arg-type]
    assert "hunter2" not in str(error.value)
    assert not (tmp_path / "run").exists()
