"""Devices of this machine as their drivers report them: what can be known before a start. No torch.

Ranks ask torch, and plan by its answer.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from cdrmix.cluster.probe import HIDING, driver_devices, rocm_devices

# Of a host with CPUs alone, DeepSpeed's launcher starts a rank for each of these.
_NUMA_NODES = Path("/sys/devices/system/node")
_MIB = 2**20


class Devices(NamedTuple):
    """Devices that ranks of this machine may use."""

    kind: Literal["cuda", "cpu"]
    number: int  # ranks that DeepSpeed's launcher starts by itself
    memory_gib: float | None  # of the smallest device, or of the host for CPUs; None: not known


def device_kind(variables: Mapping[str, str] | None = None) -> Literal["cuda", "cpu"]:
    """Kind of device that a rank will take here: "cpu" where there is no other, or all are hidden.

    Where torch cannot use the devices that a driver shows, the rank will take CPUs all the same.
    `variables` are those that the rank will have beside this process's.
    """
    environment = {**os.environ, **(variables or {})}
    hidden = [environment[name].strip() in ("", "-1") for name in HIDING if name in environment]
    is_asked = environment.get("DS_ACCELERATOR") == "cpu" or any(hidden)
    return "cpu" if is_asked or not driver_devices() else "cuda"


def devices_here(variables: Mapping[str, str] | None = None) -> Devices:
    """Kind, number and memory of the devices of this machine; `variables` as of `device_kind`."""
    environment = {**os.environ, **(variables or {})}
    if device_kind(variables) == "cpu":
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
        with_cores = [node for node in _NUMA_NODES.glob("node[0-9]*/cpulist") if _text(node)]
        if shutil.which("numactl") is None:  # which DeepSpeed asks for them
            with_cores = []
        number = int(environment.get("LOCAL_SIZE", "0")) or len(with_cores) or 1
        return Devices("cpu", number, memory)
    number = sum(driver_devices().values())
    for name in HIDING:
        if name in environment:
            number = min(number, len(environment[name].split(",")))
    return Devices("cuda", number, _smallest_gib())


def _smallest_gib() -> float | None:
    """Memory of the smallest device by its maker's program (GiB); None where it does not say."""
    if "NVIDIA" not in driver_devices():
        sizes = [device.memory_bytes for device in rocm_devices()]
        return min(filter(None, sizes)) / 2**30 if any(sizes) else None
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30)
        return min(int(line) for line in done.stdout.splitlines()) * _MIB / 2**30
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
