"""Devices of the ranks that have met, as a cluster to plan for."""

from __future__ import annotations

import math
from dataclasses import replace

from cdrmix import runtime
from cdrmix.planning.cluster import Cluster, make_cluster


def cluster_here() -> Cluster:
    """Describes the devices of all ranks; collective. Every one is taken to be as large as the
    smallest."""
    local = (runtime.local_world_size(), runtime.device_memory_gib(), runtime.host_memory_gib())
    ranks, device_gib, host_gib = zip(*runtime.all_gather_object(local), strict=True)
    world = len(ranks)
    # Hosts may have different numbers of ranks; a plan takes nodes of equal size.
    on_a_node = math.gcd(*ranks)
    if world % on_a_node:
        on_a_node = 1
    cluster = make_cluster(
        nodes=world // on_a_node,
        gpus_per_node=on_a_node,
        gpu="cpu" if runtime.use_cpu() else None,
        gpu_memory_gib=min(device_gib),
    )
    return replace(cluster, host_memory_gib=min(host_gib), host_memory_source="measured")
