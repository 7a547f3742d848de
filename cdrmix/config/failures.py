"""The section `failures`: how often a run is interrupted, and what a save and a restart cost."""

from __future__ import annotations

from pydantic import Field, model_validator

from cdrmix.config.section import Section


class FailuresConfig(Section):
    """Failures to expect and the times that they cost, from which `cdrmix plan` tells goodput and
    the best interval of saves. Nothing here changes what is trained."""

    per_device_hour: float | None = Field(None, gt=0)
    """Failures that interrupt the run in an hour of a device (count). With it, every_steps or
    every_minutes = auto of checkpoint takes the interval that costs least. null: in a plan, a
    published rate of such devices."""
    # Llama 3: 54 software bugs, 2 dependencies, 7 NCCL timeouts and 35 of the network among 419.
    hosts_stay_share: float = Field(0.23, ge=0, le=1)
    """Failures after which every host is still up, so that checkpoint.tiers.memory has its
    checkpoints (ratio)."""
    # Llama 3: 32 unplanned maintenances of hosts among 419.
    hosts_return_share: float = Field(0.08, ge=0, le=1)
    """Failures after which a host was restarted and has its disks, with those of
    checkpoint.tiers.local (ratio)."""
    stall_seconds: float | None = Field(None, gt=0)
    """Time for which training waits at a save (seconds). null: estimated from its size."""
    write_bytes_per_second: float | None = Field(None, gt=0)
    """Bandwidth of all ranks together to the run directory (bytes per second). null: assumed by the
    number of hosts."""
    restart_seconds: float | None = Field(None, gt=0)
    """Time from a failure to the first step of the next start (seconds). null: estimated."""

    @model_validator(mode="after")
    def _shares_of_all(self) -> FailuresConfig:
        if self.hosts_stay_share + self.hosts_return_share > 1:
            raise ValueError(
                f"hosts_stay_share = {self.hosts_stay_share:g} and hosts_return_share = "
                f"{self.hosts_return_share:g} are shares of all failures: their sum is at most 1"
            )
        return self
