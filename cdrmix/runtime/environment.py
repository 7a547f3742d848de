"""Environment variables of one rank: its rank, its host and its launcher. No torch."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import socket
import sys
from pathlib import Path

from cdrmix.errors import ConfigError
from cdrmix.network import address_towards, first_host, free_port, is_loopback, port_of_step

_RANK_ON_HOST = "CDRMIX_LOCAL_RANK"
_TARGETS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# Each launcher's names for _TARGETS. The first launcher wins: a deepspeed launcher that runs inside
# a SLURM step sets RANK, while SLURM_PROCID there numbers the launchers.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),  # torchrun
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE"),  # deepspeed
    tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
)


# Settings of torch's allocator on GPUs; the first one that is set counts.
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def map_environment() -> None:
    """Sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT from the launcher's variables.
    Without an address, the ranks of mpirun agree on one over MPI; the ranks of srun take the first
    host of their step and a port derived from the step's number. A process without a launcher
    becomes rank 0 of 1, on any free port. Raises ConfigError where no address can be derived."""
    env = os.environ
    for names in _LAUNCHERS:
        if names[0] not in env or names[1] not in env:
            continue
        if names[0].startswith("SLURM") and "SLURM_STEP_ID" not in env:
            continue  # inside a batch script but not started by srun: one plain process
        for target, name in zip(_TARGETS, names, strict=True):
            if name in env:
                # SLURM counts tasks by node, 4(x2),3: the first count stands for all
                env.setdefault(target, re.split("[(,]", env[name])[0])
    for target, default in zip(_TARGETS, ("0", "1", "0", "1"), strict=True):
        env.setdefault(target, default)
    if env["WORLD_SIZE"] == "1":
        place = ("127.0.0.1", 0)
    elif "MASTER_ADDR" in env and "MASTER_PORT" in env:
        return
    elif "OMPI_COMM_WORLD_RANK" in env or "MPI_LOCALRANKID" in env:
        from mpi4py import MPI

        # rank 0's address and a free port there, for all ranks of this mpirun
        world = MPI.COMM_WORLD
        hosts = world.allgather(platform.node())
        meeting = None
        if world.Get_rank() == 0:
            address = "127.0.0.1"
            if len({*hosts}) > 1:
                address = socket.gethostbyname(platform.node())
                # Debian resolves a host's own name to loopback: then that of the default route.
                address = address_towards() if is_loopback(address) else address
            meeting = (address, free_port())
        place = world.bcast(meeting)
    elif "SLURM_STEP_NODELIST" in env:
        step = int(env.get("SLURM_STEP_ID", "0"))
        restart = int(env.get("SLURM_RESTART_COUNT", "0"))
        port = port_of_step(int(env.get("SLURM_JOB_ID", "0")), step=step, restart=restart)
        place = (first_host(env["SLURM_STEP_NODELIST"]), port)
    else:
        raise ConfigError(
            f"{env['WORLD_SIZE']} ranks were started without MASTER_ADDR and MASTER_PORT: export "
            "both before mpirun or srun, or start with the deepspeed launcher"
        )
    env.setdefault("MASTER_ADDR", place[0])
    env.setdefault("MASTER_PORT", str(place[1]))


def environment_rank() -> int:
    """Global rank from the environment, before any process group exists."""
    return int(os.environ.get("RANK", "0"))


def environment_world_size() -> int:
    """World size from the environment, before any process group exists."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """Rank of this process on its host."""
    return int(os.environ.get(_RANK_ON_HOST) or os.environ.get("LOCAL_RANK", "0"))


def device_index() -> int:
    """Number of this rank's device among those that it sees."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def take_only_device() -> None:
    """Has this rank, and DeepSpeed, take device 0, the only one that it sees: srun shows each task
    its own under that number. `local_rank` stays what it is."""
    os.environ.setdefault(_RANK_ON_HOST, str(local_rank()))
    os.environ["LOCAL_RANK"] = "0"


def local_world_size() -> int:
    """Number of ranks on this host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def have_met() -> bool:
    """True once the ranks have made their process group."""
    # without an import: where torch was not imported, nobody has met
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and bool(distributed.is_initialized())


def speaks_for_errors() -> bool:
    """True on the rank that reports errors to the user: one per run once they are agreed on in the
    process group; one per host before that, when hosts can differ."""
    return environment_rank() == 0 if have_met() else local_rank() == 0


def master_address() -> str:
    """Address of rank 0's host, as all hosts know it."""
    return os.environ["MASTER_ADDR"]


def launch_folder() -> Path | None:
    """Folder in which `cdrmix launch` waits for the outcome of this start; None without it."""
    folder = os.environ.get("CDRMIX_LAUNCH_FOLDER")
    return Path(folder) if folder else None


def cache_dir() -> Path:
    """Folder for files that can be rebuilt, such as compiled kernels; not created here."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cdrmix"


def keep_graphs(folder: Path, default: str) -> Path:
    """Has torch.compile keep its kernels in `folder`, unless the user has named another one.

    `default` is torch's own folder, which it may have written into the environment itself. Returns
    the folder that is used.
    """
    name = "TORCHINDUCTOR_CACHE_DIR"
    if os.environ.get(name, default) == default:
        os.environ[name] = str(folder)
    return Path(os.environ[name])


def use_cpus_only() -> None:
    """Makes the processes started from here compute on CPUs, with one thread each."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    # Threads that wait for each other on busy cores are slower than one.
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def encode_on_one_core() -> None:
    """Makes the package tokenizers encode on one core, unless the user has set its variable."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def download_nothing() -> None:
    """Tells the packages of Hugging Face to stay offline, which ask when they are imported."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        os.environ.setdefault(name, "1")


def expand_segments() -> None:
    """Has torch's allocator on GPUs grow its segments, unless the user has settings for it.

    Sizes that differ from step to step, as those of rows between expert ranks do, would leave holes
    in segments of fixed size. Read when torch first asks a device for memory.
    """
    if allocator_settings() is None:
        os.environ[_ALLOCATOR[0]] = "expandable_segments:True"


def allocator_settings() -> str | None:
    """Settings of torch's allocator on GPUs, the user's or those of `expand_segments`."""
    return next((os.environ[name] for name in _ALLOCATOR if name in os.environ), None)


def take_place(rank: int, world_size: int, port: int) -> None:
    """Makes this process a rank of a world on this machine, by the variables a launcher sets."""
    for name, value in zip(_TARGETS, (rank, world_size, rank, world_size), strict=True):
        os.environ[name] = str(value)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(port)


def end_with_launcher(on_orphaned: int) -> None:
    """Asks the kernel to send `on_orphaned` to this rank when the process that started it dies. A
    killed launcher cannot pass a signal on; its ranks would train on unseen. Linux only."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(1, on_orphaned)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it died before the kernel was asked
        os.kill(os.getpid(), on_orphaned)


def quieten_tracer() -> None:
    """Has torch's tracer, Kineto, log its errors alone, unless the user asks for more; its lines on
    each of its stages would stand between ours."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
