"""The end of Stage B: what was learned, beside what Stage A wrote of the same run.

Stage B from a finished Stage A to its end, in the run directory that Stage A used or a new one.

Its steps go on counting where Stage A ended, so that metrics, checkpoints and progress are one row.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from cdrmix import runtime
from cdrmix.checkpoint import store
from cdrmix.checkpoint.checkpoint_file import CheckpointFile
from cdrmix.checkpoint.fragments import is_of_a_layer
from cdrmix.config.reasoning import ReasoningTask
from cdrmix.config.schema import Config
from cdrmix.data.shards import manifest_digest
from cdrmix.engines.loop import start_engine, train
from cdrmix.engines.recovery import leave_behind, resume_from, write_record
from cdrmix.engines.run import Observer, Run, Start, account, make_saver
from cdrmix.engines.run_directory import describe_stage_b, keep_tokenizer, write_finished
from cdrmix.engines.training_data import open_corpus
from cdrmix.log import get_logger
from cdrmix.monitoring.report import write_report
from cdrmix.monitoring.sinks import read_metrics, write_json_atomic, write_text_atomic
from cdrmix.parallel.tensor import mark_copy
from cdrmix.parallel.topology import Topology, make_topology
from cdrmix.planning.plan import Plan
from cdrmix.planning.stage_b import stage_b_plan
from cdrmix.stage_b.backbone_source import find_backbone, load_backbone
from cdrmix.stage_b.course import Course, LessonLoader, make_course
from cdrmix.stage_b.engine import StageB
from cdrmix.stage_b.long_context import (
    LENGTH_RATIOS,
    REASONING_FILE,
    Row,
    score_table,
    score_tasks,
    scores_json,
)
from cdrmix.stage_b.optimizer import Clip, TrainedParameters, make_clip, stage_b_adamw

logger = get_logger(__name__)
# Metrics whose last value says what a phase came to.
_LEARNED = ("stage_b/loss", "stage_b/recall", "stage_b/answered", "policy/return", "policy/success")


def finish_stage_b(run: Run, course: Course) -> None:
    """Run the reasoning suite, write metrics.json and report.html, and say how the run ended;
    collective."""
    rows = _reasoning(run, course)
    runtime.together(lambda: _write(run, rows) if runtime.rank() == 0 else None)


def _reasoning(run: Run, course: Course) -> list[Row]:
    """Rows of the suite on every rank, a cell of the table per data rank at a time.

    Each of these rounds is a phase of its own: the whole suite has no limit worth the name.
    """
    count = run.config.evaluation.reasoning_examples
    tasks = course.lessons.training.tasks
    if count == 0:
        return []
    reader = course.model.eval()
    rows = list[Row]()
    topology = run.topology
    # cells of one length take about as long
    cells = [(task, ratio) for ratio in LENGTH_RATIOS for task in tasks]

    def score(mine: list[tuple[ReasoningTask, int]]) -> list[Row]:
        return [
            row
            for task, ratio in mine
            for row in score_tasks(
                reader, course.lessons, [task], length_ratios=(ratio,), num_examples=count
            )
        ]

    for first in range(0, len(cells), topology.degrees.data):
        place = first + topology.data_rank
        with run.heartbeat.phase("reasoning"):
            own = runtime.together(partial(score, cells[place : place + 1]))
            counted = own if topology.counts_tokens else []  # the stages of a pipeline found it all
            rows += [row for each in runtime.all_gather_object(counted) for row in each]
    return sorted(rows, key=lambda row: (tasks.index(row.task), row.length_ratio))


def _write(run: Run, rows: list[Row]) -> None:
    path = run.directory.path
    write_record(run)  # what lasts is counted at the end
    write_json_atomic(path / "metrics.json", _summary(run, path, rows))
    if rows:
        write_text_atomic(path / REASONING_FILE, scores_json(rows) + "\n")
        logger.info("reasoning:\n%s", score_table(rows))
    logger.info("report: %s", write_report(path))


def _summary(run: Run, path: Path, rows: list[Row]) -> dict[str, Any]:
    """What Stage A wrote, if it did in this run, with what Stage B came to."""
    written = path / "metrics.json"
    before = json.loads(written.read_text(encoding="utf-8")) if written.exists() else {}
    lines = read_metrics(path / "metrics.jsonl")
    latest = {name: line[name] for line in lines for name in _LEARNED if name in line}
    told = {"steps": run.step, "seconds": run.seconds, "latest": latest}
    return {
        "name": run.config.name,
        "samples": run.samples,
        **before,
        "goodput": run.wall_time.to_json(),
        "start_up": run.start_up.to_json(),
        "stage_b": {**told, "reasoning": [asdict(row) for row in rows]},
        "checkpoints": {"last": run.saver.saved_step, "folder": "checkpoints"},
    }


def stage_of(found: store.FoundCheckpoint) -> str:
    """Stage that a checkpoint was saved in, `a` or `b`."""
    state = json.loads((found.path / "state.json").read_text(encoding="utf-8"))
    return str(state.get("stage", "a"))


def train_stage_b(start: Start, found: store.FoundCheckpoint | None) -> bool:
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
    config = start.config
    directory = start.directory
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


def _set_up(start: Start, found: store.FoundCheckpoint | None) -> tuple[Run, Course]:
    config = start.config
    choice = start.choice
    directory = start.directory
    assert config.stage_b is not None, "Stage B has its section"
    corpus = open_corpus(config)
    topology = make_topology(choice.degrees)
    start.start_up.done("data")
    resumed = found if found is not None and stage_of(found) == "b" else None
    source = resumed or find_backbone(config, directory, corpus.manifest, found)
    with runtime.together(lambda: CheckpointFile(source.path)) as reader:
        backbone = runtime.together(lambda: load_backbone(config, reader, topology))
        course = make_course(config, backbone, corpus)
        clip = make_clip(config, topology)
        start.start_up.done("model")
        first_step = source.step
        origin = str(source.path)
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
            loader=LessonLoader(
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
    model = TrainedParameters(course.model) if is_frozen else course.model
    return start_engine(model, config, choice, topology, optimizer=stage_b_adamw(clip))
