"""`cdrmix doctor`: reasons in a launcher's output, remedies, and files of variables."""

from __future__ import annotations

import json
import os
import textwrap
from pathlib import Path
from typing import Any

import pytest

from cdrmix.cluster.doctor import (
    _all_reduce,
    _environment_file,
    _ports,
    _RunsFolder,
    examine,
    reason_in,
)
from cdrmix.cluster.findings import Finding
from cdrmix.cluster.hosts import Host

# As the launcher of DeepSpeed 0.19.8 ends where ssh to the first host fails.
CHAINED = """
Traceback (most recent call last):
  File "/x/deepspeed/launcher/runner.py", line 489, in main
    subprocess.check_call(safe_ssh_cmd, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
subprocess.CalledProcessError: Command '['ssh', 'a', 'hostname']' returned non-zero exit status 255.

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/x/deepspeed/launcher/runner.py", line 491, in main
    raise RuntimeError(
RuntimeError: Using hostfile at /h but host=a was not reachable via ssh.
"""
FOLLOWED = """
b: [rank1]: Traceback (most recent call last):
b: [rank1]:   File "/x/launch/all_reduce.py", line 41, in _measure
b: [rank1]: torch.distributed.DistBackendError: NCCL error: out of memory
a: [rank0]: Traceback (most recent call last):
a: [rank0]: RuntimeError: Connection closed by peer
pdsh@a: b: ssh exited with exit code 1
"""


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (CHAINED, "RuntimeError: Using hostfile at /h but host=a was not reachable via ssh."),
        (FOLLOWED, "torch.distributed.DistBackendError: NCCL error: out of memory"),
        ("b: error: 10.0.0.1:7: the ranks cannot meet there\n", None),
        ("starting\nb: bash: /x/python: No such file\n\n", "bash: /x/python: No such file"),
        ("\n", "it printed nothing"),
    ],
)
def test_the_line_that_says_why_is_found(output: str, reason: str | None) -> None:
    assert reason_in(output) == (reason or "error: 10.0.0.1:7: the ranks cannot meet there")


def examined(hosts: list[Host], folder: Path | None) -> dict[str, Finding]:
    findings = examine(hosts, folder=folder, ranks_per_host=None, with_all_reduce=False)
    return {finding.check: finding for finding in findings}


def programs(folder: Path, **texts: str) -> str:
    """A folder of small shell scripts by their names, for PATH."""
    folder.mkdir()
    for name, text in texts.items():
        (folder / name).write_text(f"#!/bin/sh\n{textwrap.dedent(text)}\n")
        (folder / name).chmod(0o755)
    return str(folder)


