"""From a resolved configuration to a finished run, in order."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from cdrmix import runtime
from cdrmix.checkpoint import store
from cdrmix.checkpoint.saver import Saver
from cdrmix.cluster.heartbeat import Heartbeat
from cdrmix.cluster.start_up import StartUp
from cdrmix.cluster.starts import read_starts
from cdrmix.config.load import resolved_yaml
from cdrmix.config.schema import Config
from cdrmix.engines.finish import finish
from cdrmix.engines.loop import start_engine, train
from cdrmix.engines.observer import Observer
from cdrmix.engines.pretraining import Pretraining
from cdrmix.engines.recovery import write_record
from cdrmix.engines.resume import find_at, resume_from
from cdrmix.engines.run import Run
from cdrmix.engines.run_directory import LOG, RunDirectory, open_run_directory
from cdrmix.engines.stage_a import make_loader, open_corpus
from cdrmix.engines.stopping import Requests
from cdrmix.engines.supervision import supervised
from cdrmix.errors import EXIT_DONE, EXIT_STOPPED_BY_SIGNAL, PlanError, StateError
from cdrmix.log import get_logger, log_to_file
from cdrmix.monitoring.health import Health
from cdrmix.monitoring.sinks import write_json_atomic, write_text_atomic
from cdrmix.parallel.apply import build_model
from cdrmix.parallel.topology import make_topology
from cdrmix.planning.counts import count
from cdrmix.planning.profile import Choice

logger = get_logger(__name__)


def run_training(
    config: Config, choice: Choice, *, run_dir: Path | None, resume: str, start_up: StartUp
) -> int:
    """Train as configured; every rank calls this once its process group is there.

    Args:
        config: resolved configuration.
        choice: profile, degrees and batch sizes for this world.
        run_dir: --run-dir, or None for a new one.
        resume: --resume: never, auto, or a run directory or checkpoint.
        start_up: of this process.
    Returns:
        Exit code of the process: 0 done, 75 stopped by a signal after saving.
    Raises:
        TrainingError: on every rank, whichever met it.
    """
    if config.training.stage == "b":
        raise PlanError(
            "training.stage = b: Stage B is not available in this version. "
            "Try training.stage = a, or all, which ends after Stage A"
        )
    requests = Requests()
    requests.listen()  # before a watchdog can pass a signal on
    action = partial(
        _train, config, choice, requests, run_dir=run_dir, resume=resume, start_up=start_up
    )
    return supervised(config.supervision, action)


def _train(
    config: Config,
    choice: Choice,
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
    found = find_at(Path(resume)) if resume not in ("never", "auto") else None
    with open_run_directory(config, requested=run_dir, resume=resume) as directory:
        runtime.together(lambda: _announce(directory, choice))
        if runtime.rank() == 0:
            heartbeat.log_to(directory.path / LOG)
        if resume == "auto":
            found = store.find(directory.path, *directory.copies)
        start_up.done("resume")
        with _set_up(config, choice, directory, requests, heartbeat, start_up) as run:
            if found is not None:
                resume_from(run, found)
            elif resume == "auto":
                logger.info("no checkpoint in %s yet: starting at step 0", directory.path)
            # only now, so that a start that is refused leaves an earlier run as it was
            runtime.together(lambda: _describe(directory, config, choice))
            start_up.done("resume")
            runtime.together(partial(_account, run))
            runtime.together(lambda: write_record(run))
            num_steps = config.training.num_steps
            runtime.together(
                lambda: run.observer.open(directory.path, step=run.step, num_steps=num_steps)
            )
            with requests.deferred():
                stopped = train(run)
            if stopped:
                return EXIT_STOPPED_BY_SIGNAL
            with heartbeat.phase("finishing"):
                finish(run)
            return EXIT_DONE


def _set_up(
    config: Config,
    choice: Choice,
    directory: RunDirectory,
    requests: Requests,
    heartbeat: Heartbeat,
    start_up: StartUp,
) -> Run:
    corpus, topology = open_corpus(config), make_topology(choice.degrees)
    loader = make_loader(config, choice, topology, corpus.train)
    start_up.done("data")
    model = build_model(config, choice, topology)
    start_up.done("model")
    engine = start_engine(model, config, choice, topology)
    start_up.done("engine")
    moe = config.model.moe
    return Run(
        config=config,
        choice=choice,
        topology=topology,
        directory=directory,
        corpus=corpus,
        loader=loader,
        engine=engine,
        observer=Observer(),
        saver=Saver(
            (directory.checkpoints, *directory.copies),
            keep=config.checkpoint.keep,
            background=config.checkpoint.background,
        ),
        requests=requests,
        heartbeat=heartbeat,
        start_up=start_up,
        stage=Pretraining(config.training.num_steps),
        health=Health(config.health, num_experts=moe.num_experts if moe else None),
    )


def _account(run: Run) -> None:
    """Open the account of the wall time, before the metrics of an earlier start are cut back."""
    if runtime.rank() != 0:
        return
    folder, starts = run.directory.path, read_starts(run.directory.path)
    run.wall_time.open(
        folder,
        step=run.step,
        start_up_seconds=run.start_up.seconds,
        watched=(starts[-1].step, starts[-1].ended.timestamp()) if starts else None,
    )


def _announce(directory: RunDirectory, choice: Choice) -> None:
    """Open the log and say how the run is laid out."""
    if runtime.rank() != 0:
        return
    path = directory.path / LOG
    try:
        log_to_file(path)
    except OSError as error:
        raise StateError(f"{path}: cannot be written: {error.strerror}") from error
    logger.info("run directory: %s", directory.path)
    for reason in choice.reasons:
        logger.info("plan: %s", reason)
    for warning in choice.warnings:
        logger.warning("warning: %s", warning)


def _describe(directory: RunDirectory, config: Config, choice: Choice) -> None:
    """Write what this run is: configuration, plan, environment."""
    if runtime.rank() != 0:
        return
    path = directory.path
    write_text_atomic(path / "config_snapshot.yaml", resolved_yaml(config))
    write_json_atomic(path / "ds_config.json", choice.deepspeed)
    counts = count(config.model, config.training.sequence_length)
    size = {"total_params": counts.total_params, "active_params": counts.active_params}
    write_json_atomic(path / "plan.json", choice.to_json() | size)
    (path / "metrics.json").unlink(missing_ok=True)  # the summary of an earlier end is not ours
    write_json_atomic(path / "environment.json", runtime.describe_environment())
