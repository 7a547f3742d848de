"""Saves a run, resumes it, and carries out verdicts of health: go on, go back, or stop."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from functools import partial

from cdrmix import runtime
from cdrmix.checkpoint import engine_state, store
from cdrmix.checkpoint.candidates import check_same_model
from cdrmix.checkpoint.checkpoint_file import CheckpointFile
from cdrmix.checkpoint.held_out import score_of
from cdrmix.config.load import kept_values
from cdrmix.engines.forgetting import FORGETTING
from cdrmix.engines.run import JsonObject, Run
from cdrmix.engines.run_directory import SAVES
from cdrmix.engines.tiers_of_run import clear_host_tiers
from cdrmix.errors import InfrastructureError, NoUsableStateError, StateError
from cdrmix.log import get_logger
from cdrmix.monitoring.health import Verdict, Watched
from cdrmix.monitoring.sinks import write_json_atomic

logger = get_logger(__name__)


def save_run(run: Run, position: JsonObject) -> None:
    """Save the current step, unless the run directory has it already or is getting it; collective.

    In the background if so planned: `agree` in the loop then notices its end, or `settle` does.
    The next step's batch begins at `position`, of the stage.

    Raises:
        StateError: on every rank, if any of them could not write this checkpoint or, in the
            background, the one before.
    """
    if run.saver.step == run.step:
        return
    with _stalled(run):
        run.saver.start(
            run.step,
            run.stage.fragments(run),
            state=_state(run, position),
            rank_state={"random": runtime.random_state()},
            score=run.score,
            before=partial(_before_name, run),
            # Once the checkpoint has its name, when training may be steps further.
            after=partial(write_json_atomic, run.directory.path / SAVES, {"step": run.step}),
        )
    run.wall_time.save()
    run.cadence.saved(run.step)
    run.saved_time = time.monotonic()
    if not run.plan.saves_in_background:
        settle(run)


def save_on_hosts(run: Run, position: JsonObject) -> None:
    """Save the current step to the tiers of hosts that are due; collective. What fails there is a
    warning. For `position` see `save_run`."""
    with _stalled(run):
        run.saver.start_in_host_tiers(
            run.step,
            run.stage.fragments(run),
            state=_state(run, position),
            rank_state={"random": runtime.random_state()},
            before=partial(_before_name, run),
        )
    run.cadence.saved_on_hosts()
    if not run.plan.saves_in_background:
        settle(run)


def _before_name(run: Run) -> None:
    run.directory.check_held()
    # A resumed run cuts metrics back to its step, and could not write lost ones again.
    run.observer.sync()


def _state(run: Run, position: JsonObject) -> JsonObject:
    """Entries of a checkpoint's state.json."""
    return {
        "loader": position,
        "tokenizer": run.stage.corpus.manifest.tokenizer.sha256,
        "engine": engine_state.counters(run.engine),
        # Checkpoints are handed on: no passwords of a remote data set in them.
        "config": kept_values(run.config, mode="json"),
        "seconds": run.seconds,
        "health": run.health.state_dict(),
        "stage": run.stage.name,
        **({"base": run.base} if run.base else {}),
        **run.stage.saved(run),
        **run.cadence.state_dict(),
        **run.hooks.state_dict(),
    }


def hold(run: Run) -> None:
    """Wait until the state is copied, so that the optimizer may change it, and tell hooks; on this
    rank alone."""
    _wait_for_copy(run)
    run.hooks.backward_done(run.step)


def _wait_for_copy(run: Run) -> None:
    if run.saver.is_copying:
        with _stalled(run):
            run.saver.wait_for_copy()


@contextlib.contextmanager
def averaged(run: Run) -> Iterator[None]:
    """Puts the average of the weights into their place, as engine_state's context does; collective.

    That exchanges values in place, as an optimizer's step does: a checkpoint under way is copied
    before, or would hold the one for the other.
    """
    _wait_for_copy(run)
    with engine_state.averaged(run.engine):
        yield


def settle(run: Run) -> None:
    """Wait until the checkpoint under way is on disk; collective, and raises as `save_run` does."""
    with _stalled(run):
        run.saver.wait()


@contextlib.contextmanager
def _stalled(run: Run) -> Iterator[None]:
    with run.heartbeat.phase("saving"), run.wall_time.spent("checkpoint_stall"):
        yield


