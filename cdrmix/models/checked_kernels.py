"""Outcomes of checks of kernels: kept for later starts, and the same on all ranks of a run.

What a compiler makes of a kernel for a device is used only where its gradients are right there.
Finding that out takes seconds of compilation, so what was found is kept in the user's cache folder
under the kind of device, the versions of the packages and a digest of the kernel's source. Only
what may be used is kept: a check that failed is made again by the next start.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import torch

from cdrmix import runtime
from cdrmix.errors import StateError
from cdrmix.log import get_logger
from cdrmix.monitoring.sinks import write_json_atomic

log = get_logger(__name__)

T = TypeVar("T")

_FOLDER = "kernel_checks"
_PACKAGES = ("torch", "triton", "fla-core")


def key_of(
    kernel: str, sources: Iterable[Path], device: torch.device, case: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything that the outcome of a check depends on, as plain values.

    Args:
        kernel: name of what is checked.
        sources: files that hold the kernel, or call it, and its check.
        device: device that it was compiled for.
        case: properties of the inputs that select a compiled kernel.
    """
    kind = [device.type]
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        kind += [torch.cuda.get_device_name(device), ".".join(map(str, capability))]
    return {
        "kernel": kernel,
        "device": kind,
        "packages": {name: _version(name) for name in _PACKAGES},
        "torch": torch.__version__,  # with its build: of CUDA, ROCm or CPUs
        "source": hashlib.sha256(b"".join(each.read_bytes() for each in sources)).hexdigest(),
        "case": {name: str(value) for name, value in case.items()},
    }


def settle(key: dict[str, Any], find: Callable[[], dict[str, Any] | None]) -> dict[str, Any] | None:
    """Returns the outcome of a check, which `find` makes where no earlier start has kept it.

    All ranks of a run get that of the rank that is first to have one; None, where `find` found
    nothing that may be used here, is of this rank alone. An outcome is plain values.
    """
    outcome = _read(key)
    if outcome is None:
        outcome = find()
        if outcome is None:
            return None
        _write(key, outcome)
    # without a collective: a stage of a pipeline may have no such kernel
    agreed: dict[str, Any] = json.loads(runtime.first_answer(_digest(key), json.dumps(outcome)))
    return agreed


def in_clean_thread(device: torch.device, action: Callable[[], T]) -> T:
    """Runs an action in a thread of its own, on the device.

    There gradients are on, and no autocast and no hooks on saved tensors of the caller, such as
    those of activation checkpointing, are in force.
    """

    def run() -> T:
        if device.type == "cuda":  # a new thread begins at device 0
            with torch.cuda.device(device):
                return action()
        return action()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _digest(key: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]


def _path(key: dict[str, Any]) -> Path:
    return runtime.cache_dir() / _FOLDER / f"{key['kernel']}-{_digest(key)}.json"


def _read(key: dict[str, Any]) -> dict[str, Any] | None:
    try:
        entry = json.loads(_path(key).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # not there, or cut short: made again
        return None
    if not isinstance(entry, dict) or entry.get("key") != key:
        return None
    outcome = entry.get("outcome")
    return outcome if isinstance(outcome, dict) else None


def _write(key: dict[str, Any], outcome: dict[str, Any]) -> None:
    path = _path(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json_atomic(path, {"key": key, "outcome": outcome})
    except (OSError, StateError) as error:
        log.warning("The check of %s is not kept for later starts: %s", key["kernel"], error)
