"""Devices that the drivers of this host show, whether or not torch can use them."""

from __future__ import annotations

import os
import re
from pathlib import Path

# Variables by which somebody asks for fewer devices, or for none.
_HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def driver_devices(root: Path = Path("/")) -> dict[str, int]:
    """Number of devices by maker; makers without any are left out.

    Args:
        root: of the file system whose device files are looked at.
    """
    nvidia = [path for path in root.glob("dev/nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    counts = {"NVIDIA": len(nvidia), "AMD": 0}
    if (root / "dev/kfd").exists():
        # processors are nodes of this list too, with no SIMD units
        for node in root.glob("sys/class/kfd/kfd/topology/nodes/*/properties"):
            text = node.read_text(encoding="utf-8", errors="replace")
            counts["AMD"] += re.search(r"^simd_count [1-9]", text, re.MULTILINE) is not None
    return {maker: count for maker, count in counts.items() if count}


def unusable_devices(usable: int, root: Path = Path("/")) -> str | None:
    """Message about devices that torch cannot use though nobody asked it not to, or None.

    Args:
        usable: number of devices that torch sees.
        root: as in `driver_devices`.
    """
    counts = driver_devices(root)
    is_asked = os.environ.get("DS_ACCELERATOR") == "cpu" or any(n in os.environ for n in _HIDING)
    if is_asked or usable >= sum(counts.values()):
        return None
    listed = " and ".join(f"{count} {maker}" for maker, count in counts.items())
    return (
        f"this host has {listed} devices, and the installed torch can use {usable}: what it cannot "
        "use stands still. Install the torch build for this maker and driver (CUDA or ROCm), look "
        "at the permissions of /dev/nvidia* or /dev/kfd, or set DS_ACCELERATOR=cpu to train on CPUs"
    )
