"""Device of one rank, with its memory, threads and seeds, and its description for records. Random
states of this process are plain JSON: no pickle, so that reading one runs no code."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend

from cdrmix import __version__
from cdrmix.errors import ConfigError
from cdrmix.runtime.environment import allocator_settings, device_index, local_world_size
from cdrmix.runtime.host_memory import host_memory_gib

_PACKAGES = ("torch", "deepspeed", "transformers", "tokenizers", "numpy", "pydantic")


def use_cpu() -> bool:
    """True if this run computes on CPUs: no CUDA device, or DS_ACCELERATOR=cpu."""
    return os.environ.get("DS_ACCELERATOR") == "cpu" or not torch.cuda.is_available()


def accelerator() -> Literal["cuda", "cpu"]:
    """Kind of device that this rank computes on; "cuda" stands for ROCm too, as in torch.

    Raises ConfigError if another kind is asked for by DS_ACCELERATOR, or is here and is not
    declined by it.
    """
    asked = os.environ.get("DS_ACCELERATOR")
    if asked in ("cpu", "cuda"):
        return "cpu" if use_cpu() else "cuda"
    other = asked or (None if torch.cuda.is_available() else _other_accelerator())
    if other is None:
        return "cpu" if use_cpu() else "cuda"
    what = f"DS_ACCELERATOR = {asked}" if asked else f"this host has {_name_of(other)}"
    why = _REFUSED.get(other, "nothing here was run on it")
    raise ConfigError(
        f"{what}: CDRmix trains on CUDA, ROCm and CPUs, and refuses {_name_of(other)}: {why}. "
        "Set DS_ACCELERATOR=cpu to train on CPUs"
    )


# Of DeepSpeed's accelerators (0.19.8, accelerator/real_accelerator.py).
_REFUSED = {
    "xpu": "neither a gradient of its kernels nor its collectives (oneCCL) were checked",
    "hpu": "it compiles graphs of fixed shapes, and experts here get as many tokens as choose them",
    "npu": "neither a gradient of its kernels nor its collectives (HCCL) were checked",
    "mps": "torch has no collectives on it, and no float64 for the checks of kernels",
}
_NAMES = {
    "xpu": "an Intel GPU (xpu)",
    "hpu": "an Intel Gaudi (hpu)",
    "npu": "a Huawei Ascend (npu)",
    "mps": "an Apple GPU (mps)",
}
# Extensions of torch that bring a kind of device, as DeepSpeed looks for them.
_EXTENSIONS = {"npu": "torch_npu", "hpu": "habana_frameworks"}


def _name_of(kind: str) -> str:
    return _NAMES.get(kind, f"the accelerator {kind}")


def _other_accelerator() -> str | None:
    """Kind that torch, or an extension of it, has here beside CUDA and ROCm; None: no other."""
    if torch.xpu.is_available():
        return "xpu"
    for kind, package in _EXTENSIONS.items():
        if find_spec(package) is not None:
            return kind
    return "mps" if torch.backends.mps.is_available() else None


def check_deepspeed_agrees(deepspeed: Any) -> None:
    """Raises ConfigError if DeepSpeed has chosen another kind of device than this rank."""
    chosen = deepspeed.accelerator.get_accelerator()._name
    if chosen != accelerator():
        raise ConfigError(
            f"DeepSpeed has chosen the accelerator {chosen}, and torch here has {accelerator()}. "
            f"Set DS_ACCELERATOR={accelerator()}"
        )


def device() -> torch.device:
    """Device of this rank."""
    return torch.device("cpu") if use_cpu() else torch.device("cuda", device_index())


def device_name() -> str | None:
    """Name of this rank's device by torch; None on CPUs."""
    return None if use_cpu() else torch.cuda.get_device_name(device())


def device_memory_gib() -> float:
    """Memory of this rank's device as torch reports it; on CPUs its share of the host's (GiB)."""
    if use_cpu():
        return host_memory_gib() / local_world_size()
    return torch.cuda.get_device_properties(device()).total_memory / 2**30


def set_threads() -> None:
    """Gives each CPU rank of this host its share of the cores."""
    # OMP_NUM_THREADS of the user's shell stands for a single rank; several have to share the cores
    if "OMP_NUM_THREADS" not in os.environ or local_world_size() > 1:
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, cores // local_world_size()))


