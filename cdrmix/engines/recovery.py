"""What a run does about an unhealthy step: go on, go back, or stop."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

from cdrmix import runtime
from cdrmix.checkpoint import store
from cdrmix.checkpoint.reader import CheckpointReader
from cdrmix.engines.resume import leave_behind, restore, save, settle
from cdrmix.engines.run import Run
from cdrmix.errors import NoUsableStateError, StateError
from cdrmix.log import get_logger
from cdrmix.monitoring.health import Verdict, Watched
from cdrmix.monitoring.sinks import write_json_atomic

logger = get_logger(__name__)

_SEVERITY = ("warn", "skip", "rollback", "stop")
# What is unhealthy about the machine is not about the weights.
_STATE_IS_GOOD = ("loader", "memory")
_CALMER = "a lower training.learning_rate, more training.warmup_steps or training.precision = fp32"
_ADVICE: dict[Watched, str] = {
    "non_finite": _CALMER,
    "loss_spike": _CALMER,
    "routing": "a larger model.moe.load_balance_weight, or a lower training.learning_rate",
    "loader": "data on a faster disk, or data.order = windowed; see health.loader",
    "memory": "a smaller training.micro_batch_size; see health.memory",
}
HEALTH = "health.json"


def react(run: Run, verdicts: Iterable[Verdict | None], position: dict[str, Any]) -> bool:
    """Do what the verdicts on the last step ask for; every rank has the same ones; collective.

    Args:
        run: the run, between two steps, its step counted.
        verdicts: None is healthy.
        position: the loader's state at which the next step's batch begins.
    Returns:
        Whether the run went back, to a step that was not the last.
    Raises:
        StateError: on every rank, if the run is to stop, or there is nothing to go back to.
    """
    found = sorted(filter(None, verdicts), key=lambda verdict: _SEVERITY.index(verdict.action))
    if not found:
        return False
    news = [verdict for verdict in found if verdict.is_new or verdict.action != "warn"]
    for verdict in news if runtime.rank() == 0 else ():
        said = (run.step, verdict.why, verdict.watched, verdict.action)
        logger.warning("unhealthy: step %d: %s (health.%s: %s)", *said)
    worst = found[-1]
    if news:  # what lasts is counted at the end
        runtime.together(lambda: write_record(run))
    if worst.action == "rollback":
        with run.heartbeat.phase("rolling back"):
            _roll_back(run, worst, position)
    if worst.action == "stop":
        if worst.watched in _STATE_IS_GOOD:
            save(run, position)
        raise _stopped(run, worst)
    return worst.action == "rollback"


def write_record(run: Run) -> None:
    """Have the run directory tell what became of unhealthy steps."""
    if runtime.rank() == 0:
        write_json_atomic(run.directory.path / HEALTH, run.health.record())


def _roll_back(run: Run, verdict: Verdict, position: dict[str, Any]) -> None:
    settle(run)  # a checkpoint on its way to the disk is one to go back to
    bad_step, resumes_at = run.step, position["samples_consumed"]
    found = _newest_good(run, bad_step)
    if found is None:
        why = f"{verdict.why}, and there is no checkpoint to go back to"
        raise _stopped(run, verdict._replace(why=why))
    state = restore(run, found)
    leave_behind(run, found, newer=False)
    run.unjudged = None
    passed_over = (state["loader"]["samples_consumed"], resumes_at)
    timeline = state["health"]["timeline"] if "health" in state else None
    run.health.rolled_back(to_step=found.step, passed_over=passed_over, timeline=timeline)
    run.wall_time.go_back(found.step)
    run.loader.load_state_dict(position)
    runtime.together(lambda: run.observer.go_back(run.step))
    runtime.together(lambda: write_record(run))
    run.saver.saved_step = None  # what has this step's name knows nothing of what was passed over
    save(run, position)
    logger.info(
        "went back from step %d to %s, and on behind sample %d: rollback %d",
        *(bad_step, found.path, resumes_at, run.health.rollbacks),
    )


def _newest_good(run: Run, bad_step: int) -> store.Found | None:
    """The newest checkpoint before the bad step; where the run went back to that one before and
    got no further than to the next bad step, the one before, if there is one."""
    folders = (run.directory.checkpoints, *run.directory.copies)
    found = store.find(*folders, before=bad_step)
    if found is None or not _is_of_this_stage(run, found):
        return None
    if found.step != run.health.rolled_back_to:
        return found
    older = None
    with contextlib.suppress(NoUsableStateError):
        older = store.find(*folders, before=found.step)
    return older if older is not None and _is_of_this_stage(run, older) else found


def _is_of_this_stage(run: Run, found: store.Found) -> bool:
    """Whether it holds what this stage trains: Stage B begins with the last checkpoint of A."""
    with runtime.together(lambda: CheckpointReader(found.path)) as reader:
        return reader.state.get("stage", "a") == run.stage.saved(run)["stage"]


def _stopped(run: Run, verdict: Verdict) -> StateError:
    """The error that ends an unhealthy run, the same on every rank; collective."""
    settle(run)
    newest = run.saver.saved_step
    saved = "none yet" if newest is None else f"that of step {newest}"
    has_diverged = verdict.watched in ("non_finite", "loss_spike")
    return StateError(
        f"step {run.step}: {verdict.why}: the run {'has diverged and ' * has_diverged}was stopped. "
        f"The newest checkpoint is {saved}. Try {_ADVICE[verdict.watched]}"
    )
