"""The run directory: made once, never overwritten, held by one job at a time."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import socket
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from cdrmix import runtime
from cdrmix.checkpoint.candidates import step_folders
from cdrmix.checkpoint.files import is_passing, read_json, retried
from cdrmix.cluster.messages import LAUNCH_FOLDER
from cdrmix.cluster.start_records import STARTS_FOLDER
from cdrmix.cluster.starts import LOCK, parsed_holder, process_start_ticks
from cdrmix.config.load import new_run_dir, snapshot_yaml
from cdrmix.config.resuming import resumed_run
from cdrmix.config.schema import Config
from cdrmix.errors import DataError, InfrastructureError, StateError
from cdrmix.log import get_logger
from cdrmix.monitoring.sinks import read_metrics, write_json_atomic, write_text_atomic
from cdrmix.planning.counts import attended_tokens, count, trained_params
from cdrmix.planning.muon import muon_matrices
from cdrmix.planning.plan import Plan

if TYPE_CHECKING:  # brings torch, which is not imported before a start is checked
    from cdrmix.engines.training_data import Corpus

logger = get_logger(__name__)

# An NFSv4 server keeps the lock of a client that is gone for a lease, 90 s by default.
_SECONDS_FOR_LEASE = 100.0
_SECONDS_BETWEEN_TRIES = 0.5
LOG = "train.log"
METRICS = "metrics.jsonl"
# Optimizer and group of each parameter that trains in Stage A.
PARAMETER_GROUPS = "parameter_groups.json"
# Written after the last stage of a run, and removed when the run is extended.
FINISHED = "finished.json"
# Step of the newest save, kept outside of checkpoints/, which may be a volume that is not mounted.
SAVES = "saves.json"
# Files of a start that was refused before it became a run.
_LEFT_BY_REFUSED = {LOCK, LOG, LAUNCH_FOLDER}
# Everything else is renamed into place, which replaces a link; these would follow it elsewhere.
_WRITTEN_IN_PLACE = (
    LOCK,
    LOG,
    METRICS,
    LAUNCH_FOLDER,
    STARTS_FOLDER,
    "checkpoints",
    "tracking",
    "wall_time.tmp",
)
# flock is missing on Lustre without the mount option, and on NFS without a lock server.
_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}


@dataclass
class RunDirectory(AbstractContextManager["RunDirectory"]):
    """Folder of a run, locked by this job."""

    path: Path
    copies: tuple[Path, ...] = ()  # other folders of the same checkpoints
    _lock: IO[str] | None = field(default=None, repr=False)

    @property
    def folders(self) -> tuple[Path, ...]:
        """All folders of its checkpoints, with one folder per step; its own comes first."""
        return (self.path / "checkpoints", *self.copies)

    def holds(self, checkpoint: Path) -> bool:
        """Tells if a checkpoint belongs to this run."""
        return checkpoint.parent.resolve() in {folder.resolve() for folder in self.folders}

    def check_held(self) -> None:
        """Raises StateError if another job has taken the directory over; rank 0.

        A file server gives a lock away when it has not heard of its host for the length of a lease.
        """
        if self._lock is None:
            return
        try:
            # Opened anew: a client of NFS asks the server then, and may keep what is open.
            holder = parsed_holder((self.path / LOCK).read_text(encoding="utf-8"))
        except FileNotFoundError:  # removed by hand; nobody else has come since
            return
        if holder and (holder["host"], holder["process"]) != (socket.gethostname(), os.getpid()):
            raise StateError(
                f"{self.path}: process {holder['process']} on {holder['host']} has taken this run "
                "directory over, because the file server lost sight of this host"
            )

    def __exit__(self, *_: object) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def open_run_directory(config: Config, *, requested: Path | None, resume: str) -> RunDirectory:
    """Create or lock the run directory, --run-dir or experiments/<UTC time>-<hash>; collective.

    Raises:
        StateError: if the directory or its replica exists and is not to be resumed, belongs to a
            running job or cannot be written, or if `auto` has no directory to look in.
        InfrastructureError: if the file system fails for now, or the lock stays held.
    """
    is_first = runtime.rank() == 0
    opened = runtime.together(lambda: _open(config, requested, resume) if is_first else None)
    places = runtime.broadcast_object((opened.path, opened.copies) if opened else None)
    assert places is not None, "rank 0 opened them"

    def check_seen() -> None:
        # On every rank: rank 0 cannot tell by itself that other hosts do not share the folder.
        for replica in places[1]:
            if not replica.is_dir():
                raise StateError(
                    f"{replica}: rank 0 has made it, and it is not there. checkpoint.replica must "
                    "be a folder that all hosts share; of one host, a local one will do"
                )

    runtime.together(check_seen)
    return opened or RunDirectory(*places)


def place_of_run(config: Config, *, requested: Path | None, resume: str) -> tuple[Path, bool]:
    """Run directory of a start, and True if it goes on in there; writes nothing.

    Raises StateError if it exists and is not to be resumed, holds links in the place of what a run
    writes, or if `auto` has no directory to look in; OSError if it cannot be looked at.
    """
    if requested is None and resume == "auto":
        raise StateError("--resume auto: needs --run-dir, the directory to go on in")
    resumed = resumed_run(resume)
    path = requested or resumed or new_run_dir(config)
    goes_on = resume == "auto" or (resumed is not None and resumed.resolve() == path.resolve())
    is_run = retried(
        lambda: path.is_dir() and any(e.name not in _LEFT_BY_REFUSED for e in path.iterdir()),
        path,
    )
    for name in _WRITTEN_IN_PLACE:
        if (path / name).is_symlink():
            raise StateError(
                f"{path / name}: is a link, and a run writes nowhere but into its run "
                "directory. Replace it by what it points to; for checkpoints on another "
                "volume, mount that there or put the whole run directory on it"
            )
    if is_run and not goes_on:
        raise StateError(
            f"{path}: the run directory exists and is never overwritten. Give --resume auto "
            "to go on in it, or another --run-dir"
        )
    return path, goes_on


def not_writable(path: Path, why: str | None) -> StateError:
    """Error of a run directory that cannot be written."""
    return StateError(
        f"{path}: cannot write the run directory ({why}). Give a --run-dir that this user can "
        "write to"
    )


def _open(config: Config, requested: Path | None, resume: str) -> RunDirectory:
    path = requested or Path(resume)
    try:
        path, goes_on = place_of_run(config, requested=requested, resume=resume)
        path.mkdir(parents=True, exist_ok=True)
        lock = _locked(path / LOCK)
    except OSError as error:
        # EACCES passes where NFS renews a Kerberos ticket, but here it mostly is the user's rights.
        if is_passing(error) and not isinstance(error, PermissionError):
            raise InfrastructureError(
                f"{path}: the file system fails for now ({error.strerror}). Start again when it "
                "answers"
            ) from error
        raise not_writable(path, error.strerror) from error
    try:
        return RunDirectory(path, _open_copies(config, path, goes_on=goes_on), lock)
    except StateError:
        lock.close()
        raise


def _open_copies(config: Config, path: Path, *, goes_on: bool) -> tuple[Path, ...]:
    """Makes the folder of a run's copies, with a name that no other run directory shares."""
    folder = config.checkpoint.replica
    if folder is None:
        return ()
    whole = path.resolve()
    # Runs of one name in different folders may have one folder for copies.
    key = hashlib.sha256(str(whole).encode()).hexdigest()[:8]
    replica = Path(folder) / f"{whole.name}-{key}"
    try:
        replica.mkdir(parents=True, exist_ok=True)
        is_used = bool(step_folders(replica))
    except OSError as error:
        raise StateError(
            f"checkpoint.replica = {folder}: {replica} cannot be written ({error.strerror}). Give "
            "a folder that this user can write to"
        ) from error
    if is_used and not goes_on:
        raise StateError(
            f"{replica}: has checkpoints of an earlier run in {path}, which are never overwritten. "
            "Give --resume auto to go on from them, or another --run-dir"
        )
    return (replica,)


