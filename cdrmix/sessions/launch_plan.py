"""Check and plan of a `cdrmix launch` before anything is started, and the lines that tell of them.

The ranks plan again, in `choose_here` of session.py, and what they plan is run: they ask torch for
the memory of every device on every host. Here nobody has met, and the devices are those that the
drivers of this machine show, or that the user names: enough to refuse what does not fit before
ranks are started for it, and to tell what to expect.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from cdrmix.checkpoint.candidates import candidates, step_of
from cdrmix.cluster.devices import devices_here
from cdrmix.cluster.hosts import is_this_machine
from cdrmix.cluster.launch import Job
from cdrmix.engines.archive_of_run import check_archive
from cdrmix.log import get_logger
from cdrmix.planning.cluster import GIB, PRESETS, Cluster, make_cluster
from cdrmix.planning.comparison import Comparison, check_fits, compare
from cdrmix.planning.cost import time_text
from cdrmix.planning.fine_tuning import check_host
from cdrmix.runtime.host_memory import available_memory_gib
from cdrmix.sessions.preflight import check_start

logger = get_logger(__name__)


class Expected(NamedTuple):
    """Ranks that a launch will start, and the devices that they will have."""

    num_ranks: int
    cluster: Cluster | None  # None: nothing is known of the devices of the hosts


def check_launch(
    job: Job,
    *,
    run_dir: Path | None,
    gpu: str | None = None,
    gpu_memory_gib: float | None = None,
    command: Sequence[str] = ("cdrmix", "launch"),
) -> None:
    """Checks and plans a job, and logs what it will be in a few lines.

    Args:
        run_dir: --run-dir as given; None: the job has made a name.
        gpu, gpu_memory_gib: devices as of `cdrmix plan`; default: those of this machine.
        command: its first words, for the line that says how to go on.
    Raises:
        PlanError: if no layout fits the devices.
        TrainingError: as `check_start` does.
    """
    config = job.config
    expected = expect(job, gpu=gpu, gpu_memory_gib=gpu_memory_gib)
    check_start(
        config,
        world_size=expected.num_ranks,
        profile=job.profile,
        device=expected.cluster.device if expected.cluster else None,
        run_dir=run_dir,
        resume=job.resume,
    )
    check_archive(config, job.run_dir, resume=job.resume)
    compared = None
    if expected.cluster is not None:
        compared = compare(config, expected.cluster, profile=job.profile)
        if not job.hosts or any(is_this_machine(host.name) for host in job.hosts):
            available = available_memory_gib()
            check_host(compared.plan, config, expected.cluster, available_gib=available)
        stage = config.training.stage
        # Only what this start trains has to fit.
        if (stage != "b" and not compared.fits) or (stage != "a" and not compared.stage_b_fits):
            check_fits(compared)
    for title, text in _lines(job, expected, compared, command):
        logger.info("%-14s %s", title, text)


def expect(job: Job, *, gpu: str | None, gpu_memory_gib: float | None) -> Expected:
    """Number of ranks of a job, and its devices as a cluster of equal nodes.

    Raises PlanError for an unknown preset, or a memory that is no size.
    """
    of_hosts = [job.ranks_per_host or host.slots for host in job.hosts]
    here = None
    # A login node says nothing of the hosts' devices.
    if not job.hosts or any(is_this_machine(host.name) for host in job.hosts):
        here = devices_here(job.environment)
        of_hosts = of_hosts or [job.ranks_per_host or here.number]
    num_ranks = sum(of_hosts)
    # Hosts may have different numbers of ranks; a plan takes nodes of equal size.
    on_a_node = math.gcd(*of_hosts)
    sizes = {"nodes": num_ranks // on_a_node, "gpus_per_node": on_a_node}
    if gpu is None and gpu_memory_gib is None:
        if here is None or here.memory_gib is None:
            return Expected(num_ranks, None)
        if here.kind == "cpu":
            memory = round(here.memory_gib / max(of_hosts), 1)  # ranks share the host's
            cluster = make_cluster(**sizes, gpu="cpu", gpu_memory_gib=memory)
            return Expected(num_ranks, replace(cluster, host_memory_gib=here.memory_gib))
        gpu_memory_gib = here.memory_gib
    elif gpu is None and here is not None and here.kind == "cpu":
        gpu = "cpu"
    return Expected(num_ranks, make_cluster(**sizes, gpu=gpu, gpu_memory_gib=gpu_memory_gib))


def _lines(
    job: Job, expected: Expected, compared: Comparison | None, command: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Title and text of each line about a job."""
    yield "run directory", str(job.run_dir)
    names = [host.name for host in job.hosts]
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    where = f"{len(names)} hosts: {shown}" if len(names) > 1 else shown or "this machine"
    on_cpus = ", on its CPUs" if expected.cluster and expected.cluster.device == "cpu" else ""
    yield "ranks", f"{expected.num_ranks} on {where}{on_cpus}"
    if compared is None:
        presets = ", ".join(PRESETS)
        yield (
            "layout",
            f"chosen by the ranks; give --gpu PRESET ({presets}) to have it planned here",
        )
    else:
        yield from _plan_lines(job, compared)
    go_on = shlex.join([*command, "--run-dir", str(job.run_dir), "--resume", "auto"])
    yield "stop", f"Ctrl-C or TERM saves and stops; to go on: {go_on}"


def _plan_lines(job: Job, compared: Comparison) -> Iterator[tuple[str, str]]:
    training = job.config.training
    plan, cluster = compared.plan, compared.cluster
    memory, cost = plan.estimates()
    stage_b = plan.stage_b if training.stage != "a" else None
    of_device = (
        f"of {cluster.memory_gib:.1f} GiB a {'rank' if cluster.device == 'cpu' else 'device'}"
    )
    if training.stage != "b":
        yield "layout", plan.describe()
        then = f"; Stage B {stage_b.memory.total / GIB:.1f} GiB" if stage_b is not None else ""
        yield "memory", f"{memory.total / GIB:.1f} GiB {of_device}{then}"
        done = min(_first_step(job), training.num_steps)
        seconds = 86_400 * cost.days * (1 - done / training.num_steps)
        then = ", and Stage B, which is not timed" if stage_b is not None else ""
        left = f"{training.num_steps - done:,} of " if done else ""
        steps = f"{left}{training.num_steps:,} steps"
        yield "time", f"about {time_text(seconds)} after the start-up, {steps}{then}"
    elif stage_b is not None:
        yield "memory", f"{stage_b.memory.total / GIB:.1f} GiB {of_device}"


def _first_step(job: Job) -> int:
    """Steps that the checkpoint to resume has done; 0 for a new run."""
    if job.resume == "never":
        return 0
    folders = candidates(job.run_dir if job.resume == "auto" else Path(job.resume))
    # a checkpoint that was copied may have any name
    return step_of(folders[0]) if folders and folders[0].name[:1].isdecimal() else 0
