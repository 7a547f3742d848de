"""Two hosts, of which one is lost: `cdrmix launch` over ssh, and `cdrmix doctor`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cdrmix.checkpoint import store
from cdrmix.monitoring.sinks import read_metrics
from tests.cluster.conftest import STEPS
from tests.cluster.host_lab import HostLab, host_lab
from tests.cluster.supervised_launch import SupervisedLaunch
from tests.equal_runs import assert_equal_runs
from tests.harness import ROOT
from tests.small_run import arguments, overrides

pytestmark = pytest.mark.usefixtures("leaves_nothing")

DEADLINE_SECONDS = 12
TOKENS_PER_STEP = 8 * 64  # the global batch is the same on one rank as on two
SETTINGS = (
    "checkpoint.every_steps=10",
    "evaluation.every_steps=null",
    f"training.max_steps={STEPS}",
    f"supervision.deadline_seconds={DEADLINE_SECONDS}",
    "launch.environment.OMP_NUM_THREADS=1",
    "parallel.expert=1",  # as on one host, which the uninterrupted run has
)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostLab]:
    with host_lab(tmp_path_factory.mktemp("hosts"), "cdrmix-a", "cdrmix-b") as lab:
        yield lab


def examined(
    hosts: HostLab, folder: Path, *flags: str, **variables: str
) -> tuple[int, dict[str, Any]]:
    """Exit code of `cdrmix doctor` on the first host, and its findings by check."""
    listed = hosts.hostfile(folder / "hosts")
    command = (sys.executable, "-m", "cdrmix.cli", "doctor", "--json", "--folder", str(folder))
    done = subprocess.run(
        [*hosts.command("cdrmix-a"), *command, "--hostfile", str(listed), *flags],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    return done.returncode, {found["check"]: found for found in json.loads(done.stdout)}


def logged_steps(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def hosts_of_starts(run_dir: Path) -> list[list[str]]:
    lines = (run_dir / "starts.jsonl").read_text().splitlines()
    return [json.loads(line)["hosts"] for line in lines]


def test_a_host_that_loses_power_and_comes_back_takes_part_again(
    hosts: HostLab, uninterrupted: Path, small_corpus: Path, run_dir: Path, tmp_path: Path
) -> None:
    run = arguments(small_corpus, None, *overrides(SETTINGS))
    flags = [*run, "--hostfile", str(hosts.hostfile(tmp_path / "hosts"))]
    with SupervisedLaunch(run_dir, flags, prefix=hosts.command("cdrmix-a")) as launch:
        launch.wait_until(lambda: logged_steps(run_dir) >= 15)
        hosts.end_host("cdrmix-b")
        hosts.start_host("cdrmix-b")
        assert launch.wait() == 0, launch.output
    assert "rank 1 on cdrmix-b" in (run_dir / "train.log").read_text()
    assert hosts_of_starts(run_dir) == [["cdrmix-a", "cdrmix-b"]] * 2
    assert_equal_runs(run_dir, uninterrupted, steps=STEPS)


def test_doctor_asks_the_hosts_as_the_launcher_does(hosts: HostLab, tmp_path: Path) -> None:
    # which the launcher hands to the ranks of all hosts
    (tmp_path / ".deepspeed_env").write_text("GLOO_SOCKET_IFNAME=eth7\n")
    code, findings = examined(hosts, tmp_path, "--no-all-reduce", HOME=str(tmp_path))
    assert code == 2
    named = "cdrmix-a: GLOO_SOCKET_IFNAME=eth7; cdrmix-b: GLOO_SOCKET_IFNAME=eth7"
    assert named in findings["interface"]["detail"]
    assert findings["pdsh"]["status"] == findings["hosts"]["status"] == "ok"
    assert findings["ports"]["detail"].startswith("2 hosts reach each other")

    # a setting of pdsh alone: plain ssh reaches both hosts all the same
    wrong_port = {"PDSH_SSH_ARGS_APPEND": "-p 2222"}
    code, findings = examined(hosts, tmp_path, "--no-all-reduce", **wrong_port)
    assert code == 2
    for name in hosts.names:
        refused = f"{name}: ssh: connect to host {name} port 2222: Connection refused"
        assert refused in findings["hosts"]["detail"]
        assert f"start sshd on {name}" in findings["hosts"]["remedy"]
    assert findings["shared folder"]["status"] == "ok", "what can be looked at is looked at"


def test_doctor_finds_ports_that_a_firewall_closes(hosts: HostLab, tmp_path: Path) -> None:
    with hosts.closed_ports("cdrmix-b"):
        code, findings = examined(hosts, tmp_path, "--no-all-reduce")
    assert code == 2
    assert findings["hosts"]["status"] == "ok", "ssh is let through"
    ports = findings["ports"]
    assert ports["status"] == "FAIL"
    assert "cdrmix-a to cdrmix-b (10.213.77.12:" in ports["detail"]
    assert "cdrmix-b to cdrmix-a (10.213.77.11:" in ports["detail"]
    assert "firewall" in ports["remedy"]


def test_a_run_that_loses_a_host_goes_on_with_the_other_one(
    hosts: HostLab, small_corpus: Path, run_dir: Path, tmp_path: Path
) -> None:
    code, findings = examined(hosts, tmp_path, "--no-all-reduce")
    assert code == 0, findings
    assert findings["hosts"]["detail"].startswith("2 reached")
    assert findings["shared folder"]["detail"].endswith("seen by 1 other")
    assert "cdrmix-b: eth0" in findings["interface"]["detail"]

    run = arguments(small_corpus, None, *overrides(SETTINGS))
    flags = [*run, "--hostfile", str(hosts.hostfile(tmp_path / "hosts"))]
    with SupervisedLaunch(run_dir, flags, prefix=hosts.command("cdrmix-a")) as launch:
        launch.wait_until(lambda: logged_steps(run_dir) >= 15)
        hosts.cut("cdrmix-b")
        cut = time.monotonic()
        log = run_dir / "train.log"
        launch.wait_until(lambda: "cannot be reached" in log.read_text(), timeout=60)
        assert time.monotonic() - cut < DEADLINE_SECONDS + 5 + 3  # of a crowded machine
        assert "rank 1 on cdrmix-b cannot be reached" in log.read_text()
        assert launch.wait() == 0, launch.output
        assert "cdrmix-b cannot be reached: going on with 1 ranks" in launch.output

    found = store.find_newest(run_dir)
    assert found is not None
    assert found.step == STEPS
    assert hosts_of_starts(run_dir) == [["cdrmix-a", "cdrmix-b"], ["cdrmix-a"]]
    lines = read_metrics(run_dir / "metrics.jsonl")
    assert [(line["step"], line["tokens_seen"]) for line in lines] == [
        (step, step * TOKENS_PER_STEP) for step in range(1, STEPS + 1)
    ]

    code, findings = examined(hosts, tmp_path, "--no-all-reduce")
    assert code == 2
    assert findings["hosts"]["status"] == "FAIL"
    assert "cdrmix-b" in findings["hosts"]["detail"]