def _locked(path: Path) -> IO[str]:
    """Returns the open lock file, locked for this process, with host and process written in it.

    A lock whose holder is not known to live is waited for: a file server keeps the lock of a host
    that went down for the length of a lease.
    """
    file = path.open("a+")  # not "w": the holder's name must outlast a start that is refused
    deadline = time.monotonic() + _SECONDS_FOR_LEASE
    has_warned = False
    try:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                file.seek(0)
                holder = parsed_holder(file.read())
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                raise StateError(
                    f"{path}: this file system has no locks between hosts ({error.strerror}), "
                    "without which two jobs could write one run directory. Have Lustre mounted "
                    "with -o flock, or NFS with its lock service, or give a --run-dir on another "
                    "file system"
                ) from error
            name = f"process {holder.get('process')} on {holder.get('host')}"
            started = holder.get("started")
            is_here = started is not None and holder["host"] == socket.gethostname()
            if is_here and process_start_ticks(holder["process"]) == started:
                raise StateError(
                    f"{path.parent}: another job is running in this directory ({name}). Wait for "
                    "it, or give another --run-dir"
                )
            if time.monotonic() > deadline:
                raise InfrastructureError(
                    f"{path.parent}: another job is running in this directory, or its lock is left "
                    f"behind ({name}): held for {_SECONDS_FOR_LEASE:.0f} s. Wait for it, or give "
                    "another --run-dir"
                )
            if not has_warned:
                logger.warning("%s: locked by %s; waiting for the lock", path.parent, name)
                has_warned = True
            time.sleep(_SECONDS_BETWEEN_TRIES)
        # For others that meet the lock; the start tells a process from a later one with its number.
        file.seek(0)
        file.truncate()
        process = os.getpid()
        started = process_start_ticks(process)
        holder = {"host": socket.gethostname(), "process": process, "started": started}
        file.write(json.dumps(holder) + "\n")
        file.flush()
    except BaseException:
        file.close()
        raise
    return file


