"""Starts of a run: duration of the present one, records of all (starts.jsonl), and the run's end.

finished.json marks a finished run: written after its last stage, removed where training goes on.
"""

import contextlib
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from cdrmix.config.load import resolve
from cdrmix.config.resuming import SNAPSHOT, changes_between, resumed_run, told
from cdrmix.config.schema import Config
from cdrmix.config.yaml_text import parse_yaml
from cdrmix.errors import ConfigError

STARTS = "starts.jsonl"
MARKER = "finished.json"
LATEST = Path("checkpoints") / "latest"
# Held by the job that trains in a run directory; names its host and process.
LOCK = ".lock"
# Wall clock time of the command in seconds; set by `cdrmix launch` and job scripts.
COMMANDED_VARIABLE = "CDRMIX_COMMANDED"


class StartUp:
    """Durations of the parts of this process's start, from the command to the first step."""

    def __init__(self) -> None:
        """Measures the two parts that are over: the launcher, and this process up to here."""
        age = age_seconds(os.getpid())
        if COMMANDED_VARIABLE in os.environ:
            since_command = time.time() - float(os.environ[COMMANDED_VARIABLE])
        else:
            # the furthest ancestor with this script among its arguments: deepspeed, torchrun
            launcher = os.getpid()
            with contextlib.suppress(psutil.Error):
                ancestors = psutil.Process().parents() if sys.argv[0].endswith(".py") else []
                for ancestor in ancestors:
                    if ancestor.pid != 1 and sys.argv[0] in ancestor.cmdline():
                        launcher = ancestor.pid
            since_command = age_seconds(launcher)
        self._last = time.monotonic()
        self._parts = {"launcher": max(0.0, since_command - age), "imports": age}

    def done(self, part: str) -> None:
        """Adds the time since the last call to `part`."""
        if "first_step" in self._parts:  # setting up a second stage is not part of the start
            return
        now = time.monotonic()
        self._parts[part] = self._parts.get(part, 0.0) + now - self._last
        self._last = now

    def step_done(self) -> bool:
        """Ends the start at the first step; returns True for that step alone."""
        is_first = "first_step" not in self._parts
        self.done("first_step")
        return is_first

    @property
    def seconds(self) -> float:
        """Time from the command to the end of the last part."""
        return sum(self._parts.values())

    def __str__(self) -> str:
        """Describes the parts in one line."""
        parts = (f"{part.replace('_', ' ')} {s:.1f}" for part, s in self._parts.items())
        return f"{self.seconds:.1f} s from the command to the first step: {', '.join(parts)}"

    def to_json(self) -> dict[str, float]:
        """Seconds by part, in order, and their sum."""
        parts = {f"{part}_seconds": seconds for part, seconds in self._parts.items()}
        return parts | {"seconds": self.seconds}


def process_start_ticks(process: int) -> str | None:
    """Start of a living process, in clock ticks since boot; None if there is no such process."""
    fields = _stat(process)
    return fields[19] if fields and fields[0] != "Z" else None


def parsed_holder(text: str) -> dict[str, Any]:
    """Host, process and start of a lock's holder; empty for lock files of earlier versions."""
    try:
        holder = json.loads(text)
    except ValueError:
        return {}
    is_whole = isinstance(holder, dict) and {"host", "process", "started"} <= holder.keys()
    return holder if is_whole and isinstance(holder["process"], int) else {}


