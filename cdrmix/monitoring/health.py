"""Whether a run is healthy, judged from numbers that all ranks share, and what became of it.

Nothing here communicates or acts: given the same numbers, every rank comes to the same verdicts,
and cdrmix.engines.recovery carries them out. No torch.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal, NamedTuple

from cdrmix.config.schema import HealthConfig

Watched = Literal["non_finite", "loss_spike", "routing", "loader", "memory"]
Action = Literal["warn", "skip", "rollback", "stop"]

# A median absolute deviation times this is the standard deviation of normal numbers.
_SIGMA_PER_MAD = 1.4826
# Losses that hardly differ make any loss a spike: a deviation is at least this of the median.
_LEAST_DEVIATION = 0.01
# A run of months keeps its newest; counts go on.
_EVENTS_KEPT = 500
_NO_TIMELINE: dict[str, Any] = {"losses": [], "consecutive": 0, "uneven": 0, "ongoing": []}


class Verdict(NamedTuple):
    """Something unhealthy.

    Attributes:
        watched: what it is, by its key of the configuration's section `health`.
        action: what is to be done.
        why: what was seen and what is allowed, for people.
        is_new: False while it lasts from an earlier judgement on.
    """

    watched: Watched
    action: Action
    why: str
    is_new: bool


@dataclass
class Event:
    """Something unhealthy for as long as it lasted, and what was done.

    Attributes:
        watched, action: as in a verdict.
        first_step, last_step: steps at which it was seen.
        times: judgements that saw it.
        why: of the first one.
        outcome: what came of a rollback.
    """

    watched: Watched
    action: Action
    first_step: int
    last_step: int
    times: int
    why: str
    outcome: str = ""


class Health:
    """What the judgement of a step needs of the steps before it, and the record of a run.

    Attributes:
        skipped_steps: optimizer steps that were not taken.
        rollbacks: how often the run went back.
        rolled_back_to: step of the checkpoint that it last went back to, or None.
        passed_over: windows (first sample, last + 1) of the global order that no weight of the run
            was trained on.
        warnings: judgements that were unhealthy and left at that.
        events: all of it, in order.
    """

    def __init__(self, config: HealthConfig, *, num_experts: int | None) -> None:
        """
        Args:
            config: limits and actions.
            num_experts: experts of a layer; None for a dense model.
        """
        self._config = config
        self._most_bits = math.log2(num_experts) if num_experts else 0.0
        self._losses: deque[float] = deque(maxlen=config.loss_spike.window_steps)
        self._consecutive = 0
        self._last_not_finite = 0
        self._uneven = 0
        self._ongoing: set[Watched] = set()
        self.skipped_steps = 0
        self.rollbacks = 0
        self.rolled_back_to: int | None = None
        self.passed_over: list[tuple[int, int]] = []
        self.warnings = 0
        self.events: list[Event] = []

    # Judgements. Steps are counted as completed, from 1.

    def step_done(self, step: int, *, is_skipped: bool) -> Verdict | None:
        """Judge whether the gradients of a step were finite.

        Not called where fp16's loss scale was lowered, which tells nothing yet.

        Args:
            step: the step.
            is_skipped: whether the optimizer did not take it.
        """
        if is_skipped:
            return self._not_finite(step, "the gradients are not finite")
        self._consecutive = 0
        self._ongoing.discard("non_finite")
        return None

    def loss_known(self, step: int, loss: float) -> Verdict | None:
        """Judge the loss of a step, once it is known (nats per token)."""
        if not math.isfinite(loss):
            is_counted = step == self._last_not_finite
            return None if is_counted else self._not_finite(step, f"loss = {loss}")
        before = list(self._losses)
        limit = spike_limit(before, self._config)
        # A level that stays becomes the new median, so that spikes above it are seen again.
        self._losses.append(loss)
        if limit is None or step <= self._config.warmup_steps or loss <= limit:
            self._ongoing.discard("loss_spike")
            return None
        why = f"loss {loss:.4f} is above {limit:.4f}, the median before is {median(before):.4f}"
        return self._unhealthy("loss_spike", self._config.loss_spike.action, step, why)

    def routing_known(self, step: int, *, entropy_bits: float, overflow: float) -> Verdict | None:
        """Judge the routing of a step: its entropy, and the share of overflowing assignments."""
        limits = self._config.routing
        least = limits.min_entropy_share * self._most_bits
        faults = []
        if entropy_bits < least:
            faults.append(f"entropy {entropy_bits:.3f} bits is below {least:.3f}")
        if overflow > limits.max_overflow_fraction:
            faults.append(f"overflow {overflow:.1%} is above {limits.max_overflow_fraction:.1%}")
        self._uneven = self._uneven + 1 if faults else 0
        if self._uneven < limits.times or step <= self._config.warmup_steps:
            self._ongoing.discard("routing")
            return None
        return self._unhealthy("routing", limits.action, step, ", ".join(faults))

    def wait_known(self, step: int, *, seconds: float, share: float) -> Verdict | None:
        """Judge the time that the slowest rank waited for data since the last logged step."""
        limits = self._config.loader
        if share <= limits.max_share or seconds < limits.min_seconds:
            self._ongoing.discard("loader")
            return None
        why = (
            f"{seconds:.1f} s were waited for data, {share:.0%} of the time, "
            f"above {limits.max_share:.0%}"
        )
        return self._unhealthy("loader", limits.action, step, why)

    def memory_known(self, step: int, share: float) -> Verdict | None:
        """Judge the peak memory of the fullest rank, as a share of what it has."""
        limits = self._config.memory
        if share <= limits.max_share:
            self._ongoing.discard("memory")
            return None
        why = f"peak memory is {share:.1%} of what there is, above {limits.max_share:.0%}"
        return self._unhealthy("memory", limits.action, step, why)

    def _not_finite(self, step: int, sign: str) -> Verdict | None:
        limits = self._config.non_finite
        self._last_not_finite = step
        self.skipped_steps += 1
        self._consecutive += 1
        if limits.action != "skip" or self._consecutive <= limits.max_consecutive:
            return self._unhealthy("non_finite", limits.action, step, sign)
        why = f"{sign}, {self._consecutive} steps in a row"
        return self._unhealthy("non_finite", "stop", step, why)

    def _unhealthy(self, watched: Watched, action: Action, step: int, why: str) -> Verdict:
        if action == "rollback" and self.rollbacks >= self._config.max_rollbacks:
            action = "stop"
            why = f"{why}; health.max_rollbacks = {self.rollbacks} were done"
        self.warnings += action == "warn"
        last = next((event for event in reversed(self.events) if event.watched == watched), None)
        lasts = watched in self._ongoing and action in ("warn", "skip")
        is_new = last is None or not lasts or last.action != action
        if last is None or is_new:
            self.events.append(Event(watched, action, step, step, 1, why))
            del self.events[:-_EVENTS_KEPT]
        else:
            last.last_step = step
            last.times = last.times + 1
        self._ongoing.add(watched)
        return Verdict(watched, action, why, is_new)

    # What becomes of the run.

    def rolled_back(
        self, *, to_step: int, passed_over: tuple[int, int], timeline: dict[str, Any] | None
    ) -> None:
        """Note that the run went back.

        Args:
            to_step: step of the checkpoint.
            passed_over: samples of the global order that are not trained on: first, last + 1.
            timeline: `timeline` of the checkpoint, from which judging goes on; None: it has none.
        """
        self.rollbacks += 1
        self.rolled_back_to = to_step
        first, end = passed_over
        # what was passed over behind this checkpoint is part of what is passed over now
        self.passed_over = [window for window in self.passed_over if window[0] < first]
        self.passed_over.append((first, end))
        event = next(event for event in reversed(self.events) if event.action == "rollback")
        event.outcome = f"back to step {to_step}, past samples {first:,} to {end - 1:,}"
        self._load_timeline(timeline or _NO_TIMELINE)

    @property
    def passed_over_samples(self) -> int:
        """Samples that were passed over, all windows together."""
        return sum(end - first for first, end in self.passed_over)

    def trained_windows(self, consumed: int) -> Iterable[tuple[int, int]]:
        """Windows (first, last + 1) of the first `consumed` samples without those passed over."""
        start = 0
        for first, end in self.passed_over:
            yield start, min(first, consumed)
            start = end
        yield start, max(start, consumed)

    def metrics(self) -> dict[str, int]:
        """Counts since the start of the run, by metric name; none of a run that was healthy."""
        counts = {
            "health/skipped_steps": self.skipped_steps,
            "health/rollbacks": self.rollbacks,
            "health/passed_over_samples": self.passed_over_samples,
        }
        return {name: count for name, count in counts.items() if count}

    def timeline(self) -> dict[str, Any]:
        """What judging the next step depends on, as JSON."""
        return {
            "losses": list(self._losses),
            "consecutive": self._consecutive,
            "uneven": self._uneven,
            "ongoing": sorted(self._ongoing),
        }

    def record(self) -> dict[str, Any]:
        """What became of the run so far, as JSON."""
        return {
            "skipped_steps": self.skipped_steps,
            "rollbacks": self.rollbacks,
            "rolled_back_to": self.rolled_back_to,
            "passed_over": [list(window) for window in self.passed_over],
            "warnings": self.warnings,
            "events": [asdict(event) for event in self.events],
        }

    def state_dict(self) -> dict[str, Any]:
        """All of it, for a checkpoint."""
        return {"timeline": self.timeline(), "record": self.record()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint's state."""
        record = dict(state["record"])
        self.skipped_steps = record["skipped_steps"]
        self.rollbacks = record["rollbacks"]
        self.rolled_back_to = record["rolled_back_to"]
        self.warnings = record["warnings"]
        self.passed_over = [(first, end) for first, end in record["passed_over"]]
        self.events = [Event(**event) for event in record["events"]]
        self._load_timeline(state["timeline"])

    def _load_timeline(self, timeline: dict[str, Any]) -> None:
        self._losses.clear()
        self._losses.extend(timeline["losses"])
        self._consecutive = timeline["consecutive"]
        self._uneven = timeline["uneven"]
        self._ongoing = set(timeline["ongoing"])


def spike_limit(losses: Iterable[float], config: HealthConfig) -> float | None:
    """The loss above which the next one is a spike; None while there is too little to compare.

    Median and median absolute deviation stand where they are when a few losses are far out.
    """
    known = list(losses)
    if len(known) < config.loss_spike.window_steps // 2:
        return None
    middle = median(known)
    spread = _SIGMA_PER_MAD * median(abs(loss - middle) for loss in known)
    deviation = max(spread, _LEAST_DEVIATION * abs(middle))
    return middle + config.loss_spike.deviations * deviation
