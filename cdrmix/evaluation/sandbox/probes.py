"""Programs that try to leave the sandbox, run before those of a model."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from cdrmix.errors import PlanError
from cdrmix.evaluation.sandbox.program import Kind, Limits, Program
from cdrmix.evaluation.sandbox.worker import Worker

PROBE_LIMITS = Limits(cpu_seconds=2, memory_bytes=1 << 29)
_TESTS = "assert reached"


def _probes(outside: Path, process: int) -> dict[str, tuple[str, Kind, tuple[str, ...]]]:
    """Source, kind and errors that it may end with, by what it tries.

    Args:
        outside: file that this process can read and write, with a folder above it.
        process: that it tries to send a signal to.
    """
    # Of bubblewrap's file system nothing else is a part.
    refused: tuple[Kind, tuple[str, ...]] = ("error", ("PermissionError", "FileNotFoundError"))
    tries = {
        "reading a file": f"reached = open({str(outside)!r}).read()",
        "writing a file": f"reached = open({str(outside)!r}, 'a').write('x')",
        "listing a folder": f"import os; reached = os.listdir({str(outside.parent)!r})",
        "changing a file's mode": f"import os; os.chmod({str(outside)!r}, 0o600); reached = 1",
        "a socket": "import socket; reached = socket.socket()",
        "a new process": "import os; reached = os.posix_spawn('/bin/true', ['true'], {}) > 0",
        "a signal": f"import os; os.kill({process}, 0); reached = 1",
    }
    return {
        **{name: (source, *refused) for name, source in tries.items()},
        "2 GiB of memory": ("reached = bytes(2 << 30)", "memory", ("MemoryError",)),
    }


def check_probes(worker: Worker, wall_seconds: float) -> None:
    """Runs them.

    Raises:
        PlanError: one did what it must not, or a right program does not pass.
    """
    right = worker.run(Program("reached = sum(range(10)) == 45", tests=_TESTS), wall_seconds)
    if not right.passed:
        raise PlanError(
            f"sandbox: a right program does not pass here: {right.kind} {right.error} "
            f"{right.message}. No program is run"
        )
    with tempfile.TemporaryDirectory(prefix="cdrmix-sandbox-test-") as folder:
        outside = Path(folder) / "outside"
        outside.write_text("outside", encoding="ascii")
        for tried, (source, kind, errors) in _probes(outside, os.getpid()).items():
            verdict = worker.run(Program(source, tests=_TESTS), wall_seconds)
            if verdict.kind != kind or verdict.error not in errors:
                raise PlanError(
                    f"sandbox: {tried} ended with {verdict.kind} {verdict.error} "
                    f"{verdict.message} instead of {kind} {errors[0]}: the sandbox does not hold "
                    "here. No program is run"
                )
