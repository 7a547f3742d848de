"""A micro-batch that the memory does not hold: the next start takes smaller ones.

The rank that runs out of memory cannot join the collectives in which the others wait for it. So it
leaves a note in the run directory, which stays, and ends, which ends the run; the next start goes
on from the newest checkpoint with smaller micro-batches and as many more of them.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from cdrmix import runtime
from cdrmix.config.schema import Config, ParallelConfig
from cdrmix.engines.run import Run
from cdrmix.engines.run_directory import LOG
from cdrmix.engines.supervision import LostAlone
from cdrmix.errors import EXIT_FAULT, EXIT_USER_ERROR, PlanError
from cdrmix.log import get_logger, log_to_file
from cdrmix.planning.cluster import GIB, make_cluster
from cdrmix.planning.plan import Plan
from cdrmix.planning.profile import all_plans, smaller_micro_batch, with_micro_batch

logger = get_logger(__name__)

_NOTE = "out_of_memory_{size}.json"
_NOTES = re.compile(r"out_of_memory_(\d+)\.json")
# Estimates err by a few percent: a layout is advised if it takes this share of what did not fit.
_LESS = 0.9


def noted_size(run_dir: Path) -> int | None:
    """Returns the smallest micro batch that did not fit in earlier starts, by their notes in the
    run directory: every larger one would fail as well. None without a note; collective."""

    def noted_sizes() -> list[int]:
        matches = [_NOTES.fullmatch(path.name) for path in run_dir.iterdir()]
        # Nothing is smaller than one sample: whoever starts again has changed something else.
        (run_dir / _NOTE.format(size=1)).unlink(missing_ok=True)
        return [int(match[1]) for match in matches if match and int(match[1]) > 1]

    return min(runtime.first_rank_does(noted_sizes), default=None)


def with_what_fits(plan: Plan, config: Config, run_dir: Path) -> Plan:
    """Returns the plan, with smaller micro-batches if notes of earlier starts in the run directory
    say that its do not fit; collective."""
    too_large = noted_size(run_dir)
    micro = plan.micro_batch_size
    while too_large is not None and micro > 1 and micro >= too_large:
        micro = smaller_micro_batch(plan, micro)
    if micro == plan.micro_batch_size:
        return plan
    note = run_dir / _NOTE.format(size=too_large)
    device = "cpu" if runtime.use_cpu() else "cuda"
    reason = f"{too_large} ran out of memory, says {note}; delete it to try again"
    return with_micro_batch(plan, config, micro, device=device, reason=reason)


@contextlib.contextmanager
def noted(run: Run) -> Iterator[None]:
    """End this rank with `LostAlone` where memory runs out, with a note for the next start and, on
    GPUs, a snapshot of what the allocator holds.

    The exit code is 2 where there is no smaller micro-batch.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
        micro = run.plan.micro_batch_size
        if micro == 1:
            then = f"micro batches of one sample. {_advice(run)}"
        else:
            then = (
                f"micro batches of {micro} samples. The next start of this run takes "
                f"{smaller_micro_batch(run.plan, micro)} and as many more of them: go on with "
                "--resume auto, which `cdrmix launch` does by itself"
            )
        # Largest first: a phase that was never reached is not among them.
        by_phase = dict(sorted(run.memory.by_phase().items(), key=lambda each: -each[1]))
        _leave_snapshot(run.directory.path / f"out_of_memory_rank{runtime.rank()}.pickle")
        write_note(
            *(run.directory.path, micro, error),
            step=run.step,
            then=then,
            peak_bytes_by_phase=by_phase,
        )
        raise LostAlone(EXIT_FAULT if micro > 1 else EXIT_USER_ERROR) from error


def write_note(
    run_dir: Path, micro: int, error: Exception, *, step: int, then: str, **measured: Any
) -> None:
    """Leave a note of a micro batch that did not fit behind a step, and log it once: `then` says
    which one it was, and what happens next; `measured` joins the note."""
    rank = runtime.rank()
    cause = str(error).partition("\n")[0]
    note = {"micro_batch_size": micro, "step": step, "rank": rank, "error": cause, **measured}
    # Equal ranks run out of memory together: the one that creates the note logs the error.
    with contextlib.suppress(FileExistsError):
        with (run_dir / _NOTE.format(size=micro)).open("x", encoding="utf-8") as file:
            json.dump(note, file, indent=2)
        # Rank 0 alone writes the log of the run, until another has an error to report.
        if rank > 0:
            log_to_file(run_dir / LOG)
        logger.error("error: rank %d ran out of memory after step %d with %s", rank, step, then)


def _is_out_of_memory(error: Exception) -> bool:
    """True of an error by which an allocator says that there is no more, CPU's or CUDA's."""
    kinds = (torch.OutOfMemoryError, MemoryError)
    # torch has no class for its CPU allocator's (2.13, c10/core/impl/alloc_cpu.cpp).
    return isinstance(error, kinds) or "DefaultCPUAllocator: can't allocate" in str(error)


def _leave_snapshot(path: Path) -> None:
    if not torch.cuda.is_initialized():
        return
    from cdrmix.profiling.memory_snapshot import dump_snapshot

    # What is lost is an aid: the note and the end of this rank count more.
    try:
        dump_snapshot(path)
    except (OSError, RuntimeError) as error:
        logger.warning("warning: %s: cannot be written: %s", path, error)


def _advice(run: Run) -> str:
    """Names the fastest layout that takes less memory on these devices, if there is one."""
    local = runtime.local_world_size()
    memory = run.plan.memory
    cluster = make_cluster(
        nodes=max(1, runtime.world_size() // local),
        gpus_per_node=min(local, runtime.world_size()),
        gpu="cpu" if runtime.use_cpu() else None,
        gpu_memory_gib=runtime.device_memory_gib(),
    )
    # Without the degrees and the micro batch of the configuration, which are what does not fit.
    training = run.config.training.model_copy(update={"micro_batch_size": None})
    free_config = run.config.model_copy(update={"parallel": ParallelConfig(), "training": training})
    with contextlib.suppress(PlanError):
        for candidate in all_plans(free_config, cluster):
            total = candidate.estimates()[0].total
            if memory and not candidate.missing and total < _LESS * memory.total:
                return (
                    f"Try {candidate.describe()}: {total / GIB:.1f} GiB by the plan "
                    f"instead of {memory.total / GIB:.1f}; `cdrmix plan` lists all layouts"
                )
    return "No layout on these devices takes less: try more of them, see `cdrmix plan`"
