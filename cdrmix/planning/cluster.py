"""Clusters to plan for (devices, memory, speed, links), and the memory of a rank by part."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from cdrmix.errors import PlanError

GIB = 2**30


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal devices."""

    name: str  # name of the preset, or a description of custom sizes
    device: Literal["cuda", "cpu"]  # "cuda" (also for ROCm) or "cpu"
    nodes: int  # number of nodes
    gpus_per_node: int  # ranks of a node, one per device
    memory_gib: float  # memory of one device as torch reports it (GiB)
    intra_bandwidth: float  # within a node, per device and direction (bytes per second)
    inter_bandwidth: float  # between nodes, per device and direction (bytes per second)
    memory_bandwidth: float  # of a device's memory, by its data sheet (bytes per second)
    # share of the peak that matrix products reach over a whole step (planning/step_time.py)
    efficiency: float
    efficiency_source: str  # where that figure comes from, in words
    # dense matrix products by precision, sums in float32 (FLOP per second)
    peak_flops: dict[str, float]
    host_memory_gib: float  # host memory of one node, for offloading and copies (GiB)
    host_memory_source: str  # where that figure comes from, in words

    @property
    def world_size(self) -> int:
        """Number of ranks, one per device."""
        return self.nodes * self.gpus_per_node

    @property
    def memory_bytes(self) -> int:
        """Memory of one device (bytes)."""
        return int(self.memory_gib * GIB)

    def __str__(self) -> str:
        return f"{self.nodes} x {self.gpus_per_node} {self.name} ({self.memory_gib:g} GiB)"


class _Efficiency(NamedTuple):
    """Share of the peak that matrix products reach over a whole step."""

    share: float
    source: str  # where it comes from, in words


# tools/benchmark/public_runs.py says which runs the first two are fitted on, and holds the errors
# of the others.
_A100 = _Efficiency(0.66, "fitted on published runs on A100")
_HOPPER = _Efficiency(0.50, "fitted on published runs on H100")
_UNKNOWN = _Efficiency(0.50, "assumed as of an H100, as it is held to no run")
_CPU = _Efficiency(0.74, "fitted on two steps of one core, within 3 % of both")


def _preset(
    name: str,
    memory_gib: float,
    *,
    memory: float,
    efficiency: _Efficiency,
    intra: float,
    inter: float,
    half: float,
    single: float,
    host: float,
    device: Literal["cuda", "cpu"] = "cuda",
) -> Cluster:
    """Builds a node of eight devices; bandwidths of memory and links in GB/s, peaks in TFLOP/s."""
    flops = {"bf16": half * 1e12, "fp16": half * 1e12, "fp32": single * 1e12}
    source = f"assumed as in the preset {name}; --host-memory-gib M gives another"
    return Cluster(
        name=name,
        device=device,
        nodes=1,
        gpus_per_node=8,
        memory_gib=memory_gib,
        intra_bandwidth=intra * 1e9,
        inter_bandwidth=inter * 1e9,
        memory_bandwidth=memory * 1e9,
        efficiency=efficiency.share,
        efficiency_source=efficiency.source,
        peak_flops=flops,
        host_memory_gib=host,
        host_memory_source=source,
    )


