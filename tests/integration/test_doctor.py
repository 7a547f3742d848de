"""`cdrmix doctor` on this machine: what it looks at, and what it makes of it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from torch.utils.file_baton import FileBaton

from cdrmix import cli
from cdrmix.cluster import doctor as doctor_module
from cdrmix.cluster import probe
from cdrmix.cluster.doctor import examine
from cdrmix.cluster.handover import FOLDER_VARIABLE
from cdrmix.cluster.hosts import Host
from cdrmix.cluster.probe import driver_devices, look, unusable_devices
from tests.harness import RANK_ENVIRONMENT, ROOT

CHECKS = ["hosts", "cdrmix", "python", "packages", "devices", "clock", "interface", "disk"]
CHECKS += ["/dev/shm", "temporary", "open files", "processes", "compiler", "shared folder", "ports"]
CHECKS += [".deepspeed_env", "leftovers", "all-reduce"]


def doctor(*flags: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    """`cdrmix doctor` in a process of its own; `settings` are those of `subprocess.run`."""
    variables = settings.pop("env", {})
    return subprocess.run(
        [sys.executable, "-m", "cdrmix.cli", "doctor", *flags],
        cwd=ROOT,
        env={**os.environ, **RANK_ENVIRONMENT, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
        **settings,
    )


def test_this_machine_is_examined_down_to_an_all_reduce(tmp_path: Path) -> None:
    done = doctor("--nproc", "2", "--json", "--folder", str(tmp_path / "runs"))
    found = {finding["check"]: finding for finding in json.loads(done.stdout)}
    assert list(found) == CHECKS
    assert done.returncode == 0, found
    told = re.fullmatch(
        r"100 MB over 2 ranks in (\S+) s: (\S+) GB/s a link", found["all-reduce"]["detail"]
    )
    assert told is not None, found["all-reduce"]
    # in a ring of two each link carries half of the bytes twice, to be summed and handed back
    assert float(told[1]) * float(told[2]) == pytest.approx(0.1, rel=0.2)
    assert "deepspeed 0." in found["packages"]["detail"]
    assert found["shared folder"]["status"] == "warn", "it was not there"
    assert not (tmp_path / "runs").exists()


def test_a_folder_that_cannot_be_made_fails_with_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", "--no-all-reduce", "--folder", str(tmp_path / "file" / "x")])
    assert ended.value.code == 2
    assert capsys.readouterr().out.startswith("FAIL  shared folder")


# Read by every Python that finds it: rank 1 fails as soon as it is one.
BROKEN = """
import os, sys, traceback
if os.environ.get("RANK") == "1" and any("all_reduce" in word for word in sys.orig_argv):
    try:
        raise RuntimeError("no driver on this device")
    except RuntimeError:
        traceback.print_exc()
        os._exit(1)
