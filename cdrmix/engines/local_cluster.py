"""The plan for the devices that the ranks of a run find themselves on."""

from __future__ import annotations

import math
from dataclasses import replace

from cdrmix import runtime
from cdrmix.config.schema import Config
from cdrmix.planning.cluster import Cluster, make_cluster
from cdrmix.planning.plan import Plan
from cdrmix.planning.profile import choose


def choose_here(config: Config, *, profile: str | None) -> Plan:
    """The layout of `cdrmix plan` for these devices; collective.

    Args:
        config: of the run; the degrees and batch sizes that it gives are kept.
        profile: --profile, or None.
    Raises:
        PlanError: on every rank, if no layout can run.
    """
    cluster = seen_cluster()
    return runtime.first_rank_does(lambda: choose(config, cluster, profile=profile))


def seen_cluster() -> Cluster:
    """The devices of all ranks, the smallest standing for each; the same on every rank."""
    own = (runtime.local_world_size(), runtime.device_memory_gib(), runtime.host_memory_gib())
    ranks, device_gib, host_gib = zip(*runtime.all_gather_object(own), strict=True)
    world = len(ranks)
    on_a_node = math.gcd(*ranks)
    if world % on_a_node:
        on_a_node = 1
    cluster = make_cluster(
        nodes=world // on_a_node,
        gpus_per_node=on_a_node,
        gpu="cpu" if runtime.use_cpu() else None,
        gpu_memory_gib=min(device_gib),
    )
    return replace(cluster, host_memory_gib=min(host_gib))
