"""From a resolved configuration to a finished run, in order."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from cdrmix import runtime
from cdrmix.checkpoint import store
from cdrmix.cluster.heartbeat import Heartbeat
from cdrmix.cluster.starts import StartUp
from cdrmix.config.load import config_hash
from cdrmix.config.schema import Config
from cdrmix.engines.finish import finish
from cdrmix.engines.loop import start_engine, train
from cdrmix.engines.out_of_memory import noted, with_what_fits
from cdrmix.engines.recovery import find_at, leave_behind, resume_from, write_record
from cdrmix.engines.run import Observer, Run, Start, account, make_saver
from cdrmix.engines.run_directory import (
    LOG,
    RunDirectory,
    keep_tokenizer,
    open_run_directory,
    refuse_lost_checkpoints,
    write_description,
    write_finished,
)
from cdrmix.engines.stage_a import Pretraining
from cdrmix.engines.supervision import Requests, supervised
from cdrmix.engines.training_data import check_same, make_loader, open_corpus
from cdrmix.errors import EXIT_DONE, EXIT_STOPPED_BY_SIGNAL, StateError
from cdrmix.log import get_logger, log_to_file
from cdrmix.monitoring.health import Health
from cdrmix.parallel.apply import build_model
from cdrmix.parallel.topology import make_topology
from cdrmix.planning.plan import Plan
from cdrmix.stage_b.stage_b_session import stage_of, train_stage_b

logger = get_logger(__name__)


def run_training(
    config: Config, plan: Plan, *, run_dir: Path | None, resume: str, start_up: StartUp
) -> int:
    """Train as configured; every rank calls this once its process group is there.

    Args:
        config: resolved configuration.
        plan: profile, degrees and batch sizes for this world.
        run_dir: --run-dir, or None for a new one.
        resume: --resume: never, auto, or a run directory or checkpoint.
        start_up: of this process.
    Returns:
        Exit code of the process: 0 done, 75 stopped by a signal after saving.
    Raises:
        TrainingError: on every rank, whichever met it.
    """
    requests = Requests()
    requests.listen()  # before a watchdog can pass a signal on
    action = partial(
        _train, config, plan, requests, run_dir=run_dir, resume=resume, start_up=start_up
    )
    return supervised(config.supervision, action)


def _train(
    config: Config,
    plan: Plan,
    requests: Requests,
    heartbeat: Heartbeat,
    *,
    run_dir: Path | None,
    resume: str,
    start_up: StartUp,
) -> int:
    start_up.done("supervision")
    runtime.seed_everything(config.training.seed, deterministic=config.training.deterministic)
    start_up.done("imports")  # torch's compiler, by its setting of determinism or the optimizer
    check_same("configurations", "hash", config_hash(config))
    found = find_at(Path(resume)) if resume not in ("never", "auto") else None
    with open_run_directory(config, requested=run_dir, resume=resume) as directory:
        plan = with_what_fits(plan, config, directory.path)
        runtime.together(lambda: _announce(directory, plan))
        if runtime.rank() == 0:
            heartbeat.log_to(directory.path / LOG)
        if resume == "auto":
            found = store.find_newest(directory.path, *directory.copies)
            if found is None:
                runtime.first_rank_does(lambda: refuse_lost_checkpoints(directory, config))
                logger.info("no checkpoint in %s yet: starting at step 0", directory.path)
        start_up.done("resume")
        moe = config.model.moe
        health = Health(config.health, num_experts=moe.num_experts if moe else None)
        start = Start(config, plan, directory, requests, heartbeat, start_up, health)
        stopped = _run_stages(start, found)
        return EXIT_STOPPED_BY_SIGNAL if stopped else EXIT_DONE


def _run_stages(start: Start, found: store.FoundCheckpoint | None) -> bool:
    """The stages that are asked for and not over, from a checkpoint on; whether a signal stopped
    one of them."""
    stage = start.config.training.stage
    is_in_stage_b = found is not None and stage_of(found) == "b"
    if found is not None and is_in_stage_b and start.config.stage_b is None:
        raise StateError(
            f"{found.path}: was saved in Stage B; this config has no stage_b section. Use "
            "config_snapshot.yaml of that run"
        )
    if stage == "a" and is_in_stage_b and found is not None:
        raise StateError(
            f"{found.path}: was saved in Stage B. Try training.stage = b or all, or a new run "
            "directory"
        )
    if stage == "b" or is_in_stage_b:
        return train_stage_b(start, found)
    goes_on = stage == "all" and start.config.stage_b is not None
    if _pretrain(start, found, goes_on=goes_on):
        return True
    if not goes_on:
        return False
    runtime.release_memory()
    return train_stage_b(start, None)


def _pretrain(start: Start, found: store.FoundCheckpoint | None, *, goes_on: bool) -> bool:
    """Stage A; whether a signal stopped it. Where the run goes on, its engine is given up."""
    config = start.config
    directory = start.directory
    with _set_up(start) as run:
        if found is not None:
            resume_from(run, found)
        # only now, so that a start that is refused leaves an earlier run as it was
        runtime.together(lambda: write_description(directory, config, start.plan))
        tokenizer = run.corpus.manifest.tokenizer.sha256
        runtime.together(lambda: keep_tokenizer(directory, run.corpus.folder, tokenizer))
        if found is not None:
            leave_behind(run, found, newer=True)
        start.start_up.done("resume")
        runtime.together(partial(account, run))
        runtime.together(lambda: write_record(run))
        num_steps = run.stage.num_steps
        runtime.together(
            lambda: run.observer.open(directory.path, step=run.step, num_steps=num_steps)
        )
        with noted(run):
            with start.requests.deferred():
                stopped = train(run)
            if not stopped:
                with start.heartbeat.phase("finishing"):
                    finish(run)
                    if not goes_on:
                        runtime.together(
                            lambda: write_finished(directory, step=run.step, stage="a")
                        )
    if goes_on and not stopped:
        run.engine.destroy()
        for parameter in run.engine.module.parameters():
            # the optimizer of bf16 binds methods to each that hold it, out of the collector's sight
            vars(parameter).clear()
    return stopped


def _set_up(start: Start) -> Run:
    config = start.config
    plan = start.plan
    directory = start.directory
    start_up = start.start_up
    corpus = open_corpus(config)
    topology = make_topology(plan.degrees)
    loader = make_loader(config, plan, topology, corpus.train)
    start_up.done("data")
    model = build_model(config, plan, topology)
    start_up.done("model")
    engine = start_engine(model, config, plan, topology)
    start_up.done("engine")
    return Run(
        config=config,
        plan=plan,
        topology=topology,
        directory=directory,
        corpus=corpus,
        loader=loader,
        engine=engine,
        observer=Observer(),
        saver=make_saver(config, plan, directory),
        requests=start.requests,
        heartbeat=start.heartbeat,
        start_up=start_up,
        stage=Pretraining(config.training.num_steps),
        health=start.health,
        wall_time=start.wall_time,
    )


def _announce(directory: RunDirectory, plan: Plan) -> None:
    """Open the log and say how the run is laid out."""
    if runtime.rank() != 0:
        return
    path = directory.path / LOG
    try:
        log_to_file(path)
    except OSError as error:
        raise StateError(f"{path}: cannot be written: {error.strerror}") from error
    logger.info("run directory: %s", directory.path)
    for reason in plan.reasons:
        logger.info("plan: %s", reason)
    for warning in plan.warnings:
        logger.warning("warning: %s", warning)
