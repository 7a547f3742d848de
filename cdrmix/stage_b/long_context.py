"""Trained readers, and the suite that scores them on reasoning tasks by length of the text.

Beside each score stands that of the backbone alone, which sees only the last window of the text.
"""

# N texts

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from cdrmix.checkpoint import plain_module
from cdrmix.checkpoint.checkpoint_file import CheckpointFile
from cdrmix.checkpoint.fragments import is_stage_b, reader_logical_name
from cdrmix.data.token_dataset import TokenDataset
from cdrmix.errors import DataError, StateError
from cdrmix.evaluation.trained import TrainedModel, load_trained
from cdrmix.log import get_logger
from cdrmix.models.backbone import Backbone
from cdrmix.models.state_rows import moved
from cdrmix.monitoring.sinks import write_text_atomic
from cdrmix.monitoring.suite_results import bootstrap_interval
from cdrmix.planning.lesson_sizes import trained_segments
from cdrmix.reasoning.lessons import EVALUATION, Lessons
from cdrmix.reasoning.memory_reader import MemoryReader, segment_room
from cdrmix.reasoning.own_tasks import OwnTasks, read_own_tasks, target
from cdrmix.reasoning.policy import roll_out, roll_out_branches
from cdrmix.reasoning.reading_environment import ReadingEpisodes
from cdrmix.reasoning.recall import Samples
from cdrmix.reasoning.task_files import read_examples, write_examples
from cdrmix.reasoning.tasks import RECALL, TRAINED, Example, Wording, check_task
from cdrmix.stage_b.controls import CONTROLS, Answers, Controls, ControlScore, summary
from cdrmix.stage_b.phases import grade_by

logger = get_logger(__name__)
# Up to twice the longest texts that Stage B trains on by default.
LENGTH_RATIOS = (1, 2, 4, 8, 16)
REASONING_FILE = "reasoning.json"
# Bounds the memory of an evaluation, whose texts have up to 16 windows.
_EXAMPLES_PER_BATCH = 16
# A length may have no room for an example: so many are tried for each that is wanted.
_TRIES_PER_EXAMPLE = 4


@dataclass(frozen=True)
class TrainedReader:
    """A reader from a checkpoint, in evaluation mode, with tasks and texts in its tokens."""

    trained: TrainedModel
    reader: MemoryReader
    lessons: Lessons


def load_reader(source: Path, *, accept_threshold: float | None = None) -> TrainedReader:
    """Loads the newest whole checkpoint under `source`, a run directory or a checkpoint.

    `accept_threshold` is the advantage from which a branch is accepted; None: the run's. Raises
    StateError if there is none, it is older than Stage B, or its tokenizer is missing or another,
    and DataError if that cannot be read.
    """
    return reader_of(load_trained(source), accept_threshold=accept_threshold)


def reader_of(trained: TrainedModel, *, accept_threshold: float | None = None) -> TrainedReader:
    """Makes the reader of a model that is loaded already; see `load_reader`."""
    stage_b = trained.config.stage_b
    with CheckpointFile(trained.checkpoint) as checkpoint:
        # By the content: a Stage A of a reasoning variant has the section, but no memory yet.
        if stage_b is None or not any(map(is_stage_b, checkpoint.names())):
            raise StateError(
                f"{trained.checkpoint}: step {trained.step} has no memory to read with. Memory is "
                "trained in Stage B: train a reasoning variant (cdrmix-reason-*) with "
                "training.stage all or b"
            )
        if accept_threshold is not None:
            policy = stage_b.policy.model_copy(update={"accept_threshold": accept_threshold})
            stage_b = stage_b.model_copy(update={"policy": policy})
        training = trained.config.training
        window_tokens = stage_b.training.window_tokens or training.sequence_length
        lessons = Lessons(
            *(stage_b.training, training.seed, window_tokens, trained.tokenizer),
            top_k=stage_b.memory.top_k,
            num_segments=trained_segments(stage_b),
        )
        marks = lessons.marks
        assert isinstance(trained.model, Backbone), "a Hugging Face model has no Stage B"
        reader = MemoryReader(trained.model, stage_b, window_tokens=window_tokens, marks=marks)
        reader.to(trained.model.device)
        plain_module.load_module(reader, checkpoint, reader_logical_name)
    return TrainedReader(trained, reader.eval(), lessons)


