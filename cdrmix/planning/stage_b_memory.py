"""What Stage B takes of a device beside what Stage A takes: every rank holds the whole backbone."""

from __future__ import annotations

from cdrmix.config.schema import Config
from cdrmix.planning.activations import ELEMENT_BYTES
from cdrmix.planning.cluster import GIB, Cluster
from cdrmix.planning.counts import count, stage_b_params
from cdrmix.planning.memory import USABLE_SHARE

_MASTER_AND_MOMENTS_BYTES = 12  # of a trained parameter, float32, shared out by ZeRO


def has_stage_b(config: Config) -> bool:
    """Whether a run comes to Stage B."""
    return config.stage_b is not None and config.training.stage != "a"


def stage_b_bytes(config: Config, world_size: int) -> int:
    """Weights, gradients and optimizer of Stage B on one rank; without activations (bytes)."""
    assert config.stage_b is not None, "Stage B has its section"
    element = ELEMENT_BYTES[config.training.precision]
    backbone = count(config.model, config.training.sequence_length).total_params
    trained = stage_b_params(config.model, config.stage_b).total_params
    weights = (backbone + trained) * element
    if config.stage_b.training.backbone_lr_scale > 0:
        trained += backbone
    return weights + trained * element + trained * _MASTER_AND_MOMENTS_BYTES // world_size


def fits_stage_b(config: Config, cluster: Cluster) -> bool:
    """Whether that is within what a plan may fill of a device."""
    return stage_b_bytes(config, cluster.world_size) <= USABLE_SHARE * cluster.memory_bytes


def stage_b_reason(config: Config, cluster: Cluster) -> str:
    """How much of a device Stage B fills, in a line."""
    used = stage_b_bytes(config, cluster.world_size) / GIB
    there = cluster.memory_bytes / GIB
    told = (
        f"Stage B: {used:.1f} GiB of {there:.1f} GiB a device before activations, because every "
        "rank holds the whole backbone"
    )
    if fits_stage_b(config, cluster):
        return told
    return f"{told}: NOT within the 90 % that a plan may fill. Try training.stage = a"
