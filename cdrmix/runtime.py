"""Process group, device, seeds and environment of one rank.

The only reader of `os.environ` besides launch/, and the place where DeepSpeed is told how to
communicate. Every function here also works in a plain single process, where the collectives are
the identity.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import platform
import random
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed

from cdrmix import __version__
from cdrmix.errors import ConfigError, InfrastructureError, TrainingError
from cdrmix.log import get_logger
from cdrmix.network import (
    address_of_this_host,
    first_host,
    free_port,
    interface_towards,
    port_of_step,
)

T = TypeVar("T")
logger = get_logger(__name__)

_SECONDS_TO_TEAR_DOWN = 60.0
# What launchers call the four numbers that a rank needs: (rank, world, local rank, local world).
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),  # torchrun
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE"),  # deepspeed
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
)


@dataclass
class _ProcessGroups:
    """Settings of this run's process groups, for those that are made later."""

    timeout: timedelta | None = None


_groups = _ProcessGroups()


def map_environment() -> None:
    """Fill RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT from what the launcher set.

    torchrun and deepspeed set them; mpirun and srun set names of their own. Where these give no
    address, ranks of mpirun agree on one by MPI, those of srun take the first host of their step
    and a port by its number. A process that no launcher started becomes rank 0 of 1 on a port of
    its own.

    Raises:
        ConfigError: if several ranks were started without a way to find an address to meet at.
    """
    env = os.environ
    for names in _LAUNCHERS:
        if names[0] not in env or names[1] not in env:
            continue
        if names[0].startswith("SLURM") and "SLURM_STEP_ID" not in env:
            continue  # inside a batch script but not started by srun: one plain process
        targets = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        for target, name in zip(targets, names, strict=True):
            if name in env:
                # SLURM counts tasks by node, 4(x2),3: the first count stands for all
                env.setdefault(target, re.split("[(,]", env[name])[0])
    env.setdefault("RANK", "0")
    env.setdefault("WORLD_SIZE", "1")
    env.setdefault("LOCAL_RANK", "0")
    env.setdefault("LOCAL_WORLD_SIZE", "1")
    if env["WORLD_SIZE"] == "1":
        env.setdefault("MASTER_ADDR", "127.0.0.1")
        env.setdefault("MASTER_PORT", "0")
    elif "MASTER_ADDR" in env and "MASTER_PORT" in env:
        return
    elif "OMPI_COMM_WORLD_RANK" in env or "MPI_LOCALRANKID" in env:
        _meet_by_mpi()
    elif "SLURM_STEP_NODELIST" in env:
        _meet_by_slurm()
    else:
        raise ConfigError(
            f"{env['WORLD_SIZE']} ranks were started without MASTER_ADDR and MASTER_PORT: export "
            "both before mpirun or srun, or start with the deepspeed launcher"
        )


def _meet_by_mpi() -> None:
    """Rank 0's address and a port that is free there, told to all ranks of an mpirun."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    hosts = world.allgather(platform.node())
    meeting = None
    if world.Get_rank() == 0:
        address = "127.0.0.1" if len({*hosts}) == 1 else address_of_this_host()
        meeting = (address, str(free_port()))
    address, port = world.bcast(meeting)
    os.environ.setdefault("MASTER_ADDR", address)
    os.environ.setdefault("MASTER_PORT", port)


def _meet_by_slurm() -> None:
    """First host of the step, and a port that another step there is unlikely to take."""
    env = os.environ
    step = int(env.get("SLURM_STEP_ID", "0"))
    restart = int(env.get("SLURM_RESTART_COUNT", "0"))
    port = port_of_step(int(env.get("SLURM_JOB_ID", "0")), step=step, restart=restart)
    env.setdefault("MASTER_ADDR", first_host(env["SLURM_STEP_NODELIST"]))
    env.setdefault("MASTER_PORT", str(port))


def _choose_interface() -> None:
    """Let gloo and NCCL talk over the interface that leads to rank 0's host, unless told.

    Left alone, gloo takes the one that the host's name stands for, which is loopback on Debian, and
    NCCL the first by name.
    """
    interface = interface_towards(os.environ["MASTER_ADDR"])
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # exactly this one


def environment_rank() -> int:
    """Global rank from the environment, before any process group exists."""
    return int(os.environ.get("RANK", "0"))


def environment_world_size() -> int:
    """World size from the environment, before any process group exists."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """Rank of this process on its host."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_world_size() -> int:
    """Ranks on this host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def use_cpus_only() -> None:
    """Have those that this process starts compute on CPUs, one thread each, whatever the machine
    has: threads that wait for each other on busy cores are slower than one."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def take_place(rank: int, world_size: int, port: int) -> None:
    """Become a rank of a world of processes on this machine, as a launcher would say it."""
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in place.items()})


def master_address() -> str:
    """Address of rank 0's host, as all hosts know it."""
    return os.environ["MASTER_ADDR"]


def launch_folder() -> Path | None:
    """Folder in which `cdrmix launch` waits for the outcome of this start; None without it."""
    folder = os.environ.get("CDRMIX_LAUNCH_FOLDER")
    return Path(folder) if folder else None