def seed_everything(seed: int, *, deterministic: bool) -> None:
    """Seeds python, numpy and torch, alike on all ranks; asks for kernels that repeat bit for bit,
    unless `deterministic` leaves torch free to choose faster ones on GPUs."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # numpy takes 32 bits
    torch.manual_seed(seed)
    if deterministic:
        # cuBLAS repeats its sums only with a fixed workspace, read when it is first used
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        _use_deterministic_algorithms()
        # a debugging aid that costs 3 % of a step
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = False
    # no public function sets the order for good: torch.nn.attention.sdpa_kernel sets it for a block
    order = attention_order(deterministic=torch.are_deterministic_algorithms_enabled())
    torch._C._set_sdp_priority_order(order)


def attention_order(*, deterministic: bool) -> list[int]:
    """Kernels of attention in the order in which they are tried; torch takes the first that can.

    cuDNN's is the fastest on Hopper, and its backward pass does not repeat bit for bit.
    """
    order = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    order.insert(len(order) if deterministic else 0, SDPBackend.CUDNN_ATTENTION)
    return [each.value for each in (*order, SDPBackend.OVERRIDEABLE)]


def _use_deterministic_algorithms() -> None:
    """Does what `torch.use_deterministic_algorithms(True, warn_only=True)` does, which imports the
    compiler to tell it too: .5 s of CPU time, after 2 s for what it is built on."""
    torch.set_deterministic_debug_mode("warn")
    # the compiler reads this when it is imported
    os.environ["TORCHINDUCTOR_DETERMINISTIC"] = "1"
    if (settings := sys.modules.get("torch._inductor.config")) is not None:
        settings.deterministic = True  # type: ignore[attr-defined]


def keep_freed_memory() -> None:
    """Makes glibc keep the memory that training frees, because each step asks for as much again. By
    default it returns large blocks to the kernel at once and then waits for every page to be zeroed
    anew: 40 steps of the tiny model on two cores, one run each, took 16.9 s of system time, and
    take 1.5 s like this. Does nothing with another libc."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return
    trim_threshold = -1  # numbers of malloc.h
    top_pad = -2
    mmap_threshold = -3
    arena_max = -8
    if not libc.mallopt(mmap_threshold, 2**30):
        libc.mallopt(mmap_threshold, 2**25)  # the most that older versions take
    libc.mallopt(trim_threshold, 2**31 - 1)
    libc.mallopt(top_pad, 2**26)
    libc.mallopt(arena_max, 1)  # one pool: blocks freed by one thread serve the others


def matmul_flops_per_second(precision: Literal["bf16", "fp32"]) -> float:
    """Speed of a square matrix product of 256 on the CPU: the best of a tenth of a second."""
    size = 256
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    left, right = torch.ones(2, size, size, dtype=dtype).unbind(0)
    seconds: list[float] = []
    end = time.perf_counter() + 0.1
    while len(seconds) < 2 or time.perf_counter() < end:  # the first one sets up
        began = time.perf_counter()
        torch.mm(left, right)
        seconds.append(time.perf_counter() - began)
    return 2 * size**3 / min(seconds)


def release_pinned_memory() -> None:
    """Gives the host pinned memory back that torch keeps for later."""
    torch.accelerator.empty_host_cache()


def release_memory() -> None:
    """Frees unreachable reference cycles and cached memory of this rank, of host and device."""
    # An engine and its hooks refer to each other: its weights and moments would stay beside those
    # of the next one until Python's collector happens to run.
    gc.collect()
    if not use_cpu():
        torch.cuda.empty_cache()
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc: `keep_freed_memory` holds what was freed
        libc.malloc_trim(0)


@contextlib.contextmanager
def frozen_objects() -> Iterator[None]:
    """Inside it Python's garbage collector passes over all objects that there are now.

    They are hundreds of thousands, of modules, model and optimizer, and none is garbage. A full
    collection visits each: a rank stands still for .15 s and more, at another step than the others,
    which wait for it.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def resident_bytes() -> int:
    """Main memory that this process holds (bytes)."""
    pages = Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def describe_environment() -> dict[str, Any]:
    """Versions and devices of this run, for environment.json. Never variables or host secrets."""
    facts: dict[str, Any] = {
        "cdrmix": __version__,
        "commit": package_commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: version(name) for name in _PACKAGES},
        "world_size": dist.get_world_size() if dist.is_initialized() else 1,
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
            "allocator": allocator_settings(),
            **({"rocm": torch.version.hip} if torch.version.hip else {}),
        }
    return facts


@functools.cache
def package_commit() -> str | None:
    """Git commit of this package's checkout, with `-dirty` if files were changed, as they are when
    a process first asks for it; None without."""
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


def random_state() -> dict[str, Any]:
    """States of the generators of python, numpy, torch and, if it is in use, CUDA, as JSON."""
    version, words, gauss = random.getstate()
    # The global generator of numpy's old interface is the one that libraries draw from.
    generator: dict[str, Any] = np.random.get_state(legacy=False)
    state: dict[str, Any] = {
        "python": {"version": version, "words": list(words), "gauss": gauss},
        "numpy": {
            "words": generator["state"]["key"].tolist(),
            "position": int(generator["state"]["pos"]),
            "has_gauss": int(generator["has_gauss"]),
            "gauss": float(generator["gauss"]),
        },
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state().numpy().tobytes().hex()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Restores a result of `random_state`; its `cuda` only where CUDA is available."""
    python = state["python"]
    numpy = state["numpy"]
    random.setstate((python["version"], tuple(python["words"]), python["gauss"]))
    words = np.array(numpy["words"], dtype=np.uint32)
    np.random.set_state(("MT19937", words, numpy["position"], numpy["has_gauss"], numpy["gauss"]))
    setters = {"torch": torch.set_rng_state}
    if "cuda" in state and torch.cuda.is_available():
        setters["cuda"] = torch.cuda.set_rng_state
    for name, set_state in setters.items():
        set_state(torch.frombuffer(bytearray.fromhex(state[name]), dtype=torch.uint8))
