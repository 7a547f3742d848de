"""Partitions and devices, as sinfo tells them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cdrmix.cluster.slurm_site import Nodes, find_nodes, preset_of
from cdrmix.errors import ConfigError

SINFO = """#!/bin/bash
cat <<'END'
cpu*|1-00:00:00|64|256000+|(null)|amd
gpu|7-00:00:00|112|2048000|gpu:h100:8|ib,h100
gpu|7-00:00:00|96|1900000|gpu:h100:8|ib,h100
mixed|infinite|64|1|gpu:a100:4|(null)
mixed|infinite|64|1|gpu:h200:8|(null)
all|infinite|16|64000|(null)|amd
all|infinite|96|1024000|craynetwork:4,gpu:h100:8|h100
all|infinite|64|512000|gpu:h100:4|h100
END
"""


@pytest.fixture
def sinfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "sinfo"
    program.write_text(SINFO)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return program


def test_nodes_of_a_partition_are_told_by_their_smallest_and_largest_figures(sinfo: Path) -> None:
    cpu = find_nodes(None, for_gpus=True)
    assert cpu == Nodes("cpu", 86_400, 64, 250.0, ("(null)", "amd"), 64, 250.0)
    gpu = find_nodes("gpu", for_gpus=True)
    names = ("gpu:h100:8", "ib,h100")
    assert gpu == Nodes("gpu", 604_800, 96, 1_900_000 / 1024, names, 112, 2000.0)
    mixed = find_nodes("gpu,mixed", for_gpus=True)
    assert mixed is not None
    assert mixed.longest_seconds is None
    assert mixed.cores == 64
    with pytest.raises(ConfigError, match="no partition gpus here. There are cpu, gpu, mixed"):
        find_nodes("gpus", for_gpus=True)


def test_nodes_without_gpus_tell_nothing_of_a_job_on_gpus(sinfo: Path) -> None:
    found = find_nodes("all", for_gpus=True)
    assert found is not None
    assert (found.cores, found.memory_gib, found.most_cores) == (64, 500.0, 96)
    on_cpus = find_nodes("all", for_gpus=False)
    assert on_cpus is not None
    assert (on_cpus.cores, on_cpus.most_cores, on_cpus.most_memory_gib) == (16, 96, 1000.0)


def test_nothing_is_told_without_slurm(sinfo: Path) -> None:
    sinfo.write_text("#!/bin/bash\necho error >&2\nexit 1\n")
    assert find_nodes("gpu", for_gpus=True) is None


@pytest.mark.parametrize(
    ("names", "preset"),
    [
        (["gpu:h100:8", "ib,h100"], "h100-80"),
        (["gpu:H100_80GB:8(S:0-1)"], "h100-80"),
        (["gpu:nvidia_h200:8"], "h200-141"),
        (["gpu:a100:4,gpu:mi300x:8"], None),
        (["gpu:a100_40gb:8"], None),
        (["gpu:a100_1g.10gb:7"], None),
        (["gpu:nvidia_geforce_rtx_4090:2"], "rtx4090-24"),
        (["h100|h200"], None),
        (["gpu:8", "(null)"], None),
        (["gpu:tesla:4"], None),
        (["gpu:a100_3g.20gb:4"], None),
        (["gpu:gh200:1"], None),
        (["gpu:rtx_a1000:2"], None),
    ],
)
def test_devices_are_known_by_their_names(names: list[str], preset: str | None) -> None:
    found = preset_of(names)
    assert (found and found[0]) == preset
