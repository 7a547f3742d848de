"""The end of Stage B: what was learned, beside what Stage A wrote of the same run."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from cdrmix import runtime
from cdrmix.config.reasoning import ReasoningTask
from cdrmix.engines.recovery import write_record
from cdrmix.engines.run import Run
from cdrmix.evaluation.long_context import (
    LENGTH_RATIOS,
    REASONING_FILE,
    Row,
    as_json,
    score_tasks,
    table,
)
from cdrmix.log import get_logger
from cdrmix.monitoring.report import write_report
from cdrmix.monitoring.sinks import read_metrics, write_json_atomic, write_text_atomic
from cdrmix.reasoning.course import ReaderCourse

logger = get_logger(__name__)

# Metrics whose last value says what a phase came to.
_LEARNED = ("stage_b/loss", "stage_b/recall", "stage_b/answered", "policy/return", "policy/success")


def finish_stage_b(run: Run, course: ReaderCourse) -> None:
    """Run the reasoning suite, write metrics.json and report.html, and say how the run ended;
    collective."""
    rows = _reasoning(run, course)
    runtime.together(lambda: _write(run, rows) if runtime.rank() == 0 else None)


def _reasoning(run: Run, course: ReaderCourse) -> list[Row]:
    """Rows of the suite on every rank, a cell of the table per data rank at a time.

    Each of these rounds is a phase of its own: the whole suite has no limit worth the name.
    """
    count, tasks = run.config.evaluation.reasoning_examples, course.lessons.training.tasks
    if count == 0:
        return []
    reader, rows, topology = course.model.eval(), list[Row](), run.topology
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
        write_text_atomic(path / REASONING_FILE, as_json(rows) + "\n")
        logger.info("reasoning:\n%s", table(rows))
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
