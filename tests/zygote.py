"""The process that forks the ranks of `harness.run_ranks`; it lives as long as the test process."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import operator
import os
import pickle
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import IO, NoReturn

from tests.harness import Outcome, Request, rank_environment, reserved_port, tail

# Modules that the ranks of tests import, but for those of Stage B, which a run without it must not
# import. torch imports its compiler only with the first optimizer, DeepSpeed some of itself inside
# initialize(): with our own, 3 s of CPU that each rank would pay.
_PRELOADED = (
    "torch",
    "torch._dynamo",
    "launch.train",
    "cdrmix.sessions.session",  # before DeepSpeed, which it imports without MLflow
    "deepspeed",
    "deepspeed.comm.mori",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.moe.layer",
    "deepspeed.ops.op_builder.all_ops",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.stage_1_and_2",
    "encodings.idna",
    "matplotlib.backends.backend_svg",
    "matplotlib.figure",
    "psutil",
    "pydantic",
    "pytest",
    "safetensors.torch",
    "setuptools",
    "tiktoken",
    "tokenizers",
    "torch.profiler._cupti_monitor",
    "yaml",
    "cdrmix.models.mamba",
    "cdrmix.monitoring.report",
    "cdrmix.planning.blocks.rwkv",
)
_SECONDS_TO_END = 2.0  # for a rank that has sent its result or dumps its stacks, or was killed
# A killed process closes its sockets, which others see, before it is gone.
_SECONDS_TO_DIE = 0.2


@dataclass
class _Rank:
    pid: int
    results: Connection
    output: IO[bytes]
    outcome: Outcome = Outcome("stopped")


def serve(requests: Connection) -> None:
    """Answer requests until the test process closes its end."""
    _die_with_parent()
    _preload(_PRELOADED)
    _prepare()
    # Collections in a rank pass over what is imported, and so copy none of its pages: that takes a
    # tenth of the CPU time of short runs.
    gc.freeze()
    with contextlib.suppress(EOFError):
        while True:
            request = pickle.loads(requests.recv_bytes())
            if request.preloaded:
                _preload(request.preloaded)
                gc.freeze()
            requests.send_bytes(pickle.dumps(_run(request, requests)))


def _preload(modules: Sequence[str]) -> None:
    for module in modules:
        importlib.import_module(module)
    num_threads = len(list(Path("/proc/self/task").iterdir()))
    assert num_threads == 1, f"an import started {num_threads - 1} threads: forks would lack them"


def _prepare() -> None:
    """Do once what each rank would do again: compile the pages' templates, which for the report of
    a short run takes .3 s of CPU, and ask git for the commit."""
    from cdrmix.monitoring import page
    from cdrmix.runtime import hardware

    hardware.package_commit()
    for name in page._environment.list_templates(extensions=["html"]):
        page._environment.get_template(name)


def _run(request: Request, requests: Connection) -> list[Outcome]:
    deadline = time.monotonic() + request.timeout_seconds
    ranks: list[_Rank] = []
    with reserved_port() as port:
        try:
            for rank in range(request.world_size):
                environment = rank_environment(rank, request.world_size, port)
                ranks.append(_fork(request, environment, requests))
            _collect(ranks, deadline, requests)
        finally:
            for each in ranks:
                _stop(each)
    return [_finish(rank) for rank in ranks]


def _fork(request: Request, environment: dict[str, str], requests: Connection) -> _Rank:
    receiver, sender = Pipe(duplex=False)
    output = tempfile.TemporaryFile()
    pid = os.fork()
    if pid == 0:
        requests.close()
        receiver.close()
        _be_rank(request, environment, output, sender)
    sender.close()
    return _Rank(pid, receiver, output)


def _be_rank(
    request: Request, environment: dict[str, str], output: IO[bytes], sender: Connection
) -> NoReturn:
    """The forked process: take the rank's place, call the function, send what came of it."""
    try:
        os.setsid()  # so that what the rank starts can be ended with it
        _die_with_parent()
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        faulthandler.enable(file=2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.environ.update(environment)
        os.chdir(request.folder)
        sender.send_bytes(_call(request))
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # what was registered for the zygote's end is not a rank's to run


def _call(request: Request) -> bytes:
    try:
        fn = operator.attrgetter(request.qualname)(importlib.import_module(request.module))
        return pickle.dumps(Outcome("result", fn(*request.args)))
    except SystemExit as ending:
        return pickle.dumps(Outcome("exited", ending.code))
    except BaseException:
        return pickle.dumps(Outcome("raised", traceback.format_exc()))


def _collect(ranks: list[_Rank], deadline: float, requests: Connection) -> None:
    """Wait for the outcomes; returns early at the first failure and at the deadline.

    The first that is seen to fail may be one that lost another: that one's end is noted too.
    """
    waiting = list(ranks)
    while waiting:
        connections = [requests, *(rank.results for rank in waiting)]
        ready = wait(connections, timeout=max(0.0, deadline - time.monotonic()))
        if requests in ready:
            raise EOFError  # the test process is gone
        if not ready:
            return
        for rank in [rank for rank in waiting if rank.results in ready]:
            waiting.remove(rank)
            rank.outcome = _outcome(rank)
            if rank.outcome.kind != "result":
                _note_deaths(waiting)
                return


def _note_deaths(ranks: list[_Rank]) -> None:
    for rank in ranks:
        if rank.results.poll(_SECONDS_TO_DIE):
            rank.outcome = _outcome(rank)


def _outcome(rank: _Rank) -> Outcome:
    """What the rank sent, or how it ended without a word; it stays to be reaped."""
    try:
        return pickle.loads(rank.results.recv_bytes())
    except EOFError:
        end = os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT)
    assert end is not None
    if end.si_code == os.CLD_EXITED:
        return Outcome("exited", end.si_status)
    return Outcome("signalled", signal.Signals(end.si_status).name)


def _stop(rank: _Rank) -> None:
    """End the rank and what it started, and reap it; a busy one first dumps its stacks."""
    if rank.outcome.kind == "stopped":
        os.kill(rank.pid, signal.SIGABRT)  # faulthandler's signal
    flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
    _await(lambda: os.waitid(os.P_PID, rank.pid, flags) is not None)
    _kill_group(rank.pid)
    os.kill(rank.pid, signal.SIGKILL)  # one that has not made its process group yet
    os.waitpid(rank.pid, 0)
    _await(lambda: not _kill_group(rank.pid))


def _kill_group(pid: int) -> bool:
    """Kill a process group; returns whether there was one."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def _await(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _SECONDS_TO_END
    while not happened() and time.monotonic() < deadline:
        time.sleep(0.01)


def _finish(rank: _Rank) -> Outcome:
    rank.results.close()
    with rank.output as output:
        return Outcome(rank.outcome.kind, rank.outcome.value, tail(output))


def _die_with_parent() -> None:
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
