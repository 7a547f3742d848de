"""How long a start takes, from the command to the first step, by its parts.

The starts of a run that `cdrmix launch` made, as starts.jsonl keeps them.

The marker of a finished run: written after its last stage, removed where training goes on.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from cdrmix.config.schema import Config

# When the command was given, seconds of the wall clock; `cdrmix launch` and job scripts set it.
COMMANDED_VARIABLE = "CDRMIX_COMMANDED"


class StartUp:
    """Seconds of the parts of this process's start; each part ends where it is named."""

    def __init__(self) -> None:
        """Note what is over: the launcher, and this process up to here."""
        own = _age_seconds(os.getpid()) or 0.0
        commanded = max(own, _seconds_since_command() or own)
        self._began = self._last = time.monotonic()
        self._parts = {"launcher": commanded - own, "imports": own}

    def done(self, part: str) -> None:
        """What has passed since the part before belongs to `part`, which may have had time.

        After the first step nothing is added: what a second stage sets up is no start.
        """
        if "first_step" in self._parts:
            return
        now = time.monotonic()
        self._parts[part] = self._parts.get(part, 0.0) + now - self._last
        self._last = now

    def step_done(self) -> bool:
        """The first step ends the last part; whether this was it."""
        is_first = "first_step" not in self._parts
        if is_first:
            self.done("first_step")
        return is_first

    @property
    def seconds(self) -> float:
        """From the command to the end of the last part."""
        return sum(self._parts.values())

    def __str__(self) -> str:
        """One line for people."""
        parts = (f"{part.replace('_', ' ')} {s:.1f}" for part, s in self._parts.items())
        return f"{self.seconds:.1f} s from the command to the first step: {', '.join(parts)}"

    def to_json(self) -> dict[str, float]:
        """Seconds by part, in order, and of all."""
        parts = {f"{part}_seconds": seconds for part, seconds in self._parts.items()}
        return parts | {"seconds": self.seconds}


def seconds_since_this_process_began() -> float:
    """Age of this process, or 0 where the system does not tell."""
    return _age_seconds(os.getpid()) or 0.0


def _seconds_since_command() -> float | None:
    """Since the command that started this rank, as told, or else as its launchers show."""
    told = os.environ.get(COMMANDED_VARIABLE)
    if told is not None:
        return time.time() - float(told)
    return _age_seconds(_launcher())


def _launcher() -> int:
    """The furthest ancestor that has this script among its arguments: deepspeed, torchrun, ..."""
    script = sys.argv[0].encode()
    found = os.getpid()
    process = os.getpid()
    if not script.endswith(b".py"):
        return found
    while (process := _parent(process)) > 1:
        try:
            words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
        except OSError:
            break
        if script in words:
            found = process
    return found


def _parent(process: int) -> int:
    fields = _stat(process)
    return int(fields[1]) if fields else 0


def _age_seconds(process: int) -> float | None:
    """How long ago a process was started; None where the system does not tell."""
    fields = _stat(process)
    if not fields:
        return None
    # not the wall clock, which may have been set since
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def process_start_ticks(process: int) -> str | None:
    """Start of a living process, in ticks since the machine's own; None if there is no such."""
    fields = _stat(process)
    return fields[19] if fields and fields[0] != "Z" else None


def _stat(process: int) -> list[str]:
    """Fields of /proc/PID/stat after the name (state, parent, ...); none without Linux's /proc."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


STARTS = "starts.jsonl"


@dataclass(frozen=True)
class StartRecord:
    """One start of a run.

    Attributes:
        began, ended: wall clock.
        hosts: their names; none is this machine.
        exit_code, reason: how it ended.
        resumed_at: step of the checkpoint that it began from.
        step: last step that any rank reached.
    """

    began: datetime
    ended: datetime
    hosts: tuple[str, ...]
    exit_code: int
    reason: str
    resumed_at: int
    step: int

    def to_json(self) -> dict[str, Any]:
        """As a line of the file."""
        times = {name: getattr(self, name).isoformat() for name in ("began", "ended")}
        return asdict(self) | times

    @classmethod
    def from_json(cls, line: dict[str, Any]) -> StartRecord:
        """From a line of the file."""
        times = {name: datetime.fromisoformat(line[name]) for name in ("began", "ended")}
        return cls(**(line | times | {"hosts": tuple(line["hosts"])}))


def append_start(run_dir: Path, start: StartRecord) -> None:
    """Add a start to those of a run."""
    with (run_dir / STARTS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(start.to_json()) + "\n")


def read_starts(run_dir: Path) -> list[StartRecord]:
    """All starts of a run, in order; none where `cdrmix launch` made none.

    A line that was not written whole, as on a full disk, is no start: nothing depends on it.
    """
    path = run_dir / STARTS
    if not path.is_file():
        return []
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            found.append(StartRecord.from_json(json.loads(line)))
    return found


MARKER = "finished.json"


def is_marked(run_dir: Path) -> bool:
    """Whether the run has ended its last stage, and nothing went on since."""
    return (run_dir / MARKER).is_file()


def is_at_its_end(run_dir: Path, config: Config) -> bool:
    """Whether nothing is left to train of what `config` asks for.

    A run of an earlier version has no marker: there the summary counts, unless a stage follows
    that one, which would have replaced it.
    """
    wants_stage_b = config.stage_b is not None and config.training.stage != "a"
    end = _parsed(run_dir / MARKER)
    if end is None:
        end = _parsed(run_dir / "metrics.json")
        if end is None or wants_stage_b:
            return False
        return int(end.get("steps", 0)) >= config.training.num_steps
    if wants_stage_b and end.get("stage") != "b":
        return False
    return end.get("stage") == "b" or int(end.get("step", 0)) >= config.training.num_steps


def _parsed(path: Path) -> dict[str, Any] | None:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) else None
