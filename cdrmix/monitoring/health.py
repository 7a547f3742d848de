"""Health of a run: verdicts on numbers that all ranks share, and the record of the events.

Nothing here communicates or acts: from the same numbers, every rank comes to the same verdicts,
and cdrmix.engines.recovery carries them out. No torch.
"""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any, Literal, NamedTuple, Self

from cdrmix.config.faults import HealthConfig
from cdrmix.config.schema import Config

Watched = Literal["non_finite", "loss_spike", "routing", "loader", "memory", "forgetting"]
Action = Literal["warn", "lower_rate", "skip", "rollback", "stop"]

# A median absolute deviation times this is the standard deviation of normal numbers.
_SIGMA_PER_MAD = 1.4826
# Smallest deviation as a share of the median: where losses hardly differ, any would be a spike.
_LEAST_DEVIATION = 0.01
# A run of months stores its newest events only; the counts go on.
_MAX_EVENTS = 500


class Verdict(NamedTuple):
    """A judgement that something is unhealthy."""

    watched: Watched  # key of the configuration's section `health`; or of `cpt`, forgetting
    action: Action
    why: str  # the value and its limit, for people
    is_new: bool  # False while the same state lasts since an earlier judgement


@dataclass
class Event:
    """An unhealthy state from its first judgement to its last."""

    watched: Watched
    action: Action
    first_step: int
    last_step: int
    times: int  # number of judgements
    why: str  # reason of the first one
    outcome: str = ""  # of a rollback, or of a lowered rate


@dataclass
class _Timeline:
    """State that the next judgement depends on."""

    losses: list[float] = field(default_factory=list)
    consecutive: int = 0  # steps in a row that were not finite
    uneven: int = 0  # logged steps in a row with uneven routing
    ongoing: set[Watched] = field(default_factory=set)
    lowerings: int = 0  # times that the learning rate was lowered
    rate_scale: float = 1.0  # factor of the schedule's learning rate after them


