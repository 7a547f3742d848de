"""`cdrmix launch`: starts a run, watches it, and restarts it when it was lost."""

import contextlib
import fcntl
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from types import FrameType

from cdrmix import errors
from cdrmix.cluster.handover import LauncherStart, launch_environment, train_arguments
from cdrmix.cluster.hosts import Host, read_hostfile, run_on
from cdrmix.cluster.messages import LAUNCH_FOLDER, LAUNCHER_LOCK, Outcome, ask_to_stop
from cdrmix.cluster.start_records import first_step, newest_number
from cdrmix.cluster.starts import (
    COMMANDED_VARIABLE,
    LATEST,
    MARKER,
    StartRecord,
    age_seconds,
    append_start,
    end_of_run,
    newest_saved_step,
)
from cdrmix.config.load import new_run_dir
from cdrmix.config.resuming import config_of_start, resumed_run
from cdrmix.config.schema import Config
from cdrmix.errors import ConfigError, InfrastructureError, PlanError, StateError
from cdrmix.log import get_logger
from cdrmix.planning.profile import check_legal

logger = get_logger(__name__)

# These blame configuration or checkpoints, which were good if an earlier start was.
_DOUBTFUL = (errors.EXIT_USER_ERROR, errors.EXIT_NO_USABLE_STATE)
# Doubled with each restart in a row: a server or host that reboots takes minutes.
_FIRST_WAIT_SECONDS = 2.0
_LONGEST_WAIT_SECONDS = 60.0
# Signals that a person sends without naming them.
_TOLD = {"SIGINT": "an interrupt (SIGINT)", "SIGHUP": "the end of the terminal (SIGHUP)"}


@dataclass(frozen=True)
class Job:
    """Training that one `cdrmix launch` carries out, or one start of it."""

    config: Config
    arguments: Sequence[str]  # of launch/train.py without --run-dir and --resume
    run_dir: Path
    resume: str
    profile: str | None
    hosts: Sequence[Host]  # of a hostfile, or none
    ranks_per_host: int | None
    max_restarts: int  # in a row without a newer checkpoint before the run is given up
    environment: Mapping[str, str] = field(repr=False)  # of the ranks
    hostfile: Path | None = None  # that names the hosts, for messages


class _Signals:
    """Handler of TERM, INT, USR1 and HUP: the first asks the ranks to save and stop, the second
    ends them at once."""

    def __init__(self) -> None:
        self.folder: Path | None = None  # of the start under way
        self.name: str | None = None  # of the signal that asked to stop
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
            # nohup has it ignored, so that the run outlives its terminal
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._on_stop)

    @property
    def told(self) -> str:
        """Signal that asked to stop, for people."""
        return _TOLD.get(self.name or "", self.name or "")

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        if self.name is not None:
            raise SystemExit(errors.EXIT_FAULT)  # leaves the context of the start, which ends it
        self.name = signal.Signals(number).name
        if self.folder is None:
            raise SystemExit(errors.EXIT_STOPPED_BY_SIGNAL)
        ask_to_stop(self.folder, self.told)
        # not logged: a handler that interrupts the writing of a line must not write to the same
        # buffer, which raises RuntimeError
        text = f"{self.name}: asking the ranks to save and stop; once more ends them\n"
        with contextlib.suppress(OSError):
            os.write(2, text.encode())


def make_job(
    *,
    config: Path | None,
    overrides: Sequence[str],
    hostfile: Path | None,
    ranks_per_host: int | None,
    max_restarts: int,
    profile: str | None,
    run_dir: Path | None,
    resume: str,
) -> Job:
    """Makes a job from a command line; TrainingError if configuration or hostfile is wrong.

    `config` may be left out where a run is resumed, which has its own.
    """
    resolved_config = config_of_start(
        config,
        overrides,
        run_dir=run_dir,
        resume=resume,
        check=partial(end_of_run, run_dir=run_dir, resume=resume),
    )
    place = run_dir or resumed_run(resume) or new_run_dir(resolved_config)
    if re.search(r"[\x00-\x1f\x7f]", str(place)):
        raise ConfigError(
            f"run directory {str(place)!r}: has control characters, which files of variables and "
            "scripts cannot hold. Give another name"
        )
    return Job(
        config=resolved_config,
        arguments=train_arguments(config, overrides, profile),
        run_dir=place,
        resume=resume,
        profile=profile,
        hosts=read_hostfile(hostfile) if hostfile else (),
        ranks_per_host=ranks_per_host,
        max_restarts=max_restarts,
        environment=launch_environment(resolved_config),
        hostfile=hostfile,
    )


