"""Stage B from a finished Stage A to its end, in the run directory that Stage A used or a new one.

Its steps go on counting where Stage A ended, so that metrics, checkpoints and progress are one row.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import Any

from cdrmix import runtime
from cdrmix.checkpoint import store
from cdrmix.checkpoint.reader import CheckpointReader
from cdrmix.config.schema import Config
from cdrmix.data.shards import manifest_digest
from cdrmix.engines.backbone_source import find_backbone, load_backbone
from cdrmix.engines.course import Course, make_course
from cdrmix.engines.loop import start_engine, train
from cdrmix.engines.observer import Observer
from cdrmix.engines.recovery import write_record
from cdrmix.engines.resume import leave_behind, resume_from
from cdrmix.engines.run import Run, Start, account, make_saver
from cdrmix.engines.run_directory import describe_stage_b, keep_tokenizer, write_finished
from cdrmix.engines.stage_a import open_corpus
from cdrmix.engines.stage_b import StageB
from cdrmix.engines.stage_b_finish import finish_stage_b
from cdrmix.engines.stage_b_lessons import Lessons
from cdrmix.engines.stage_b_optim import Clip, Trained, make_clip, stage_b_adamw
from cdrmix.log import get_logger
from cdrmix.parallel.shard import mark_copy
from cdrmix.parallel.topology import Topology, make_topology
from cdrmix.planning.plan import Plan
from cdrmix.planning.stage_b import stage_b_plan
from cdrmix.reasoning.course import ReaderCourse
from cdrmix.reasoning.parts import is_of_a_layer

logger = get_logger(__name__)


def stage_of(found: store.Found) -> str:
    """Stage that a checkpoint was saved in, `a` or `b`."""
    state = json.loads((found.path / "state.json").read_text(encoding="utf-8"))
    return str(state.get("stage", "a"))


def train_stage_b(start: Start, found: store.Found | None) -> bool:
    """Stage B; collective.

    Args:
        start: of the run, with the choice of Stage A on these ranks.
        found: checkpoint to go on from: of Stage B, or, where no other run is named, of the Stage A
            to start on; None looks for that in the run directory.
    Returns:
        Whether a signal stopped it; the state is then saved.
    Raises:
        TrainingError: on every rank, whichever met it.
    """
    config, directory = start.config, start.directory
    with start.heartbeat.phase("starting"):
        # as in a process of its own, whatever Stage A drew
        runtime.seed_everything(config.training.seed, deterministic=config.training.deterministic)
        choice = stage_b_plan(config, start.choice, world_size=runtime.world_size())
        for reason in (*choice.reasons, *choice.warnings):
            logger.info("plan: %s", reason)
        run, course = _set_up(replace(start, choice=choice), found)
    with run:
        num_steps = run.stage.num_steps
        runtime.together(lambda: describe_stage_b(directory, config, choice, num_steps))
        tokenizer = run.corpus.manifest.tokenizer.sha256
        runtime.together(lambda: keep_tokenizer(directory, run.corpus.folder, tokenizer))
        if found is not None:
            leave_behind(run, found, newer=True)
        start.start_up.done("resume")
        runtime.together(partial(account, run))
        runtime.together(lambda: write_record(run))
        runtime.together(
            lambda: run.observer.open(directory.path, step=run.step, num_steps=num_steps)
        )
        with start.requests.deferred():
            stopped = train(run)
        if not stopped:
            with start.heartbeat.phase("finishing"):
                finish_stage_b(run, course)
                runtime.together(lambda: write_finished(directory, step=run.step, stage="b"))
        return stopped


def _set_up(start: Start, found: store.Found | None) -> tuple[Run, ReaderCourse]:
    config, choice, directory = start.config, start.choice, start.directory
    assert config.stage_b is not None, "Stage B has its section"
    corpus, topology = open_corpus(config), make_topology(choice.degrees)
    start.start_up.done("data")
    resumed = found if found is not None and stage_of(found) == "b" else None
    source = resumed or find_backbone(config, directory, corpus.manifest, found)
    with runtime.together(lambda: CheckpointReader(source.path)) as reader:
        backbone = runtime.together(lambda: load_backbone(config, reader, topology))
        course, clip = make_course(config, backbone, corpus), make_clip(config, topology)
        start.start_up.done("model")
        first_step, origin = source.step, str(source.path)
        if reader.state.get("stage") == "b":
            first_step = reader.state["stage_b"]["first_step"]
        if resumed is not None:
            origin = reader.state["stage_b"]["origin"]
        elif directory.holds(source.path) and "health" in reader.state:
            start.health.load_state_dict(reader.state["health"])  # one record for both stages
        engine = _start(course, config, choice, topology, clip)
        start.start_up.done("engine")
        run = Run(
            config=config,
            choice=choice,
            topology=topology,
            directory=directory,
            corpus=corpus,
            loader=Lessons(
                course,
                config.stage_b,
                rank=topology.data_rank,
                world_size=choice.degrees.data,
                manifest_digest=manifest_digest(corpus.manifest),
                seed=config.training.seed,
                is_shared=choice.degrees.pipeline > 1,
            ),
            engine=engine,
            observer=Observer(),
            saver=make_saver(config, choice, directory, pinned=first_step),
            requests=start.requests,
            heartbeat=start.heartbeat,
            start_up=start.start_up,
            stage=StageB(course, config, clip, first_step=first_step, origin=origin),
            health=start.health,
            wall_time=start.wall_time,
            step=first_step,
        )
    if resumed is not None:
        resume_from(run, resumed)
    else:
        logger.info("Stage B: the backbone is that of %s", source.path)
    return run, course


def _start(course: Course, config: Config, choice: Plan, topology: Topology, clip: Clip) -> Any:
    """DeepSpeed's engine around what is trained."""
    assert config.stage_b is not None, "Stage B has its section"
    for name, parameter in course.model.named_parameters():
        if not topology.is_first_stage and not is_of_a_layer(name):
            mark_copy(parameter)
    is_frozen = config.stage_b.training.backbone_lr_scale == 0
    model = Trained(course.model) if is_frozen else course.model
    return start_engine(model, config, choice, topology, optimizer=stage_b_adamw(clip))
