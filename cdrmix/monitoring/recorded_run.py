"""Contents of a run directory, as a report reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cdrmix.config.faults import HealthConfig
from cdrmix.config.schema import Config
from cdrmix.monitoring.metric_columns import MetricColumns


@dataclass(frozen=True)
class RecordedRun:
    """Contents of a run directory, of a run that finished, still goes on, or died.

    `problems` says, by file, why one could not be read.
    """

    folder: Path
    metrics: MetricColumns
    summary: Mapping[str, Any]
    plan: Mapping[str, Any]
    environment: Mapping[str, Any]
    health: Mapping[str, Any]
    reasoning: Mapping[str, Any]
    starts: Sequence[Mapping[str, Any]]  # in order; empty for a run that kept none
    config_text: str
    config: Config | None
    problems: Mapping[str, str]

    @property
    def last_step(self) -> int:
        """Completed steps, as far as they are logged."""
        return max(self.metrics.last_step, self.summary.get("steps") or 0)

    @property
    def num_steps(self) -> int | None:
        """Planned steps, those of Stage B included; None when the configuration cannot be read."""
        # The plan counts the steps of both stages; the configuration has those of each.
        both_stages = (self.plan.get("stage_b") or {}).get("num_steps")
        if both_stages is not None:
            return int(both_stages)
        return None if self.config is None else self.config.training.num_steps

    @property
    def has_stage_b_steps(self) -> bool:
        """True where a step of Stage B was logged."""
        return any(name.startswith(("stage_b/", "policy/")) for name in self.metrics.names)

    @property
    def is_stage_b_alone(self) -> bool:
        """True where only steps of Stage B were logged: Stage A was another run."""
        return self.has_stage_b_steps and self.latest("loss") is None

    @property
    def reasoning_rows(self) -> Sequence[Mapping[str, Any]]:
        """Rows of the reasoning suite: those of the end of the run, else those stored since."""
        final_rows = (self.summary.get("stage_b") or {}).get("reasoning")
        return final_rows or self.reasoning.get("rows") or []

    @property
    def unjudged_steps(self) -> int:
        """First steps, of which health judges neither loss nor routing."""
        health = self.config.health if self.config else HealthConfig()
        return health.warmup_steps

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns steps and values of a metric, where it was logged."""
        return self.metrics.series(name)

    def with_final(
        self, steps: np.ndarray, values: np.ndarray, final: float | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Adds the value of the final evaluation, which is not among the logged ones."""
        last = self.summary.get("steps")
        # An evaluation of the last step on the way is the same point of the curve.
        if final is None or last is None or last in steps:
            return steps, values
        # Where the run was made longer, later steps have been evaluated by now.
        place = np.searchsorted(steps, last)
        return np.insert(steps, place, last), np.insert(values, place, final)

    def latest(self, name: str) -> float | None:
        """Returns the last logged value of a metric."""
        return self.metrics.latest(name)
