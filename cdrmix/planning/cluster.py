"""Clusters that a run is planned for: devices, their memory and speed, and their links.

Memory that a rank needs, by part, and a check that it fits.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from cdrmix.errors import PlanError

GIB = 2**30
Precision = Literal["bf16", "fp16", "fp32"]


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal devices.

    Attributes:
        name: preset, or what the sizes were given as.
        device: "cuda" (ROCm goes by that name too) or "cpu".
        nodes: number of nodes.
        gpus_per_node: ranks of a node, one per device.
        memory_gib: memory of one device as torch reports it (GiB).
        intra_bandwidth: within a node, per device and direction (bytes per second).
        inter_bandwidth: between nodes, per device and direction (bytes per second).
        peak_flops: dense matrix products by precision, sums in float32 (FLOP per second).
        host_memory_gib: memory of one node's host, for what is offloaded (GiB).
    """

    name: str
    device: Literal["cuda", "cpu"]
    nodes: int
    gpus_per_node: int
    memory_gib: float
    intra_bandwidth: float
    inter_bandwidth: float
    peak_flops: dict[str, float]
    host_memory_gib: float

    @property
    def world_size(self) -> int:
        """Ranks, one per device."""
        return self.nodes * self.gpus_per_node

    @property
    def memory_bytes(self) -> int:
        """Memory of one device (bytes)."""
        return int(self.memory_gib * GIB)

    def __str__(self) -> str:
        return f"{self.nodes} x {self.gpus_per_node} {self.name} ({self.memory_gib:g} GiB)"


def _preset(
    name: str,
    memory_gib: float,
    *,
    intra: float,
    inter: float,
    half: float,
    single: float,
    host: float,
    device: Literal["cuda", "cpu"] = "cuda",
) -> Cluster:
    """One node of eight; bandwidths in GB/s, peaks in TFLOP/s."""
    flops = {"bf16": half * 1e12, "fp16": half * 1e12, "fp32": single * 1e12}
    return Cluster(name, device, 1, 8, memory_gib, intra * 1e9, inter * 1e9, flops, host)


# Peaks are those of dense matrix products in the vendor's data sheet. float32 is true float32:
# PyTorch leaves TF32 off unless asked. Memory is what torch's out-of-memory messages call the
# total capacity; drivers differ by up to 0.2 GiB, and the lower figure stands here.
PRESETS: dict[str, Cluster] = {
    preset.name: preset
    for preset in (
        # NVIDIA A100 80GB SXM data sheet: 312 and 19.5 TFLOP/s, NVLink 600 GB/s both ways. DGX
        # A100: one 200 Gb/s adapter a GPU, 2 TB of host memory. torch: 79.15 to 79.33 GiB.
        _preset("a100-80", 79.1, intra=300, inter=25, half=312, single=19.5, host=1900),
        # NVIDIA H100 SXM data sheet: 989 (1,979 with sparsity) and 67 TFLOP/s, NVLink 900 GB/s both
        # ways. DGX H100: one 400 Gb/s adapter a GPU, 2 TB. torch: 79.1 to 79.3 GiB.
        _preset("h100-80", 79.1, intra=450, inter=50, half=989, single=67, host=1900),
        # NVIDIA H200 SXM data sheet: compute and NVLink of the H100, 141 GB. DGX H200: network and
        # host of the DGX H100. torch: about 139.7 GiB.
        _preset("h200-141", 139.7, intra=450, inter=50, half=989, single=67, host=1900),
        # AMD MI300X data sheet: 1,307 and 163.4 TFLOP/s, Infinity Fabric 896 GB/s both ways over
        # seven links, 192 GB. Azure ND MI300X v5: one 400 Gb/s adapter a GPU, 1,850 GiB of host.
        _preset("mi300x-192", 191.5, intra=448, inter=50, half=1307, single=163.4, host=1850),
        # NVIDIA Ada whitepaper, GeForce RTX 4090: 165.2 TFLOP/s with sums in float32, 82.6 without
        # tensor cores. PCIe 4.0 x16, 32 GB/s each way, and no peer-to-peer: half of it is assumed,
        # as are 100 Gb/s and 256 GB a node. torch: 23.64 GiB.
        _preset("rtx4090-24", 23.6, intra=16, inter=1.5, half=165, single=82.6, host=240),
        # One core with AVX2, gloo over loopback and 10 Gb/s Ethernet: 80 GFLOP/s measured in
        # float32 and 1.2 in bf16 (planning/rules.py); memory of a small virtual machine, assumed.
        _preset("cpu", 8, intra=2, inter=0.15, half=0.0012, single=0.08, host=16, device="cpu"),
    )
}


def make_cluster(
    *, nodes: int, gpus_per_node: int, gpu: str | None = None, gpu_memory_gib: float | None = None
) -> Cluster:
    """A cluster of a preset's devices, of devices of a given memory, or of a preset changed so.

    With memory alone, speed is that of the smallest preset that has as much.

    Args:
        nodes: number of nodes.
        gpus_per_node: devices of a node.
        gpu: name of a preset.
        gpu_memory_gib: memory of one device as torch reports it (GiB).

    Raises:
        PlanError: if the preset is unknown or a size is not positive, naming all that is wrong.
    """
    problems = [
        f"--{name} {value:g}: allowed is a number from 1"
        for name, value in (("nodes", nodes), ("gpus-per-node", gpus_per_node))
        if value < 1
    ]
    if gpu_memory_gib is not None and not 0 < gpu_memory_gib < float("inf"):
        problems.append(f"--gpu-memory-gib {gpu_memory_gib:g}: allowed is a number above 0")
    if gpu is not None and gpu not in PRESETS:
        problems.append(_unknown_preset(gpu))
    if gpu is None and gpu_memory_gib is None:
        problems.append(f"give --gpu PRESET ({', '.join(PRESETS)}) or --gpu-memory-gib M")
    if problems:
        raise PlanError("\n".join(problems))
    preset = PRESETS[gpu] if gpu is not None else _like(gpu_memory_gib or 0)
    if gpu_memory_gib is None:
        return replace(preset, nodes=nodes, gpus_per_node=gpus_per_node)
    return replace(
        preset,
        name=f"{preset.name} at {gpu_memory_gib:g} GiB" if gpu else f"device like {preset.name}",
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        memory_gib=gpu_memory_gib,
    )


def processes(number: int) -> Cluster:
    """Ranks that are CPU processes of one machine."""
    return make_cluster(nodes=1, gpus_per_node=number, gpu="cpu")


def _like(memory_gib: float) -> Cluster:
    """The smallest accelerator that has the memory, but for what a driver keeps; else the
    largest."""
    accelerators = [preset for preset in PRESETS.values() if preset.device == "cuda"]
    accelerators.sort(key=lambda preset: preset.memory_gib)
    enough = (preset for preset in accelerators if preset.memory_gib >= 0.95 * memory_gib)
    return next(enough, accelerators[-1])


def _unknown_preset(gpu: str) -> str:
    near = difflib.get_close_matches(gpu.lower(), PRESETS, n=1, cutoff=0)
    return (
        f"--gpu {gpu}: unknown preset. Did you mean '{near[0]}'? Known: {', '.join(PRESETS)}. Or "
        "give --gpu-memory-gib M"
    )


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
