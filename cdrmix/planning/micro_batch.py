"""Micro batches that a probe may try, and the search for the largest that fits.

The memory of a step is a straight line over the samples of a micro-batch, as long as the model and
its layout stay: states and buffers, and activations for each sample. So the search goes up by
predictions and tries only what is expected to fit: running out of memory on purpose would leave
other ranks in a collective, and on a host it would call the kernel's killer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from cdrmix.planning.plan import Plan

# A slope by two small sizes says little about much larger ones.
_LARGEST_JUMP = 8
# Micro-steps of a trial: the second finds the gradients of the first.
_MICRO_STEPS = 2


class Fit(NamedTuple):
    """Result of a search."""

    micro_batch_size: int
    tried: dict[int, int | None]  # size: bytes of the fullest rank; None: it ran out of memory
    limit_bytes: int

    @property
    def fits(self) -> bool:
        """True if the size is within the limit, which the smallest of all may not be."""
        used = self.tried[self.micro_batch_size]
        return used is not None and used <= self.limit_bytes


def sizes_to_try(plan: Plan, *, below: int | None = None) -> list[int]:
    """Micro batches that keep the global batch: divisors of a rank's samples of a step, rising.

    In a pipeline a step keeps as many micro-batches as stages, as far as there are samples for it:
    with fewer of them some stage would always wait. `below` leaves out sizes from there on, except
    for one sample.
    """
    samples = plan.micro_batch_size * plan.gradient_accumulation_steps
    most = max(1, samples // plan.degrees.pipeline)
    if below is not None:
        most = max(1, min(most, below - 1))
    return [size for size in range(1, most + 1) if samples % size == 0]


def trial_plan(plan: Plan, micro: int) -> Plan:
    """Plan of a short step with a micro batch: of a few micro-steps, which takes the memory of
    one with more of them."""
    samples = plan.micro_batch_size * plan.gradient_accumulation_steps
    steps = min(samples // micro, _MICRO_STEPS + plan.degrees.pipeline - 1)
    batches = {
        "train_batch_size": micro * steps * plan.degrees.data,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
    }
    return replace(
        plan,
        micro_batch_size=micro,
        gradient_accumulation_steps=steps,
        deepspeed=plan.deepspeed | batches,
    )


def largest_that_fits(
    sizes: Sequence[int],
    measure: Callable[[int], int | None],
    *,
    limit_bytes: int,
    sample_bytes: int,
) -> Fit:
    """Finds the largest of `sizes`, which rise from 1 sample, that takes at most `limit_bytes`.

    Args:
        measure: bytes that a step with a size takes; None: it ran out of memory.
        sample_bytes: of each further sample, by the plan: a guess until two sizes are measured.
    """
    tried: dict[int, int | None] = {}
    best, over = sizes[0], sizes[-1] + 1  # the smallest size known not to fit
    while True:
        trial = best if not tried else _next(sizes, tried, best, over, limit_bytes, sample_bytes)
        if trial is None:
            return Fit(best, tried, limit_bytes)
        used = tried[trial] = measure(trial)
        if used is not None and used <= limit_bytes:
            best = trial
        elif trial == best:  # the smallest of all
            return Fit(best, tried, limit_bytes)
        else:
            over = trial


def _next(
    sizes: Sequence[int],
    tried: dict[int, int | None],
    best: int,
    over: int,
    limit_bytes: int,
    sample_bytes: int,
) -> int | None:
    """Largest untried size that is expected to fit; None if no larger one is."""
    measured = sorted((size, used) for size, used in tried.items() if used is not None)
    used_by_best = tried[best]
    assert used_by_best is not None, "it fits"
    slope = min(float(sample_bytes), used_by_best / best)  # what is fixed is not below zero
    if len(measured) > 1:
        (first, low), (last, high) = measured[0], measured[-1]
        slope = max(0.0, (high - low) / (last - first))
    # One size tells nothing of the slope: then the next one alone.
    most = (
        best * _LARGEST_JUMP
        if len(measured) > 1
        else next((size for size in sizes if size > best), best)
    )
    candidates = [
        size
        for size in sizes
        if best < size < over
        and size <= most
        and used_by_best + slope * (size - best) <= limit_bytes
    ]
    return max(candidates, default=None)
