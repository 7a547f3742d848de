"""The `health` section: what is watched, and what is done about it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from cdrmix.config.section import Section


class NonFiniteConfig(Section):
    """A loss or gradient that is not finite. Its step is never taken: weights and moments stay as
    they are, whatever the action. In fp16 a lower loss scale is tried first for a
    gradient."""

    action: Literal["skip", "rollback", "stop"] = Field(
        "skip", description="skip: go on with the next batch. rollback, stop: at the first one."
    )
    max_consecutive: int = Field(
        5, ge=1, description="Most steps skipped in a row before the run is stopped (count)."
    )


class LossSpikeConfig(Section):
    """A loss far above its recent median. Its step is taken by the time that it is known."""

    action: Literal["warn", "rollback", "stop"] = Field(
        "warn", description="rollback: as if its batch, and those since the checkpoint, were not."
    )
    window_steps: int = Field(
        128, ge=8, description="Steps that a loss is compared with; half of them must be there."
    )
    deviations: float = Field(
        10.0,
        gt=0,
        description="Height above the median from which a loss is a spike (standard deviations, "
        "as 1.4826 times the median absolute deviation; at least 1 % of the median each).",
    )


class RoutingConfig(Section):
    """Routing of logged steps, means over the layers of a mixture of experts."""

    action: Literal["warn", "rollback", "stop"] = Field(
        "warn", description="rollback: a fault of the data is passed over, one of the router not."
    )
    times: int = Field(
        3, ge=1, description="Logged steps in a row that must be so: single batches vary (count)."
    )
    min_entropy_share: float = Field(
        5 / 6, ge=0, le=1, description="Least entropy over log2(num_experts) (ratio)."
    )
    max_overflow_fraction: float = Field(
        0.05, ge=0, le=1, description="Most assignments beyond the experts' capacity (ratio)."
    )


class LoaderWaitConfig(Section):
    """Waiting for data, on the rank that waits longest, between two logged steps."""

    action: Literal["warn", "stop"] = Field("warn", description="stop: after a save.")
    max_share: float = Field(
        0.5, gt=0, le=1, description="Most of the time that may be waited for data (ratio)."
    )
    min_seconds: float = Field(
        1.0, ge=0, description="Waiting that is short of this is never a stall (seconds)."
    )


class MemoryShareConfig(Section):
    """Peak memory of the fullest rank at logged steps: of its GPU, or of its share of the host."""

    action: Literal["warn", "stop"] = Field("warn", description="stop: after a save.")
    max_share: float = Field(0.9, gt=0, le=1, description="Most of the memory (ratio).")


class HealthConfig(Section):
    """Faults that are watched for while a run trains, and what is done. `warn` logs one while it
    lasts; `rollback` goes back to the newest good checkpoint and on behind the bad batch; `stop`
    ends the run with exit code 2."""

    non_finite: NonFiniteConfig = NonFiniteConfig()
    loss_spike: LossSpikeConfig = LossSpikeConfig()
    routing: RoutingConfig = RoutingConfig()
    loader: LoaderWaitConfig = LoaderWaitConfig()
    memory: MemoryShareConfig = MemoryShareConfig()
    warmup_steps: int = Field(
        100, ge=0, description="First steps, whose loss and routing are not judged (count)."
    )
    max_rollbacks: int = Field(
        3, ge=0, description="Rollbacks of a run; the next one stops it instead (count)."
    )