def with_held_out(loaded: TrainedReader, *, data: Path | None) -> TrainedReader:
    """Gives a reader what training held out, for the suite: text of the corpus in the folder
    `data`, for the task `recall`, and rows of the run's `task_file`.

    Warns of what is not there, or is not what the run learned from, and leaves it out.
    """
    lessons = loaded.lessons
    config = loaded.trained.config
    samples = None
    own = None
    try:
        if RECALL in lessons.training.tasks:
            if data is None:
                raise DataError("the data set of the run is not here. Try --data")
            dataset = TokenDataset(data, "validation", config.training.sequence_length)
            samples = Samples(dataset.rows, dataset.num_samples)
    except DataError as error:
        logger.warning("warning: %s is left out: %s", RECALL, error)
    try:
        own = read_own_tasks(
            lessons.training,
            window_tokens=lessons.window_tokens,
            encode=lessons.tokenizer.encode,
        )
        if own is not None:
            _check_learned(loaded.trained.checkpoint, own)
    except DataError as error:
        logger.warning("warning: rows held out of task_file are left out: %s", error)
        own = None
    return replace(loaded, lessons=replace(lessons, held_out=samples, own=own))


def _check_learned(checkpoint: Path, own: OwnTasks) -> None:
    """Raises DataError if a file of tasks is not the one that a run learned from."""
    with CheckpointFile(checkpoint) as file:
        learned = str(file.state.get("loader", {}).get("task_file"))
    if learned != own.digest:
        raise DataError(
            f"{own.path}: is not the file that the run learned from: sha256 {learned[:12]} there, "
            f"{own.digest[:12]} here"
        )


@dataclass(frozen=True)
class Row:
    """One cell of the table of scores, each a mean over `n` texts, 0 to 1."""

    task: str
    length_ratio: int  # of the texts, in windows
    score: float
    backbone_score: float  # of the backbone alone, on the same texts
    n: int
    low: float | None = None  # 95 % interval of the score, over the texts; None of a single one
    high: float | None = None
    controls: dict[str, ControlScore] | None = None  # by column, the agent first; None: not asked

    def as_json(self) -> dict[str, Any]:
        """Fields as plain values; controls only where there are some."""
        fields = asdict(self)
        if self.controls is None:
            del fields["controls"]
        return fields


@dataclass(frozen=True)
class Evaluated:
    """Result of an evaluation."""

    rows: list[Row]
    accepted: float | None = None  # share of the decisions that accepted a branch

    def as_json(self) -> str:
        """Rows as one JSON object, with the share of accepted branches if there is one."""
        share = {} if self.accepted is None else {"accepted_branches": self.accepted}
        return json.dumps({"rows": [row.as_json() for row in self.rows], **share})

    def table(self) -> str:
        """Table of scores for a person: a line per task, a column per length."""
        ratios = sorted({row.length_ratio for row in self.rows})
        by_cell = {(row.task, row.length_ratio): row for row in self.rows}
        heads = "".join(f"{f'{ratio}x':>14}" for ratio in ratios)
        lines = [f"{'score, backbone alone':<24}{heads}"]
        for task in dict.fromkeys(row.task for row in self.rows):
            cells = []
            for ratio in ratios:
                row = by_cell.get((task, ratio))
                cells.append(f"{row.score:.2f}, {row.backbone_score:.2f}" if row else "-")
            lines.append(f"{task:<24}" + "".join(f"{cell:>14}" for cell in cells))
        if not self.rows:
            return "\n".join([*lines, "no task fits"])
        # A length that has no room for some examples has fewer.
        fewest = min(row.n for row in self.rows)
        most = max(row.n for row in self.rows)
        texts = f"{most}" if fewest == most else f"{fewest} to {most}"
        lines.append(f"{texts} texts each; lengths in windows")
        if self.accepted is not None:
            lines[-1] += f"; {self.accepted:.1%} of the decisions accepted a branch"
        for row in self.rows:
            if row.controls is not None:
                lines += ["", *_control_lines(row, row.controls)]
        return "\n".join(lines)


def _control_lines(row: Row, controls: dict[str, ControlScore]) -> list[str]:
    head = f"{row.task}, {row.length_ratio}x"
    lines = [f"{head:<24}{'score':>7}  {'95 % interval':<13}  {'operations':>10}  {'seconds':>8}"]
    for name, each in controls.items():
        between = f"{each.low:.2f} to {each.high:.2f}"
        operations = "-" if each.operations is None else f"{each.operations:.1f}"
        lines.append(
            f"  {name:<22}{each.score:7.2f}  {between:<13}  {operations:>10}  {each.seconds:8.3f}"
        )
    return lines


