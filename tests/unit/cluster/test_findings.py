"""Judgement of the hosts' answers: a host that is well, changed in one point at a time."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest

from cdrmix.cluster.findings import Finding, judge
from cdrmix.cluster.probe import look

Told = dict[str, Any]


@pytest.fixture(scope="module")
def well(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """Answer of this machine, with plenty of all that can be short."""
    began = time.time()
    told = look(str(tmp_path_factory.mktemp("runs")), "127.0.0.1")
    plenty = {"disk_free_bytes": 2**40, "shared_memory_free_bytes": 2**35, "unusable": None}
    nothing: Told = {"processes": [], "files": [], "unknown_interfaces": []}
    told |= {**plenty, **nothing, "began": began, "seconds": time.time() - began}
    told |= {"devices": ["NVIDIA H100, 81559 MiB"] * 8, "is_for_cpus": False, "interface": "eth0"}
    told |= {"compiler": "/usr/bin/c++", "has_python_header": True}
    told["temporary"] = {"folder": "/tmp", "error": None}
    told["limits"] |= {"open_files": 65536, "most_open_files": 65536, "tasks_left": None}
    told["limits"] |= {"free_inodes": 10**6, "infiniband": [], "locked_bytes": 65536}
    return told


def found(answers: dict[str, Told], *, over_ssh: bool = True) -> dict[str, Finding]:
    ranks = dict.fromkeys(answers, 8)
    return {finding.check: finding for finding in judge(answers, ranks, over_ssh=over_ssh)}


def test_hosts_that_are_well_have_no_remedy(well: Told) -> None:
    findings = found({"a": well, "b": copy.deepcopy(well)})
    assert {finding.status for finding in findings.values()} == {"ok"}
    assert {finding.remedy for finding in findings.values()} == {None}
    assert "locked memory" not in findings, "no host has InfiniBand"


def limit(**values: object) -> Callable[[Told], None]:
    return lambda told: told["limits"].update(values)


def value(**values: object) -> Callable[[Told], None]:
    return lambda told: told.update(values)


@pytest.mark.parametrize(
    ("check", "change", "status", "detail", "remedy"),
    [
        ("cdrmix", value(cdrmix=["0", "0.0.9"]), "FAIL", "b: 0.0.9", "rsync"),
        ("python", value(python=["3.9", "3.9 at /x"]), "FAIL", "b: 3.9 at /x", "same Python"),
        ("devices", value(devices=["H100"] * 4), "FAIL", "b: 4 devices for 8 ranks", "slots"),
        ("devices", value(devices=["H200"] * 8), "warn", "sets the pace", "slower"),
        ("devices", value(unusable="cannot use"), "FAIL", "b: cannot use", "nvidia-smi"),
        ("clock", value(time=0.0), "warn", "b is", "chrony"),
        ("interface", value(interface=None), "FAIL", "from b", "ip route"),
        (
            "interface",
            value(unknown_interfaces=["GLOO_SOCKET_IFNAME=ib7"]),
            *("FAIL", "b: GLOO_SOCKET_IFNAME=ib7", "unset"),
        ),
        ("disk", value(disk_free_bytes=2**20), "FAIL", "b: 0.0 GiB", "--folder"),
        ("disk", value(disk_free_bytes=None), "FAIL", "b: the folder", "mount"),
        ("disk", value(disk_free_bytes=2**31), "warn", "b: 2.0 GiB", "20 GiB"),
        ("disk", limit(free_inodes=10), "FAIL", "10 inodes", "delete"),
        ("/dev/shm", value(shared_memory_free_bytes=2**26), "FAIL", "8 ranks take", "--shm-size"),
        ("/dev/shm", value(shared_memory_free_bytes=2**29), "warn", "0.50 GiB", "--shm-size"),
        ("/dev/shm", value(shared_memory_free_bytes=None), "FAIL", "not there", "mount"),
        (
            "temporary",
            value(temporary={"folder": "/x", "error": "Read-only file system"}),
            *("FAIL", "b: /x: Read-only", "TMPDIR"),
        ),
        ("open files", limit(open_files=512), "FAIL", "b: at most 512", "limits.d"),
        ("open files", limit(open_files=2048), "warn", "b: at most 2,048", "limits.d"),
        ("processes", limit(tasks_left=399), "FAIL", "b: 399 more", "--pids-limit"),
        ("processes", limit(tasks_left=1000), "warn", "8 ranks may take 1,600", "--pids-limit"),
        ("locked memory", limit(infiniband=["mlx5_0"]), "warn", "mlx5_0", "memlock unlimited"),
        ("compiler", value(compiler=None), "warn", "b: no C++", "apt-get install g++"),
        ("compiler", value(has_python_header=False), "warn", "b: no Python.h", "python3-dev"),
        ("leftovers", value(files=["/dev/shm/torch_1"]), "warn", "b: /dev", "--remove-leftovers"),
    ],
)
def test_a_host_that_is_not_well_is_named_with_a_remedy(
    well: Told, check: str, change: Callable[[Told], None], status: str, detail: str, remedy: str
) -> None:
    other = copy.deepcopy(well)
    change(other)
    finding = found({"a": well, "b": other})[check]
    assert finding.status == status
    assert detail in finding.detail
    assert finding.remedy is not None
    assert remedy in finding.remedy


def test_only_packages_that_differ_are_told_of(well: Told) -> None:
    other = copy.deepcopy(well)
    other["packages"]["numpy"] = "1.0"
    finding = found({"a": well, "b": other})["packages"]
    assert finding.status == "FAIL"
    assert finding.detail == f"numpy (a: {well['packages']['numpy']}, b: 1.0)"
    other["packages"]["torch"] = None
    assert found({"b": other})["packages"].detail == "torch (missing)"


def test_hosts_with_the_same_fault_share_a_line(well: Told) -> None:
    other = copy.deepcopy(well)
    other["limits"]["open_files"] = 512
    finding = found({"a": well, "b": other, "c": other})["open files"]
    assert finding.detail.startswith("b, c: at most 512")
    assert finding.remedy is not None
    assert finding.remedy.count("limits.d") == 1


def test_the_worst_host_decides(well: Told) -> None:
    warned, failing = copy.deepcopy(well), copy.deepcopy(well)
    warned["limits"]["open_files"] = 2048
    failing["limits"]["open_files"] = 512
    finding = found({"a": warned, "b": failing})["open files"]
    assert finding.status == "FAIL"
    assert finding.detail.startswith("b: at most 512"), "the warning waits"


def test_a_limit_of_this_shell_is_raised_in_this_shell(well: Told) -> None:
    other = copy.deepcopy(well)
    other["limits"]["open_files"] = 512
    finding = found({"localhost": other}, over_ssh=False)["open files"]
    assert finding.remedy == "ulimit -n 65536 in this shell"


def test_ranks_on_cpus_need_little_shared_memory(well: Told) -> None:
    other = {**well, "is_for_cpus": True, "shared_memory_free_bytes": 2**26}
    assert found({"a": other})["/dev/shm"].status == "warn"


def test_no_device_is_no_warning_where_cpus_are_meant(well: Told) -> None:
    other = {**well, "devices": [], "is_for_cpus": False}
    assert found({"a": other})["devices"].status == "warn"
    assert found({"a": {**other, "is_for_cpus": True}})["devices"].status == "ok"
