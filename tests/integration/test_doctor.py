"""`cdrmix doctor` on this machine: what it looks at, and what it makes of it."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from cdrmix.cluster.doctor import as_table, examine, is_ready
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
    assert "100 MB over 2 ranks" in found["all-reduce"]["detail"]
    assert "deepspeed 0." in found["packages"]["detail"]
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_folder_that_cannot_be_made_fails(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    findings = examine([], folder=tmp_path / "file" / "x", ranks_per_host=1, with_all_reduce=False)
    assert not is_ready(findings)
    assert as_table(findings).startswith("FAIL  shared folder")


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