def evaluate_reasoning(
    loaded: TrainedReader,
    *,
    num_examples: int,
    seed: int = 0,
    wording: Wording = TRAINED,
    length_ratios: Sequence[int] | None = None,
    file: Path | None = None,
    written: Path | None = None,
    branches: bool = False,
    controls: bool = False,
) -> Evaluated:
    """Scores a trained reader on the suite, or on tasks from a file; see `store_rows`.

    Args:
        num_examples: texts for each task of its training and each length.
        seed, wording, length_ratios: of these texts; lengths in windows, None for the usual ones.
        file: tasks to read in place of the suite; DataError if a row cannot be used.
        written: file to write the tasks to; StateError if it cannot be written.
        branches: whether to act by branches instead of the likeliest action.
        controls: whether to score rivals and controls on the same texts, see `controls`.
    """
    lessons = loaded.lessons
    if file is not None:
        examples = read_examples(file, check=lambda each: check_room(lessons, each.question))
        for warning in _answer_warnings(lessons, file, examples):
            logger.warning("warning: %s", warning)
    else:
        tasks = made_up(lessons)
        examples = suite(
            lessons,
            tasks,
            length_ratios=length_ratios or LENGTH_RATIOS,
            num_examples=num_examples,
            seed=seed,
            wording=wording,
        )
        for cell in held_out_cells(lessons, num_examples=num_examples):
            examples += cell
    if written is not None:
        write_examples(written, examples)
    return score_examples(loaded.reader, lessons, examples, branches=branches, controls=controls)


def made_up(lessons: Lessons) -> tuple[str, ...]:
    """Tasks of a run that are not of a user's file."""
    is_left_out = lessons.training.task_file is not None and lessons.training.task_file_share == 1
    return () if is_left_out else lessons.training.tasks


def held_out_cells(lessons: Lessons, *, num_examples: int) -> list[list[Example]]:
    """Rows of a user's file that training did not see, by task and length, the first
    `num_examples` of each; none without a file."""
    cells: dict[tuple[str, int], list[Example]] = {}
    for example in lessons.own.held_out if lessons.own else ():
        # A row of its own in the table, whatever it is called.
        suffix = " (task_file)" if example.task in made_up(lessons) else ""
        named = replace(example, task=f"{example.task}{suffix}")
        cell = cells.setdefault((named.task, named.length_ratio), [])
        if len(cell) < num_examples:
            cell.append(named)
    return list(cells.values())


def _answer_warnings(lessons: Lessons, file: Path, examples: Sequence[Example]) -> list[str]:
    """Warnings about answers that are longer than what the reader may say."""
    most = lessons.training.answer_tokens
    lengths = [len(lessons.tokenizer.encode(target(example))) + 1 for example in examples]
    too_long = sum(length > most for length in lengths)
    if not too_long:
        return []
    return [
        f"{file}: {too_long} of {len(examples)} answers take more than the {most} tokens that this "
        f"model says at most (stage_b.training.answer_tokens), up to {max(lengths)}"
    ]


def check_room(lessons: Lessons, question: str) -> None:
    """Raises ValueError if a window has no room for a question."""
    count = len(lessons.tokenizer.encode(question))
    room = segment_room(lessons.window_tokens, count, lessons.training.answer_tokens)
    if room < 0:
        raise ValueError(
            f"question takes {count} tokens, {-room} more than a window of "
            f"{lessons.window_tokens} tokens has room for"
        )


def store_rows(checkpoint: Path, rows: Sequence[Row]) -> None:
    """Writes the rows of a suite into the run directory of a checkpoint folder, if it is in one."""
    folder = checkpoint.parent
    # A checkpoint that was copied elsewhere belongs to no run directory.
    if folder.name == "checkpoints":
        write_text_atomic(folder.parent / REASONING_FILE, Evaluated(list(rows)).as_json() + "\n")


