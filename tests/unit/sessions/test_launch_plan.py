"""Plan of a launch before its ranks: their number, their devices, what is refused and told."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cdrmix import cli
from cdrmix.cluster import devices
from cdrmix.cluster.devices import Devices, device_kind, devices_here
from cdrmix.cluster.hosts import Host
from cdrmix.cluster.launch import Job, make_job
from cdrmix.errors import PlanError
from cdrmix.sessions import launch_plan
from cdrmix.sessions.launch_plan import check_launch, expect
from tests.conftest import TINY
from tests.unit.data.token_folder import write_token_folder


def job(
    *settings: str,
    ranks: int | None = None,
    hosts: Sequence[Host] = (),
    config: Path = TINY,
    **more: Any,
) -> Job:
    given = {"run_dir": None, "resume": "never", "profile": None} | more
    made = make_job(
        config=TINY,
        overrides=settings,
        hostfile=None,
        ranks_per_host=ranks,
        max_restarts=0,
        **given,
    )
    return Job(**(vars(made) | {"hosts": hosts}))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    splits = {"train": [range(1000)], "validation": [range(1000)]}
    return write_token_folder(tmp_path / "data", splits)


def has(monkeypatch: pytest.MonkeyPatch, here: Devices) -> None:
    monkeypatch.setattr(launch_plan, "devices_here", lambda variables: here)


def test_the_devices_found_here_are_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, Devices("cpu", 2, 12.0))
    for ranks, memory in ((None, 6.0), (4, 3.0)):
        expected = expect(job(ranks=ranks), gpu=None, gpu_memory_gib=None)
        assert expected.cluster is not None
        assert expected.num_ranks == expected.cluster.world_size == (ranks or 2)
        assert (expected.cluster.device, expected.cluster.memory_gib) == ("cpu", memory)
        assert expected.cluster.host_memory_gib == 12.0
    cluster = expect(job(), gpu=None, gpu_memory_gib=3.0).cluster
    assert cluster is not None
    assert (cluster.device, cluster.memory_gib) == ("cpu", 3.0)
    has(monkeypatch, Devices("cuda", 8, 79.6))
    cluster = expect(job(), gpu=None, gpu_memory_gib=None).cluster
    assert cluster is not None
    assert (cluster.device, cluster.world_size, cluster.memory_gib) == ("cuda", 8, 79.6)
    has(monkeypatch, Devices("cuda", 8, None))
    assert expect(job(), gpu=None, gpu_memory_gib=None) == (8, None)
    with pytest.raises(PlanError, match="unknown preset"):
        expect(job(), gpu="h1000", gpu_memory_gib=None)


def test_slots_of_hosts_are_devices_of_equal_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, Devices("cpu", 1, 12.0))
    elsewhere = [Host("cdrmix-a.invalid", 8), Host("cdrmix-b.invalid", 4)]
    # of a login node without devices: nothing follows for the hosts
    assert expect(job(hosts=elsewhere), gpu=None, gpu_memory_gib=None) == (12, None)
    cluster = expect(job(hosts=elsewhere), gpu="h100-80", gpu_memory_gib=None).cluster
    assert cluster is not None
    assert (cluster.nodes, cluster.gpus_per_node, cluster.device) == (3, 4, "cuda")
    here = [Host("localhost", 4), *elsewhere]
    cluster = expect(job(hosts=here, ranks=2), gpu=None, gpu_memory_gib=None).cluster
    assert cluster is not None
    assert (cluster.nodes, cluster.gpus_per_node, cluster.memory_gib) == (3, 2, 6.0)


def test_devices_that_are_hidden_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DS_ACCELERATOR", "LOCAL_SIZE", *devices.HIDING):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(devices, "driver_devices", lambda: {"NVIDIA": 4})
    monkeypatch.setattr(devices, "_smallest_gib", lambda: 24.0)
    assert devices_here() == ("cuda", 4, 24.0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert devices_here() == ("cuda", 2, 24.0)
    assert devices_here({"CUDA_VISIBLE_DEVICES": "1"}) == ("cuda", 1, 24.0)
    assert device_kind({"DS_ACCELERATOR": "cpu"}) == "cpu"  # of launch.environment
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert device_kind() == "cpu"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert devices_here().kind == "cpu"
    assert devices_here().number >= 1


def told(given: Job, caplog: pytest.LogCaptureFixture, **more: Any) -> dict[str, str]:
    caplog.clear()
    with caplog.at_level("INFO", logger="cdrmix"):
        check_launch(given, run_dir=None, **more)
    lines = [record.getMessage() for record in caplog.records]
    return {line[:14].strip(): line[15:] for line in lines}


def test_the_plan_is_told_in_a_few_lines(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = job(f"data.path={data}", "training.max_steps=500", ranks=2)
    lines = told(given, caplog, gpu="cpu", command=["cdrmix", "train", "--nproc", "2"])
    assert lines["run directory"] == str(given.run_dir)
    assert lines["ranks"] == "2 on this machine, on its CPUs"
    assert lines["layout"].startswith("zero1, data 2")
    assert lines["memory"].endswith(" GiB of 8.0 GiB a rank")
    assert lines["time"].startswith("about ")
    assert lines["time"].endswith(" after the start-up, 500 steps")
    assert lines["stop"].endswith(f"cdrmix train --nproc 2 --run-dir {given.run_dir} --resume auto")
    # the layout that is given is kept
    settings = (f"data.path={data}", "parallel.tensor=2")
    assert told(job(*settings, ranks=2), caplog, gpu="cpu")["layout"].startswith("zero1, tensor 2")
    given = job(f"data.path={data}", ranks=2, profile="zero2")
    assert told(given, caplog, gpu="cpu")["layout"].startswith("zero2, ")


def test_a_run_that_goes_on_is_told_the_rest(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = (f"data.path={data}", "training.max_steps=500")
    for step in (100, 400):
        (tmp_path / "run" / "checkpoints" / str(step)).mkdir(parents=True)
    given = job(*settings, ranks=2, resume="auto", run_dir=tmp_path / "run")
    assert launch_plan._first_step(given) == 400
    given = job(*settings, ranks=2, resume=str(tmp_path / "run" / "checkpoints" / "100"))
    assert launch_plan._first_step(given) == 100


def test_what_does_not_fit_is_refused_in_the_words_of_the_plan(
    data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = job(f"data.path={data}", ranks=2)
    with pytest.raises(PlanError, match="no layout fits 1 x 2 cpu at 0.5 GiB .*What to try: it"):
        check_launch(given, run_dir=None, gpu="cpu", gpu_memory_gib=0.5)


@pytest.mark.parametrize("verb", ["launch", "train"])
def test_a_mistake_is_told_by_the_command_before_any_start(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cdrmix.cluster.launch._Signals", lambda: None)
    monkeypatch.chdir(tmp_path)
    words = [verb, "--config", str(TINY), "--nproc", "2", "--set", "data.path=none"]
    assert cli.main([*words, "--profile", "zero22"]) == 2
    first, *errors = capsys.readouterr().err.splitlines()
    assert first.endswith("cdrmix-core-tiny: checking layout, data and memory")
    assert [line.split(":")[0] for line in errors] == ["error", "none/manifest.json"]
    assert not any(tmp_path.iterdir())
    assert cli.main([verb, "--resume", "auto"]) == 2
    assert "--resume auto: needs --run-dir" in capsys.readouterr().err


def test_steps_of_stage_a_are_warned_of_in_a_run_of_stage_b_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cdrmix.cluster.launch._Signals", lambda: None)
    monkeypatch.chdir(tmp_path)
    reason = TINY.with_name("cdrmix-reason-tiny.yaml")
    words = ["train", "--config", str(reason), "--nproc", "1", "--set", "data.path=none"]
    of_stage_b = ["--set", "training.stage=b", "--set", "stage_b.run=none"]
    counted = ["--max-steps", "2"]
    for more, is_told in (([*of_stage_b, *counted], True), (of_stage_b, False), (counted, False)):
        assert cli.main([*words, *more]) == 2
        told = capsys.readouterr().err
        assert "none/manifest.json: not found" in told
        assert ("counts steps of Stage A, which this run has none of" in told) == is_told
        assert ("--set stage_b.training.policy_steps=N" in told) == is_told
