"""Real gloo ranks for tests, in seconds: `run_ranks` runs a function on processes of this machine.

Importing torch and DeepSpeed takes longer than most tests, so one process, the zygote
(tests/zygote.py), imports them once and forks the ranks of each request. It is a fresh interpreter
with a single thread, because a fork of pytest's own process would inherit the locks of OpenMP
threads that the fork does not have. Runs under the launcher are started by tests/launcher.py.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent

# One thread and no GPU: ranks share the cores of a laptop, and no CUDA context survives a fork.
RANK_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
    "MKL_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
}
_OUTPUT_SHOWN_BYTES = 20_000


@dataclass(frozen=True)
class Outcome:
    """How one rank ended.

    `kind` is result, raised, exited, signalled or stopped (by us); `value` goes with it: what the
    function returned, the traceback, the exit code, the signal's name, None. `output` is the end
    of what the rank wrote to stdout and stderr.
    """

    kind: str
    value: Any = None
    output: str = ""


class RanksFailed(AssertionError):
    """A rank raised, exited, died or was still busy at the time limit; `outcomes` is by rank."""

    def __init__(self, title: str, outcomes: Sequence[Outcome]) -> None:
        self.outcomes = tuple(outcomes)
        lines = [title]
        for rank, outcome in enumerate(outcomes):
            lines.append(f"rank {rank} {_describe(outcome)}")
            if outcome.kind != "result" and outcome.output:
                lines.append(f"rank {rank} wrote:\n{outcome.output}")
        super().__init__("\n".join(lines))


@dataclass(frozen=True)
class Request:
    """One call of a function on ranks, as it travels to the zygote."""

    module: str
    qualname: str
    args: tuple[Any, ...]
    world_size: int
    timeout_seconds: float
    folder: str
    preloaded: tuple[str, ...] = ()


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120,
    preloaded: Sequence[str] = (),
) -> list[Any]:
    """Run `fn(*args)` on each of `world_size` ranks and return their results in rank order.

    Args:
        fn: module-level function; makes its own process group (runtime.initialize_distributed).
        world_size: number of processes; each finds RANK, WORLD_SIZE and the like in os.environ.
        args: picklable, the same for every rank; so must results be.
        timeout: seconds until all ranks are stopped, the stacks of the busy ones shown.
        preloaded: modules that the zygote imports before it forks these ranks and all later ones.
    Raises:
        RanksFailed: at the first rank that does not return; the others are stopped.
    """
    name = f"{fn.__module__}.{fn.__qualname__}"
    if "<" in name:
        raise ValueError(f"{name}: a rank can only import a function of module level")
    request = Request(
        *(fn.__module__, fn.__qualname__, args, world_size, timeout, os.getcwd()),
        preloaded=tuple(preloaded),
    )
    outcomes = _zygote().ask(request)
    if any(outcome.kind != "result" for outcome in outcomes):
        raise RanksFailed(f"{name} on {world_size} ranks, time limit {timeout} s:", outcomes)
    for rank, outcome in enumerate(outcomes):
        if outcome.output:  # pytest shows it where a later assertion fails
            print(f"--- rank {rank} of {name}\n{outcome.output}")
    return [outcome.value for outcome in outcomes]


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A TCP port of 127.0.0.1 that no other process is given while the context lasts.

    The socket is bound and never listens: the kernel hands the port to nobody else who asks for
    any, and still lets the rendezvous bind it, since both sides set SO_REUSEADDR.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What a launcher on one host tells each rank."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "CDRMIX_COMMANDED": str(time.time()),
    }


def tail(file: IO[bytes]) -> str:
    """The end of a file of output, as text."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _OUTPUT_SHOWN_BYTES))
    return file.read().decode(errors="replace").strip()


def _describe(outcome: Outcome) -> str:
    match outcome.kind:
        case "raised":
            return f"raised:\n{outcome.value}"
        case "exited":
            return f"exited with code {outcome.value} before it returned"
        case "signalled":
            return f"died by {outcome.value}"
        case "stopped":
            return "was still busy and was stopped"
        case _:
            return "returned"


class _Zygote:
    """The test process's end of the connection to its zygote."""

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        self._output = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.zygote", str(theirs.fileno())],
            cwd=ROOT,
            env={**os.environ, **RANK_ENVIRONMENT},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )
        theirs.close()
        atexit.register(self.close)

    def ask(self, request: Request) -> list[Outcome]:
        try:
            self._connection.send_bytes(pickle.dumps(request))
            return pickle.loads(self._connection.recv_bytes())
        except (EOFError, ConnectionError) as error:
            self._give_up()
            raise RuntimeError(f"the zygote died:\n{tail(self._output)}") from error
        except BaseException:  # an interrupted request's answer would be taken for the next one's
            self._give_up()
            raise

    def close(self) -> None:
        self._connection.close()
        self._process.wait()

    def _give_up(self) -> None:
        _zygote.cache_clear()
        self.close()


@functools.cache
def _zygote() -> _Zygote:
    return _Zygote()
