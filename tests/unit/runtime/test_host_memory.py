"""Memory that a host has left, by the kernel's estimate and the limits of control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdrmix.runtime.host_memory import available_memory_gib, host_memory_gib

GIB = 2**30


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def test_the_kernels_estimate_counts(tmp_path: Path) -> None:
    write(tmp_path / "proc/meminfo", "MemTotal:  999999 kB\nMemAvailable:   524288 kB")
    assert available_memory_gib(tmp_path) == 0.5
    assert available_memory_gib(tmp_path / "nothing") == host_memory_gib()


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_group_counts_and_files_are_free(version: int, tmp_path: Path) -> None:
    write(tmp_path / "proc/meminfo", f"MemAvailable:   {2**30} kB")
    kind, top = ("", "sys/fs/cgroup")
    limit, used, files = "memory.max", "memory.current", "inactive_file"
    if version == 1:
        kind, top = "cpu,memory", "sys/fs/cgroup/cpu,memory"
        limit, used, files = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
    write(tmp_path / "proc/self/cgroup", f"3:{kind}:/outer/inner")
    inner, outer = (tmp_path / top / group for group in ("outer/inner", "outer"))
    write(inner / limit, "max")
    write(inner / used, GIB)
    assert available_memory_gib(tmp_path) == host_memory_gib()
    write(outer / limit, 3 * GIB // 4)
    write(outer / used, GIB // 2)
    assert available_memory_gib(tmp_path) == 0.25
    write(outer / "memory.stat", f"anon 5\n{files} {GIB // 4}")
    assert available_memory_gib(tmp_path) == 0.5
    write(inner / limit, GIB // 2)  # less than it uses
    assert available_memory_gib(tmp_path) == 0
