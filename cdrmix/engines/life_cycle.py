"""The life of a stage from set-up to finished.json, the same for Stage A and Stage B."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from cdrmix import runtime
from cdrmix.checkpoint import store
from cdrmix.cluster.starts import read_starts
from cdrmix.engines.loop import measure, train
from cdrmix.engines.recovery import leave_behind, restore, save_run, write_record
from cdrmix.engines.run import JsonObject, Run
from cdrmix.engines.run_directory import FINISHED, write_base, write_description
from cdrmix.engines.stage_a_optimizer import record_groups
from cdrmix.engines.start_record import record_start
from cdrmix.engines.tiers_of_run import is_on_hosts_alone
from cdrmix.hooks import RunView
from cdrmix.log import get_logger
from cdrmix.monitoring.metrics import record
from cdrmix.monitoring.sinks import write_json_atomic
from cdrmix.runtime.phases import watched_by

logger = get_logger(__name__)


def run_stage(
    run: Run,
    checkpoint: store.FoundCheckpoint | None,
    *,
    resumes: bool,
    finish: Callable[[], None],
    is_last: bool,
    guard: AbstractContextManager[None] | None = None,
) -> bool:
    """Resume, describe, train and finish a stage, and tear its run down; collective.

    Args:
        run: just set up.
        checkpoint: that the start goes on from; newer ones of this run are renamed. None: there
            is none, or Stage A has just ended.
        resumes: `checkpoint` is one of this stage, to be loaded; Stage B may start on one of A.
        finish: called after the last step, on every rank.
        is_last: no other stage follows in this run.
        guard: entered around training and `finish`, whose evaluation takes memory as well.
    Returns:
        True if a signal or a hook stopped it; the state is then saved.
    """
    stage = run.stage
    with run, watched_by(run.memory.watch):
        with run.heartbeat.phase("starting"):
            state = _resume_and_describe(run, checkpoint, resumes=resumes)
        # Inside the guard, which has errors of its own for some.
        with guard or nullcontext(), run.hooks.told_of_errors():
            with run.heartbeat.phase("starting"):
                run.hooks.start(_view(run), state=state)
                run.hooks.check()
            measuring = run.hooks.measuring(run.step, is_last=False) if state is None else []
            if measuring:
                metrics = measure(run, measuring)
                run.hooks.evaluated(run.step, metrics)
                line = run.hooks.log(run.step, record(step=run.step, **metrics))
                runtime.together(partial(run.observer.write, run.step, line))
                run.start_up.done("baseline")
            # Outside of the training loop nothing is unsaved: a signal may end the rank at once.
            with run.requests.deferred(), runtime.frozen_objects():
                is_stopped = train(run)
            if is_stopped:
                run.hooks.end("stopped")
                run.hooks.check()
                return True
            with run.heartbeat.phase("finishing"):
                # Before the results, which tell what the archive has.
                run.saver.finish(seconds=run.config.supervision.phase_seconds / 2)
                finish()
                run.hooks.end("done")
                run.hooks.check()
                # Last of all: the batch script takes this file as the end of the run.
                if is_last:
                    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
                    end = {"step": run.step, "stage": stage.name, "finished": now}
                    marker = run.directory.path / FINISHED
                    runtime.first_rank_does(lambda: write_json_atomic(marker, end))
    return False


def _resume_and_describe(
    run: Run, checkpoint: store.FoundCheckpoint | None, *, resumes: bool
) -> JsonObject | None:
    """Takes over the state of a checkpoint, and writes what describes this start; collective.

    Returns the checkpoint's state.json; None of a stage that begins.
    """
    state = None
    if checkpoint is not None and resumes:
        state = restore(run, checkpoint)
        run.earlier_seconds = state["seconds"]
        if "health" in state:  # early versions saved none
            run.health.load_state_dict(state["health"])
        logger.info("resumed from %s", checkpoint.path)
    # Only now, so that a start that is refused leaves an earlier run as it was.
    if run.base is not None and run.base_files is not None:
        keep = partial(write_base, run.directory, run.base_files, run.base["digest"])
        runtime.first_rank_does(keep)
    stage = run.stage
    describe = partial(write_description, run.directory, run.config, run.plan, stage.corpus)
    steps = stage.num_steps if stage.name == "b" else None
    runtime.first_rank_does(lambda: describe(stage_b_steps=steps))
    if stage.name == "a":
        record_groups(run.directory, run.engine, run.config)
    if not run.is_recorded:
        record_start(run, state)
    if checkpoint is not None:
        leave_behind(run, checkpoint, newer=True)
    run.start_up.done("resume")
    runtime.first_rank_does(lambda: _open_records(run))
    only_here = partial(is_on_hosts_alone, run.config, run.directory)
    if checkpoint is not None and state is not None and only_here(checkpoint):
        # The host may be lost next: the run directory has it as soon as may be.
        save_run(run, run.stage.loader.state_dict())
    return state


def _view(run: Run) -> RunView:
    return RunView(
        directory=run.directory.path,
        config=run.config,
        stage=run.stage.name,
        rank=runtime.rank(),
        world_size=runtime.world_size(),
        num_steps=run.stage.num_steps,
        step=run.step,
        engine=run.engine,
    )


def _open_records(run: Run) -> None:
    # The account first: it needs the metrics of an earlier start, which the observer cuts back.
    # Stage B goes on with the account of Stage A.
    folder = run.directory.path
    if run.wall_time.path is None:
        starts = read_starts(folder)
        run.wall_time.open(
            folder,
            step=run.step,
            start_up_seconds=run.start_up.seconds,
            watched=(starts[-1].step, starts[-1].ended.timestamp()) if starts else None,
        )
    write_record(run)
    tokens = run.config.training.tokens_per_step if run.stage.name == "a" else None
    num_steps = run.stage.num_steps
    run.observer.open(folder, step=run.step, num_steps=num_steps, tokens_per_step=tokens)
