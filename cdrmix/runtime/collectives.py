"""Process group of the run, made by DeepSpeed, and collectives that also work without one."""

from __future__ import annotations

import faulthandler
import os
import re
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from typing import Any, TypeVar

import torch
import torch.distributed

from cdrmix.errors import ConfigError, InfrastructureError, TrainingError
from cdrmix.network import free_port, interface_towards
from cdrmix.runtime.deferred_compiler import defer_compiler
from cdrmix.runtime.environment import (
    device_index,
    have_met,
    map_environment,
    take_only_device,
)
from cdrmix.runtime.hardware import accelerator, check_deepspeed_agrees, device, use_cpu

T = TypeVar("T")
_SECONDS_TO_TEAR_DOWN = 60.0
_SECONDS_TO_LOOK_AGAIN = 0.05


class _GroupSettings:
    """Timeout of the run's process group, for the groups that are made later; failures there."""

    timeout: timedelta | None = None
    failures: int = 0  # calls of `fails_everywhere`


def import_deepspeed() -> Any:
    """Imports DeepSpeed quietly, on the accelerator of this run, without its shared-memory op."""
    defer_compiler()  # before anything asks torch for it
    if use_cpu():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("DS_LOG_LEVEL", "warning")
    # DeepSpeed 0.19.8 calls collectives by names that torch 2.13 deprecates, on every rank
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    # DeepSpeed's autotuner, which is not used here, imports MLflow where it is installed (0.19.8:
    # autotuning/autotuner.py): .6 s in every rank, and a thread that sends telemetry.
    is_first = "mlflow" not in sys.modules
    if is_first:
        sys.modules["mlflow"] = None  # type: ignore[assignment]  # its import fails
    try:
        import deepspeed
    finally:
        if is_first:
            del sys.modules["mlflow"]
    from deepspeed.runtime import compiler
    from deepspeed.utils import logger as deepspeed_logger

    # The shared-memory all-reduce of its CPU backend leaves 69 MB per rank in /dev/shm after every
    # run, a clean one too, and is compiled for two minutes first (0.19.8: ops/csrc/cpu/comm/shm.cpp
    # unlinks only in a destructor). The function that makes it, not the table of ops that it looks
    # into: that is filled when it is first read, by trying to build each op, .5 s in every rank.
    backend = import_module("deepspeed.comm.torch")  # its name there is torch's own
    backend.build_shm_op = lambda: None  # type: ignore[attr-defined]
    # Every start looks for DeepSpeed's Muon optimizer, which is not used here. A decorator in it
    # imports all of torch.compile's backend, 1.9 s of CPU time in every rank (0.19.8:
    # runtime/zero/muon/original_muon.py), so it is imported once with a decorator that does nothing
    compile_function = compiler.compile
    compiler.compile = lambda: lambda function: function
    try:
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
    finally:
        compiler.compile = compile_function
    deepspeed_logger.setLevel("WARNING")
    return deepspeed


def initialize_distributed(*, timeout_minutes: float = 30) -> None:
    """Makes the process group of this run through DeepSpeed: nccl on GPUs, gloo on CPUs.

    Raises InfrastructureError if the port is taken or the address cannot be reached for now,
    ConfigError if the address does not exist, or this user may not bind the port, or the devices
    are of a kind that is refused.
    """
    map_environment()
    accelerator()  # before DeepSpeed, which fails at one that torch here has no extension for
    deepspeed = import_deepspeed()
    check_deepspeed_agrees(deepspeed)
    _GroupSettings.timeout = timedelta(minutes=timeout_minutes)
    if not use_cpu():
        if torch.cuda.device_count() == 1:
            take_only_device()
        torch.cuda.set_device(device_index())
    if os.environ["MASTER_PORT"] == "0":
        os.environ["MASTER_PORT"] = str(free_port())
    # By default gloo takes the interface of the host's name, which is loopback on Debian, and NCCL
    # the first one by name. A user's own choice stands.
    if interface := interface_towards(os.environ["MASTER_ADDR"]):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # exactly this one
    try:
        deepspeed.init_distributed(
            dist_backend="gloo" if use_cpu() else "nccl",
            auto_mpi_discovery=False,
            verbose=False,
            timeout=_GroupSettings.timeout,
        )
    except torch.distributed.DistNetworkError as error:
        # torch gives no error code, only text. An unknown name is a mistake; a name server that
        # cannot answer now (gai error -3) is a passing fault
        is_wrong = re.search(r"gai error: -2\b|EACCES|EADDRNOTAVAIL", str(error))
        raise (ConfigError if is_wrong else InfrastructureError)(
            f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}: the ranks cannot meet there "
            f"({error}). Is another job on that port? Try another: --master_port of the deepspeed "
            "launcher, --master-port of torchrun, MASTER_PORT elsewhere"
        ) from error