def have_met() -> bool:
    """Whether the ranks have made their process group."""
    return torch.distributed.is_initialized()


def speaks_for_errors() -> bool:
    """Whether this rank tells a user what went wrong: one voice per run once the ranks have met and
    agree on errors, one per host before that, when hosts can differ."""
    return rank() == 0 if have_met() else local_rank() == 0


def cache_dir() -> Path:
    """Folder for what can be rebuilt, such as compiled kernels; not created here."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "cdrmix"


def use_cpu() -> bool:
    """Whether this run computes on CPUs: no CUDA device, or DS_ACCELERATOR=cpu."""
    return os.environ.get("DS_ACCELERATOR") == "cpu" or not torch.cuda.is_available()


def device() -> torch.device:
    """Device of this rank."""
    return torch.device("cpu") if use_cpu() else torch.device("cuda", local_rank())


def device_memory_gib() -> float:
    """Memory of this rank's device as torch reports it; on CPUs its share of the host's (GiB)."""
    if use_cpu():
        return host_memory_gib() / local_world_size()
    return torch.cuda.get_device_properties(device()).total_memory / 2**30


def host_memory_gib() -> float:
    """Memory of this rank's host (GiB)."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30


def import_deepspeed() -> Any:
    """DeepSpeed, quiet, with its accelerator agreed and its shared-memory op off.

    The shared-memory all-reduce of its CPU backend leaves 69 MB per rank in /dev/shm after every
    run, a clean one too, and is compiled for two minutes first (0.19.8: ops/csrc/cpu/comm/shm.cpp
    unlinks only in a destructor). comm/torch.py asks this table before it builds the op.
    """
    if use_cpu():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("DS_LOG_LEVEL", "warning")
    # DeepSpeed 0.19.8 calls collectives by names that torch 2.13 deprecates, on every rank
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    import deepspeed
    import deepspeed.ops
    from deepspeed.utils import logger as deepspeed_logger

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    _import_muon_uncompiled()
    deepspeed_logger.setLevel("WARNING")
    return deepspeed


def _import_muon_uncompiled() -> None:
    """Import DeepSpeed's Muon optimizer, which it looks for in every start, without compiling it.

    It is not used here, and a decorator in it imports all of torch.compile's backend: 1.9 s of CPU
    time in every rank (0.19.8: runtime/zero/muon/original_muon.py).
    """
    from deepspeed.runtime import compiler

    compile_function = compiler.compile
    compiler.compile = lambda: lambda function: function
    try:
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
    finally:
        compiler.compile = compile_function


def initialize_distributed(*, timeout_minutes: float = 30) -> None:
    """Make the process group of this run through DeepSpeed: nccl on GPUs, gloo on CPUs.

    Args:
        timeout_minutes: how long a collective may wait before it fails.
    Raises:
        InfrastructureError: if the port is taken or the address cannot be reached for now.
        ConfigError: if the address has no meaning, or the port is not this user's to take.
    """
    map_environment()
    deepspeed = import_deepspeed()
    _groups.timeout = timedelta(minutes=timeout_minutes)
    if not use_cpu():
        if torch.cuda.device_count() == 1:  # srun shows each task its own device as number 0
            os.environ["LOCAL_RANK"] = "0"
        torch.cuda.set_device(local_rank())
    if os.environ["MASTER_PORT"] == "0":
        os.environ["MASTER_PORT"] = str(free_port())
    _choose_interface()
    try:
        deepspeed.init_distributed(
            dist_backend="gloo" if use_cpu() else "nccl",
            auto_mpi_discovery=False,
            verbose=False,
            timeout=_groups.timeout,
        )
    except torch.distributed.DistNetworkError as error:
        # torch says it in words alone; a name that is not known at all is a mistake, one that the
        # name server cannot tell for now (gai error -3) is not
        is_wrong = re.search(r"gai error: -2\b|EACCES|EADDRNOTAVAIL", str(error))
        raise (ConfigError if is_wrong else InfrastructureError)(
            f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}: the ranks cannot meet there "
            f"({error}). Is another job on that port? Try another: --master_port of the deepspeed "
            "launcher, --master-port of torchrun, MASTER_PORT elsewhere"
        ) from error


def new_group(ranks: list[int], *, is_made_alone: bool = False) -> torch.distributed.ProcessGroup:
    """Process group of some ranks, with the timeout of the run's: torch gives each its own default.

    Args:
        ranks: members; every rank of the world calls this, in the same order.
        is_made_alone: the members make it without help of the others.
    """
    return torch.distributed.new_group(
        ranks, timeout=_groups.timeout, use_local_synchronization=is_made_alone
    )


def destroy_distributed() -> None:
    """End the process group, if there is one; where that hangs, show it and end the process.

    Nobody watches a rank that has told its exit code, and its launcher would wait for it.
    """
    if torch.distributed.is_initialized():
        faulthandler.dump_traceback_later(_SECONDS_TO_TEAR_DOWN, exit=True)
        torch.distributed.destroy_process_group()
        faulthandler.cancel_dump_traceback_later()


