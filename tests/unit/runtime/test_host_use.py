"""Use of a host's links, by the kernel's account of them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from cdrmix.runtime.host_use import IdleCores, NetworkUse

TITLES = "Inter-|   Receive\n face |bytes    packets\n"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_fullest_link_with_a_speed_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    counts = TITLES + "    lo: {} 1\n  eth0:{} 1\n  eth1: {} 1\n veth: {} 1\n"
    write(tmp_path / "proc/net/dev", counts.format(0, 5, 0, 0))
    for name, speed in (("eth0", "8"), ("eth1", "80"), ("veth", "-1")):  # megabits a second
        write(tmp_path / "sys/class/net" / name / "speed", speed + "\n")
    use = NetworkUse(tmp_path)
    clock[0] += 2
    write(tmp_path / "proc/net/dev", counts.format(10**9, 1_000_005, 4_000_000, 10**9))
    assert use.read() == pytest.approx(0.5)  # 1 MB in 2 s of 1 MB/s; eth1 is at 0.2
    clock[0] += 1
    assert use.read() == 0.0, "since the last reading"
    assert use.read() == 0.0, "in no time"


def test_a_host_without_these_accounts_tells_nothing(tmp_path: Path) -> None:
    assert NetworkUse(tmp_path).read() == 0.0
    assert IdleCores(tmp_path).read() == 0.0


def test_this_host_tells_something() -> None:
    assert 0.0 <= NetworkUse().read() <= 10.0
    assert IdleCores().read() >= 0.0
