"""Stage B of a run: from a finished Stage A to the reasoning suite at its end.

It goes on in the run directory that Stage A used or begins a new one. Its steps go on counting
where Stage A ended, so that metrics, checkpoints and progress are one series.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

from cdrmix import runtime
from cdrmix.checkpoint import store
from cdrmix.checkpoint.checkpoint_file import CheckpointFile
from cdrmix.config.schema import Config
from cdrmix.data.shards import manifest_digest
from cdrmix.engines.life_cycle import run_stage
from cdrmix.engines.loop import start_engine
from cdrmix.engines.recovery import state_of, write_record
from cdrmix.engines.run import Run, Start, make_run
from cdrmix.engines.run_directory import METRICS
from cdrmix.engines.training_data import Corpus, check_same, open_corpus
from cdrmix.log import get_logger
from cdrmix.monitoring.report import write_report
from cdrmix.monitoring.sinks import read_metrics, write_json_atomic, write_text_atomic
from cdrmix.parallel.tensor import mark_copy
from cdrmix.parallel.topology import make_topology
from cdrmix.planning.stage_b import stage_b_plan
from cdrmix.reasoning.own_tasks import OwnTasks, read_own_tasks
from cdrmix.reasoning.tasks import Example
from cdrmix.stage_b import long_context
from cdrmix.stage_b.backbone_source import find_backbone, load_backbone
from cdrmix.stage_b.engine import LessonLoader, StageB
from cdrmix.stage_b.long_context import (
    Evaluated,
    Row,
    held_out_cells,
    made_up,
    score_examples,
    suite,
)
from cdrmix.stage_b.optimizer import Clip, TrainedParameters, stage_b_adamw
from cdrmix.stage_b.phases import Course, make_course, stage_b_section

logger = get_logger(__name__)
# Metrics whose last value summarises a phase.
_LEARNED = ("stage_b/loss", "stage_b/recall", "stage_b/answered", "policy/return", "policy/success")


def train_stage_b(start: Start, checkpoint: store.FoundCheckpoint | None) -> bool:
    """Run Stage B; True if a signal stopped it, its state then saved; collective.

    Args:
        start: of the run, with the plan of Stage A on these ranks.
        checkpoint: to go on from: of Stage B, or, where no other run is named, of the Stage A to
            start on; None takes the backbone from the run directory.
    """
    training = start.config.training
    with start.heartbeat.phase("starting"):
        # Whatever Stage A drew, Stage B draws as in a process of its own.
        runtime.seed_everything(training.seed, deterministic=training.deterministic)
        plan = stage_b_plan(start.config, start.plan, world_size=runtime.world_size())
        for reason in (*plan.reasons, *plan.warnings):
            logger.info("plan: %s", reason)
        resumes = checkpoint is not None and state_of(checkpoint).get("stage") == "b"
        run, course = _set_up(replace(start, plan=plan), checkpoint, resumes=resumes)
    finish = partial(finish_stage_b, run, course)
    return run_stage(run, checkpoint, resumes=resumes, finish=finish, is_last=True)


def _set_up(
    start: Start, checkpoint: store.FoundCheckpoint | None, *, resumes: bool
) -> tuple[Run, Course]:
    """Builds reader, engine and stage around a backbone; see `train_stage_b`."""
    config = start.config
    plan = start.plan
    settings = stage_b_section(config)
    training = settings.training
    corpus = open_corpus(config, sample=start.sample)
    own = _own_tasks(config, corpus)
    topology = make_topology(plan.degrees)
    start.start_up.done("data")
    source = checkpoint if resumes else None
    if source is None:
        source = find_backbone(config, start.directory, corpus.manifest, checkpoint)
        logger.info("Stage B: the backbone is that of %s", source.path)
    with runtime.together(lambda: CheckpointFile(source.path)) as reader:
        # Before the engine: DeepSpeed copies masters and frozen weights from what it wraps.
        backbone = runtime.together(lambda: load_backbone(config, reader, topology))
        state = reader.state
        if reader.has_average:
            logger.info("Stage B: it begins with the trained weights, not with their average")
    course = make_course(config, backbone, corpus, own)
    clip = Clip(config, topology)
    start.start_up.done("model")
    of_stage_b = state["stage_b"] if state.get("stage") == "b" else {}
    if not resumes and start.directory.holds(source.path) and "health" in state:
        start.health.load_state_dict(state["health"])  # one record for both stages
        start.hooks.inherit(state)
    for name, parameter in course.model.named_parameters():
        # A block is on its own pipeline stage. Other parts are on every stage: the first one alone
        # counts and saves them.
        is_of_a_block = "blocks" in name.replace("/", ".").split(".")
        if not topology.is_first_stage and not is_of_a_block:
            mark_copy(parameter)
    is_frozen = training.backbone_lr_scale == 0
    model = TrainedParameters(course.model) if is_frozen else course.model
    optimizer = partial(stage_b_adamw, clip=clip)
    engine = start_engine(model, config, plan, topology, optimizer=optimizer)
    start.start_up.done("engine")
    loader = LessonLoader(
        course,
        training,
        rank=topology.data_rank,
        world_size=plan.degrees.data,
        manifest_digest=manifest_digest(corpus.manifest),
        seed=config.training.seed,
        task_file=None if own is None else own.digest,
        is_shared=plan.degrees.pipeline > 1,
    )
    # Of a resumed run its own begin, and not the step of the checkpoint that it goes on from.
    first_step = of_stage_b.get("first_step", source.step)
    origin = of_stage_b["origin"] if resumes else str(source.path)
    num_steps = first_step + training.num_steps
    stage = StageB(course, settings, clip, loader, corpus, first_step, num_steps, origin)
    return make_run(start, topology, engine, stage, first_step=first_step), course


def _own_tasks(config: Config, corpus: Corpus) -> OwnTasks | None:
    """Reads the tasks of the user's, equal on all ranks, and tells what is odd; collective."""
    training = stage_b_section(config).training
    window = training.window_tokens or config.training.sequence_length
    encode = corpus.tokenizer.encode
    own = runtime.together(lambda: read_own_tasks(training, window_tokens=window, encode=encode))
    if own is not None:
        check_same("files of tasks", "sha256", own.digest)
        logger.info(
            "Stage B: %s: %d rows to train on, %d held out, sha256 %s",
            *(own.path, len(own.train), len(own.held_out), own.digest[:12]),
        )
        for warning in own.warnings:
            logger.warning("warning: %s", warning)
    return own


