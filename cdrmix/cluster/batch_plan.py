"""Plan of a batch job: layout and time on its devices, cores and memory of its nodes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from cdrmix.cluster.slurm_site import Nodes, preset_of
from cdrmix.config.schema import Config
from cdrmix.errors import PlanError
from cdrmix.log import get_logger
from cdrmix.planning.cluster import GIB, PRESETS, Cluster, make_cluster
from cdrmix.planning.comparison import Comparison, check_fits, compare, plan_text
from cdrmix.planning.cost import time_text

logger = get_logger(__name__)

# Host memory of the processes of a rank: Python, torch, DeepSpeed and the watchdog. The tiny model
# on one CPU rank takes 0.8 GiB in all, measured. CUDA's libraries, its context, and NCCL's buffers
# in shared memory come on top on GPUs: assumed.
PROCESS_GIB = {"cpu": 1.0, "cuda": 6.0}
# Launcher, srun and this script, on each node: 0.35 GiB measured.
NODE_GIB = 0.5
# Cores of a rank. CUDA: the rank, its backward pass, reading ahead, writing a checkpoint, and NCCL
# take turns on four; DeepSpeed's Adam on the host keeps more of them busy.
_CORES = {"cpu": 1, "cuda": 4}
_CORES_WITH_OFFLOADING = 8
# Options of sbatch that can name the devices.
_DEVICE_OPTIONS = ("gres", "gpus", "gpus-per-node", "gpus-per-task", "constraint", "prefer")
# Bytes of a checkpoint that a node writes in a second to shared storage, and bytes of a parameter
# in it (float32 master and both moments; as much again as a master for an average of the weights):
# the former is assumed.
_SAVED_BYTES_PER_SECOND = 1e9
_SAVED_BYTES = 12
_SAVED_AVERAGE_BYTES = 4


@dataclass(frozen=True)
class BatchPlan:
    """Layout of a batch job, and what it asks of a node."""

    compared: Comparison
    is_of_device: bool  # False: only what no device of a preset could hold was refused
    source: str  # says where the kind of device comes from
    cores: int  # of a rank
    memory_gib: int  # of a node
    saved_step: int  # of Stage A, from which the run goes on; 0 for a new run

    @property
    def run_seconds(self) -> float:
        """Estimated time from the first step that is left to the last one of Stage A."""
        share_left = self._steps_left / self.compared.config.training.num_steps
        return self.compared.plan.estimates()[1].days * 86_400 * share_left

    @property
    def _steps_left(self) -> int:
        # the steps of Stage B are counted on from those of Stage A
        return max(0, self.compared.config.training.num_steps - self.saved_step)

    @property
    def save_seconds(self) -> float:
        """Assumed time to write a checkpoint."""
        from cdrmix.planning.counts import trained_params

        config = self.compared.config
        each = _SAVED_BYTES
        if config.training.ema_decay is not None:
            each += _SAVED_AVERAGE_BYTES
        saved = each * trained_params(config.model)
        return saved / (_SAVED_BYTES_PER_SECOND * self.compared.cluster.nodes)

    def lines(self) -> dict[str, str]:
        """Layout, memory and time for people, by a title each."""
        compared = self.compared
        plan = compared.plan
        memory, cost = plan.estimates()
        on = f"{compared.cluster} ({self.source})"
        if not self.is_of_device:
            return {"layout": "chosen at the start, by the devices that are there"}
        stage_b = ""
        if plan.stage_b is not None:
            stage_b = f"; Stage B {plan.stage_b.memory.total / GIB:.1f} GiB"
        left = f"{self._steps_left:,} of " if self.saved_step else ""
        steps = f"{left}{compared.config.training.num_steps:,} steps"
        untimed = ", and Stage B, which is not timed" if plan.stage_b is not None else ""
        return {
            "devices": on,
            "layout": plan.describe(),
            "memory": f"{memory.total / GIB:.1f} GiB of {compared.cluster.memory_gib:g} GiB a "
            f"device{stage_b}",
            "time": f"{time_text(self.run_seconds)} to the end: {steps} of "
            f"{time_text(cost.step_seconds)}{untimed}",
        }


def plan_batch(
    config: Config,
    *,
    nodes: int,
    ranks_per_node: int,
    on_cpu: bool,
    profile: str | None,
    gpu: str | None,
    gpu_memory_gib: float | None,
    host_memory_gib: float | None,
    options: Mapping[str, str | None],
    site: Nodes | None,
    saved_step: int = 0,
) -> BatchPlan:
    """Plans a run on the devices that are asked for.

    Args:
        gpu, gpu_memory_gib: as of `cdrmix plan`; without both the devices that `options` or the
            nodes of SLURM name; without these, the largest preset.
        host_memory_gib: of a node, as asked for; None: that of the nodes, or else of the preset.
        saved_step: of the checkpoint that the run goes on from.
    Raises:
        PlanError: if no layout fits; the page of the plan is logged before.
    """
    gpu, source = _device(on_cpu, gpu, gpu_memory_gib, options, site)
    is_of_device = bool(gpu or gpu_memory_gib)
    cluster = make_cluster(
        nodes=nodes,
        gpus_per_node=ranks_per_node,
        gpu=gpu if is_of_device else _largest_preset(),
        gpu_memory_gib=gpu_memory_gib,
    )
    host = host_memory_gib or (site.memory_gib if site else None)
    if host:
        cluster = _with_host(cluster, host, keeps_device=gpu_memory_gib is not None)
    compared = compare(config, cluster, profile=profile)
    try:
        check_fits(compared)
    except PlanError as error:
        logger.info("%s\n", plan_text(compared))
        if is_of_device:
            raise
        raise PlanError(f"even on the largest devices that are known: {error}") from None
    cores = _CORES_WITH_OFFLOADING if compared.plan.offloads_optimizer else _CORES[cluster.device]
    if site and site.cores:
        cores = max(1, min(cores, site.cores // ranks_per_node))
    memory_gib = _asked_memory(compared, host)
    return BatchPlan(compared, is_of_device, source, cores, memory_gib, saved_step)


def _device(
    on_cpu: bool,
    gpu: str | None,
    gpu_memory_gib: float | None,
    options: Mapping[str, str | None],
    site: Nodes | None,
) -> tuple[str | None, str]:
    """Preset of the devices, None where it is not known, and where that comes from."""
    if on_cpu:
        return gpu or "cpu", "--cpu"
    if gpu or gpu_memory_gib:
        return gpu, "--gpu" if gpu else "--gpu-memory-gib"
    named = preset_of(value for name in _DEVICE_OPTIONS if (value := options.get(name)))
    if named:
        return named[0], f"--option says {named[1]}"
    named = preset_of(site.devices) if site else None
    if named and site:
        return named[0], f"sinfo says {named[1]} of partition {site.partitions}"
    return None, "neither --gpu nor SLURM says which devices these are"


def _largest_preset() -> str:
    return max(PRESETS.values(), key=lambda preset: preset.memory_gib).name


def _with_host(cluster: Cluster, memory_gib: float, *, keeps_device: bool) -> Cluster:
    """Cluster whose nodes have so much memory, without that of their processes."""
    processes = NODE_GIB + PROCESS_GIB[cluster.device] * cluster.gpus_per_node
    left = max(round(memory_gib - processes, 1), 0.1)
    if cluster.device == "cuda" or keeps_device:
        return replace(cluster, host_memory_gib=left)
    return replace(cluster, host_memory_gib=left, memory_gib=round(left / cluster.gpus_per_node, 2))


def _asked_memory(compared: Comparison, limit_gib: float | None) -> int:
    """Memory to ask of a node (GiB): the plan's with its margin, and that of the processes."""
    cluster, plan = compared.cluster, compared.plan
    memories = [plan.estimates()[0], *([plan.stage_b.memory] if plan.stage_b else [])]
    on_cpu = cluster.device == "cpu"
    planned = max(m.of_device(cluster) if on_cpu else m.on_host for m in memories) / GIB
    # the margin that the plan keeps on a device: what it fills is at most this share
    planned /= compared.config.resources.share
    asked = NODE_GIB + cluster.gpus_per_node * (planned + PROCESS_GIB[cluster.device])
    # a node that the plan fits has as much: only rounding can go above it
    most = math.floor(limit_gib) if limit_gib else math.ceil(asked)
    return max(1, min(math.ceil(asked), most))