def state_of(checkpoint: store.FoundCheckpoint) -> JsonObject:
    """Content of a checkpoint's state.json; collective. Early versions, of `a`, name no stage."""
    with runtime.together(lambda: CheckpointFile(checkpoint.path)) as reader:
        return _with_hooks_of_today(reader.state)


def restore(run: Run, checkpoint: store.FoundCheckpoint) -> JsonObject:
    """Load a checkpoint into a run, between two steps, and return its state.json; collective.

    Raises StateError on every rank, if it is of another model or data order, or cannot be read.
    """
    for name, why in checkpoint.skipped:
        logger.warning("skipped checkpoint %s: %s", name, why)
    with runtime.together(lambda: CheckpointFile(checkpoint.path)) as reader:
        state = _with_hooks_of_today(reader.state)

        def check_config() -> None:
            # Other changes may be on purpose, and stand in the record of the start.
            check_same_model(checkpoint.path, state["config"], run.config)

        # Refused before anything is loaded, which leaves the run as it was.
        runtime.together(check_config)
        runtime.together(lambda: run.stage.loader.load_state_dict(state["loader"]))
        run.stage.load(run, reader)
        # None of a rank that the saving run did not have: this one keeps its seed.
        saved_random = runtime.together(lambda: reader.rank_state(runtime.rank()))
        if saved_random is not None:
            runtime.restore_random_state(saved_random["random"])
    run.step = checkpoint.step
    run.cadence.load_state_dict(state, step=checkpoint.step)
    # Rank 0 writes the record: a checkpoint saved again, after a rollback or elsewhere, keeps it.
    score = score_of(checkpoint.path) if runtime.rank() == 0 else None
    run.evaluated = None if score is None else (checkpoint.step, score)
    # A checkpoint of another run or of the replica: this step is still to be saved here.
    is_ours = checkpoint.path.parent.resolve() == run.directory.folders[0].resolve()
    run.saver.saved_step = checkpoint.step if is_ours else None
    return state


def _with_hooks_of_today(state: JsonObject) -> JsonObject:
    """Content of state.json with what earlier versions kept beside the state of hooks."""
    if "cpt" not in state:
        return state
    return state | {"hooks": state.get("hooks", {}) | {FORGETTING: state["cpt"]}}


def leave_behind(run: Run, checkpoint: store.FoundCheckpoint, *, newer: bool) -> None:
    """Rename the damaged checkpoints of a run that were skipped for `checkpoint`; collective.

    With `newer` also whole ones of later steps. Raises InfrastructureError on every rank, if the
    file system fails for now.
    """

    def rename() -> None:
        try:
            is_newer_ours = newer and run.directory.holds(checkpoint.path)
            store.set_aside(checkpoint, run.directory.folders, newer=is_newer_ours)
        except OSError as error:
            raise InfrastructureError(
                f"{run.directory.folders[0]}: cannot be listed ({error.strerror}). Start again "
                "when the file system answers"
            ) from error

    runtime.first_rank_does(rename)
    clear_host_tiers(run.config, run.directory, checkpoint, newer=newer)


# From mild to severe: of several verdicts on a step the last is carried out.
_SEVERITY = ("warn", "skip", "lower_rate", "rollback", "stop")
# A slow disk or a full device says nothing against the weights, and the user may take what they
# have forgotten: the last step is worth saving.
_STATE_IS_GOOD = ("loader", "memory", "forgetting")
_CALMER = "a lower training.learning_rate, more training.warmup_steps or training.precision = fp32"
_ADVICE: dict[Watched, str] = {
    "non_finite": _CALMER,
    "loss_spike": _CALMER,
    "routing": "a larger model.moe.load_balance_weight, or a lower training.learning_rate",
    "loader": "data on a faster disk, or data.order = windowed; see health.loader",
    "memory": "a smaller training.micro_batch_size; see health.memory",
    "forgetting": "a larger cpt.replay.fraction or a lower training.learning_rate in a new run, or "
    "a larger cpt.forgetting.stop_above to go on",
}