def launch(job: Job, *, check: Callable[[], None] | None = None) -> int:
    """Trains to the end, over as many starts as are allowed; returns the exit code of the command.

    `check` is called before anything is started. Raises TrainingError if it does, or if a host
    cannot be reached before the first start.
    """
    end = end_of_run(job.config, run_dir=job.run_dir, resume=job.resume)
    if end is not None:
        logger.info("%s", end)
        return errors.EXIT_DONE
    # first, so that a signal while all is checked ends the command by its code
    signals = _Signals()
    if check is not None:
        check()
    start = replace(job, hosts=_reachable_hosts(job, is_first=True))
    logger.info("%-14s %s", "now", "starting the ranks, which import torch and DeepSpeed first")
    furthest = _resumed_at(start)
    lost_in_a_row = 0
    has_been_good = False
    for number in itertools.count(1):
        outcome, began, resumed_at = _try_start(start, signals, is_first=number == 1)
        got_further = outcome.step > resumed_at
        # after a good start the same error before the first step is a passing fault of the machine
        is_mistake = outcome.exit_code in _DOUBTFUL and (got_further or not has_been_good)
        # a refused configuration is no start of the run: it must not count in its goodput
        if outcome.exit_code != errors.EXIT_USER_ERROR or not is_mistake:
            _record(start, outcome, began=began, resumed_at=resumed_at)
        if is_mistake or outcome.exit_code in (errors.EXIT_DONE, errors.EXIT_STOPPED_BY_SIGNAL):
            break
        has_been_good = has_been_good or got_further
        if signals.name is not None:
            logger.error("error: %s; not started again after %s", outcome.reason, signals.name)
            break
        following = replace(job, resume="auto")
        saved = _resumed_at(following)
        if saved > furthest:  # a checkpoint more than any start before
            furthest = saved
            lost_in_a_row = 0
        lost_in_a_row += 1
        why = outcome.reason or f"exit code {outcome.exit_code}, see above"
        if lost_in_a_row > job.max_restarts:
            logger.error("error: %s. Given up after %d restarts", why, job.max_restarts)
            break
        if start.resume not in ("auto", "never") and not (job.run_dir / LATEST).is_file():
            # `auto` would begin a new run here, without the checkpoint that the user named
            logger.error(
                "error: %s, before the first checkpoint in %s. Start again with --resume %s and "
                "another --run-dir",
                *(why, job.run_dir, start.resume),
            )
            break
        wait = min(_LONGEST_WAIT_SECONDS, _FIRST_WAIT_SECONDS * 2 ** (lost_in_a_row - 1))
        logger.warning(
            "start %d was lost at step %d (%s); start %d follows in %.0f s",
            *(number, outcome.step, why, number + 1, wait),
        )
        time.sleep(wait)
        start = replace(following, hosts=_reachable_hosts(job, is_first=False))
    return outcome.exit_code


def _reachable_hosts(job: Job, *, is_first: bool) -> Sequence[Host]:
    """Hosts that can be reached now; all of them where the configuration does not fit on these.

    At the first start all must be reached.
    """
    if is_first and job.hosts and shutil.which("pdsh") is None:
        raise ConfigError(
            "no program pdsh here, by which the deepspeed launcher reaches other hosts. Try "
            "apt-get install pdsh, or no --hostfile"
        )
    if is_first and job.hosts:  # a sign of life: a host that does not answer takes a while
        logger.info("reaching %d hosts by ssh", len(job.hosts))
    # at once, because each lost host takes its whole time limit
    with ThreadPoolExecutor(max_workers=32) as pool:
        results = pool.map(lambda host: run_on(host.name, ["true"], timeout_seconds=20), job.hosts)
    alive = [host for host, done in zip(job.hosts, results, strict=True) if done.returncode == 0]
    lost = ", ".join(host.name for host in job.hosts if host not in alive)
    if lost and is_first:  # a wrong name or key, rather than a host that has just died
        doctor = shlex.join(["cdrmix", "doctor", "--hostfile", str(job.hostfile or "HOSTS")])
        raise ConfigError(f"cannot reach {lost} by ssh without a password. `{doctor}` tells more")
    if not lost or not alive:
        return job.hosts
    num_ranks = sum(job.ranks_per_host or host.slots for host in alive)
    try:
        check_legal(job.config, world_size=num_ranks, profile=job.profile)
    except PlanError as error:
        logger.warning("%s cannot be reached, and the rest will not do: %s", lost, error)
        return job.hosts
    logger.warning("%s cannot be reached: going on with %d ranks", lost, num_ranks)
    return alive