class Health:
    """Judge of each step by the steps before it, and record of a run."""

    def __init__(
        self,
        config: HealthConfig,
        *,
        num_experts: int | None,
        num_mixer_experts: int | None = None,
    ) -> None:
        """Takes limits and actions, and the experts of a layer and of a mixer; None without."""
        self._config = config
        self._most_bits = math.log2(num_experts) if num_experts else 0.0
        self._most_mixer_bits = math.log2(num_mixer_experts) if num_mixer_experts else 0.0
        self._timeline = _Timeline()
        self._last_not_finite = 0
        self.skipped_steps = 0  # optimizer steps that were not taken
        self.rollbacks = 0
        self.rolled_back_to: int | None = None  # step of the checkpoint of the last rollback
        # windows (first sample, last + 1) of the global order that no weight was trained on
        self.passed_over: list[tuple[int, int]] = []
        self.warnings = 0  # unhealthy judgements without a further action
        self.events: list[Event] = []  # the newest, in order
        self._forgetting: Verdict | None = None  # until it is taken

    @classmethod
    def of_run(cls, config: Config) -> Self:
        """Makes that of a run, whose model tells how many experts there are to choose from."""
        moe, mixers = config.model.moe, config.model.routing_mamba
        return cls(
            config.health,
            num_experts=moe.num_experts if moe else None,
            num_mixer_experts=mixers.num_experts if mixers else None,
        )

    # Judgements. Steps are counted as completed, from 1.

    def step_done(self, step: int, *, is_skipped: bool) -> Verdict | None:
        """Judges whether the gradients of a step were finite: else the optimizer skipped it.

        Not called where the loss scale of fp16 was lowered: that step proves nothing yet.
        """
        if is_skipped:
            return self._not_finite(step, "the gradients are not finite")
        self._timeline.consecutive = 0
        self._timeline.ongoing.discard("non_finite")
        return None

    def loss_known(self, step: int, loss: float) -> Verdict | None:
        """Judges the loss of a step, once it is known (nats per token)."""
        if not math.isfinite(loss):
            # Its gradients were not finite either, and step_done has counted them.
            is_counted = step == self._last_not_finite
            return None if is_counted else self._not_finite(step, f"loss = {loss}")
        before = self._timeline.losses
        limit = spike_limit(before, self._config)
        # A level that stays becomes the new median, so that spikes above it are seen again.
        window = [*before, loss][-self._config.loss_spike.window_steps :]
        self._timeline.losses = window
        if limit is None or step <= self._config.warmup_steps or loss <= limit:
            self._timeline.ongoing.discard("loss_spike")
            return None
        why = f"loss {loss:.4f} is above {limit:.4f}, the median before is {median(before):.4f}"
        return self._unhealthy("loss_spike", self._config.loss_spike.action, step, why)

    def routing_known(
        self,
        step: int,
        *,
        entropy_bits: float | None,
        overflow: float,
        mixer_entropy_bits: float | None = None,
    ) -> Verdict | None:
        """Judges the routing of a step: its entropy, that of mixers with experts, and the share of
        overflowing assignments; None where there are no such experts."""
        limits = self._config.routing
        faults = []
        for of, bits, most in (
            ("entropy", entropy_bits, self._most_bits),
            ("entropy of mixers", mixer_entropy_bits, self._most_mixer_bits),
        ):
            least = limits.min_entropy_share * most
            if bits is not None and bits < least:
                faults.append(f"{of} {bits:.3f} bits is below {least:.3f}")
        if overflow > limits.max_overflow_fraction:
            faults.append(f"overflow {overflow:.1%} is above {limits.max_overflow_fraction:.1%}")
        self._timeline.uneven = self._timeline.uneven + 1 if faults else 0
        if self._timeline.uneven < limits.times or step <= self._config.warmup_steps:
            self._timeline.ongoing.discard("routing")
            return None
        return self._unhealthy("routing", limits.action, step, ", ".join(faults))

    def wait_known(self, step: int, *, seconds: float, share: float) -> Verdict | None:
        """Judges the time that the slowest rank waited for data since the last logged step."""
        limits = self._config.loader
        if share <= limits.max_share or seconds < limits.min_seconds:
            self._timeline.ongoing.discard("loader")
            return None
        why = (
            f"{seconds:.1f} s were waited for data, {share:.0%} of the time, "
            f"above {limits.max_share:.0%}"
        )
        return self._unhealthy("loader", limits.action, step, why)

    def memory_known(self, step: int, share: float) -> Verdict | None:
        """Judges the peak memory of the fullest rank, as a share of its memory."""
        limits = self._config.memory
        if share <= limits.max_share:
            self._timeline.ongoing.discard("memory")
            return None
        why = f"peak memory is {share:.1%} of what there is, above {limits.max_share:.0%}"
        return self._unhealthy("memory", limits.action, step, why)

    def forgetting_known(self, step: int, forgotten: dict[str, float], limit: float | None) -> None:
        """Judges the rise of the held-out loss on old data, by folder (nats per token), for
        `take_forgetting`."""
        name = max(forgotten, key=forgotten.__getitem__, default=None)
        if name is None or limit is None or forgotten[name] <= limit:
            self._timeline.ongoing.discard("forgetting")
            return
        why = f"{forgotten[name]:.4f} nats of {name} are forgotten, above {limit:g}"
        self._forgetting = self._unhealthy("forgetting", "stop", step, why)

    def take_forgetting(self) -> Verdict | None:
        """Returns the verdict on what is forgotten, once."""
        verdict, self._forgetting = self._forgetting, None
        return verdict

    def _not_finite(self, step: int, sign: str) -> Verdict | None:
        limits = self._config.non_finite
        self._last_not_finite = step
        self.skipped_steps += 1
        self._timeline.consecutive += 1
        # Single steps skip for a bad batch; many in a row mean weights that no batch mends.
        if limits.action != "skip" or self._timeline.consecutive <= limits.max_consecutive:
            return self._unhealthy("non_finite", limits.action, step, sign)
        why = f"{sign}, {self._timeline.consecutive} steps in a row"
        return self._unhealthy("non_finite", "stop", step, why)

    def _unhealthy(self, watched: Watched, action: Action, step: int, why: str) -> Verdict:
        # Spikes that come back at a fraction of the rate have another cause than the rate.
        if action == "lower_rate" and self.lowerings >= self._config.loss_spike.max_lowerings:
            action = "warn"
            why = f"{why}; health.loss_spike.max_lowerings = {self.lowerings} were done"
        # A fault that comes back after each rollback is not in the data that was passed over.
        if action == "rollback" and self.rollbacks >= self._config.max_rollbacks:
            action = "stop"
            why = f"{why}; health.max_rollbacks = {self.rollbacks} were done"
        self.warnings += action == "warn"
        # A rollback or a stop is an event of its own each time; a warning may last over many steps.
        last = next((event for event in reversed(self.events) if event.watched == watched), None)
        lasts = watched in self._timeline.ongoing and action in ("warn", "skip")
        is_new = last is None or not lasts or last.action != action
        if last is None or is_new:
            self.events.append(Event(watched, action, step, step, 1, why))
            del self.events[:-_MAX_EVENTS]
        else:
            last.last_step = step
            last.times = last.times + 1
        self._timeline.ongoing.add(watched)
        return Verdict(watched, action, why, is_new)

    # Reactions, and the record of the run.

    @property
    def lowerings(self) -> int:
        """Times that the learning rate was lowered, without those that a rollback undid."""
        return self._timeline.lowerings

    @property
    def rate_scale(self) -> float:
        """Factor of the schedule's learning rate in the coming step."""
        return self._timeline.rate_scale

    def rate_lowered(self) -> None:
        """Lowers the learning rate of all later steps, after a verdict `lower_rate`.

        The window of losses begins anew: the plateau that a spike may end in is no reason to act
        again, and nothing is judged a spike until half a window of losses is known.
        """
        self._timeline.lowerings += 1
        # A product, so that another rate_factor later on changes later lowerings alone.
        self._timeline.rate_scale *= self._config.loss_spike.rate_factor
        self._timeline.losses = []
        event = next(event for event in reversed(self.events) if event.action == "lower_rate")
        event.outcome = (
            f"learning rate times {self.rate_scale:g} from the next step on, lowering "
            f"{self.lowerings} of {self._config.loss_spike.max_lowerings}"
        )

    def rolled_back(
        self, *, to_step: int, passed_over: tuple[int, int], timeline: dict[str, Any] | None
    ) -> None:
        """Records a rollback to the checkpoint of a step.

        Args:
            passed_over: samples of the global order that are not trained on: first, last + 1.
            timeline: of the checkpoint, from which judging continues; None if it has none.
        """
        self.rollbacks += 1
        self.rolled_back_to = to_step
        first, end = passed_over
        # The new window begins at the checkpoint, so it covers every window behind that.
        self.passed_over = [window for window in self.passed_over if window[0] < first]
        self.passed_over.append((first, end))
        # The judgement that led here is on record already: events are added with the verdict.
        event = next(event for event in reversed(self.events) if event.action == "rollback")
        event.outcome = f"back to step {to_step}, past samples {first:,} to {end - 1:,}"
        self._load_timeline(timeline or {})

    @property
    def passed_over_samples(self) -> int:
        """Number of samples in all windows that were passed over."""
        return sum(end - first for first, end in self.passed_over)

    def trained_windows(self, consumed: int) -> Iterable[tuple[int, int]]:
        """Yields the windows (first, last + 1) of `consumed` samples that were trained on."""
        start = 0
        for first, end in self.passed_over:
            yield start, min(first, consumed)
            start = end
        yield start, max(start, consumed)

    def metrics(self) -> dict[str, int]:
        """Returns counts since the start of the run, by metric name; empty for a healthy run."""
        counts = {
            "health/skipped_steps": self.skipped_steps,
            "health/rollbacks": self.rollbacks,
            "health/passed_over_samples": self.passed_over_samples,
            "health/lowerings": self.lowerings,
        }
        return {name: count for name, count in counts.items() if count}

    def record(self) -> dict[str, Any]:
        """Returns the record of the run so far, as JSON."""
        return {
            "skipped_steps": self.skipped_steps,
            "rollbacks": self.rollbacks,
            "rolled_back_to": self.rolled_back_to,
            "passed_over": [list(window) for window in self.passed_over],
            "lowerings": self.lowerings,
            "warnings": self.warnings,
            "events": [asdict(event) for event in self.events],
        }

    def state_dict(self) -> dict[str, Any]:
        """Returns timeline and record, for a checkpoint."""
        timeline = asdict(self._timeline) | {"ongoing": sorted(self._timeline.ongoing)}  # as JSON
        return {"timeline": timeline, "record": self.record()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from the state in a checkpoint."""
        record = dict(state["record"])
        self.skipped_steps = record["skipped_steps"]
        self.rollbacks = record["rollbacks"]
        self.rolled_back_to = record["rolled_back_to"]
        self.warnings = record["warnings"]
        self.passed_over = [(first, end) for first, end in record["passed_over"]]
        self.events = [Event(**event) for event in record["events"]]
        self._load_timeline(state["timeline"])

    def _load_timeline(self, timeline: dict[str, Any]) -> None:
        state = _Timeline(**timeline)
        losses = state.losses[-self._config.loss_spike.window_steps :]
        self._timeline = replace(state, losses=losses, ongoing=set(state.ongoing))


def spike_limit(losses: Iterable[float], config: HealthConfig) -> float | None:
    """Returns the loss above which the next one is a spike; None while there are too few losses.

    Median and median absolute deviation, because a few losses far out do not move them.
    """
    known = list(losses)
    # Of fewer losses, median and deviation say little.
    if len(known) < config.loss_spike.window_steps // 2:
        return None
    middle = median(known)
    spread = _SIGMA_PER_MAD * median(abs(loss - middle) for loss in known)
    deviation = max(spread, _LEAST_DEVIATION * abs(middle))
    return middle + config.loss_spike.deviations * deviation
