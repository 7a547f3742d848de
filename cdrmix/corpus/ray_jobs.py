"""Runs the jobs of a data build as rows of a Ray data set."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Self

import ray
import ray.data

from cdrmix.corpus.remote_jobs import (
    Function,
    J,
    RoundsEngine,
    error_as_json,
    error_from_json,
    pack_job,
    run_packed,
)

# Rows are a job's description and its error; the least that Ray allows is 75 MB.
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
        # The build shows its own progress.
        ray.data.DataContext.get_current().enable_progress_bars = False
        logging.getLogger("ray.data").setLevel(logging.WARNING)
        return self

    def end(self) -> None:
        """Disconnects from Ray, which ends the jobs."""
        ray.shutdown()

    def run_round(self, function: Function[J], jobs: Sequence[J], show: Callable[[], None]) -> None:
        """Runs each job as a row; Ray itself restarts a job whose worker died."""
        rows = [{"call": pack_job(function, job)} for job in jobs]
        tasks_at_a_time = ray.data.TaskPoolStrategy(size=min(self._max_tasks, len(rows)))
        # A block per row: Ray starts and repeats whole blocks.
        results = ray.data.from_items(rows, override_num_blocks=len(rows)).map(
            _run_row, compute=tasks_at_a_time
        )
        for row in results.iter_rows():
            if row["error"]:
                raise error_from_json(row["error"])
            show()


def _run_row(row: dict[str, bytes]) -> dict[str, bytes]:
    # An error is part of the row: Ray would wrap one that is raised, and repeat the job.
    error = run_packed(row["call"])
    return {"error": b"" if error is None else error_as_json(error)}
