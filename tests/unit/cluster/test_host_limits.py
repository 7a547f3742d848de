"""Limits of one host, read from small roots and from this process."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cdrmix.cluster.host_limits import (
    ephemeral_ports,
    limits,
    own_version,
    tasks_left,
    temporary_folder,
    unknown_interfaces,
)
from tests.harness import ROOT


def put(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.skipif(os.getuid() != 0, reason="the limit of the user's processes counts too")
def test_the_tightest_group_of_processes_limits_what_may_start(tmp_path: Path) -> None:
    assert tasks_left(tmp_path) is None
    put(
        tmp_path,
        {
            "proc/self/cgroup": "0::/user/session\n",
            "sys/fs/cgroup/user/session/pids.max": "max\n",
            "sys/fs/cgroup/user/session/pids.current": "3\n",
            "sys/fs/cgroup/user/pids.max": "100\n",
            "sys/fs/cgroup/user/pids.current": "60\n",
        },
    )
    assert tasks_left(tmp_path) == 40
    put(
        tmp_path,
        {
            "proc/self/cgroup": "8:pids:/box\n4:memory:/box\n",
            "sys/fs/cgroup/pids/box/pids.max": "64\n",
            "sys/fs/cgroup/pids/box/pids.current": "60\n",
        },
    )
    assert tasks_left(tmp_path) == 4


def test_the_limits_are_those_of_the_process(tmp_path: Path) -> None:
    put(tmp_path, {"sys/class/infiniband/mlx5_0/x": ""})
    put(tmp_path, {"proc/sys/net/ipv4/ip_local_port_range": "2000\t3000\n"})
    told = limits(tmp_path, tmp_path)
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert told["open_files"] == (None if soft == resource.RLIM_INFINITY else soft)
    assert told["infiniband"] == ["mlx5_0"]
    assert told["ports"] == (2000, 3000)
    assert limits(tmp_path / "nowhere", tmp_path)["free_inodes"] is None
    assert ephemeral_ports(tmp_path / "nowhere") == (32768, 60999)


INTERFACES = ("lo", "eth0", "eth1", "docker0")


@pytest.mark.parametrize(
    ("variable", "value", "is_known"),
    [
        ("GLOO_SOCKET_IFNAME", "eth0", True),
        ("GLOO_SOCKET_IFNAME", "eth0,eth1", True),
        ("GLOO_SOCKET_IFNAME", "eth", False),
        ("GLOO_SOCKET_IFNAME", "eth0,ib0", False),
        ("NCCL_SOCKET_IFNAME", "eth", True),
        ("NCCL_SOCKET_IFNAME", "ib0,eth1", True),
        ("NCCL_SOCKET_IFNAME", "ib", False),
        ("NCCL_SOCKET_IFNAME", "=eth", False),
        ("NCCL_SOCKET_IFNAME", "=eth1:4000", True),
        ("NCCL_SOCKET_IFNAME", "^docker", True),
        ("NCCL_SOCKET_IFNAME", "^docker,eth", False),
        ("NCCL_SOCKET_IFNAME", "^=eth,docker0", True),
    ],
)
def test_an_interface_that_is_not_there_is_told_of(
    variable: str, value: str, is_known: bool
) -> None:
    wrong = unknown_interfaces({variable: value}, INTERFACES)
    assert wrong == ([] if is_known else [f"{variable}={value}"])


def test_a_temporary_folder_that_cannot_be_written_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert temporary_folder() == {"folder": str(tmp_path), "error": None}
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("TMPDIR", str(tmp_path / "nowhere"))
    assert temporary_folder()["error"] == "No such file or directory"


def test_the_version_tells_of_sources_that_differ(tmp_path: Path) -> None:
    (tmp_path / "cdrmix").mkdir()
    (tmp_path / "launch").mkdir()
    shutil.copy(ROOT / "launch" / "rank.py", tmp_path / "launch")
    first, text = own_version(tmp_path)
    assert str(tmp_path) in text
    assert own_version(tmp_path)[0] == first
    (tmp_path / "launch" / "rank.py").write_text("")
    assert own_version(tmp_path)[0] != first


def test_a_repository_that_git_does_not_know_has_no_commit(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    assert "commit" not in own_version(tmp_path)[1]


def test_it_is_read_without_torch() -> None:
    program = "import sys, cdrmix.cluster.probe; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0