def _try_start(start: Job, signals: _Signals, *, is_first: bool) -> tuple[Outcome, datetime, int]:
    """Makes a start; returns its outcome, when it began, and the step that it began from."""
    before = newest_number(start.run_dir)
    began = datetime.now(UTC)
    if is_first:  # the goodput counts this process's own imports as part of the start
        began -= timedelta(seconds=age_seconds(os.getpid()))
    resumed_at = _resumed_at(start)
    try:
        outcome = _start_once(start, signals, began)
    except (ConfigError, InfrastructureError) as error:
        if is_first:  # else the host was there at the first start
            raise
        outcome = Outcome(errors.EXIT_FAULT, str(error), 0)
    resumed_at = first_step(start.run_dir, after=before, otherwise=resumed_at)
    # it may have had no step left
    return replace(outcome, step=max(resumed_at, outcome.step)), began, resumed_at


def _start_once(job: Job, signals: _Signals, began: datetime) -> Outcome:
    marker = job.run_dir / MARKER
    was_finished = marker.is_file()
    folder = job.run_dir / LAUNCH_FOLDER / datetime.now(UTC).strftime("%Y%m%d-%H%M%S-%f")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700)  # it holds variables that nobody else may read
    except OSError as error:
        raise StateError(
            f"{job.run_dir}: cannot write the run directory ({error.strerror}). Give a --run-dir "
            "that this user can write to"
        ) from error
    signals.folder = folder
    arguments = [*job.arguments, "--run-dir", str(job.run_dir), "--resume", job.resume]
    variables = {**job.environment, COMMANDED_VARIABLE: str(began.timestamp())}
    try:
        with (folder / LAUNCHER_LOCK).open("w") as lock:
            # While it is held, `cdrmix doctor` takes no process of this start for a leftover. On a
            # file system without locks, the run directory's lock will refuse to run.
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            with LauncherStart(
                job.hosts,
                arguments,
                ranks_per_host=job.ranks_per_host,
                folder=folder,
                variables=variables,
            ) as start:
                outcome = start.wait(start_seconds=job.config.supervision.phase_seconds)
    finally:
        signals.folder = None  # before it is removed, since a signal would write into it
        shutil.rmtree(folder, ignore_errors=True)
        for empty in (folder.parent, job.run_dir):  # refused before it became a run
            with contextlib.suppress(OSError):
                empty.rmdir()
    if outcome.exit_code == errors.EXIT_FAULT and marker.is_file() and not was_finished:
        # the ranks' outcome file was lost, as on a file server that is slow to show it
        outcome = replace(outcome, exit_code=errors.EXIT_DONE)
    if outcome.exit_code == errors.EXIT_STOPPED_BY_SIGNAL and signals.name and not outcome.reason:
        outcome = replace(outcome, reason=f"stopped by {signals.told}")
    return outcome


def _record(job: Job, outcome: Outcome, *, began: datetime, resumed_at: int) -> None:
    """Appends the start to the run's starts; after the last one, logs the cost of all of them."""
    if not job.run_dir.is_dir():
        return
    hosts = tuple(host.name for host in job.hosts)
    ended = datetime.now(UTC)
    start = StartRecord(began, ended, hosts, resumed_at=resumed_at, **asdict(outcome))
    try:
        append_start(job.run_dir, start)
    except OSError as error:
        logger.warning("%s: the start cannot be noted: %s", job.run_dir, error.strerror)
    summary = job.run_dir / "metrics.json"
    if outcome.exit_code != errors.EXIT_DONE or not summary.is_file():
        return
    cost = json.loads(summary.read_text(encoding="utf-8")).get("goodput")
    if cost is None:  # a summary of an earlier version
        return
    logger.info(
        "goodput: %d of %d steps were new, %.1f %% of %.0f s went into them; starts: %d, %.0f s "
        "between them",
        *(cost["productive_steps"], cost["productive_steps"] + cost["redone_steps"]),
        *(100 * cost["share"], cost["seconds"], cost["starts"], cost["down_seconds"]),
    )


def _resumed_at(job: Job) -> int:
    """Step of the newest checkpoint if the start resumes from it, else 0."""
    return newest_saved_step(job.run_dir) if job.resume == "auto" else 0
