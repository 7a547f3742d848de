"""The plan for the devices that the ranks of a run find themselves on."""

from __future__ import annotations

import math

from cdrmix import runtime
from cdrmix.config.schema import Config
from cdrmix.planning.cluster import Cluster, make_cluster
from cdrmix.planning.profile import Choice, choose


def choose_here(config: Config, *, profile: str | None) -> Choice:
    """The layout of `cdrmix plan` for these devices, where the user left it open; collective.

    Args:
        config: of the run; with any degree given, the rest follows from sizes alone.
        profile: --profile, or None; with it too.
    Raises:
        PlanError: on every rank, if no layout can run.
    """
    cluster = seen_cluster()
    if profile is not None or config.parallel.model_fields_set:
        world_size, device = cluster.world_size, cluster.device
        return choose(config, world_size=world_size, profile=profile, device=device)
    return runtime.first_rank_does(
        lambda: choose(config, world_size=cluster.world_size, cluster=cluster)
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
