"""The run directory: made once, never overwritten, held by one job at a time."""

from __future__ import annotations

import fcntl
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Self

from cdrmix import runtime
from cdrmix.checkpoint.folder import step_folders
from cdrmix.checkpoint.manifest import is_checkpoint
from cdrmix.cluster.outcome import LAUNCH_FOLDER
from cdrmix.config.load import new_run_dir, resolved_yaml
from cdrmix.config.schema import Config
from cdrmix.errors import StateError
from cdrmix.monitoring.sinks import write_json_atomic, write_text_atomic
from cdrmix.planning.counts import count
from cdrmix.planning.plan import Plan

_LOCK = ".lock"
LOG = "train.log"
# What a start leaves that was refused before it became a run.
_LEFT_BY_REFUSED = {_LOCK, LOG, LAUNCH_FOLDER}


@dataclass
class RunDirectory:
    """One run's folder.

    Attributes:
        path: the folder.
        replica: where copies of its checkpoints are, if anywhere.
    """

    path: Path
    replica: Path | None = None
    _lock: IO[str] | None = field(default=None, repr=False)

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints, one folder per step."""
        return self.path / "checkpoints"

    @property
    def copies(self) -> tuple[Path, ...]:
        """Other folders of the same checkpoints."""
        return () if self.replica is None else (self.replica,)

    def holds(self, checkpoint: Path) -> bool:
        """Whether a checkpoint is one of this run's."""
        folders = (self.checkpoints, *self.copies)
        return checkpoint.parent.resolve() in {folder.resolve() for folder in folders}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Let another job take the directory."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def open_run_directory(config: Config, *, requested: Path | None, resume: str) -> RunDirectory:
    """Make or take the run directory; collective.

    Args:
        config: gives the hash in the name.
        requested: --run-dir, or None for experiments/<UTC timestamp>-<hash>.
        resume: --resume: never, auto or the path of a run directory or checkpoint.
    Raises:
        StateError: if the directory or its replica exists and is not to be resumed, belongs to a
            running job or cannot be written, or if `auto` has no directory to look in.
    """
    opened = runtime.together(
        lambda: _open(config, requested, resume) if runtime.rank() == 0 else None
    )
    places = runtime.broadcast_object((opened.path, opened.replica) if opened else None)
    assert places is not None, "rank 0 opened them"
    path, replica = places
    runtime.together(lambda: _check_seen(replica))
    return opened or RunDirectory(path, replica)


def _open(config: Config, requested: Path | None, resume: str) -> RunDirectory:
    if requested is None and resume == "auto":
        raise StateError("--resume auto: needs --run-dir, the directory to go on in")
    resumed = _run_of(resume)
    path = requested or resumed or new_run_dir(config)
    goes_on = resume == "auto" or (resumed is not None and resumed.resolve() == path.resolve())
    try:
        taken = path.is_dir() and any(e.name not in _LEFT_BY_REFUSED for e in path.iterdir())
        if taken and not goes_on:
            raise StateError(
                f"{path}: the run directory exists and is never overwritten. Give --resume auto "
                "to go on in it, or another --run-dir"
            )
        path.mkdir(parents=True, exist_ok=True)
        lock = _locked(path / _LOCK)
    except BlockingIOError as error:
        raise StateError(
            f"{path}: another job is running in this directory. Wait for it, or give another "
            "--run-dir"
        ) from error
    except OSError as error:
        raise StateError(
            f"{path}: cannot write the run directory ({error.strerror}). Give a --run-dir that "
            "this user can write to"
        ) from error
    try:
        return RunDirectory(path, _open_replica(config, path, goes_on=goes_on), lock)
    except StateError:
        lock.close()
        raise


def _open_replica(config: Config, path: Path, *, goes_on: bool) -> Path | None:
    """Folder of a run's copies, made: of this run alone, whatever others are called."""
    folder = config.checkpoint.replica
    if folder is None:
        return None
    whole = path.resolve()
    key = hashlib.sha256(str(whole).encode()).hexdigest()[:8]
    replica = Path(folder) / f"{whole.name}-{key}"
    try:
        replica.mkdir(parents=True, exist_ok=True)
        taken = bool(step_folders(replica))
    except OSError as error:
        raise StateError(
            f"checkpoint.replica = {folder}: {replica} cannot be written ({error.strerror}). Give "
            "a folder that this user can write to"
        ) from error
    if taken and not goes_on:
        raise StateError(
            f"{replica}: has checkpoints of an earlier run in {path}, which are never overwritten. "
            "Give --resume auto to go on from them, or another --run-dir"
        )
    return replica


def _check_seen(replica: Path | None) -> None:
    if replica is not None and not replica.is_dir():
        raise StateError(
            f"{replica}: rank 0 has made it, and it is not there. checkpoint.replica must be a "
            "folder that all hosts share; of one host, a local one will do"
        )


def _locked(path: Path) -> IO[str]:
    """The file, open and locked. Raises BlockingIOError while another process has the lock."""
    file = path.open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise
    return file


def _run_of(resume: str) -> Path | None:
    """Run directory that an explicit --resume PATH lies in; None for never and auto, and for a
    checkpoint that was copied out of its run directory."""
    if resume in ("never", "auto"):
        return None
    path = Path(resume)
    if path.parent.name == "checkpoints":
        return path.parent.parent
    if is_checkpoint(path):
        return None
    return path.parent if path.name == "checkpoints" else path


def describe(directory: RunDirectory, config: Config, choice: Plan) -> None:
    """Write what this run is: configuration, plan, environment."""
    if runtime.rank() != 0:
        return
    path = directory.path
    write_text_atomic(path / "config_snapshot.yaml", resolved_yaml(config))
    write_json_atomic(path / "ds_config.json", choice.deepspeed)
    counts = count(config.model, config.training.sequence_length)
    size = {"total_params": counts.total_params, "active_params": counts.active_params}
    write_json_atomic(path / "plan.json", choice.to_json() | size)
    (path / "metrics.json").unlink(missing_ok=True)  # the summary of an earlier end is not ours
    write_json_atomic(path / "environment.json", runtime.describe_environment())


def describe_stage_b(directory: RunDirectory, config: Config, choice: Plan, num_steps: int) -> None:
    """Add to what Stage A wrote of this run, or, in a run of its own, write it.

    Args:
        directory: of the run.
        config: resolved.
        choice: of Stage B.
        num_steps: step at which the run ends, with those of Stage A.
    """
    if runtime.rank() != 0:
        return
    path = directory.path
    write_text_atomic(path / "config_snapshot.yaml", resolved_yaml(config))
    write_json_atomic(path / "ds_config_stage_b.json", choice.deepspeed)
    plan_path = path / "plan.json"
    plan = json.loads(plan_path.read_text(encoding="utf-8")) if plan_path.exists() else {}
    plan["stage_b"] = {**choice.to_json(), "num_steps": num_steps}
    write_json_atomic(plan_path, plan)
    write_json_atomic(path / "environment.json", runtime.describe_environment())
