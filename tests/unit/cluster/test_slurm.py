"""`cdrmix slurm`: what is planned, asked of SLURM and told, before a script waits in a queue."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from cdrmix.cli import main
from cdrmix.cluster.slurm import Batch, Request, make_batch, write_script
from cdrmix.config.load import load_config, snapshot_yaml
from cdrmix.errors import ConfigError, PlanError
from tests.conftest import TINY
from tests.harness import ROOT

CONFIGS = ROOT / "model_configs"
SINFO = """#!/bin/bash
echo 'gpu*|2-00:00:00|96|1024000|gpu:h100:8|ib'
"""


@pytest.fixture(autouse=True)
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of programs before all others, with a sbatch and a sinfo that tell nothing."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sbatch", "sinfo"):
        write_program(folder / name, "#!/bin/bash\nexit 1\n")
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


def write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def batch(config: str, folder: Path, **changes: object) -> Batch:
    values: dict[str, object] = {
        "config": CONFIGS / f"{config}.yaml",
        "run_dir": folder / "run",
        "nodes": 1,
        "ranks_per_node": 8,
    }
    return make_batch(Request(**(values | changes)))  # type: ignore[arg-type]


def options(made: Batch) -> dict[str, str]:
    """Options of the #SBATCH lines of the written script; fails where one is there twice."""
    found: dict[str, str] = {}
    for line in write_script(made).read_text().splitlines():
        if line.startswith("#SBATCH --"):
            name, _, value = line.removeprefix("#SBATCH --").partition("=")
            assert name not in found, line
            found[name] = value
    return found


