"""Memory that a rank needs, by part, and a check that it fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cdrmix.planning.cluster import GIB, Cluster


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest rank.

    Attributes:
        weights: flat buffers of the weights.
        gradients: what is kept from one micro-step to the next.
        optimizer: float32 masters and both moments.
        activations: what autograd keeps of the micro-batches in flight.
        buffers: by kind, what comes and goes within a step, and allowances.
        host: of the rank's host, for what is offloaded.
        checkpoint: of the rank's host, for the copy that is written in the background; on CPUs it
            is among the buffers.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    buffers: dict[str, int]
    host: int = 0
    checkpoint: int = 0

    @property
    def saves_in_background(self) -> bool:
        """True if there is room for a copy of a checkpoint."""
        return self.checkpoint > 0 or "checkpoint_copy" in self.buffers

    @property
    def on_host(self) -> int:
        """Bytes of the rank's host beside its device."""
        return self.host + self.checkpoint

    @property
    def total(self) -> int:
        """Bytes on the device."""
        states = self.weights + self.gradients + self.optimizer
        return states + self.activations + sum(self.buffers.values())

    def fits(self, cluster: Cluster, *, share: float) -> bool:
        """True if it stays within `share` of the device's memory, and of the host's."""
        return self.total <= share * cluster.memory_bytes and self.fits_host(cluster, share=share)

    def fits_host(self, cluster: Cluster, *, share: float) -> bool:
        """True if all ranks of a host stay within `share` of its memory."""
        return self.on_host * cluster.gpus_per_node <= share * cluster.host_memory_gib * GIB

    def to_json(self) -> dict[str, Any]:
        """Bytes by part as plain values."""
        return {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "activations": self.activations,
            "buffers": sum(self.buffers.values()),
            "total": self.total,
        }

    def described(self) -> Iterator[tuple[str, int]]:
        """Each part with its bytes, buffers by kind."""
        yield "weights", self.weights
        yield "gradients", self.gradients
        yield "optimizer", self.optimizer
        yield "activations", self.activations
        for kind, size in self.buffers.items():
            yield f"buffers: {kind.replace('_', ' ')}", size