def suite(
    lessons: Lessons,
    tasks: Sequence[str],
    *,
    length_ratios: Sequence[int],
    num_examples: int,
    seed: int = 0,
    wording: Wording = TRAINED,
) -> list[Example]:
    """Returns examples of every task and length (windows), on texts that training did not see.

    Another `seed` gives other texts, so that choices can be made on some and told of others.
    Examples too long for a length are replaced by later ones, as long as tries last. Raises
    DataError if a task is unknown.
    """
    # A seed of its own: lessons of training are drawn from others.
    of_texts = f"{lessons.seed}/{seed}{EVALUATION}" if seed else f"{lessons.seed}{EVALUATION}"
    chosen = []
    for task, ratio in product(tasks, length_ratios):
        check_task(task)
        examples: list[Example] = []
        misfit = None
        for number in range(_TRIES_PER_EXAMPLE * num_examples):
            try:
                examples.append(lessons.example(task, of_texts, number, ratio, wording=wording))
            except DataError as error:
                misfit = error
            if len(examples) == num_examples:
                break
        if misfit is not None and len(examples) < num_examples:
            logger.info("%d of %d texts found: %s", len(examples), num_examples, misfit)
        chosen += examples
    return chosen


@dataclass
class _Cell:
    """Answers to the texts of one task and length, batch by batch."""

    agent: list[Answers] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)  # scores of the backbone alone
    controls: dict[str, list[Answers]] = field(default_factory=dict)
    num_accepted: int = 0
    num_decisions: int = 0

    def row(self, task: str, ratio: int) -> Row:
        """Means over the texts."""
        scores = [score for batch in self.agent for score in batch.scores]
        low = high = None
        if len(scores) > 1:
            low, high = bootstrap_interval(scores)
        controls = None
        if self.controls:
            of_each = {"agent": self.agent, **self.controls}
            controls = {
                name: summary(batches)
                for name, batches in of_each.items()
                # All columns are of the same texts: one that some of them have no answer of, as
                # `oracle` of rows without evidence, is left out.
                if sum(len(batch.scores) for batch in batches) == len(scores)
            }
        count = len(scores)
        mean, alone = sum(scores) / count, sum(self.alone) / count
        return Row(task, ratio, mean, alone, count, low, high, controls)


@torch.no_grad()
def score_examples(
    reader: MemoryReader,
    lessons: Lessons,
    examples: Sequence[Example],
    *,
    branches: bool = False,
    controls: bool = False,
) -> Evaluated:
    """Mean scores of a reader in evaluation mode, and of its backbone alone, by task and length.

    A window must have room for the questions. With `branches` the reader acts by branches instead
    of the likeliest action; with `controls` all columns of `controls.CONTROLS` answer too.
    """
    cells: dict[tuple[str, int], list[Example]] = {}
    for example in examples:
        # One length at a time: texts of a batch are padded to the longest.
        cells.setdefault((example.task, example.length_ratio), []).append(example)
    rows = []
    num_accepted = 0
    num_decisions = 0
    for (task, ratio), chosen in cells.items():
        cell = _Cell()
        for first in range(0, len(chosen), _EXAMPLES_PER_BATCH):
            batch = chosen[first : first + _EXAMPLES_PER_BATCH]
            _answer_batch(cell, reader, lessons, batch, branches=branches, controls=controls)
        rows.append(cell.row(task, ratio))
        num_accepted += cell.num_accepted
        num_decisions += cell.num_decisions
    return Evaluated(rows, num_accepted / num_decisions if num_decisions else None)


def _answer_batch(
    cell: _Cell,
    reader: MemoryReader,
    lessons: Lessons,
    batch: Sequence[Example],
    *,
    branches: bool,
    controls: bool,
) -> None:
    segments = [lessons.segments(each.text) for each in batch]
    texts = lessons.texts(segments, [each.question for each in batch])
    texts = moved(texts, reader.backbone.device)
    # The same checker for all columns, so that they differ by the memory alone.
    grade = grade_by(batch, lessons.tokenizer)
    began = time.perf_counter()
    reading = reader.read(texts)
    if reading.keys.is_cuda:
        torch.cuda.synchronize()  # else only the launches would be timed
    reading_seconds = time.perf_counter() - began
    episodes = ReadingEpisodes(reader, reading, grade)
    if branches:
        branched = roll_out_branches(episodes, reader.policy, episodes.start())
        final = branched.final
        cell.num_accepted += branched.num_accepted
        cell.num_decisions += branched.num_decisions
    else:
        final = roll_out(episodes, reader.policy, episodes.start(), generator=None).final
    seconds = time.perf_counter() - began
    cell.agent.append(Answers(final.earned.tolist(), final.operations.tolist(), seconds))
    cell.alone += [grade(row, answer) for row, answer in enumerate(reader.answer_alone(texts))]
    if not controls:
        return
    columns = Controls(reader, lessons, batch, texts, reading, reading_seconds, grade)
    for name in CONTROLS:
        answers = columns.answers(name)
        if answers is not None:
            cell.controls.setdefault(name, []).append(answers)
