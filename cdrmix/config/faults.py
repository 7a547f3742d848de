"""Schema of `health`: faults that a run watches for, and what it does about each."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from cdrmix.config.section import Section


class NonFiniteConfig(Section):
    """Non-finite loss or gradient. Its step is never applied, whatever the action: weights and
    moments do not change. In fp16, a gradient is first tried with a lower loss scale."""

    action: Literal["skip", "rollback", "stop"] = "skip"
    """skip: continue with the next batch. rollback, stop: at the first one."""
    max_consecutive: int = Field(5, ge=1)
    """Most steps skipped in a row before the run is stopped (count)."""


class LossSpikeConfig(Section):
    """Loss far above its recent median. Its step is already applied when it is detected."""

    action: Literal["warn", "lower_rate", "rollback", "stop"] = "warn"
    """lower_rate: multiplies the learning rate of all later steps by rate_factor, and judges again
    once half of window_steps are over. rollback: drops its batch, and those since the
    checkpoint."""
    rate_factor: float = Field(0.5, gt=0, lt=1)
    """Factor of lower_rate (ratio)."""
    max_lowerings: int = Field(3, ge=1)
    """Times that lower_rate acts in a run; the next spike is a warning (count)."""
    window_steps: int = Field(128, ge=8)
    """Steps that a loss is compared with, at least half of them present."""
    # The factor makes it the standard deviation where losses are normal; the median is not moved by
    # a few losses far out. Losses that hardly vary would make spikes of nothing: hence a least one.
    deviations: float = Field(10.0, gt=0)
    """Height above the median from which a loss is a spike (standard deviations, as 1.4826 times
    the median absolute deviation; at least 1 % of the median each)."""


class RoutingConfig(Section):
    """Collapse of expert routing at logged steps, by means over the layers."""

    action: Literal["warn", "rollback", "stop"] = "warn"
    """rollback: helps against bad data, not against a bad router."""
    times: int = Field(3, ge=1)
    """Logged steps in a row beyond a limit: single batches vary (count)."""
    min_entropy_share: float = Field(5 / 6, ge=0, le=1)
    """Least entropy over log2(num_experts) (ratio)."""
    max_overflow_fraction: float = Field(0.05, ge=0, le=1)
    """Largest share of assignments beyond the capacity (ratio)."""


class LoaderWaitConfig(Section):
    """Waiting for data, on the rank that waits longest, between two logged steps."""

    action: Literal["warn", "stop"] = Field("warn", description="stop: after a save.")
    max_share: float = Field(0.5, gt=0, le=1)
    """Largest share of the time spent waiting for data (ratio)."""
    min_seconds: float = Field(1.0, ge=0, description="Shorter waiting is never a stall (seconds).")


class MemoryShareConfig(Section):
    """Peak memory of the fullest rank at logged steps: of its GPU, or of its share of the host."""

    action: Literal["warn", "stop"] = Field("warn", description="stop: after a save.")
    max_share: float = Field(0.9, gt=0, le=1, description="Largest share of the memory (ratio).")


class HealthConfig(Section):
    """Faults that a run watches for, and its reactions. `warn` logs a fault while it lasts;
    `rollback` returns to the newest good checkpoint and continues behind the bad batch; `stop` ends
    the run with exit code 2."""

    non_finite: NonFiniteConfig = NonFiniteConfig()
    loss_spike: LossSpikeConfig = LossSpikeConfig()
    routing: RoutingConfig = RoutingConfig()
    loader: LoaderWaitConfig = LoaderWaitConfig()
    memory: MemoryShareConfig = MemoryShareConfig()
    warmup_steps: int = Field(100, ge=0)
    """First steps, without checks of loss and routing (count)."""
    max_rollbacks: int = Field(3, ge=0)
    """Rollbacks of a run; the next one stops it instead (count)."""