@pytest.mark.parametrize("flags", [["--gpu", "h100-80"], []])
def test_a_run_that_cannot_fit_is_refused_and_no_script_is_written(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(CONFIGS / "cdrmix-core-200b.yaml")
    run = ["--config", config, "--run-dir", str(tmp_path / "run")]
    assert main(["slurm", *run, "--nodes", "1", "--gpus-per-node", "1", *flags]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert "does NOT fit" in told.err
    assert "GiB too much for a device" in told.err
    assert not (tmp_path / "run").exists()


def test_without_a_kind_of_device_the_rest_is_checked_and_that_is_told(tmp_path: Path) -> None:
    made = batch("cdrmix-core-4b", tmp_path)
    (warning,) = [each for each in made.warnings if "Give --gpu PRESET" in each]
    assert "memory and time were not checked for the device" in warning
    assert "time" not in made.lines
    with pytest.raises(PlanError, match="even on the largest devices"):
        batch("cdrmix-core-40b", tmp_path)


def test_slurm_or_the_options_name_the_devices(tmp_path: Path, programs: Path) -> None:
    made = batch("cdrmix-core-4b", tmp_path, options=["gres=gpu:h200:8"])
    assert "1 x 8 h200-141 (139.7 GiB) (--option says gpu:h200:8)" in made.lines["devices"]
    assert "gpus-per-node" not in options(made)
    write_program(programs / "sinfo", SINFO)
    made = batch("cdrmix-core-4b", tmp_path)
    assert "sinfo says gpu:h100:8 of partition gpu" in made.lines["devices"]
    made = batch("cdrmix-core-4b", tmp_path, gpu="a100-80")
    assert "1 x 8 a100-80 (79.1 GiB) (--gpu)" in made.lines["devices"]


def test_a_job_asks_for_the_cores_and_memory_of_its_plan(tmp_path: Path) -> None:
    by_rank = options(batch("cdrmix-core-4b", tmp_path, gpu="h100-80", nodes=2))
    assert (by_rank["ntasks-per-node"], by_rank["cpus-per-task"]) == ("8", "4")
    by_node = batch("cdrmix-core-4b", tmp_path, gpu="h100-80", nodes=2, starter="deepspeed")
    assert options(by_node)["ntasks-per-node"] == "1"
    assert options(by_node)["cpus-per-task"] == "32"
    memory = by_node.plan.compared.plan.estimates()[0]
    assert memory.on_host > 0, "the copy of a checkpoint"
    asked = int(by_rank["mem"].removesuffix("G"))
    assert asked == by_node.plan.memory_gib
    least = 8 * memory.on_host / 2**30
    assert least + 8 * 6 < asked < 1.2 * least + 8 * 6 + 2
    on_cpu = batch("cdrmix-core-tiny", tmp_path, on_cpu=True, ranks_per_node=2)
    assert options(on_cpu)["cpus-per-task"] == "1"
    assert "gpus-per-node" not in options(on_cpu)
    assert 2 * 1.0 < on_cpu.plan.memory_gib < 2 * 4


def test_an_optimizer_on_the_host_gets_cores_and_memory(tmp_path: Path) -> None:
    values = {"gpu": "h100-80", "ranks_per_node": 4, "profile": "zero2_offload"}
    made = batch("cdrmix-core-1b", tmp_path, **values)
    assert made.plan.compared.plan.offloads_optimizer
    assert made.plan.cores == 8
    plain = batch("cdrmix-core-1b", tmp_path, **(values | {"profile": None}))
    assert made.plan.memory_gib > plain.plan.memory_gib


def test_a_plan_keeps_to_the_memory_and_cores_of_the_nodes(tmp_path: Path, programs: Path) -> None:
    write_program(programs / "sinfo", "#!/bin/bash\necho 'gpu*|infinite|16|81920|gpu:h100:8|ib'\n")
    made = batch("cdrmix-core-4b", tmp_path, nodes=4)
    assert not made.plan.compared.plan.saves_in_background, "80 GiB hold no copy"
    assert made.plan.memory_gib <= 80
    assert made.plan.cores == 2
    with pytest.raises(ConfigError, match="100 GiB, and a node of partition gpu has 80.0 GiB"):
        batch("cdrmix-core-4b", tmp_path, nodes=4, memory="100G")
    with pytest.raises(ConfigError, match="8 tasks of 3 cores: a node of partition gpu has 16"):
        batch("cdrmix-core-4b", tmp_path, nodes=4, cpus_per_task=3)
    with pytest.raises(ConfigError, match="8 tasks of 4 cores"):
        batch("cdrmix-core-4b", tmp_path, nodes=4, options=["cpus-per-task=4"])


def test_what_the_largest_nodes_have_is_not_refused(tmp_path: Path, programs: Path) -> None:
    lines = "gpu*|infinite|16|65536|(null)|x\\ngpu*|infinite|96|1048576|gpu:h100:8|x\\n"
    write_program(programs / "sinfo", f"#!/bin/bash\nprintf '{lines}'\n")
    found = options(batch("cdrmix-core-4b", tmp_path, nodes=2, memory="500G", cpus_per_task=8))
    assert (found["mem"], found["cpus-per-task"]) == ("500G", "8")
    assert options(batch("cdrmix-core-4b", tmp_path, nodes=2))["cpus-per-task"] == "4"


def test_flags_win_over_the_plan_and_options_over_flags(tmp_path: Path) -> None:
    values = {"gpu": "h100-80", "cpus_per_task": 12, "memory": "900G"}
    found = options(batch("cdrmix-core-4b", tmp_path, **values))
    assert (found["cpus-per-task"], found["mem"]) == ("12", "900G")
    given = ["cpus-per-task=6", "mem-per-gpu=100G", "no-requeue", "time=3-0", "time=2-0"]
    found = options(batch("cdrmix-core-4b", tmp_path, **values, options=given))
    assert found["cpus-per-task"] == "6"
    assert found["mem-per-gpu"] == "100G"
    assert found["time"] == "2-0"
    assert not {"mem", "requeue"} & found.keys()


def test_it_is_told_how_many_jobs_the_run_takes(tmp_path: Path) -> None:
    made = batch("cdrmix-core-4b", tmp_path, gpu="h100-80", nodes=2)
    assert made.lines["time"].startswith("24 days to the end: 286,103 steps")
    assert made.lines["jobs"].startswith("24 starts of --time 24:00:00")
    many = "takes 24 starts of --time 24:00:00, each after its turn in the queue. Give a longer"
    assert any(many in warning for warning in made.warnings)
    made = batch("cdrmix-core-4b", tmp_path, gpu="h100-80", nodes=2, chain=3, time_limit="2-0")
    assert made.lines["jobs"] == "12 of --time 2-0, one after the other"
    assert not any("in the queue" in warning for warning in made.warnings)
    assert "--chain 3 ends before the run: give --chain 12" in made.warnings
    for given in ({"time_limit": "90"}, {"options": ["time=90"]}):
        made = batch("cdrmix-core-4b", tmp_path, gpu="h100-80", nodes=2, **given)
        assert " starts of --time 90 (minutes): " in made.lines["jobs"]
        assert any("of --time 90 (minutes), each" in warning for warning in made.warnings)
        assert options(made)["time"] == "90"
    made = batch("cdrmix-core-tiny", tmp_path, on_cpu=True)
    assert made.lines["jobs"] == "one of --time 24:00:00"
    made = batch("cdrmix-core-tiny", tmp_path, on_cpu=True, time_limit="UNLIMITED")
    assert made.lines["jobs"] == "one, without a time limit"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"time_limit": "2"}, "--time is 2 minutes, and the signal to save comes 2 minutes"),
        ({"time_limit": "3-00:00:00"}, "partition gpu allows 2 days"),
        ({"time_limit": "UNLIMITED"}, "--time is without a limit, and partition gpu allows 2 days"),
        (
            {"options": ["gres=gpu:4"]},
            "4 devices of a node for its 8 ranks. Give --gpus-per-node 4",
        ),
        ({"options": ["cpus-per-task=all"]}, "give a whole number"),
        ({"time_limit": "2days"}, "such as 2-00:00:00"),
        ({"options": ["partition=cpu"]}, "no partition cpu here. There are gpu"),
        ({"options": ["partiton=gpu"]}, "Did you mean partition?"),
        ({"options": ["signal=USR1@60"]}, "signal=B:USR1@SECONDS"),
        ({"gpu": "h100-80", "on_cpu": True}, "--gpu h100-80: give --cpu for ranks on CPUs"),
        ({"gpu": "cpu"}, "--gpu cpu: give --cpu for ranks on CPUs"),
        ({"gpu": "h100"}, "Did you mean 'h100-80'?"),
    ],
)
def test_a_wrong_value_is_refused_before_anything_is_written(
    changes: dict[str, object], problem: str, tmp_path: Path, programs: Path
) -> None:
    write_program(programs / "sinfo", SINFO)
    with pytest.raises((ConfigError, PlanError)) as error:
        batch("cdrmix-core-tiny", tmp_path, **changes)
    assert problem in str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_short_limit_and_paths_of_one_machine_are_warned_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    changes = {"on_cpu": True, "time_limit": "5", "overrides": [f"data.path={data}"]}
    monkeypatch.setattr("cdrmix.cluster.slurm._OF_A_NODE", (str(tmp_path),))
    warnings = "\n".join(batch("cdrmix-core-tiny", tmp_path, **changes).warnings)
    assert "--time leaves 3 minutes to start up and train" in warnings
    assert f"the run directory is at {tmp_path / 'run'}, and each node has" in warnings
    assert f"data.path = {data}: not on this machine, so it was not looked at" in warnings
    data.mkdir()
    warnings = "\n".join(batch("cdrmix-core-tiny", tmp_path, **changes).warnings)
    assert "not on this machine" not in warnings
    assert f"data.path is at {data}, and each node has" in warnings


