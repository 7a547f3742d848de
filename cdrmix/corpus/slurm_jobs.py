"""Runs the jobs of a data build as ranks of a datatrove pipeline, by its SLURM executor.

The build itself stays on a login node, since datatrove refuses to submit from within a job. It
submits an array of tasks for each round and continues when the queue holds none of them.
"""

from __future__ import annotations

import hashlib
import itertools
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from datatrove.executor import SlurmPipelineExecutor
from datatrove.pipeline.base import PipelineStep

from cdrmix import log
from cdrmix.corpus.remote_jobs import (
    Function,
    J,
    RoundsEngine,
    error_from_json,
    run_call,
    write_calls,
)
from cdrmix.errors import DataError

# SLURM's own limit on the tasks of an array is 1,001; where there are more jobs, a task takes some.
_MAX_ARRAY_TASKS = 1_000
# SLURM asks its users not to query the controller in a tight loop.
_POLL_SECONDS = 2.0
# A busy controller answers after tens of seconds.
_SQUEUE_SECONDS = 60
_logger = log.get_logger(__name__)


class RunJobs(PipelineStep):
    """A datatrove step whose rank r runs job r of a folder."""

    # datatrove shows a step by these names in its logs.
    type = "CDRmix"
    name = "build jobs"

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Any:
        """Runs one job and returns `data` unchanged, as a step of a longer pipeline has to."""
        with self.track_time():
            run_call(self._folder, rank)
        self.stat_update("jobs", unit="job")
        return data


class _ArrayExecutor(SlurmPipelineExecutor):
    """datatrove's executor without its second job, which merges statistics.

    Nothing reads them, and the job would wait in the queue for ever after a task that failed.
    """

    def launch_job(self) -> None:
        try:
            super().launch_job()
        except subprocess.CalledProcessError as error:
            raise DataError(
                "--engine slurm: sbatch refused the tasks, as it says above. See --sbatch, and "
                f"{self.logging_dir.resolve_paths('launch_script.slurm')}"
            ) from error

    def launch_merge_stats(self) -> None:
        pass

    def get_sbatch_args(self, max_array: int = 1) -> dict[str, Any]:
        """Returns the directives with a value; for the others, SLURM has defaults."""
        directives = super().get_sbatch_args(max_array)
        return {name: value for name, value in directives.items() if value is not None}


class SlurmEngine(RoundsEngine):
    """Runs jobs as task arrays of SLURM.

    Args:
        folder: for jobs, logs and datatrove's completion marks, with a subfolder for each round;
            on a file system that all nodes share.
        max_tasks: most tasks at a time.
        sbatch: further options of sbatch, such as partition, time and mem-per-cpu.
    Raises:
        DataError: if this machine has no SLURM.
    """

    def __init__(self, folder: Path, *, max_tasks: int, sbatch: Mapping[str, str]) -> None:
        missing = [name for name in ("sbatch", "squeue", "scancel") if shutil.which(name) is None]
        if missing:
            raise DataError(
                f"--engine slurm: {', '.join(missing)}: not found on this machine. Start the build "
                "on a node from which jobs are submitted, or take --engine local."
            )
        self._folder = folder.resolve()
        self.logs = str(self._folder)
        self._max_tasks = max_tasks
        self._sbatch = dict(sbatch)
        self._numbers = itertools.count()
        # By this name a build finds the tasks that an earlier, killed build left in the queue.
        place = hashlib.sha256(self.logs.encode()).hexdigest()
        self._job_name = f"cdrmix-data-{place[:12]}"

    def __enter__(self) -> Self:
        answer = self._ask_queue()
        if answer.returncode != 0:
            raise DataError(f"--engine slurm: squeue: {answer.stderr.strip()}")
        self.end()
        shutil.rmtree(self._folder, ignore_errors=True)  # of a build that was interrupted
        # For the owner alone: datatrove's own description of the tasks is code, too.
        self._folder.mkdir(parents=True, mode=0o700)
        return self

    def end(self) -> None:
        """Ends the tasks in the queue and waits until they are gone."""
        if self._in_queue():
            subprocess.run(["scancel", "--me", "--name", self._job_name], check=False)
            while self._in_queue():
                time.sleep(_POLL_SECONDS)

    def run_round(self, function: Function[J], jobs: Sequence[J], show: Callable[[], None]) -> None:
        """Submits an array of tasks and waits until the queue holds none of them."""
        folder = self._folder / str(next(self._numbers))
        write_calls(folder / "jobs", function, jobs)
        self._new_array(RunJobs(folder / "jobs"), len(jobs), folder).run()
        while self._in_queue():
            time.sleep(_POLL_SECONDS)
            show()
        for path in sorted((folder / "jobs").glob("*.error")):
            raise error_from_json(path.read_bytes())

    def _new_array(self, step: PipelineStep, num_tasks: int, folder: Path) -> _ArrayExecutor:
        return _ArrayExecutor(
            pipeline=[step],
            tasks=num_tasks,
            time=None,
            partition=None,
            tasks_per_job=-(-num_tasks // _MAX_ARRAY_TASKS),
            workers=self._max_tasks,
            job_name=self._job_name,
            qos=None,
            # The interpreter of the build, whose folder has datatrove's launcher in it.
            env_command=f"export PATH='{Path(sys.executable).parent}':$PATH",
            sbatch_args={"mem-per-cpu": None} | self._sbatch,
            logging_dir=str(folder),
            with_srun=False,
        )

    def _in_queue(self) -> bool:
        """Returns True if any task is pending, running or ending."""
        answer = self._ask_queue()
        # A controller that is away for a while must not end a build of days: its tasks still run.
        if answer.returncode != 0:
            _logger.warning("squeue: %s; asking again", answer.stderr.strip())
            time.sleep(_POLL_SECONDS)
        return answer.returncode != 0 or bool(answer.stdout.strip())

    def _ask_queue(self) -> subprocess.CompletedProcess[str]:
        command = ["squeue", "--noheader", "--me", "--name", self._job_name, "--format", "%i"]
        try:
            return subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=_SQUEUE_SECONDS
            )
        except subprocess.TimeoutExpired as error:
            return subprocess.CompletedProcess(command, 1, "", str(error))