"""


def test_an_all_reduce_that_fails_says_why_in_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(BROKEN)
    runs = tmp_path / "runs"
    done = doctor("--nproc", "2", "--folder", str(runs), env={"PYTHONPATH": str(folder)})
    assert done.returncode == 2
    assert "Traceback" not in done.stdout
    *_, line = done.stdout.split("FAIL  all-reduce ")
    told = re.search(
        r"the launcher ended with code (\d+) after (\d+) s: (.*) try: ", " ".join(line.split())
    )
    assert told is not None, done.stdout
    assert int(told[1]) != 0
    assert told[3] == "RuntimeError: no driver on this device"
    (kept,) = runs.iterdir()
    assert str(kept) in done.stdout
    assert "Traceback" in kept.read_text()


def test_an_all_reduce_that_hangs_is_told_of_with_the_time_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_module, "_ALL_REDUCE_SECONDS", 0.1)
    for name, value in RANK_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    *_, finding = examine([], folder=tmp_path, ranks_per_host=1, with_all_reduce=True)
    assert finding.status == "FAIL"
    # starting the launcher counts, which takes as long as the machine is busy
    assert re.match(r"time ran out after \d s: ", finding.detail)
    assert finding.remedy == f"read {tmp_path}/doctor-all-reduce.log"


def test_limits_that_end_a_run_are_told_in_lines_of_80_columns(tmp_path: Path) -> None:
    def lower() -> None:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, most))

    done = doctor(
        *("--no-all-reduce", "--folder", str(tmp_path / "runs")),
        env={
            "TMPDIR": str(tmp_path / "nowhere"),
            "GLOO_SOCKET_IFNAME": "nowhere0",
            "PATH": str(tmp_path),
        },
        preexec_fn=lower,
    )
    assert done.returncode == 2
    findings = {}
    check = ""
    for line in done.stdout.splitlines():
        assert len(line) <= 80 or len(line[22:].split()) == 1, "a path is not cut"
        if not line.startswith(" "):
            check = line[6:].split("  ")[0]
        assert line[:22].strip() == "" or not line.startswith(" "), "a hanging indent"
        findings[check] = f"{findings.get(check, '')} {line.strip()}".strip()
    for check, status, remedy in (
        ("interface", "FAIL", "unset"),
        ("temporary", "FAIL", "export TMPDIR=DIR"),
        ("open files", "FAIL", "ulimit -n"),
        ("compiler", "warn", "apt-get install g++"),
    ):
        assert findings[check].startswith(status), findings
        assert f"try: {remedy}" in findings[check]


def test_a_host_without_an_address_fails(tmp_path: Path) -> None:
    hosts = [Host("no-such-host.invalid", 1)]
    findings = examine(hosts, folder=tmp_path, ranks_per_host=None, with_all_reduce=False)
    *_, finding = findings
    assert (finding.check, finding.status) == ("hosts", "FAIL")
    assert "no-such-host.invalid" in finding.detail
    assert "/etc/hosts" in (finding.remedy or "")


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm")
def test_shared_memory_in_use_is_no_leftover(tmp_path: Path) -> None:
    path = Path("/dev/shm") / f"torch_{uuid4().hex}"
    path.write_bytes(bytes(4096))

    def is_left() -> bool:
        told: dict[str, Any] = look(str(tmp_path), "127.0.0.1")
        return str(path) in told["files"]

    try:
        assert is_left()
        with path.open("r+b") as file, contextlib.closing(mmap.mmap(file.fileno(), 4096)):
            assert not is_left()
    finally:
        path.unlink()


def test_the_lock_of_a_killed_build_is_a_leftover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    build = FileBaton(str(lock))
    assert build.try_acquire()
    of_yesterday = time.time() - 86_400
    os.utime(lock, (of_yesterday, of_yesterday))
    assert lock not in probe._build_locks(), "the build goes on"
    assert build.fd is not None
    os.close(build.fd)  # as when its process is killed
    assert lock in probe._build_locks()
    os.utime(lock)
    assert lock not in probe._build_locks(), "it may be of another host"
    os.utime(lock, (of_yesterday, of_yesterday))
    assert str(lock) in probe.remove_leftovers()["removed"]
    assert not lock.exists()


@contextlib.contextmanager
def orphan(variables: dict[str, str], *words: str) -> Iterator[int]:
    """A process whose starter has ended, so that process 1 is its parent."""
    shell = ["sh", "-c", '"$@" >/dev/null 2>&1 & echo $!', "sh", *words]
    environment = {**os.environ, **variables}
    done = subprocess.run(shell, env=environment, capture_output=True, text=True, check=True)
    process = int(done.stdout)
    try:
        parent = Path(f"/proc/{process}/stat").read_text().split()[3]
        if parent != "1":
            pytest.skip(f"orphans become children of process {parent} here")
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, 9)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def test_only_marked_processes_of_runs_that_are_over_are_leftovers(tmp_path: Path) -> None:
    start = tmp_path / "run" / "launch" / "20260101"
    start.mkdir(parents=True)
    no_utf8 = ["-X", os.fsdecode(b"caf\xe9")]
    sleep = [sys.executable, *no_utf8, "-c", "import time; time.sleep(60)", "launch/train.py"]
    mark = {FOLDER_VARIABLE: str(start)}

    def left() -> set[int]:
        return {number for number, _ in probe._processes()}

    with orphan(mark, *sleep) as rank, orphan({}, *sleep) as bystander:
        deadline = time.monotonic() + 10
        while rank not in left():  # until it has become the program
            assert time.monotonic() < deadline
        assert bystander not in left(), "a program of the same name, such as an editor"
        for lock in (tmp_path / "run" / ".lock", start / "launcher.lock"):
            with locked(lock):
                assert rank not in left(), f"{lock.name} is held: somebody is at work"
        told = probe.remove_leftovers()["removed"]
        assert any(line.startswith(f"process {rank} ") for line in told)
        assert "\n".join(told).encode(), "can be printed"
        assert not any(line.startswith(f"process {bystander} ") for line in told)
        os.kill(bystander, 0)


def test_devices_that_torch_cannot_use_are_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "dev").mkdir()
    assert unusable_devices(0, tmp_path) is None
    for name in ("kfd", "nvidia0", "nvidiactl"):
        (tmp_path / "dev" / name).touch()
    for node, units in enumerate((0, 304, 304)):
        folder = tmp_path / "sys/class/kfd/kfd/topology/nodes" / str(node)
        folder.mkdir(parents=True)
        (folder / "properties").write_text(f"cpu_cores_count 0\nsimd_count {units}\n")
    assert driver_devices(tmp_path) == {"NVIDIA": 1, "AMD": 2}
    told = unusable_devices(1, tmp_path)
    assert told is not None
    assert "1 NVIDIA and 2 AMD devices, and the installed torch can use 1" in told
    assert unusable_devices(3, tmp_path) is None
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert unusable_devices(0, tmp_path) is None
