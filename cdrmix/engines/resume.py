"""A run into a checkpoint and back: what is saved beside the engine, what may change between."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cdrmix import runtime
from cdrmix.checkpoint import engine_state, random_state, store
from cdrmix.checkpoint.reader import CheckpointReader
from cdrmix.config.load import changed_keys
from cdrmix.config.redaction import redacted
from cdrmix.engines.run import Run
from cdrmix.engines.run_directory import record_save
from cdrmix.errors import InfrastructureError, StateError
from cdrmix.log import get_logger

logger = get_logger(__name__)


def save(run: Run, position: dict[str, Any]) -> None:
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


def find_at(source: Path) -> store.Found:
    """The newest checkpoint that verifies at --resume PATH; collective.

    Raises:
        NoUsableStateError: if there are checkpoints and all are damaged.
        StateError: if there is none.
    """
    found = store.find(source)
    if found is None:
        raise StateError(
            f"--resume {source}: no checkpoint there. Try a run directory or one of its "
            "checkpoints/<step> folders, or --resume auto with --run-dir"
        )
    return found


def resume_from(run: Run, found: store.Found) -> None:
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


def restore(run: Run, found: store.Found) -> dict[str, Any]:
    """Put a checkpoint into a run, between two steps; collective.

    Returns:
        What was saved beside the engine.
    Raises:
        StateError: as `resume_from`.
    """
    for name, why in found.skipped:
        logger.warning("skipped checkpoint %s: %s", name, why)
    with runtime.together(lambda: CheckpointReader(found.path)) as reader:
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


def leave_behind(run: Run, found: store.Found, *, newer: bool) -> None:
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