def test_a_data_set_of_another_model_is_refused_and_one_of_the_nodes_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["slurm", "--config", str(TINY), "--run-dir", str(tmp_path / "run"), "--nodes", "1"]
    data = tmp_path / "data"
    assert main([*run, "--cpu", "--set", f"data.path={data}"]) == 0
    assert f"data.path = {data}: not on this machine" in capsys.readouterr().err
    (tmp_path / "run" / "job.sbatch").unlink()
    data.mkdir()
    assert main([*run, "--cpu", "--set", f"data.path={data}"]) == 2
    assert str(data) in capsys.readouterr().err
    assert not (tmp_path / "run" / "job.sbatch").exists()


def test_a_run_that_goes_on_needs_no_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    words = ["slurm", "--run-dir", str(run_dir), "--nodes", "1", "--gpus-per-node", "2", "--cpu"]
    assert main(words) == 2
    assert "--config FILE: missing" in capsys.readouterr().err
    run_dir.mkdir()
    own = load_config(TINY, ["training.max_steps=700"])
    (run_dir / "config_snapshot.yaml").write_text(snapshot_yaml(own))
    assert main(words) == 0
    assert "to the end: 700 steps" in capsys.readouterr().err
    assert "--config" not in (run_dir / "job.sbatch").read_text()


