"""MLflow: one run in a SQLite file of the run directory, or on a server.

MLflow overwrites no point and can delete none, so what a run takes back would be shown twice. Where
a run has gone back, its copy is made anew: a new run of MLflow gets the lines that still count, and
the one before is deleted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

from cdrmix.config.tracking import MlflowOptions
from cdrmix.tracking.environment import keep_mlflow_quiet
from cdrmix.tracking.tracker import Line, TrackedRun, Tracker

_MOST_METRICS = 1000  # of one request, by the server's limit
_MOST_PARAMS = 100
_MOST_LETTERS = 500  # of a parameter, which servers of earlier versions take
_REFUSED = re.compile(r"[^\w.\- :/]", re.ASCII)  # in names
_DATABASE = "mlflow.db"
_RUN_ID = "run_id"  # file with the id of the run to go on with


class MlflowTracker(Tracker):
    """A run of MLflow, which the starts of ours go on with."""

    Options = MlflowOptions

    def __init__(self, options: MlflowOptions) -> None:
        self._options = options

    def open(self, run: TrackedRun) -> None:
        """Finds the run of earlier starts or begins one; nothing is sent to MLflow's makers."""
        keep_mlflow_quiet()
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        self._tracked = run
        uri = self._options.uri or f"sqlite:///{run.folder / _DATABASE}"
        self._client: Any = MlflowClient(tracking_uri=uri, registry_uri=uri)
        self._run_id = None
        with suppress(FileNotFoundError, MlflowException):  # the server may have lost it
            there = self._client.get_run((run.place / _RUN_ID).read_text())
            if there.info.lifecycle_stage == "active":
                self._run_id = there.info.run_id
        self._replaced = self._run_id if run.is_copy else None  # once the copy is whole
        if run.is_copy or self._run_id is None:
            self._begin_anew(up_to=None)
        elif there.data.metrics.get("step", -1) > run.step or there.data.params != self._params():
            self._begin_anew(up_to=run.step)
        else:
            self._client.set_terminated(self._run_id, status="RUNNING")

    def write(self, lines: Sequence[Line]) -> None:
        """Logs the lines in batches."""
        from mlflow.entities import Metric

        metrics = (
            Metric(_name(key), value, int(line.time * 1000), line.step)
            for line in lines
            for key, value in line.values.items()
        )
        for batch in _batches(metrics, _MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=batch)

    def rewind(self, step: int) -> None:
        """Puts a run of the lines up to `step` in the place of the present one."""
        self._begin_anew(up_to=step)

    def close(self) -> None:
        """Marks the run as finished."""
        self._client.set_terminated(self._run_id)
        if self._replaced is not None:
            self._client.delete_run(self._replaced)

    def _begin_anew(self, *, up_to: int | None) -> None:
        """Begins a run with the lines up to a step, None: without any, and deletes the earlier."""
        from mlflow.entities import Param

        earlier = self._run_id
        run = self._tracked
        made = self._client.create_run(self._experiment(), run_name=run.name)
        self._run_id = made.info.run_id
        for batch in _batches((Param(*each) for each in self._params().items()), _MOST_PARAMS):
            self._client.log_batch(self._run_id, params=batch)
        if up_to is not None:
            self.write(run.lines(up_to=up_to))
        (run.folder / _RUN_ID).write_text(self._run_id)
        if earlier is not None and not run.is_copy:
            self._client.delete_run(earlier)

    def _experiment(self) -> str:
        from mlflow.exceptions import MlflowException

        name = self._options.experiment
        folder = None if self._options.uri else (self._tracked.place / "artifacts").as_uri()
        with suppress(MlflowException):  # it exists
            return str(self._client.create_experiment(name, artifact_location=folder))
        return str(self._client.get_experiment_by_name(name).experiment_id)

    def _params(self) -> dict[str, str]:
        return dict(_flat(self._tracked.config, ""))


def _flat(config: Mapping[str, Any], path: str) -> Iterator[tuple[str, str]]:
    """Yields the keys of a configuration, dotted, with their values as texts."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{path}{key}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value)
            yield _name(f"{path}{key}"), text[:_MOST_LETTERS]


def _name(key: str) -> str:
    """Key as MLflow takes it: of ours, `@`, `%` and `~` become `:`, which no key of ours has."""
    return _REFUSED.sub(":", key)


def _batches(items: Iterator[Any], size: int) -> Iterator[list[Any]]:
    while batch := list(islice(items, size)):
        yield batch
