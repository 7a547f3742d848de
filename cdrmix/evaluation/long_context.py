"""Reasoning tasks by the length of their texts: the reader, and its backbone alone beside it.

The backbone alone sees what its window holds at the end of the text; state and cache begin there.
"""

# N texts

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from cdrmix.checkpoint import store
from cdrmix.config.reasoning import ReasoningTask
from cdrmix.errors import DataError
from cdrmix.evaluation.readers import load_reader
from cdrmix.log import get_logger
from cdrmix.reasoning.episodes import roll_out
from cdrmix.reasoning.lessons import Lessons
from cdrmix.reasoning.phases import grade_by
from cdrmix.reasoning.reader import MemoryReader
from cdrmix.reasoning.reading import ReadingEpisodes

LENGTH_RATIOS = (1, 2, 4, 8, 16)
REASONING_FILE = "reasoning.json"
_EXAMPLES_PER_BATCH = 16

logger = get_logger(__name__)


@dataclass(frozen=True)
class Row:
    """One cell of the table.

    Attributes:
        task: its name.
        length_ratio: length of the texts (windows).
        score: of the reader, mean of 0 to 1.
        backbone_score: of the backbone alone, on the same texts.
        n: texts.
    """

    task: str
    length_ratio: int
    score: float
    backbone_score: float
    n: int


def evaluate_reasoning(
    source: Path,
    *,
    tasks: Sequence[ReasoningTask] | None = None,
    length_ratios: Sequence[int] = LENGTH_RATIOS,
    num_examples: int,
) -> list[Row]:
    """Evaluate a trained reader, and store the rows in its run directory.

    Args:
        source: a run directory or a checkpoint of one.
        tasks: which; None: those that it was trained on.
        length_ratios: lengths (windows).
        num_examples: texts for each cell.
    Raises:
        StateError: if there is no checkpoint, or it has not come to Stage B.
    """
    loaded = load_reader(source)
    logger.info("%s: step %d", source, loaded.trained.step)
    names = tasks or loaded.lessons.training.tasks
    rows = score_tasks(
        loaded.reader, loaded.lessons, names, length_ratios=length_ratios, num_examples=num_examples
    )
    path = _run_directory(source) / REASONING_FILE
    path.write_text(as_json(rows) + "\n", encoding="utf-8")
    return rows


def score_tasks(
    reader: MemoryReader,
    lessons: Lessons,
    tasks: Sequence[str],
    *,
    length_ratios: Sequence[int],
    num_examples: int,
) -> list[Row]:
    """Mean scores of greedy episodes, and of the backbone alone.

    Texts are none of those that training saw. A task whose statements a length has no room for has
    no row there.

    Args:
        reader: in evaluation mode.
        lessons: tasks in its tokens.
        tasks: names.
        length_ratios: lengths (windows).
        num_examples: texts for each cell.
    """
    rows = []
    for task in tasks:
        for ratio in length_ratios:
            try:
                scores = _scores(reader, lessons, task, ratio, num_examples)
            except DataError as error:
                logger.info("%s", error)
                continue
            mean, alone = scores.mean(0).tolist()
            rows.append(Row(task, ratio, mean, alone, num_examples))
    return rows


@torch.no_grad()
def _scores(
    reader: MemoryReader, lessons: Lessons, task: str, ratio: int, count: int
) -> torch.Tensor:
    """Score with memory and alone of each example, [count, 2].

    Raises:
        DataError: if the task does not fit into the length.
    """
    parts = []
    seed = f"{lessons.seed}/evaluation"
    for first in range(0, count, _EXAMPLES_PER_BATCH):
        numbers = range(first, min(first + _EXAMPLES_PER_BATCH, count))
        examples = [lessons.example(task, seed, number, ratio) for number in numbers]
        texts = lessons.texts([lessons.segments(each.text) for each in examples], examples)
        texts = texts.to(reader.backbone.device)
        grade = grade_by(examples, lessons.tokenizer)
        episodes = ReadingEpisodes(reader, reader.read(texts), grade)
        final = roll_out(episodes, reader.policy, episodes.start(), generator=None).final
        alone = [grade(row, answer) for row, answer in enumerate(reader.answer_alone(texts))]
        parts.append(torch.stack([final.earned.cpu(), torch.tensor(alone)], dim=1))
    return torch.cat(parts)


def as_json(rows: Sequence[Row]) -> str:
    """The rows as one JSON object."""
    return json.dumps({"rows": [asdict(row) for row in rows]})


def table(rows: Sequence[Row]) -> str:
    """The rows for a person: a line per task, a column per length."""
    ratios = sorted({row.length_ratio for row in rows})
    by_cell = {(row.task, row.length_ratio): row for row in rows}
    heads = "".join(f"{f'{ratio}x':>14}" for ratio in ratios)
    lines = [f"{'score, backbone alone':<24}{heads}"]
    for task in dict.fromkeys(row.task for row in rows):
        cells = []
        for ratio in ratios:
            row = by_cell.get((task, ratio))
            cells.append(f"{row.score:.2f}, {row.backbone_score:.2f}" if row else "-")
        lines.append(f"{task:<24}" + "".join(f"{cell:>14}" for cell in cells))
    lines.append(f"{rows[0].n} texts each; lengths in windows" if rows else "no task fits")
    return "\n".join(lines)


def _run_directory(source: Path) -> Path:
    """The run directory of itself or of one of its checkpoints."""
    found = store.find(source)
    assert found is not None, "it was found a moment ago"
    return found.path.parent.parent