def own_run(run_dir: Path, *, step: int, finished: bool) -> None:
    """A run of 40 steps that has saved this one."""
    (run_dir / "checkpoints").mkdir(parents=True)
    (run_dir / "checkpoints" / "latest").write_text(f"{step}\n")
    own = load_config(TINY, ["training.max_steps=40"])
    (run_dir / "config_snapshot.yaml").write_text(snapshot_yaml(own))
    if finished:
        (run_dir / "finished.json").write_text(json.dumps({"step": step, "stage": "a"}))


def going_on(run_dir: Path, **changes: str) -> Batch:
    asked = Request(config=None, run_dir=run_dir, nodes=1, ranks_per_node=2, on_cpu=True)
    return make_batch(replace(asked, **changes))  # type: ignore[arg-type]


def test_a_finished_run_is_not_queued_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    own_run(run_dir, step=40, finished=True)
    words = ["slurm", "--run-dir", str(run_dir), "--nodes", "1", "--gpus-per-node", "2", "--cpu"]
    assert main(words) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert "the run is at its end (step 40 of 40)" in told.err
    assert main([*words, "--set", "training.learning_rate=1e-3"]) == 2
    assert "Nothing is left to train with other values" in capsys.readouterr().err
    assert not (run_dir / "job.sbatch").exists()
    assert main([*words, "--set", "training.max_steps=50"]) == 0
    assert "to the end: 10 of 50 steps of" in capsys.readouterr().err


def test_a_job_has_the_steps_that_are_left(tmp_path: Path) -> None:
    own_run(tmp_path / "run", step=30, finished=False)
    made = going_on(tmp_path / "run")
    assert "to the end: 10 of 40 steps of" in made.lines["time"]
    assert made.to_json()["saved_step"] == 30
    (tmp_path / "run" / "checkpoints" / "latest").unlink()
    whole = going_on(tmp_path / "run")
    assert "to the end: 40 steps of" in whole.lines["time"]
    assert made.plan.run_seconds == pytest.approx(whole.plan.run_seconds / 4)


def test_a_script_that_was_changed_is_kept_beside_the_new_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own_run(tmp_path / "run", step=0, finished=False)

    def write(**changes: str) -> str:
        return write_script(going_on(tmp_path / "run", **changes)).read_text()

    def kept() -> dict[str, str]:
        return {each.name: each.read_text() for each in (tmp_path / "run").glob("job.sbatch.*")}

    first = write()
    (tmp_path / "run" / "checkpoints" / "latest").write_text("30\n")
    assert write() != first, "another time is left"
    assert not kept()
    assert not caplog.records
    edited = first.replace("\n\ncd ", "\n\nmodule load cuda\ncd ")
    assert edited != first
    (tmp_path / "run" / "job.sbatch").write_text(edited)
    ours = write()
    assert "module load" not in ours
    assert kept() == {"job.sbatch.before": edited}
    (told,) = caplog.messages
    assert told.startswith(f"warning: {tmp_path / 'run' / 'job.sbatch'}: was another script")
    assert "kept as job.sbatch.before." in told
    longer = write(time_limit="36:00:00")
    assert longer != ours
    assert kept() == {"job.sbatch.before": edited, "job.sbatch.before-2": ours}


def test_stdout_holds_one_line_for_scripts_and_stderr_the_rest(
    tmp_path: Path, programs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "a run"
    words = ["slurm", "--config", str(TINY), "--run-dir", str(run_dir), "--nodes", "1", "--cpu"]
    assert main(words) == 0
    told = capsys.readouterr()
    assert told.out == f"{run_dir}/job.sbatch\n"
    assert f"next     sbatch '{run_dir}/job.sbatch'" in told.err
    assert "layout   zero1, data 8" in told.err
    write_program(
        programs / "sbatch",
        "#!/bin/bash\necho $1 >>$0.log\n[ $1 = --test-only ] && echo 'sbatch: Job 7 to start' >&2 "
        "&& exit 0\necho '7;lab'\n",
    )
    assert main([*words, "--submit"]) == 0
    told = capsys.readouterr()
    assert told.out == "7\n"
    assert "sbatch   Job 7 to start" in told.err
    asked = (programs / "sbatch.log").read_text().split()
    assert asked == ["--help", "--test-only", "--parsable"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["script"] == f"{run_dir}/job.sbatch"
    assert found["job"] is None
    assert found["plan"]["fits"] is True
    assert "cpus-per-task=1" in found["options"]