def finish_stage_b(run: Run, course: Course) -> None:
    """Run the reasoning suite, write metrics.json and report.html, log the results; collective."""
    rows = _reasoning(run, course)
    if rows:
        scores = {f"reasoning/{row.task}/{row.length_ratio}x": row.score for row in rows}
        run.hooks.evaluated(run.step, scores)

    def write_results() -> None:
        path = run.directory.path
        write_record(run)  # repeated warnings are counted, and written only here
        summary_path = path / "metrics.json"
        # of Stage A, if that was trained in this run directory
        earlier = json.loads(summary_path.read_text("utf-8")) if summary_path.exists() else {}
        lines = read_metrics(path / METRICS)
        stage_b = {
            "steps": run.step,
            "seconds": run.seconds,
            # Later lines overwrite earlier ones: a phase's metrics end with the phase.
            "latest": {name: line[name] for line in lines for name in _LEARNED if name in line},
            "reasoning": [row.as_json() for row in rows],
        }
        summary = {
            "name": run.config.name,
            "samples": [],
            **earlier,
            "goodput": run.wall_time.to_json(),
            "start_up": run.start_up.to_json(),
            "stage_b": stage_b,
            "checkpoints": run.checkpoints(),
        }
        write_json_atomic(summary_path, summary)
        if rows:
            evaluated = Evaluated(rows)
            write_text_atomic(path / long_context.REASONING_FILE, evaluated.as_json() + "\n")
            logger.info("reasoning:\n%s", evaluated.table())
        logger.info("report: %s", write_report(path))

    runtime.first_rank_does(write_results)


def _reasoning(run: Run, course: Course) -> list[Row]:
    """Rows of the suite on every rank, a cell of the table per data rank at a time."""
    count = run.config.evaluation.reasoning_examples
    with_controls = run.config.evaluation.reasoning_controls
    tasks = made_up(course.lessons)
    if count == 0:
        return []
    # After the last step: nothing is trained from here on.
    reader = course.model.eval()
    rows = list[Row]()
    topology = run.topology
    # Cells of one length take about as long, so that ranks of a round wait little.
    cells: list[tuple[str, int] | list[Example]] = [
        (task, ratio) for ratio in long_context.LENGTH_RATIOS for task in tasks
    ]
    own = held_out_cells(course.lessons, num_examples=count)
    cells += own

    def score(place: int) -> list[Row]:
        if place >= len(cells):  # the last round has fewer cells than ranks
            return []
        cell = cells[place]
        if isinstance(cell, tuple):
            cell = suite(course.lessons, [cell[0]], length_ratios=cell[1:], num_examples=count)
        return score_examples(reader, course.lessons, cell, controls=with_controls).rows

    for first in range(0, len(cells), topology.degrees.data):
        with run.heartbeat.phase("reasoning"):  # for each round: no limit would fit the whole suite
            scored = runtime.together(partial(score, first + topology.data_rank))
            counting = scored if topology.counts_tokens else []  # all pipeline stages score alike
            rows += [row for each in runtime.all_gather_object(counting) for row in each]
    names = [*tasks, *(cell[0].task for cell in own)]
    return sorted(rows, key=lambda row: (names.index(row.task), row.length_ratio))