def rank() -> int:
    """Global rank; 0 without a process group."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def world_size() -> int:
    """Number of ranks; 1 without a process group."""
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def barrier() -> None:
    """Wait until every rank is here."""
    if world_size() > 1:
        torch.distributed.barrier()


def broadcast_object(value: T, *, source: int = 0) -> T:
    """The `source` rank's value, on every rank. The value must be picklable."""
    if world_size() == 1:
        return value
    box = [value]
    torch.distributed.broadcast_object_list(box, src=source, device=device())
    return box[0]


def all_gather_object(value: T) -> list[T]:
    """Every rank's value, in rank order. The values must be picklable."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def all_reduce_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Sum of `tensor` over all ranks, in place, returned for convenience. Not differentiable."""
    if world_size() > 1:
        torch.distributed.all_reduce(tensor)
    return tensor


def together(action: Callable[[], T]) -> T:
    """Run `action` on every rank; if it fails on any of them, all raise the same error.

    For phases in which one rank alone can meet a damaged file or a full disk: without agreement
    the others would wait in the next collective until its timeout. Only errors that a user can
    cause are agreed on; a fault of ours is left to end its own rank with its traceback.

    Raises:
        TrainingError: the first failing rank's error, on every rank.
    """
    result = None
    failure = None
    try:
        result = action()
    except TrainingError as error:
        failure = error
    failures = all_gather_object(failure)
    for failing_rank, found in enumerate(failures):
        if found is None:
            continue
        if failing_rank > 0:
            found.args = (f"[rank {failing_rank}] {found}",)
        raise found
    return result  # type: ignore[return-value]


def first_rank_does(action: Callable[[], T]) -> T:
    """Run `action` on rank 0 only and give its result to every rank; its error reaches all.

    Raises:
        TrainingError: rank 0's error, on every rank.
    """
    result = together(lambda: action() if rank() == 0 else None)
    return broadcast_object(result)  # type: ignore[return-value]


def seed_everything(seed: int, *, deterministic: bool) -> None:
    """Seed python, numpy and torch, and ask torch for kernels that give equal bits each time.

    Args:
        seed: one number for the run; all ranks take the same.
        deterministic: False leaves torch free to choose faster kernels on GPUs.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        # a debugging aid that costs 3 % of a step
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = False


def keep_freed_memory() -> None:
    """Let glibc keep what training frees, because each step asks for the same tensors again.

    By default it gives large blocks back to the kernel at once and then waits for every page to
    be zeroed anew. Measured on the tiny model, two cores, one rank, one run each: 40 steps took
    24.7 s of user and 16.9 s of system time before, 26.0 s and 1.5 s after. Nothing happens with
    another libc.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return
    m_trim_threshold = -1
    m_top_pad = -2
    m_mmap_threshold = -3
    m_arena_max = -8
    if not libc.mallopt(m_mmap_threshold, 2**30):
        libc.mallopt(m_mmap_threshold, 2**25)  # the most that older versions take
    libc.mallopt(m_trim_threshold, 2**31 - 1)
    libc.mallopt(m_top_pad, 2**26)
    libc.mallopt(m_arena_max, 1)  # one pool: blocks freed by one thread serve the others


def release_memory() -> None:
    """Free what nothing refers to but itself, on this rank and its accelerator.

    An engine and its hooks refer to each other: its weights and moments would stay beside those of
    the next one until Python happens to look for them.
    """
    gc.collect()
    if not use_cpu():
        torch.cuda.empty_cache()


def set_threads() -> int:
    """Give each CPU rank of this host its share of the cores; returns the number of threads."""
    if "OMP_NUM_THREADS" not in os.environ or local_world_size() > 1:
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, cores // local_world_size()))
    return torch.get_num_threads()


def end_with_launcher(on_orphaned: int = signal.SIGTERM) -> None:
    """Ask the kernel to send `on_orphaned` to this rank when the process that started it dies.

    A launcher that is killed cannot pass a signal on; its ranks would train on unseen. Linux only
    (prctl PR_SET_PDEATHSIG); elsewhere a dead launcher is noticed by nobody.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid()
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, on_orphaned)
    if os.getppid() != parent:  # it died before the kernel was asked
        os.kill(os.getpid(), on_orphaned)


def _commit() -> str | None:
    """Git commit of the checkout that this package lies in, `-dirty` where files differ from it;
    None where there is no checkout or no git."""
    root = Path(__file__).resolve().parent.parent
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


def describe_environment() -> dict[str, Any]:
    """Versions and devices of this run, for environment.json. Never variables or host secrets."""
    from importlib.metadata import version

    packages = ("torch", "deepspeed", "transformers", "tokenizers", "numpy", "pydantic")
    described: dict[str, Any] = {
        "cdrmix": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: version(name) for name in packages},
        "world_size": world_size(),
        "backend": "gloo" if use_cpu() else "nccl",
    }
    if use_cpu():
        described["device"] = {"kind": "cpu", "cores": len(os.sched_getaffinity(0))}
        described["threads_per_rank"] = torch.get_num_threads()
    else:
        properties = torch.cuda.get_device_properties(device())
        described["device"] = {
            "kind": "cuda",
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
        }
    return described