def last_saved_step(directory: RunDirectory) -> int | None:
    """Step of the newest save of a run; None if it has none, or is of an early version. Raises
    StateError if the record of it cannot be read."""
    path = directory.path / SAVES
    try:
        return int(read_json(path)["step"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise StateError(f"{path}: cannot be read ({error}). Try removing it") from error


def refuse_lost_checkpoints(directory: RunDirectory, config: Config) -> None:
    """Raises StateError if a run without a checkpoint has saved: a volume may not be mounted."""
    path = directory.path
    step = last_saved_step(directory)
    if step is None:
        # A run of an older version, or one that has not saved yet. A second save waits for the
        # first, so past two intervals there was one. A run of Stage B alone does not begin at 0.
        lines = read_metrics(path / METRICS) if (path / METRICS).exists() else []
        steps = [int(line["step"]) for line in lines] or [0]
        step = max(steps)
        every = config.checkpoint.every_steps
        if every == "auto" and config.checkpoint.auto_range is not None:
            every = int(config.checkpoint.auto_range[1])
        if not isinstance(every, int) or step - min(steps) < 2 * every:
            return
    raise StateError(
        f"{directory.folders[0]}: holds no checkpoint, though this run has come to step {step} "
        "and saved. Is a volume not mounted, or were they moved? Bring them back. To begin again, "
        f"give another --run-dir, or remove {SAVES} and {METRICS} from this one"
    )


def write_base(directory: RunDirectory, source: Path, digest: str) -> None:
    """Keep config.json, tokenizer and other small files of the base beside the checkpoints, which
    can then be used without it; rank 0.

    `source` is the folder of the base with this digest, or `base` of another run directory. Raises
    StateError if they cannot be copied.
    """
    from cdrmix.checkpoint.base_model import write_base_files  # brings torch

    for folder in (directory.path, *directory.copies):
        try:
            write_base_files(folder, source, digest)
        except OSError as error:
            raise StateError(
                f"{error.filename or folder}: the files of the base model cannot be copied "
                f"({error.strerror}). Make room, or give a --run-dir that this user can write to"
            ) from error


def write_description(
    directory: RunDirectory,
    config: Config,
    plan: Plan,
    corpus: Corpus,
    *,
    stage_b_steps: int | None = None,
) -> None:
    """Write what a starting stage runs with: configuration, plan, environment, tokenizer; rank 0.

    Stage B, which ends at step `stage_b_steps`, is described beside a Stage A in the same run.
    Raises DataError if the tokenizer's file has another digest than the manifest says.
    """
    path = directory.path
    (path / FINISHED).unlink(missing_ok=True)  # a finished run may be extended
    write_text_atomic(path / "config_snapshot.yaml", snapshot_yaml(config))
    plan_path = path / "plan.json"
    if stage_b_steps is None:
        write_json_atomic(path / "ds_config.json", plan.deepspeed)
        counts = count(config.model, attended_tokens(config))
        size: dict[str, Any] = {
            "total_params": counts.total_params,
            "active_params": counts.active_params,
            "trained_params": trained_params(config.model),
        }
        if config.optimizer.kind == "muon":
            matrices, elements = muon_matrices(config)
            size["optimizer"] = (
                f"Muon for {matrices:,} matrices of {elements / 1e6:,.3g}M parameters, AdamW for "
                f"the rest ({PARAMETER_GROUPS})"
            )
        write_json_atomic(plan_path, plan.to_json() | size)
        (path / "metrics.json").unlink(missing_ok=True)  # the summary of an earlier end
    else:
        write_json_atomic(path / "ds_config_stage_b.json", plan.deepspeed)
        content = json.loads(plan_path.read_text(encoding="utf-8")) if plan_path.exists() else {}
        content["stage_b"] = {**plan.to_json(), "num_steps": stage_b_steps}
        write_json_atomic(plan_path, content)
    write_json_atomic(path / "environment.json", runtime.describe_environment())
    # Beside the checkpoints, which can then be used without the data set.
    for name, digest in corpus.manifest.tokenizer.digests().items():
        source = corpus.folder / name
        try:
            text = source.read_bytes().decode()
        except (OSError, ValueError) as error:
            raise DataError(
                f"{source}: cannot be read ({error}). Copy the data set again"
            ) from error
        if hashlib.sha256(text.encode()).hexdigest() != digest:
            raise DataError(f"{source}: its content has changed (sha256). Copy the data set again")
        for folder in (path, *directory.copies):
            write_text_atomic(folder / name, text)
