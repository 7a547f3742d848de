"""Probe for the largest micro batch that fits: real steps before the run begins, on all ranks.

Each size is tried with an engine of its own, made as the run's will be and thrown away, so that
nothing of a trial is left in the run: no gradients, counters, statistics or scales have to be put
back, and random numbers are drawn again from the same state. A run with `auto` is therefore that
with the size given, bit by bit. A size that was found is kept, in the run directory and for later
runs (`found_micro_batch`).

A rank that runs out of memory cannot join the collectives in which the others wait for it, so that
no size is tried that is expected not to fit; one that fails all the same leaves the note that
`out_of_memory` makes of it, and the next start looks below it.
"""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from cdrmix import runtime
from cdrmix.config.schema import Config
from cdrmix.data.mixture import MixedDataset
from cdrmix.data.read_ahead import ReadLimits
from cdrmix.data.token_dataset import TokenDataset
from cdrmix.engines import found_micro_batch
from cdrmix.engines.combination import Batch, own_weights, with_further_labels
from cdrmix.engines.found_micro_batch import Found
from cdrmix.engines.loop import end_engine, start_engine
from cdrmix.engines.out_of_memory import noted_size, write_note
from cdrmix.engines.run import Start
from cdrmix.engines.stage_a import Pretraining
from cdrmix.engines.supervision import LostAlone
from cdrmix.engines.training_data import Corpus
from cdrmix.engines.training_step import train_step
from cdrmix.errors import EXIT_FAULT
from cdrmix.log import get_logger
from cdrmix.monitoring.peak_memory import take_peak_bytes
from cdrmix.optimizers.average import keep_average
from cdrmix.parallel.apply import build_model
from cdrmix.parallel.topology import Topology, own_tokens
from cdrmix.planning.cluster import GIB
from cdrmix.planning.micro_batch import Fit, largest_that_fits, sizes_to_try, trial_plan
from cdrmix.planning.plan import Plan
from cdrmix.planning.profile import with_micro_batch
from cdrmix.planning.text_page import size_text
from cdrmix.runtime.host_memory import usable_bytes

logger = get_logger(__name__)

# The optimizer makes its state in the first step: the second has it all along.
_STEPS = 2


def plan_that_fits(
    start: Start, topology: Topology, corpus: Corpus, replay: TokenDataset | MixedDataset | None
) -> Plan:
    """Returns the plan with the largest micro batch that fits, found now or before; collective.

    Raises:
        LostAlone: where this rank ran out of memory while others may wait for it.
    """
    config, folder = start.config, start.directory.path
    below = noted_size(folder)
    sizes = sizes_to_try(start.plan, below=below)
    key = found_micro_batch.key_of(config, start.plan)
    again = config.resources.probe == "again"

    def remembered() -> Found | None:
        return None if again else found_micro_batch.read(key, folder)

    found = runtime.first_rank_does(remembered)
    before = runtime.resident_bytes()
    if found is not None:
        found = _still_fits(found, sizes, before)
    why = f"found at an earlier start, {found.when}" if found else ""
    if found is None:
        found = _probe(start, topology, corpus, replay, sizes=sizes, before=before)
        why = "found by trying"
        runtime.first_rank_does(lambda: found_micro_batch.write(key, found, folder))
    device = "cpu" if runtime.use_cpu() else "cuda"
    reason = _told(found, start.plan, sizes, why, config)
    plan = with_micro_batch(
        start.plan, config, found.micro_batch_size, device=device, reason=reason
    )
    if runtime.rank() == 0:
        logger.info("plan: %s", plan.reasons[-1])
    return plan


def _still_fits(found: Found, sizes: list[int], before: int) -> Found | None:
    """Found size, or the next smaller one that has not failed since; None, with a line, where it is
    to be looked for again; collective."""
    fitting = [size for size in sizes if size <= found.micro_batch_size]
    if runtime.use_cpu():  # other processes may have more of the host by now
        limits = runtime.all_gather_object(_limit(found.share, before) - before)
        if found.used_bytes > min(limits):
            if runtime.rank() == 0:
                logger.info(
                    "micro batch: %d took %s at an earlier start, and %s are left now: tried again",
                    *(found.micro_batch_size, size_text(found.used_bytes), size_text(min(limits))),
                )
            return None
    return found._replace(micro_batch_size=max(fitting))


def _probe(
    start: Start,
    topology: Topology,
    corpus: Corpus,
    replay: TokenDataset | MixedDataset | None,
    *,
    sizes: list[int],
    before: int,
) -> Found:
    began = time.monotonic()
    config, plan = start.config, start.plan
    random_state = runtime.random_state()
    samples = _samples(config, plan, topology, corpus, replay)
    share = config.resources.share
    limit = min(runtime.all_gather_object(int(_limit(share, before))))
    estimates = [_by_plan(plan, config, size) for size in sizes[:2]]
    slope = max(0, estimates[-1] - estimates[0]) // max(1, sizes[:2][-1] - sizes[0])
    copied = _copy_bytes(plan)

    def measure(micro: int) -> int | None:
        try:
            peak: int | None = _peak(config, trial_plan(plan, micro), topology, samples) + copied
        except torch.OutOfMemoryError as error:
            if runtime.world_size() > 1:
                then = f"micro batches of {micro} samples in a probe. The next start looks below"
                write_note(start.directory.path, micro, error, step=0, then=then)
                raise LostAlone(EXIT_FAULT) from error
            peak = None
        runtime.restore_random_state(random_state)
        runtime.release_memory()
        peaks = runtime.all_gather_object(peak)
        known = [each for each in peaks if each is not None]
        return max(known) if len(known) == len(peaks) else None

    fit = largest_that_fits(sizes, measure, limit_bytes=limit, sample_bytes=slope)
    _warn_if_short(fit)
    # Compared with the plan is what the run takes beside the interpreter and its libraries.
    held = max(runtime.all_gather_object(before)) if runtime.use_cpu() else 0
    used = max(1, (fit.tried[fit.micro_batch_size] or limit) - held)
    return Found.now(
        fit.micro_batch_size,
        used_bytes=used,
        share=share,
        tried={size: None if each is None else each - held for size, each in fit.tried.items()},
        limit_bytes=limit - held,
        seconds=time.monotonic() - began,
    )