@pytest.mark.parametrize(
    ("ranks", "told"),
    [(1, "one rank, so no link to measure"), (2, "100 MB over 2 ranks in 0.500 s: 0.20 GB/s a")],
)
def test_the_bandwidth_of_links_is_told_where_there_are_any(
    ranks: int, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Start:
        """A launcher whose ranks have measured."""

        def __init__(self, hosts: Any, words: list[str], **others: Any) -> None:
            result = {"ranks": ranks, "bytes": 10**8, "seconds": 0.5}
            result["bus_bytes_per_second"] = 2e8 * (ranks - 1)
            Path(words[-1]).write_text(json.dumps(result))

        def __enter__(self) -> Start:
            return self

        def __exit__(self, *error: object) -> None: ...

        def wait_for_launcher(self, seconds: float) -> int:
            return 0

    monkeypatch.setattr("cdrmix.cluster.handover.LauncherStart", Start)
    finding = _all_reduce([], tmp_path, None)
    assert finding.status == "ok"
    assert finding.detail.startswith(told)
    assert ("GB/s" in finding.detail) == (ranks > 1)


def test_a_folder_that_means_nothing_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    finding, last = examine([], folder=Path("x"), ranks_per_host=1, with_all_reduce=True)
    assert (finding.check, finding.status) == ("shared folder", "FAIL")
    assert last.detail == "not run, because these failed: shared folder"
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    found = examined([], tmp_path / "circle")
    assert found["shared folder"].status == "FAIL"


def test_a_folder_that_is_not_there_is_told_and_not_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    mistyped = tmp_path / "experimnets" / "first"
    found = examined([], mistyped)["shared folder"]
    assert found.status == "warn"
    assert "was not there" in found.detail
    assert (found.remedy or "").startswith(f"mkdir -p {mistyped}, or another --folder")
    assert examined([], None)["shared folder"].status == "ok", "the first run makes experiments"
    assert not [*tmp_path.iterdir()]
    findings = examine([], folder=mistyped, ranks_per_host=None, with_all_reduce=False)
    next(findings)
    assert mistyped.is_dir()
    del findings  # as an interrupt does
    assert not [*tmp_path.iterdir()]
    mistyped.mkdir(parents=True)
    runs = _RunsFolder(mistyped, is_named=True)
    runs.make()
    written = Finding("shared folder", "ok", "written")
    assert runs.judged(written) == written
    runs.remove()
    assert mistyped.is_dir(), "it is the user's"


def test_a_hostfile_with_this_machine_twice_fails_and_the_rest_is_not_run(tmp_path: Path) -> None:
    hosts = [Host("localhost", 1), Host("127.0.0.1", 1)]
    *_, twice, last = examine(hosts, folder=tmp_path, ranks_per_host=1, with_all_reduce=True)
    assert (twice.check, twice.status) == ("hosts", "FAIL")
    assert twice.detail.startswith("localhost and 127.0.0.1 are both this machine")
    assert (last.check, last.status) == ("all-reduce", "warn")
    assert last.detail.endswith("failed: hosts")


REFUSING = "echo 'root@host: Permission denied (publickey,password).' >&2; exit 255"
OTHER = Host("192.0.2.7", 2)  # an address for documentation, which no machine has


def test_a_missing_pdsh_is_told_of_with_what_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", programs(tmp_path / "bin", ssh=REFUSING))
    findings = examined([OTHER], tmp_path / "runs")
    assert [*findings] == ["pdsh", "hosts"], "what launch needs first, and nothing without a host"
    assert findings["pdsh"].status == findings["hosts"].status == "FAIL"
    assert "apt-get install pdsh" in (findings["pdsh"].remedy or "")


def test_a_host_that_the_first_step_of_the_launcher_cannot_reach_is_not_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", programs(tmp_path / "bin", ssh=REFUSING))
    finding = examined([Host("localhost", 2)], tmp_path / "runs")["hosts"]
    assert finding.status == "FAIL"
    assert finding.detail == "localhost: root@host: Permission denied (publickey,password)."
    assert (finding.remedy or "").startswith("ssh-copy-id localhost")
    assert "leave out --hostfile" in (finding.remedy or "")


def test_hosts_are_reached_by_pdsh_and_never_asked_for_a_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pdsh = f"""
    echo "$PDSH_RCMD_TYPE $PDSH_SSH_ARGS_APPEND $@" >> {tmp_path}/called
    echo '192.0.2.7: ssh: connect to host 192.0.2.7 port 2222: Connection refused' >&2
    echo 'pdsh@here: 192.0.2.7: ssh exited with exit code 255' >&2
    exit 255
    """
    path = programs(tmp_path / "bin", ssh="echo '{}'", pdsh=pdsh)
    monkeypatch.setenv("PATH", path)
    monkeypatch.setenv("PDSH_SSH_ARGS_APPEND", "-p 2222")
    finding = examined([OTHER], tmp_path / "runs")["hosts"]
    assert finding.status == "FAIL"
    refused = "ssh: connect to host 192.0.2.7 port 2222: Connection refused"
    assert finding.detail == f"192.0.2.7: {refused}"
    assert "start sshd on 192.0.2.7" in (finding.remedy or "")
    called = (tmp_path / "called").read_text()
    assert called.startswith("ssh -p 2222 -o PasswordAuthentication=no")
    assert called.endswith("-w 192.0.2.7 true\n")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("echo welcome; echo '{}'", "another version of CDRmix, which tells no address"),
        ("echo welcome; echo 5; echo no such shell >&2", "no such shell"),
    ],
)
def test_a_host_with_another_cdrmix_or_none_is_told_of(
    answer: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", programs(tmp_path / "bin", ssh=answer, pdsh="exit 0"))
    finding = examined([OTHER], tmp_path / "runs")["hosts"]
    assert finding.status == "FAIL"
    assert finding.detail.startswith(f"192.0.2.7: {reason}")
    assert "make setup in the same folder on 192.0.2.7" in (finding.remedy or "")


def test_a_file_of_variables_that_a_start_refuses_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / ".deepspeed_env"
    file.write_text("A=1\nunset B\n")
    finding, _ = _environment_file(over_ssh=True)
    assert finding.status == "FAIL"
    assert ".deepspeed_env:2: not NAME=VALUE" in finding.detail
    file.write_text("A=1\n")
    file.chmod(0o666)
    finding, _ = _environment_file(over_ssh=True)
    assert "chmod go-w" in finding.detail
    file.write_bytes(b"A=\xff\n")
    file.chmod(0o600)
    assert _environment_file(over_ssh=True)[0].status == "FAIL"
    file.write_text("A=1\n")
    finding, variables = _environment_file(over_ssh=True)
    assert (finding.status, finding.detail) == ("ok", f"{file} is taken over")
    assert variables["A"] == "1"
    assert variables.get("DS_ACCELERATOR") == os.environ.get("DS_ACCELERATOR")
    assert _environment_file(over_ssh=False)[1] == {}, "the launcher reads it for other hosts only"


def test_a_file_of_variables_that_is_passed_over_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / ".deepspeed_env").write_text("A=1\n")
    monkeypatch.chdir(tmp_path)
    finding, _ = _environment_file(over_ssh=False)
    assert finding.status == "warn"
    assert finding.detail.startswith(f"{tmp_path}/.deepspeed_env: not taken over")
    assert (finding.remedy or "").startswith("Put its lines into")
    assert not caplog.records, "said once, in the table"


def test_a_host_that_is_left_calls_itself_and_not_the_lost_first_one() -> None:
    answers = {"localhost": {"limits": {"ports": [32768, 60999]}}}
    finding = _ports(answers, {"192.0.2.7": "192.0.2.7", "localhost": "127.0.0.1"})
    assert finding.status == "ok"
    assert finding.detail == "this machine reaches itself on a port of 32768-60999"
