"""Runs the jobs of a data build as tasks of Ray."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, Self

import ray
import ray.exceptions

from cdrmix.corpus.remote_jobs import (
    Function,
    J,
    RoundsEngine,
    error_as_json,
    error_from_json,
    pack_job,
    run_packed,
)

# Results are a job's error; the least that Ray allows is 75 MB.
_OBJECT_STORE_BYTES = 2**27


class RayEngine(RoundsEngine):
    """Runs jobs on a Ray cluster that this machine belongs to, else on this machine.

    Args:
        max_tasks: most jobs at a time.
    """

    logs = "the logs of Ray"

    def __init__(self, *, max_tasks: int) -> None:
        self._max_tasks = max_tasks

    def __enter__(self) -> Self:
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "WARNING"}
        try:
            ray.init(address="auto", **quiet)
        except ConnectionError:  # no cluster is running: start one of this machine alone
            ray.init(
                num_cpus=self._max_tasks,
                object_store_memory=_OBJECT_STORE_BYTES,
                include_dashboard=False,
                **quiet,
            )
        return self

    def end(self) -> None:
        """Disconnects from Ray, which ends the jobs."""
        ray.shutdown()

    def run_round(self, function: Function[J], jobs: Sequence[J], show: Callable[[], None]) -> None:
        """Runs each job as a task."""
        # By default Ray starts the task of a worker that died again and again; a document that
        # kills its reader would never be set aside.
        task = ray.remote(max_retries=0)(_run_job)
        waiting = iter(jobs)
        running: list[Any] = []
        while True:
            room = self._max_tasks - len(running)
            running += [task.remote(pack_job(function, job)) for job in islice(waiting, room)]
            if not running:
                return
            done, running = ray.wait(running)
            for reference in done:
                try:
                    error = ray.get(reference)
                except ray.exceptions.RayTaskError:  # a fault of ours, not of a machine
                    raise
                except ray.exceptions.RayError:  # the worker died: what it left behind counts
                    continue
                if error:
                    raise error_from_json(error)
            show()


def _run_job(call: bytes) -> bytes:
    # An error that a user can correct is a result: Ray would wrap one that is raised.
    error = run_packed(call)
    return b"" if error is None else error_as_json(error)
