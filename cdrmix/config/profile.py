"""The `profile` section: a profile of single steps."""

from __future__ import annotations

from pydantic import Field, field_validator

from cdrmix.config.section import Section


class ProfileConfig(Section):
    """Profile of a window of steps, into the folder `profile` of the run directory. DeepSpeed's
    flops profiler is none of it: it replaces functions of torch while it runs."""

    # Not strict: a list is what JSON has, such as a checkpoint's copy of the configuration.
    steps: tuple[int, ...] = Field(strict=False)
    """First and last optimizer step of the window, counted from 1."""
    ranks: tuple[int, ...] = Field((0,), strict=False, min_length=1)
    """Ranks that are profiled, counted from 0; the others wait where these take longer."""
    trace: bool = True
    """Write a trace of the window, for Perfetto or chrome://tracing."""
    shapes: bool = False
    """Tell kernels apart by the shapes of their inputs, at some cost in the window. On CPUs shapes
    are recorded in any case, for the bytes of collectives."""
    stacks: bool = False
    """Record the Python lines that called each operator, at a cost in the window."""
    memory: bool = True
    """On GPUs, record what allocates and frees, and write a snapshot of the allocator."""
    flops: bool = True
    """Count FLOPs of matrix products and convolutions, beside those of the plan."""

    @field_validator("steps")
    @classmethod
    def _is_a_window(cls, steps: tuple[int, ...]) -> tuple[int, ...]:
        if len(steps) != 2 or not 1 <= steps[0] <= steps[1]:
            raise ValueError(
                f"steps = {[*steps]} is no window: give the first step, from 1 on, and the last, "
                "such as [10, 13]"
            )
        return steps

    @field_validator("ranks")
    @classmethod
    def _each_once(cls, ranks: tuple[int, ...]) -> tuple[int, ...]:
        if min(ranks) < 0 or len({*ranks}) < len(ranks):
            raise ValueError(f"ranks = {[*ranks]}: give each once, counted from 0")
        return ranks
