"""From a resolved configuration to a finished run: Stage A, Stage B, or both."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from cdrmix import runtime
from cdrmix.checkpoint import store
from cdrmix.checkpoint.candidates import nothing_to_resume
from cdrmix.cluster.heartbeat import Heartbeat
from cdrmix.cluster.start_records import command_to_go_on
from cdrmix.cluster.starts import StartUp
from cdrmix.config.load import config_hash
from cdrmix.config.schema import Config
from cdrmix.engines.archive_of_run import check_archive, is_url
from cdrmix.engines.combination import describe_objectives
from cdrmix.engines.finish import finish
from cdrmix.engines.forgetting import FORGETTING, Forgetting
from cdrmix.engines.hooks_of_run import hooks_of_run
from cdrmix.engines.life_cycle import run_stage
from cdrmix.engines.loop import end_engine, start_engine
from cdrmix.engines.old_data import HeldOut, OldData, open_old_data
from cdrmix.engines.out_of_memory import noted, with_what_fits
from cdrmix.engines.recovery import state_of
from cdrmix.engines.rewarming import warn_of_rewarming
from cdrmix.engines.run import Start, make_run
from cdrmix.engines.run_directory import (
    LOG,
    RunDirectory,
    open_run_directory,
    refuse_lost_checkpoints,
)
from cdrmix.engines.self_replay import own_replay
from cdrmix.engines.stage_a import Pretraining
from cdrmix.engines.start_from import find_start, take_weights
from cdrmix.engines.supervision import Requests, supervised
from cdrmix.engines.tiers_of_run import fetch_resumed, find_in_tiers
from cdrmix.engines.training_data import Corpus, check_same, open_corpus, recorded_sample
from cdrmix.errors import EXIT_DONE, EXIT_STOPPED_BY_SIGNAL, StateError
from cdrmix.hooks.called import NamedHook
from cdrmix.log import get_logger, log_to_file
from cdrmix.models.mixer_trial import try_mixers
from cdrmix.monitoring.health import Health
from cdrmix.parallel.apply import build_model
from cdrmix.parallel.topology import Topology, make_topology
from cdrmix.planning.fine_tuning import check_host
from cdrmix.planning.plan import Plan
from cdrmix.planning.profile import choose
from cdrmix.runtime.host_memory import available_memory_gib
from cdrmix.sessions.ranks_here import cluster_here

logger = get_logger(__name__)


def choose_here(config: Config, *, profile: str | None) -> Plan:
    """Lay the run out as `cdrmix plan` would on these devices, or raise PlanError; collective."""
    cluster = cluster_here()
    plan = runtime.first_rank_does(lambda: choose(config, cluster, profile=profile))
    runtime.together(
        lambda: check_host(plan, config, cluster, available_gib=available_memory_gib())
    )
    return plan


def run_training(
    config: Config,
    plan: Plan,
    *,
    run_dir: Path | None,
    resume: str,
    start_up: StartUp,
    command: Sequence[str] = (),
) -> int:
    """Train as configured; every rank calls this once its process group is there.

    Args:
        config, plan, start_up: of this start, on these ranks.
        run_dir: --run-dir, or None for a new one.
        resume: --resume: never, auto, or a run directory or checkpoint.
        command: words of the user's command, without secrets.
    Returns:
        Exit code of the process: 0 done, 75 stopped by a signal after saving.
    """
    requests = Requests()
    requests.listen()  # before a watchdog can pass a signal on

    def act(heartbeat: Heartbeat) -> int:
        start_up.done("supervision")
        runtime.seed_everything(config.training.seed, deterministic=config.training.deterministic)
        # torch imports its compiler with the setting of determinism, or else with the optimizer
        start_up.done("imports")
        # Hosts read the file from their own disks, and may have versions of it.
        check_same("configurations", "hash", config_hash(config))
        checkpoint = None
        if resume not in ("never", "auto") and not is_url(resume):
            checkpoint = store.find_newest(Path(resume))
            if checkpoint is None:
                raise nothing_to_resume(resume)
        with open_run_directory(config, requested=run_dir, resume=resume) as directory:
            runtime.first_rank_does(lambda: check_archive(config, directory.path, resume=resume))
            start = Start(
                config=config,
                # Behind the lock: no other start adds notes of what did not fit meanwhile.
                plan=with_what_fits(plan, config, directory.path),
                directory=directory,
                requests=requests,
                heartbeat=heartbeat,
                start_up=start_up,
                health=Health.of_run(config),
                hooks=hooks_of_run(config, plan, heartbeat),
                command=command,
            )
            runtime.first_rank_does(lambda: _announce(start))
            if resume == "auto" or is_url(resume):
                checkpoint = _found(directory, config, resume)
            start.sample = recorded_sample(directory.path, checkpoint)
            start_up.done("resume")
            is_stopped = _run_stages(start, checkpoint)
        return EXIT_STOPPED_BY_SIGNAL if is_stopped else EXIT_DONE

    return supervised(config.supervision, act)


def _found(directory: RunDirectory, config: Config, resume: str) -> store.FoundCheckpoint | None:
    """Find the checkpoint that --resume means, auto or the URL of an archive; collective."""
    if is_url(resume):
        runtime.first_rank_does(lambda: fetch_resumed(resume, directory, config))
        return store.find_newest(directory.path)
    checkpoint = find_in_tiers(directory, config)
    if checkpoint is None:
        runtime.first_rank_does(lambda: refuse_lost_checkpoints(directory, config))
        logger.info("no checkpoint in %s yet: starting at step 0", directory.path)
    return checkpoint


def _announce(start: Start) -> None:
    """Open the log of the run, and log its directory and plan; rank 0."""
    path = start.directory.path / LOG
    try:
        log_to_file(path)
    except OSError as error:
        raise StateError(f"{path}: cannot be written: {error.strerror}") from error
    logger.info("run directory: %s", start.directory.path)
    for reason in start.plan.reasons:
        # the other reasons are those of the layout of Stage A
        if start.config.training.stage != "b" or reason.startswith("Stage B"):
            logger.info("plan: %s", reason)
    for warning in start.plan.warnings:
        logger.warning("warning: %s", warning)
    if start.config.training.precision == "bf16" and runtime.use_cpu():
        _compare_bf16()
    go_on = command_to_go_on(start.command, start.directory.path)
    start.heartbeat.log_to(path, go_on=go_on)


def _compare_bf16() -> None:
    """Log how fast this CPU multiplies in bf16, which only a trial can tell."""
    half = runtime.matmul_flops_per_second("bf16")
    full = runtime.matmul_flops_per_second("fp32")
    figures = f"{half / 1e9:.1f} GFLOP/s in bf16 and {full / 1e9:.0f} in fp32"
    if half >= full:
        logger.info("this CPU multiplies with %s: bf16 pays here", figures)
    else:
        logger.warning(
            "warning: this CPU multiplies with %s: training.precision = fp32 is faster", figures
        )


def _run_stages(start: Start, checkpoint: store.FoundCheckpoint | None) -> bool:
    """Run the configured stages from a checkpoint on; True if a signal stopped one of them."""
    stage = start.config.training.stage
    has_stage_b = start.config.stage_b is not None
    is_in_stage_b = checkpoint is not None and state_of(checkpoint).get("stage") == "b"
    if checkpoint is not None and is_in_stage_b and not has_stage_b:
        raise StateError(
            f"{checkpoint.path}: was saved in Stage B; this config has no stage_b section. Use "
            "config_snapshot.yaml of that run"
        )
    if checkpoint is not None and is_in_stage_b and stage == "a":
        raise StateError(
            f"{checkpoint.path}: was saved in Stage B. Try training.stage = b or all, or a new run "
            "directory"
        )
    # Stage A is over where a checkpoint of Stage B is there.
    if stage != "b" and not is_in_stage_b:
        goes_on = stage == "all" and has_stage_b
        is_stopped = _pretrain(start, checkpoint, goes_on=goes_on)
        if is_stopped or not goes_on:
            return is_stopped
        runtime.release_memory()
        checkpoint = None  # Stage B takes the newest one, of the Stage A that has just ended
    # A run of Stage A alone imports no module of Stage B.
    from cdrmix.stage_b.stage_b_session import train_stage_b

    return train_stage_b(start, checkpoint)


def _pretrain(start: Start, checkpoint: store.FoundCheckpoint | None, *, goes_on: bool) -> bool:
    """Run Stage A; True if a signal stopped it. Where Stage B follows, free the engine's memory."""
    config = start.config
    corpus = open_corpus(config, sample=start.sample)
    old = open_old_data(config, config.cpt, corpus) if config.cpt is not None else None
    replay = None if old is None else old.replay
    topology = make_topology(start.plan.degrees)
    # A run that has a checkpoint goes on with its own weights, wherever they came from.
    source = find_start(config, corpus) if checkpoint is None else None
    if source is not None and runtime.rank() == 0:
        warn_of_rewarming(config, source)
    runtime.first_rank_does(lambda: describe_objectives(config, corpus))
    segments = config.data.segment_documents
    runtime.first_rank_does(lambda: try_mixers(config.model, segments_documents=segments))
    start.start_up.done("data")
    if config.training.micro_batch_size == "auto":
        # imported by runs that ask for it alone
        from cdrmix.engines.micro_batch_probe import plan_that_fits

        start.plan = plan_that_fits(start, topology, corpus, replay)
        start.start_up.done("probe")
    plan = start.plan
    model = build_model(config, plan, topology)
    start.start_up.done("model")
    engine = start_engine(model, config, plan, topology)
    if config.model.kind == "hf":
        # transformers takes seconds to import
        from cdrmix.engines import base_model

        base_model.begin(start, engine, checkpoint)
    if source is not None:
        start.start_from = take_weights(engine, source, config.model)
    start.start_up.done("engine")
    if old is not None and config.cpt is not None and config.cpt.writes_replay:
        replay = own_replay(start, corpus, topology, engine, checkpoint)
        start.start_up.done("replay")
    stage = Pretraining(config, plan, topology, corpus, replay)
    forgetting = _add_forgetting(start, topology, corpus, old, checkpoint)
    run = make_run(start, topology, engine, stage)
    is_stopped = run_stage(
        run,
        checkpoint,
        resumes=checkpoint is not None,
        finish=partial(finish, run, stage, forgetting),
        is_last=not goes_on,
        guard=noted(run),
    )
    start.is_recorded = True
    if goes_on and not is_stopped:
        end_engine(engine)
    return is_stopped


def _add_forgetting(
    start: Start,
    topology: Topology,
    corpus: Corpus,
    old: OldData | None,
    checkpoint: store.FoundCheckpoint | None,
) -> Forgetting | None:
    """Adds the hook that measures old and new data to a run with such data, and returns it.

    Collective; raises StateError on every rank if a checkpoint holds those of other data.
    """
    config = start.config
    if old is None or config.cpt is None:
        return None
    forgetting = Forgetting(
        *(config.cpt, old.held_out, HeldOut("new", corpus.validation)),
        health=start.health,
        topology=topology,
        batch_size=start.plan.micro_batch_size,
        segment_documents=config.data.segment_documents,
    )
    if checkpoint is not None:
        forgetting.check(state_of(checkpoint).get("hooks", {}).get(FORGETTING))
    start.hooks.add(NamedHook(FORGETTING, forgetting, unsafe=True))
    return forgetting