def new_group(ranks: list[int], *, is_made_alone: bool = False) -> torch.distributed.ProcessGroup:
    """Makes a process group with the run's timeout, which torch does not pass on by itself. Every
    rank of the world calls this, in the same order; only the members if it `is_made_alone`."""
    return torch.distributed.new_group(
        ranks, timeout=_GroupSettings.timeout, use_local_synchronization=is_made_alone
    )


def share_timeout() -> None:
    """Gives the run's timeout to all groups of this rank: DeepSpeed makes those of experts without.

    Torch's own is 10 minutes with NCCL, less than a save to a slow file server may take.
    """
    assert _GroupSettings.timeout is not None, "initialize_distributed comes first"
    for group in torch.distributed.distributed_c10d._world.pg_map:
        group.set_timeout(_GroupSettings.timeout)


def destroy_distributed() -> None:
    """Ends the process group, if there is one; if that hangs, prints the stacks and exits."""
    if have_met():
        # The rank's watchdog is gone by now: nobody else would end it, and its launcher would wait.
        faulthandler.dump_traceback_later(_SECONDS_TO_TEAR_DOWN, exit=True)
        torch.distributed.destroy_process_group()
        faulthandler.cancel_dump_traceback_later()


def rank() -> int:
    """Global rank; 0 without a process group."""
    return torch.distributed.get_rank() if have_met() else 0


def world_size() -> int:
    """Number of ranks; 1 without a process group."""
    return torch.distributed.get_world_size() if have_met() else 1


def barrier() -> None:
    """Waits for every rank."""
    if world_size() > 1:
        torch.distributed.barrier()


def broadcast_object(value: T) -> T:
    """Returns rank 0's value on every rank. The value must be picklable."""
    if world_size() == 1:
        return value
    box = [value]
    torch.distributed.broadcast_object_list(box, src=0, device=device())
    return box[0]


def all_gather_object(value: T) -> list[T]:
    """Returns every rank's value, in rank order. The values must be picklable."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def all_reduce_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Sums `tensor` over all ranks, in place, and returns it. Not differentiable."""
    if world_size() > 1:
        torch.distributed.all_reduce(tensor)
    return tensor


def together(action: Callable[[], T]) -> T:
    """Runs `action` on every rank; if a TrainingError ends it on any, all raise that of the first.
    For phases in which one rank alone can meet a damaged file or a full disk: without agreement the
    others would wait in the next collective until its timeout. A defect of this program ends its
    own rank with its traceback."""
    result = None
    failure = None
    try:
        result = action()
    except TrainingError as error:
        failure = error
    for failing_rank, cause in enumerate(all_gather_object(failure)):
        if cause is not None:
            if failing_rank > 0:
                cause.args = (f"[rank {failing_rank}] {cause}",)
            raise cause
    return result  # type: ignore[return-value]


def fails_everywhere(*, within_seconds: float) -> bool:
    """Tells if every rank calls this within that time, because it has met an error.

    No collective, in which the calls of a rank with an error and of others that wait elsewhere
    would be taken for one another.
    """
    if world_size() == 1:
        return True
    _GroupSettings.failures += 1
    key = f"cdrmix/failures/{_GroupSettings.failures}"
    try:
        if not _all_come(key, within_seconds=within_seconds, waits=True):
            return False
        # Rank 0 holds the store, and may end next: only once all others have looked.
        _all_come(f"{key}/seen", within_seconds=within_seconds, waits=rank() == 0)
    except RuntimeError:  # the store has gone with the rank that held it
        return False
    return True


def _all_come(key: str, *, within_seconds: float, waits: bool) -> bool:
    """Counts this rank under a key of the store; tells if all are, waiting for them if asked to."""
    store = torch.distributed.distributed_c10d._get_default_store()
    come = store.add(key, 1)
    deadline = time.monotonic() + within_seconds
    while waits and come < world_size() and time.monotonic() < deadline:
        time.sleep(_SECONDS_TO_LOOK_AGAIN)
        come = store.add(key, 0)
    return come == world_size()


def first_answer(name: str, answer: str) -> str:
    """The answer of the rank that was first to give one under this name; the same on all ranks.

    No collective: whoever comes gets it at once, and nobody waits for ranks that never ask.
    """
    if world_size() == 1:
        return answer
    store = torch.distributed.distributed_c10d._get_default_store()
    return store.compare_set(f"cdrmix/answers/{name}", "", answer).decode()


def first_rank_does(action: Callable[[], T]) -> T:
    """Runs `action` on rank 0 only; its result, or its TrainingError, reaches every rank."""
    result = together(lambda: action() if rank() == 0 else None)
    return broadcast_object(result)  # type: ignore[return-value]