def age_seconds(process: int) -> float:
    """Age of a process; 0 where the system does not report it."""
    fields = _stat(process)
    if not fields:
        return 0.0
    # not the wall clock, which may have been set since the process began
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def _stat(process: int) -> list[str]:
    """Fields of /proc/PID/stat after the name (state, parent, ...); empty without Linux's /proc."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    # the name may hold spaces and parentheses of its own
    return text.rpartition(")")[2].split()


@dataclass(frozen=True)
class StartRecord:
    """One start of a run, with the fields of its Outcome."""

    began: datetime
    ended: datetime
    hosts: tuple[str, ...]  # their names; empty for this machine
    exit_code: int
    reason: str
    resumed_at: int  # step of the checkpoint that it began from
    step: int  # last that any rank reached


def append_start(run_dir: Path, start: StartRecord) -> None:
    """Appends a start to the records of a run."""
    with (run_dir / STARTS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(start), default=datetime.isoformat) + "\n")


def read_starts(run_dir: Path) -> list[StartRecord]:
    """Reads the starts of a run, in order; none if `cdrmix launch` did not start it.

    Skips lines that were not written whole, as on a full disk: nothing depends on them.
    """
    path = run_dir / STARTS
    if not path.is_file():
        return []
    starts = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            record = json.loads(line)
            times = {name: datetime.fromisoformat(record[name]) for name in ("began", "ended")}
            starts.append(StartRecord(**(record | times | {"hosts": tuple(record["hosts"])})))
    return starts


def end_of_run(config: Config, *, run_dir: Path | None, resume: str) -> str | None:
    """Says that a run to go on with is at its end, in a line; None if there is more to train.

    Raises ConfigError if `config` asks for other changes than for more training.
    """
    if resume not in ("auto", "never"):
        source = resumed_run(resume)
        # another run directory goes on from the end of this one
        if source is None or (run_dir is not None and run_dir.resolve() != source.resolve()):
            return None
        run_dir = source
    if resume == "never" or run_dir is None or not is_at_its_end(run_dir, config):
        return None
    end = _json_of(run_dir / MARKER) or {"step": _json_of(run_dir / "metrics.json").get("steps")}
    checkpoint = Path(resume)
    is_one = checkpoint.name.isdecimal() and checkpoint.parent.name == "checkpoints"
    if is_one and int(checkpoint.name) != end.get("step"):
        return None  # the steps after it are to be trained again
    kept = _steps_kept(run_dir)
    if kept and max(kept) < int(end.get("step") or 0):
        return None  # somebody has removed the checkpoints after it
    try:
        text = (run_dir / SNAPSHOT).read_text(encoding="utf-8")
        own = resolve(parse_yaml(text, place=SNAPSHOT), place=SNAPSHOT)
    except (OSError, UnicodeDecodeError, ConfigError):
        return None  # for the ranks to tell
    is_stage_b = end.get("stage") == "b"
    if (
        is_stage_b
        and own.stage_b
        and config.stage_b
        and config.stage_b.training.num_steps > own.stage_b.training.num_steps
    ):
        return None
    step = end.get("step")
    steps = step if is_stage_b else own.training.num_steps
    phase = "stage_b.training.policy_steps" if is_stage_b else "training.max_steps"
    said = f"the run is at its end (step {step} of {steps}): {run_dir / 'report.html'}"
    advice = f"To train on, give --set {phase}=N"
    changes = changes_between(own.model_dump(mode="json"), config.model_dump(mode="json"))
    if changes:
        raise ConfigError(
            f"{said}. Nothing is left to train with other values: {told(changes)}. {advice}"
        )
    return f"{said}. {advice}"


def _steps_kept(run_dir: Path) -> list[int]:
    with contextlib.suppress(OSError):
        names = [each.name for each in (run_dir / "checkpoints").iterdir()]
        return [int(name) for name in names if name.isdecimal()]
    return []


def newest_saved_step(run_dir: Path) -> int:
    """Step of the newest checkpoint of a run, as it names it; 0 without one."""
    with contextlib.suppress(OSError):
        text = (run_dir / LATEST).read_text(encoding="utf-8", errors="replace").strip()
        return int(text) if text.isdecimal() else 0
    return 0


def _json_of(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        values = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(values, dict):
            return values
    return {}


def is_at_its_end(run_dir: Path, config: Config) -> bool:
    """True if the run has trained all that `config` asks for.

    A run of an earlier version has no marker. There the summary counts, unless `config` asks for
    Stage B: that summary may be Stage A's, because Stage B's replaces it.
    """
    wants_stage_b = config.stage_b is not None and config.training.stage != "a"
    found: dict[str, dict[str, Any]] = {}
    for name in (MARKER, "metrics.json"):
        with contextlib.suppress(OSError, ValueError):
            values = json.loads((run_dir / name).read_text(encoding="utf-8"))
            if isinstance(values, dict):
                found[name] = values
    end = found.get(MARKER)
    if end is None:
        steps = found.get("metrics.json", {}).get("steps", 0)
        return (
            "metrics.json" in found
            and not wants_stage_b
            and int(steps) >= config.training.num_steps
        )
    if wants_stage_b and end.get("stage") != "b":
        return False
    return end.get("stage") == "b" or int(end.get("step", 0)) >= config.training.num_steps