# Peaks are those of dense matrix products in the vendor's data sheet. float32 is true float32:
# PyTorch leaves TF32 off unless asked. Memory is what torch's out-of-memory messages call the
# total capacity; drivers differ by up to 0.2 GiB, and the lower figure stands here.
PRESETS: dict[str, Cluster] = {
    preset.name: preset
    for preset in (
        # NVIDIA A100 80GB SXM data sheet: 312 and 19.5 TFLOP/s, 2,039 GB/s, NVLink 600 GB/s both
        # ways. DGX A100: one 200 Gb/s adapter a GPU, 2 TB of host memory. torch: 79.15 to 79.3 GiB.
        _preset(
            "a100-80",
            79.1,
            memory=2039,
            efficiency=_A100,
            intra=300,
            inter=25,
            half=312,
            single=19.5,
            host=1900,
        ),
        # NVIDIA H100 SXM data sheet: 989 (1,979 with sparsity) and 67 TFLOP/s, 3.35 TB/s, NVLink
        # 900 GB/s both ways. DGX H100: one 400 Gb/s adapter a GPU, 2 TB. torch: 79.1 to 79.3 GiB.
        _preset(
            "h100-80",
            79.1,
            memory=3350,
            efficiency=_HOPPER,
            intra=450,
            inter=50,
            half=989,
            single=67,
            host=1900,
        ),
        # NVIDIA H200 SXM data sheet: compute and NVLink of the H100, 141 GB at 4.8 TB/s. DGX H200:
        # network and host of the DGX H100. torch: about 139.7 GiB.
        _preset(
            "h200-141",
            139.7,
            memory=4800,
            efficiency=_HOPPER,
            intra=450,
            inter=50,
            half=989,
            single=67,
            host=1900,
        ),
        # AMD MI300X data sheet: 1,307 and 163.4 TFLOP/s, Infinity Fabric 896 GB/s both ways over
        # seven links, 192 GB at 5.3 TB/s. Azure ND MI300X v5: one 400 Gb/s adapter a GPU, 1,850 GiB
        # of host.
        _preset(
            "mi300x-192",
            191.5,
            memory=5300,
            efficiency=_UNKNOWN,
            intra=448,
            inter=50,
            half=1307,
            single=163.4,
            host=1850,
        ),
        # AMD MI250X data sheet: 383 and 95.7 TFLOP/s and 128 GB at 3,277 GB/s for two dies, each a
        # device of its own. Frontier's user guide: eight of 64 GB a node, 50 to 200 GB/s between
        # them, four 200 Gb/s adapters and 512 GB of host memory. torch: 63.98 GiB.
        _preset(
            "mi250x-64",
            63.9,
            memory=1638,
            efficiency=_UNKNOWN,
            intra=50,
            inter=12.5,
            half=191.5,
            single=47.8,
            host=480,
        ),
        # NVIDIA Ada whitepaper, GeForce RTX 4090: 165.2 TFLOP/s with sums in float32, 82.6 without
        # tensor cores; 1,008 GB/s. PCIe 4.0 x16, 32 GB/s each way, and no peer-to-peer: half of it
        # is assumed, as are 100 Gb/s and 256 GB a node. torch: 23.64 GiB.
        _preset(
            "rtx4090-24",
            23.6,
            memory=1008,
            efficiency=_UNKNOWN,
            intra=16,
            inter=1.5,
            half=165,
            single=82.6,
            host=240,
        ),
        # One core with AVX2, gloo over loopback and 10 Gb/s Ethernet: 80 GFLOP/s measured in
        # float32 and 1.2 in bf16 (planning/rules.py), which has no support there: with AVX512-BF16
        # or AMX bf16 is faster than that by far, as a run measures. 20 GB/s in pointwise passes
        # over tensors of a few MB; memory of a small virtual machine, assumed.
        _preset(
            "cpu",
            8,
            memory=20,
            efficiency=_CPU,
            intra=2,
            inter=0.15,
            half=0.0012,
            single=0.08,
            host=16,
            device="cpu",
        ),
    )
}


def make_cluster(
    *,
    nodes: int,
    gpus_per_node: int,
    gpu: str | None = None,
    gpu_memory_gib: float | None = None,
    host_memory_gib: float | None = None,
) -> Cluster:
    """Builds a cluster from a preset, from a memory size, or from a preset with another size.

    A memory size (GiB of a device, as torch reports it) alone takes the speed of the smallest
    accelerator preset that has as much, less 5 % for the driver's share; above all presets, that of
    the largest. The host memory of a node (GiB) is the preset's if it is not given.
    Raises PlanError with all problems, of an unknown preset and sizes not positive.
    """
    problems = [
        f"--{name} {value:g}: allowed is a number from 1"
        for name, value in (("nodes", nodes), ("gpus-per-node", gpus_per_node))
        if value < 1
    ]
    sizes = {"gpu-memory-gib": gpu_memory_gib, "host-memory-gib": host_memory_gib}
    problems += [
        f"--{name} {size:g}: allowed is a number above 0"
        for name, size in sizes.items()
        if size is not None and not 0 < size < float("inf")
    ]
    if gpu is not None and gpu not in PRESETS:
        (near,) = difflib.get_close_matches(gpu.lower(), PRESETS, n=1, cutoff=0)
        problems.append(
            f"--gpu {gpu}: unknown preset. Did you mean '{near}'? Known: {', '.join(PRESETS)}. Or "
            "give --gpu-memory-gib M"
        )
    if gpu is None and gpu_memory_gib is None:
        problems.append(f"give --gpu PRESET ({', '.join(PRESETS)}) or --gpu-memory-gib M")
    if problems:
        raise PlanError("\n".join(problems))
    preset = PRESETS[gpu] if gpu is not None else _like(gpu_memory_gib or 0)
    if not preset.memory_bandwidth > 0:
        raise PlanError(
            f"--gpu {preset.name}: the preset has no memory bandwidth, without which no time can "
            "be estimated. Give it the data sheet's in planning/cluster.py, or take another preset"
        )
    cluster = replace(preset, nodes=nodes, gpus_per_node=gpus_per_node)
    if gpu_memory_gib is not None:
        as_fast = f"devices assumed as fast as {preset.name}"
        name = f"{preset.name} at {gpu_memory_gib:g} GiB" if gpu else as_fast
        cluster = replace(cluster, name=name, memory_gib=gpu_memory_gib)
    if host_memory_gib is not None:
        given = "--host-memory-gib as given"
        cluster = replace(cluster, host_memory_gib=host_memory_gib, host_memory_source=given)
    return cluster


