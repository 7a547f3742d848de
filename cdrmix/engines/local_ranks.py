"""Ranks as processes of this machine: real collectives without a cluster or a launcher."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from cdrmix import runtime

# Imported once by the server that the ranks are forked from; without the last three, which
# DeepSpeed imports inside initialize(), each rank would pay seconds for them.
_PRELOADED = [
    "cdrmix.engines.session",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.pipe.engine",
    "deepspeed.ops.op_builder.all_ops",
]
_OUTPUT_SHOWN_LINES = 25


class RanksFailed(Exception):
    """A rank ended with another code than 0, or was still busy at the time limit."""


def run_ranks(
    action: Callable[..., int], world_size: int, *args: Any, log: Path, timeout: float
) -> None:
    """Run `action(*args)` on every rank of a world of CPU processes, and wait for all of them.

    Args:
        action: function of a module; returns the exit code of its rank.
        world_size: number of processes.
        args: picklable, the same for every rank.
        log: file that the ranks' output is appended to.
        timeout: seconds until a world that is still busy is ended.
    Raises:
        RanksFailed: if a rank does not return 0 in time, with the end of what was printed.
    """
    runtime.use_cpus_only()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    port = runtime.free_port()
    ranks = [
        context.Process(target=_be_rank, args=(rank, world_size, port, log, action, args))
        for rank in range(world_size)
    ]
    for rank in ranks:
        rank.start()
    try:
        ended = _wait(ranks, timeout)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    codes = [rank.exitcode for rank in ranks]
    if not ended or any(codes):
        lines = log.read_text(errors="replace").splitlines()[-_OUTPUT_SHOWN_LINES:]
        fault = f"exit codes {codes}" if ended else f"still busy after {timeout:.0f} s"
        raise RanksFailed("\n  ".join([f"{world_size} ranks: {fault}. They wrote last:", *lines]))


def _wait(ranks: list[ForkServerProcess], timeout: float) -> bool:
    """Whether all ended in time; the first that fails ends the wait."""
    deadline = time.monotonic() + timeout
    while any(rank.is_alive() for rank in ranks):
        if any(rank.exitcode for rank in ranks):
            time.sleep(0.5)  # for the others to say what they have to say
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _be_rank(
    rank: int, world_size: int, port: int, log: Path, action: Callable[..., int], args: tuple
) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    runtime.take_place(rank, world_size, port)
    sys.exit(action(*args))