def react(run: Run, verdicts: Iterable[Verdict | None], position: JsonObject) -> bool:
    """Carry out the verdicts on the last step, which every rank has alike; collective.

    None is healthy. For `position` see `save_run`.

    Returns:
        True if the run went back to an earlier step.
    Raises:
        StateError: on every rank, if the run is to stop, or there is nothing to go back to.
    """
    unhealthy = sorted(filter(None, verdicts), key=lambda verdict: _SEVERITY.index(verdict.action))
    if not unhealthy:
        return False
    news = [verdict for verdict in unhealthy if verdict.is_new or verdict.action != "warn"]
    for verdict in news if runtime.rank() == 0 else ():
        section = "cpt" if verdict.watched == "forgetting" else "health"
        logger.warning(
            "unhealthy: step %d: %s (%s.%s: %s)",
            *(run.step, verdict.why, section, verdict.watched, verdict.action),
        )
    worst = unhealthy[-1]
    if worst.action == "lower_rate":  # not beside a rollback or a stop, which end this course
        run.health.rate_lowered()
        logger.info(
            "learning rate: the schedule's times %g from step %d on, lowering %d",
            *(run.health.rate_scale, run.step + 1, run.health.lowerings),
        )
    if news:  # repeated warnings are written once, at the end of the run
        runtime.first_rank_does(lambda: write_record(run))
    if worst.action == "rollback":
        with run.heartbeat.phase("rolling back"):
            _roll_back(run, worst, position)
    if worst.action == "stop":
        if worst.watched in _STATE_IS_GOOD:
            save_run(run, position)
        raise _stopped(run, worst)
    return worst.action == "rollback"


def write_record(run: Run) -> None:
    """Write the record of unhealthy steps into the run directory; rank 0."""
    write_json_atomic(run.directory.path / "health.json", run.health.record())


def _roll_back(run: Run, verdict: Verdict, position: JsonObject) -> None:
    settle(run)  # the checkpoint under way may be the one to go back to
    bad_step = run.step
    resumes_at = position["samples_consumed"]
    folders = run.directory.folders
    checkpoint = store.find_newest(*folders, before=bad_step)
    # Stage B begins with the last checkpoint of Stage A, which it cannot load as its own.
    if checkpoint is None or state_of(checkpoint).get("stage", "a") != run.stage.name:
        why = f"{verdict.why}, and there is no checkpoint to go back to"
        raise _stopped(run, verdict._replace(why=why))
    if checkpoint.step == run.health.rolled_back_to:
        # The last time, the run went back to this one and came no further than the next bad step:
        # the fault may be older. Go on from the one before, if there is one.
        older = None
        with contextlib.suppress(NoUsableStateError):
            older = store.find_newest(*folders, before=checkpoint.step)
        if older is not None and state_of(older).get("stage", "a") == run.stage.name:
            checkpoint = older
    state = restore(run, checkpoint)
    leave_behind(run, checkpoint, newer=False)
    run.unjudged = None
    passed_over = (state["loader"]["samples_consumed"], resumes_at)
    timeline = state["health"]["timeline"] if "health" in state else None
    run.health.rolled_back(to_step=checkpoint.step, passed_over=passed_over, timeline=timeline)
    run.wall_time.go_back(checkpoint.step)
    # The weights go back and the data does not: the samples that led here are passed over.
    run.stage.loader.load_state_dict(position)
    runtime.together(lambda: run.observer.go_back(run.step))
    run.hooks.rewound(run.step, state)
    runtime.first_rank_does(lambda: write_record(run))
    # The checkpoint of this step does not know which samples are passed over: save it again.
    run.saver.saved_step = None
    save_run(run, position)
    logger.info(
        "went back from step %d to %s, and on behind sample %d: rollback %d",
        *(bad_step, checkpoint.path, resumes_at, run.health.rollbacks),
    )


def _stopped(run: Run, verdict: Verdict) -> StateError:
    """Returns the error that ends an unhealthy run, the same on every rank; collective."""
    settle(run)  # so that the message names a checkpoint that is on disk
    newest = run.saver.saved_step
    saved = "none yet" if newest is None else f"that of step {newest}"
    has_diverged = verdict.watched in ("non_finite", "loss_spike")
    return StateError(
        f"step {run.step}: {verdict.why}: the run {'has diverged and ' * has_diverged}was stopped. "
        f"The newest checkpoint is {saved}. Try {_ADVICE[verdict.watched]}"
    )