def _like(gpu_memory_gib: float) -> Cluster:
    """Returns the smallest preset of a GPU with as much memory, or the largest of all."""
    # A die of an MI250X is half as fast as others of its size.
    known = (each for name, each in PRESETS.items() if name != "mi250x-64")
    accelerators = [each for each in known if each.device == "cuda"]
    accelerators.sort(key=lambda each: each.memory_gib)
    # a nominal size is up to 5 % above the capacity that torch reports
    enough = (each for each in accelerators if each.memory_gib >= 0.95 * gpu_memory_gib)
    return next(enough, accelerators[-1])


def processes(number: int) -> Cluster:
    """Builds a cluster of CPU processes on one machine."""
    return make_cluster(nodes=1, gpus_per_node=number, gpu="cpu")


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest rank."""

    weights: int  # flat buffers of the weights
    gradients: int  # gradients that last from one micro-step to the next
    optimizer: int  # float32 masters, both moments, and the average of the weights if there is one
    activations: int = 0  # tensors that autograd saves for the micro-batches in flight
    # temporary allocations of a step by kind, and allowances
    buffers: dict[str, int] = field(default_factory=dict)
    host: int = 0  # offloaded states in host memory
    # copy of a checkpoint in host memory, which is written in the background; on CPUs it is among
    # the buffers
    checkpoint: int = 0
    # checkpoints of checkpoint.tiers.memory; on CPUs they are among the buffers
    memory_tier: int = 0
    # played episodes of Stage B, which wait in host memory until they are learned from
    waiting_episodes: int = 0

    @property
    def saves_in_background(self) -> bool:
        """True if a copy of a checkpoint is part of the memory."""
        return self.checkpoint > 0 or "checkpoint_copy" in self.buffers

    @property
    def has_memory_tier(self) -> bool:
        """True if checkpoints of checkpoint.tiers.memory are part of the memory."""
        return self.memory_tier > 0 or "memory_tier" in self.buffers

    @property
    def on_host(self) -> int:
        """Bytes in host memory."""
        return self.host + self.checkpoint + self.memory_tier + self.waiting_episodes

    @property
    def total(self) -> int:
        """Bytes on the device."""
        states = self.weights + self.gradients + self.optimizer
        return states + self.activations + sum(self.buffers.values())

    def of_device(self, cluster: Cluster) -> int:
        """Bytes on the device, which on CPUs is the host too: what is offloaded goes nowhere."""
        moved = self.host + self.waiting_episodes
        return self.total + (moved if cluster.device == "cpu" else 0)

    def fits(self, cluster: Cluster, *, share: float) -> bool:
        """True if it is within `share` of the device's memory, and of the host's."""
        fits_device = self.of_device(cluster) <= share * cluster.memory_bytes
        return fits_device and self.fits_host(cluster, share=share)

    def fits_host(self, cluster: Cluster, *, share: float) -> bool:
        """True if all ranks of a host are within `share` of its memory."""
        return self.on_host * cluster.gpus_per_node <= share * cluster.host_memory_gib * GIB

    def to_json(self) -> dict[str, Any]:
        """Returns bytes by part as plain values."""
        return {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "activations": self.activations,
            "buffers": sum(self.buffers.values()),
            "total": self.total,
        }
