"""Time of a micro-step from FLOPs, bytes and launches, and of collectives from their links.

A rank's products run at a share of the peak, one number for each kind of device, the only one that
is fitted (`Cluster.efficiency`). All other kernels wait for memory, which reaches a fixed share of
the data sheet's bandwidth. On a GPU kernels are launched ahead of their work, so that a micro-step
takes the longer of both; on a CPU both are the same core's. tools/benchmark/public_runs.py holds
this to published training runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from cdrmix.planning.cluster import Cluster

# Share of a memory's data-sheet bandwidth that streaming kernels reach: 4.3 of 4.8 TB/s have been
# seen on an H200. Not fitted.
MEMORY_SHARE = 0.9
# Time in which the host starts a kernel. CUDA: the usual 5 us of PyTorch without graphs, assumed.
# CPU: what a step of cdrmix-core-tiny takes less with eight samples at once than one by one, 172
# ms, over seven micro-steps, four blocks and their kernels.
LAUNCH_SECONDS = {"cuda": 5e-6, "cpu": 2e-5}


@dataclass(frozen=True)
class Work:
    """Work of one rank in a micro-step, or in some of its passes."""

    flops: float  # of matrix products, at the peak of the run's precision
    moved_bytes: float  # read and written by all other kernels
    launches: float  # kernels started

    def __add__(self, other: Work) -> Work:
        return Work(
            self.flops + other.flops,
            self.moved_bytes + other.moved_bytes,
            self.launches + other.launches,
        )


def product_seconds(flops: float, cluster: Cluster, peak: float) -> float:
    """Time of matrix products at `peak` FLOP per second."""
    return flops / (cluster.efficiency * peak)


def memory_seconds(moved_bytes: float, cluster: Cluster) -> float:
    """Time in which a device reads and writes so many bytes."""
    return moved_bytes / (MEMORY_SHARE * cluster.memory_bandwidth)


def seconds_of(work: Work, cluster: Cluster, peak: float) -> float:
    """Time of a rank's work, communication left out; `peak` is that of the run's precision."""
    running = product_seconds(work.flops, cluster, peak) + memory_seconds(work.moved_bytes, cluster)
    launching = work.launches * LAUNCH_SECONDS[cluster.device]
    return max(running, launching) if cluster.device == "cuda" else running + launching


def hidden_seconds(exchange: float, beside: float, *, last: float) -> float:
    """Time of an exchange that passes under computation of the same rank (seconds).

    `exchange` is what its links take, `beside` the computation that it may run under; the share
    `last` of it begins when that is over. That collectives slow products down a little is left out.
    """
    return min((1 - last) * exchange, beside)


def ring_bandwidth(cluster: Cluster, ranks: int, *, stride: int = 1) -> float:
    """Bandwidth of a ring over `ranks` ranks, each `stride` from the next one (bytes per second).

    A ring that leaves a node enters it once and visits all its members there, while each member's
    adapter carries a ring of its own: together they carry as much as their number of adapters.
    """
    inside = max(1, cluster.gpus_per_node // stride)  # members of the group on a node
    if ranks <= inside:
        return cluster.intra_bandwidth
    return min(cluster.intra_bandwidth, inside * cluster.inter_bandwidth)


def exchange_seconds(payload: float, cluster: Cluster, ranks: int, *, stride: int = 1) -> float:
    """Time of an all-to-all in which a rank's `payload` is spread evenly over `ranks` ranks.

    What stays on the node takes its links, the rest the rank's own adapter, at the same time.
    """
    inside = min(ranks, max(1, cluster.gpus_per_node // stride))
    within = payload * (inside - 1) / ranks / cluster.intra_bandwidth
    between = payload * (ranks - inside) / ranks / cluster.inter_bandwidth
    return max(within, between)


def pipeline_seconds(micro_step: float, *, micro_steps: int, stages: int, parts: int = 1) -> float:
    """Time of all micro-steps of a pipeline; the last stage starts after the others' first ones.

    `parts` is the number of parts of the model that a stage holds, which interleaved schedules run
    in turn, so that each waits for parts of a micro-step alone.
    """
    return micro_step * (micro_steps + (stages - 1) / parts)
