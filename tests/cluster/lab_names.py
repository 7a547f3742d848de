"""Names of labs, with the process that owns them: what a killed one left is known by them."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from pathlib import Path

import psutil

# A variable of all processes of a lab that could outlive it, with the lab's name as its value.
VARIABLE = "CDRMIX_LAB"
_SECONDS_TO_DIE = 10


def new_name() -> str:
    """A name that no other lab has, owned by this process."""
    return f"{os.getpid()}-{_started(os.getpid())}-{secrets.token_hex(4)}"


def is_dead(name: str) -> bool:
    """Whether the owner of the lab of this name has ended; false for what is no lab's name."""
    named = re.fullmatch(r"(\d+)-(\d+)-[0-9a-f]{8}", name)
    return named is not None and _started(int(named[1])) != named[2]


def end_processes(name: str) -> None:
    """Kill what has the variable of a lab of this name, and what it starts meanwhile."""
    deadline = time.monotonic() + _SECONDS_TO_DIE
    while processes := [p for p in psutil.process_iter() if _lab_of(p) == name]:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        assert time.monotonic() < deadline, f"do not die: {processes}"
        time.sleep(0.05)


def end_processes_of_dead_labs() -> None:
    """Kill what labs left whose owner did not come to its end."""
    for name in {_lab_of(process) for process in psutil.process_iter()}:
        if is_dead(name):
            end_processes(name)


def _lab_of(process: psutil.Process) -> str:
    """Name of the lab that a living process belongs to, or nothing."""
    with contextlib.suppress(psutil.Error):
        if process.status() != psutil.STATUS_ZOMBIE:
            return process.environ().get(VARIABLE, "")
    return ""


def _started(pid: int) -> str | None:
    """When a process started, in ticks since the machine did; None if there is none or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    state, *fields = stat.rpartition(")")[2].split()
    return None if state == "Z" else fields[18]