def _samples(
    config: Config,
    plan: Plan,
    topology: Topology,
    corpus: Corpus,
    replay: TokenDataset | MixedDataset | None,
) -> Batch:
    """This rank's samples of the first step, [samples, 1, T]."""
    single = plan.micro_batch_size * plan.gradient_accumulation_steps
    one = replace(plan, micro_batch_size=1, gradient_accumulation_steps=single)
    loader = Pretraining(config, one, topology, corpus, replay).loader
    loader.set_limits(ReadLimits(0))  # one batch is read, and none ahead
    try:
        return own_tokens(with_further_labels(loader.next(), config), topology)
    finally:
        loader.close()


def _peak(config: Config, plan: Plan, topology: Topology, samples: Batch) -> int:
    """Bytes that this rank holds at most in a step of a plan, with an engine of its own."""
    take_peak_bytes()
    steps, micro = plan.gradient_accumulation_steps, plan.micro_batch_size
    batch = {
        name: values[: steps * micro].reshape(steps, micro, *values.shape[2:])
        for name, values in samples.items()
    }
    weights = [max(1.0, each * plan.degrees.sample_ranks) for each in own_weights(batch, config)]
    engine = start_engine(build_model(config, plan, topology), config, plan, topology)
    if config.training.ema_decay is not None:  # as a hook of the run does
        keep_average(engine, config.training.ema_decay)
    try:
        if config.model.kind == "hf":
            # transformers takes seconds to import
            from cdrmix.engines import base_model

            base_model.load_base(config, engine)
        scaler = getattr(engine.optimizer, "loss_scaler", None)
        if scaler is not None:  # no step is to be skipped: the optimizer would make no state
            scaler.cur_scale = 1.0
        for step in range(_STEPS):
            train_step(engine, config, topology, batch, step=step, weights=weights)
        return _taken_bytes()
    finally:
        end_engine(engine)


def _taken_bytes() -> int:
    """Most memory of this rank's device since the last reading (bytes): on CPUs resident memory, on
    GPUs what torch has reserved, and what is beside it."""
    if runtime.use_cpu():
        return take_peak_bytes()
    free, total = torch.cuda.mem_get_info()
    beside = max(0, total - free - torch.cuda.memory_reserved())
    reserved = torch.cuda.max_memory_reserved()
    take_peak_bytes()
    return reserved + beside


def _limit(share: float, before: int) -> float:
    """Most bytes that this rank may hold: its share of the device; of a host, which others use as
    well, no more than is left."""
    most = share * runtime.device_memory_gib() * GIB
    if runtime.use_cpu():
        most = min(most, before + usable_bytes(share) / runtime.local_world_size())
    return most


def _copy_bytes(plan: Plan) -> int:
    """Bytes of a checkpoint's copy, which a step does not have, where it is in the same memory."""
    return plan.memory.buffers.get("checkpoint_copy", 0) if plan.memory else 0


def _by_plan(plan: Plan, config: Config, micro: int) -> int:
    device = "cpu" if runtime.use_cpu() else "cuda"
    memory = with_micro_batch(plan, config, micro, device=device, reason="").memory
    assert memory is not None, "estimated for a micro batch"
    return memory.total


def _warn_if_short(fit: Fit) -> None:
    if not fit.fits and runtime.rank() == 0:
        used = fit.tried[fit.micro_batch_size]
        takes = "does not fit" if used is None else f"takes {size_text(used)}"
        logger.warning(
            "warning: a micro batch of one sample %s, and %s may be filled (resources.memory_share)"
            ": the run may end for lack of memory. `cdrmix plan` lists layouts that take less",
            *(takes, size_text(fit.limit_bytes)),
        )


def _told(found: Found, plan: Plan, sizes: list[int], why: str, config: Config) -> str:
    """Line about a size: of which, how it was found, and how far the plan was off."""
    predicted = _by_plan(plan, config, found.measured_size)
    off = found.used_bytes / predicted - 1
    others = ", ".join(str(size) for size in sizes[:12])
    more = f" and {len(sizes) - 12} more" if len(sizes) > 12 else ""
    return (
        f"the largest of {others}{more} that fits, {why} in {found.seconds:.0f} s; "
        f"{size_text(found.used_bytes)} measured of {size_text(found.limit_bytes)}, "
        f"{size_text(predicted)} by the plan ({off:+.0%})"
    )
