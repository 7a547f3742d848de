"""`cdrmix doctor` on this machine: what it looks at, and what it makes of it."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from cdrmix import cli
from cdrmix.cluster.doctor import examine
from cdrmix.cluster.hosts import Host
from cdrmix.cluster.probe import look
from tests.harness import RANK_ENVIRONMENT, ROOT

CHECKS = ["hosts", "python", "packages", "devices", "clock", "interface", "disk", "/dev/shm"]
CHECKS += ["shared folder", "ports", "leftovers", "all-reduce"]


def test_this_machine_is_examined_down_to_an_all_reduce(tmp_path: Path) -> None:
    flags = ("--nproc", "2", "--json", "--folder", str(tmp_path / "runs"))
    done = subprocess.run(
        [sys.executable, "-m", "cdrmix.cli", "doctor", *flags],
        cwd=ROOT,
        env={**os.environ, **RANK_ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
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
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_folder_that_cannot_be_made_fails_with_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", "--no-all-reduce", "--folder", str(tmp_path / "file" / "x")])
    assert ended.value.code == 2
    assert capsys.readouterr().out.startswith("FAIL  shared folder")


def test_a_host_without_an_address_fails(tmp_path: Path) -> None:
    hosts = [Host("no-such-host.invalid", 1)]
    findings = examine(hosts, folder=tmp_path, ranks_per_host=None, with_all_reduce=False)
    assert [finding.status for finding in findings] == ["FAIL"]
    assert "no-such-host.invalid" in findings[0].detail


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
