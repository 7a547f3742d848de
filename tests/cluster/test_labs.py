"""The labs themselves: at the same time, killed in the middle, and broken while they start."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.host_lab import HostLab, host_lab, missing
from tests.harness import ROOT

_HOLD_A_LAB = """
import sys
from pathlib import Path
from tests.cluster.host_lab import host_lab
with host_lab(Path(sys.argv[1]), "cdrmix-a") as lab:
    print(lab.command("cdrmix-a")[3], flush=True)
    sys.stdin.read()
"""


def seen_by_this_machine() -> set[str]:
    """Namespaces and settings of all labs."""
    folders = (Path("/run/netns"), Path("/etc/netns"))
    return {str(path) for folder in folders for path in folder.glob("cdrmix-lab.*")}


def hostname(lab: HostLab, *through: str) -> str:
    done = subprocess.run(
        [*lab.command("cdrmix-a"), *through, "hostname"],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_labs_at_the_same_time_do_not_meet_and_leave_nothing(tmp_path: Path) -> None:
    before = seen_by_this_machine()
    folders = [tmp_path / name for name in ("one", "other")]
    for folder in folders:
        folder.mkdir()
    with host_lab(folders[0], "cdrmix-a", "cdrmix-b") as one:
        with host_lab(folders[1], "cdrmix-a", "cdrmix-b") as other:
            other.end_host("cdrmix-b")
        assert hostname(one, "ssh", "cdrmix-b") == "cdrmix-b"
    assert not seen_by_this_machine() - before


def test_a_lab_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    reason = missing()
    if reason:
        pytest.skip(reason)
    folders = [tmp_path / name for name in ("killed", "next")]
    for folder in folders:
        folder.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD_A_LAB, folders[0]],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        namespace = Path("/run/netns") / holder.stdout.readline().strip()
        holder.send_signal(signal.SIGKILL)
    assert namespace.exists()
    with host_lab(folders[1], "cdrmix-a") as lab:
        assert not namespace.exists()
        assert hostname(lab, "ssh", "cdrmix-a") == "cdrmix-a"


def test_a_lab_that_does_not_start_leaves_nothing(tmp_path: Path) -> None:
    before = seen_by_this_machine()
    names = ("cdrmix-a", "no/name")
    with pytest.raises(AssertionError, match="ip netns add"), host_lab(tmp_path, *names):
        pass
    assert not seen_by_this_machine() - before
