"""Versions, commit and devices of a run, for its records."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from cdrmix import __version__
from cdrmix.runtime.collectives import world_size
from cdrmix.runtime.device import device, use_cpu

_PACKAGES = ("torch", "deepspeed", "transformers", "tokenizers", "numpy", "pydantic")


def describe_environment() -> dict[str, Any]:
    """Versions and devices of this run, for environment.json. Never variables or host secrets."""
    facts: dict[str, Any] = {
        "cdrmix": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: version(name) for name in _PACKAGES},
        "world_size": world_size(),
        "backend": "gloo" if use_cpu() else "nccl",
    }
    if use_cpu():
        facts["device"] = {"kind": "cpu", "cores": len(os.sched_getaffinity(0))}
        facts["threads_per_rank"] = torch.get_num_threads()
    else:
        properties = torch.cuda.get_device_properties(device())
        facts["device"] = {
            "kind": "cuda",
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
        }
    return facts


def _commit() -> str | None:
    """Git commit of this package's checkout, with `-dirty` if files were changed; None without."""
    root = Path(__file__).resolve().parents[2]
    # an installed package may lie inside the repository of something else
    if not (root / ".git").exists():
        return None
    git = ["git", "-C", str(root)]
    try:
        commit, changes = (
            subprocess.run([*git, *words], capture_output=True, text=True, timeout=10, check=True)
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "-uno"])
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return commit.stdout.strip() + "-dirty" * bool(changes.stdout.strip())
