"""Supervision of a run, from the meeting of its ranks to the exit code of each."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from cdrmix import runtime
from cdrmix.cluster.heartbeat import Heartbeat, Limits, start_head
from cdrmix.cluster.outcome import Outcome, await_outcome, write_outcome
from cdrmix.config.schema import SupervisionConfig
from cdrmix.errors import EXIT_FAULT, TrainingError

_INTERVALS_FOR_THE_HEAD = 3
_SECONDS_FOR_OUTCOME = 2.0
_SECONDS_TO_BE_FOLLOWED = 12.0  # a little longer than the head waits for the others


class LostAlone(SystemExit):
    """A rank ends, has said why, and leaves the others waiting in a collective."""


def supervised(config: SupervisionConfig, action: Callable[[Heartbeat], int]) -> int:
    """Run `action` while every rank beats; collective.

    Args:
        config: deadlines.
        action: does the work of this rank, and gives its exit code.
    Returns:
        The exit code, which the head then knows too.
    """
    limits = Limits(config.deadline_seconds, config.phase_seconds)
    head = None
    if runtime.rank() == 0:
        head = start_head(
            runtime.master_address(),
            limits,
            world_size=runtime.world_size(),
            folder=runtime.launch_folder(),
        )
    meeting = runtime.broadcast_object(head.meeting if head else None)
    assert meeting is not None, "rank 0 made it"
    pipe = head.pipe if head else None
    heartbeat = Heartbeat(meeting, limits, rank=runtime.rank(), head_pipe=pipe)
    code = EXIT_FAULT
    try:
        code = action(heartbeat)
    except TrainingError as error:
        code = error.exit_code
        raise
    except RuntimeError:
        # Where a collective broke because another rank ended, the head says so and ends this one
        # before a traceback here, and in all other ranks, hides it.
        time.sleep(_INTERVALS_FOR_THE_HEAD * limits.interval_seconds)
        raise
    except SystemExit as end:  # of a signal, outside the loop
        code = end.code if isinstance(end.code, int) else EXIT_FAULT
        raise
    finally:
        heartbeat.leave(code)
        if isinstance(sys.exception(), LostAlone) and runtime.world_size() > 1:
            # its connections stay until the head has ended the others, who would each tell of them
            time.sleep(_SECONDS_TO_BE_FOLLOWED)
        folder = runtime.launch_folder()
        if folder is not None and runtime.rank() == 0:
            # srun ends the head with the last rank: it may write first
            await_outcome(folder, _SECONDS_FOR_OUTCOME)
    return code


def tell_launch(code: int) -> None:
    """Tell `cdrmix launch` of an end before the ranks have met; afterwards the head does."""
    folder = runtime.launch_folder()
    if folder is not None and not runtime.have_met():
        rank = runtime.environment_rank()
        write_outcome(folder, Outcome(code, f"rank {rank} ended before the ranks met", 0))
