"""A run into a checkpoint and back: what is saved beside the engine, what may change between.

What a run does about an unhealthy step: go on, go back, or stop.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from cdrmix import runtime
from cdrmix.checkpoint import engine_state, random_state, store
from cdrmix.checkpoint.checkpoint_file import CheckpointFile
from cdrmix.config.load import changed_keys
from cdrmix.config.redaction import redacted
from cdrmix.engines.run import Run
from cdrmix.engines.run_directory import record_save
from cdrmix.errors import InfrastructureError, NoUsableStateError, StateError
from cdrmix.log import get_logger
from cdrmix.monitoring.health import Verdict, Watched
from cdrmix.monitoring.sinks import write_json_atomic

logger = get_logger(__name__)


def save_run(run: Run, position: dict[str, Any]) -> None:
    """Save the current step, unless the run directory has it already or is getting it; collective.

    In the background if so planned: `agree` in the loop takes note of its end, or `settle` does.

    Args:
        run: the run, between two steps.
        position: the loader's state at which the next step's batch begins.
    Raises:
        StateError: on every rank, if any of them could not write this checkpoint or, in the
            background, the one before.
    """
    if run.saver.step == run.step:
        return
    step = run.step  # that of the save, when training is steps further
    with _stalled(run):
        run.saver.start(
            run.step,
            run.stage.fragments(run),
            state={
                "loader": position,
                "tokenizer": run.corpus.manifest.tokenizer.sha256,
                "engine": engine_state.counters(run.engine),
                "config": redacted(run.config.model_dump(mode="json")),
                "seconds": run.seconds,
                "samples": run.samples,
                "health": run.health.state_dict(),
                **run.stage.saved(run),
            },
            rank_state={"random": random_state.random_state()},
            before=run.observer.sync,
            after=lambda: record_save(run.directory, step),
        )
    run.wall_time.save()
    run.saved_time = time.monotonic()
    if not run.choice.saves_in_background:
        settle(run)


def hold(run: Run) -> None:
    """Wait until the optimizer may change what is being saved; on this rank alone."""
    if run.saver.is_copying:
        with _stalled(run):
            run.saver.wait_for_copy()


def settle(run: Run) -> None:
    """Wait until what is being saved is saved; collective.

    Raises:
        StateError: on every rank, if any of them could not write.
    """
    with _stalled(run):
        run.saver.wait()


@contextlib.contextmanager
def _stalled(run: Run) -> Iterator[None]:
    with run.heartbeat.phase("saving"), run.wall_time.spent("checkpoint_stall"):
        yield


def find_at(source: Path) -> store.FoundCheckpoint:
    """The newest checkpoint that verifies at --resume PATH; collective.

    Raises:
        NoUsableStateError: if there are checkpoints and all are damaged.
        StateError: if there is none.
    """
    found = store.find_newest(source)
    if found is None:
        raise StateError(
            f"--resume {source}: no checkpoint there. Try a run directory or one of its "
            "checkpoints/<step> folders, or --resume auto with --run-dir"
        )
    return found


def resume_from(run: Run, found: store.FoundCheckpoint) -> None:
    """Go on from a checkpoint; collective.

    Args:
        run: a run that was just set up.
        found: the checkpoint, and the newer ones that were skipped.
    Raises:
        StateError: on every rank, if it belongs to another model or data order, or if any of them
            could not read it.
    """
    state = restore(run, found)
    run.earlier_seconds = state["seconds"]
    if "health" in state:  # of older versions it has none
        run.health.load_state_dict(state["health"])
    logger.info("resumed from %s", found.path)


def restore(run: Run, found: store.FoundCheckpoint) -> dict[str, Any]:
    """Put a checkpoint into a run, between two steps; collective.

    Returns:
        What was saved beside the engine.
    Raises:
        StateError: as `resume_from`.
    """
    for name, why in found.skipped:
        logger.warning("skipped checkpoint %s: %s", name, why)
    with runtime.together(lambda: CheckpointFile(found.path)) as reader:
        state = reader.state
        runtime.together(lambda: check_config(run, state["config"], found.path))
        runtime.together(lambda: run.loader.load_state_dict(state["loader"]))
        run.stage.load(run, reader)
        saved_random = runtime.together(lambda: reader.rank_state(runtime.rank()))
        if saved_random is not None:
            random_state.restore_random_state(saved_random["random"])
    run.step, run.samples = found.step, list(state["samples"])
    is_ours = found.path.parent.resolve() == run.directory.checkpoints.resolve()
    run.saver.saved_step = found.step if is_ours else None
    return state


def leave_behind(run: Run, found: store.FoundCheckpoint, *, newer: bool) -> None:
    """Rename checkpoints of this run that are passed over for `found`; collective.

    Args:
        run: goes on from there.
        found: the checkpoint.
        newer: also whole ones of later steps.
    Raises:
        InfrastructureError: on every rank, if the file system fails for now.
    """
    folders = (run.directory.checkpoints, *run.directory.copies)

    def rename() -> None:
        try:
            store.set_aside(found, folders, newer=newer and run.directory.holds(found.path))
        except OSError as error:
            raise InfrastructureError(
                f"{run.directory.checkpoints}: cannot be listed ({error.strerror}). Start again "
                "when the file system answers"
            ) from error

    runtime.first_rank_does(rename)


def check_config(run: Run, saved: dict[str, Any], path: Path) -> None:
    """Refuse another model; log every other change."""
    changed = changed_keys(redacted(saved), redacted(run.config.model_dump(mode="json")))
    model = [f"{key}: {old} -> {new}" for key, old, new in changed if key.startswith("model.")]
    if model:
        raise StateError(
            f"{path}: was trained with another model. Changed: {'; '.join(model)}. Try the saved "
            "values, or a new run directory"
        )
    for key, old, new in changed:
        logger.info("config changed since the checkpoint: %s: %s -> %s", key, old, new)


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
            save_run(run, position)
        raise _stopped(run, worst)
    return worst.action == "rollback"


def write_record(run: Run) -> None:
    """Have the run directory tell what became of unhealthy steps."""
    if runtime.rank() == 0:
        write_json_atomic(run.directory.path / HEALTH, run.health.record())


def _roll_back(run: Run, verdict: Verdict, position: dict[str, Any]) -> None:
    settle(run)  # a checkpoint on its way to the disk is one to go back to
    bad_step = run.step
    resumes_at = position["samples_consumed"]
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
    save_run(run, position)
    logger.info(
        "went back from step %d to %s, and on behind sample %d: rollback %d",
        *(bad_step, found.path, resumes_at, run.health.rollbacks),
    )


def _newest_good(run: Run, bad_step: int) -> store.FoundCheckpoint | None:
    """The newest checkpoint before the bad step; where the run went back to that one before and
    got no further than to the next bad step, the one before, if there is one."""
    folders = (run.directory.checkpoints, *run.directory.copies)
    found = store.find_newest(*folders, before=bad_step)
    if found is None or not _is_of_this_stage(run, found):
        return None
    if found.step != run.health.rolled_back_to:
        return found
    older = None
    with contextlib.suppress(NoUsableStateError):
        older = store.find_newest(*folders, before=found.step)
    return older if older is not None and _is_of_this_stage(run, older) else found


def _is_of_this_stage(run: Run, found: store.FoundCheckpoint) -> bool:
    """Whether it holds what this stage trains: Stage B begins with the last checkpoint of A."""
    with runtime.together(lambda: CheckpointFile(found.path)) as reader:
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
