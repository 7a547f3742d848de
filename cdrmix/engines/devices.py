"""The plan for the devices that the ranks of a run find themselves on."""

from __future__ import annotations

import math

from cdrmix import runtime
from cdrmix.config.schema import Config
from cdrmix.planning.cluster import Cluster, make_cluster
from cdrmix.planning.profile import Choice, choose


def choose_here(config: Config, *, profile: str | None) -> Choice:
    """The layout of `cdrmix plan` for the devices of this run; collective.

    Args:
        config: of the run; what it gives is kept.
        profile: --profile, or None.
    Raises:
        PlanError: on every rank, if no layout can run.
    """
    cluster = seen_cluster()
    return runtime.first_rank_does(
        lambda: choose(config, world_size=cluster.world_size, profile=profile, cluster=cluster)
    )


def seen_cluster() -> Cluster:
    """The devices of all ranks, the smallest standing for each; the same on every rank."""
    found = runtime.all_gather_object((runtime.device_memory_gib(), runtime.local_world_size()))
    world, on_a_node = len(found), math.gcd(*(ranks for _, ranks in found))
    if world % on_a_node:
        on_a_node = 1
    return make_cluster(
        nodes=world // on_a_node,
        gpus_per_node=on_a_node,
        gpu="cpu" if runtime.use_cpu() else None,
        gpu_memory_gib=min(memory for memory, _ in found),
    )
