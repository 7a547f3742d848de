"""A small reader finds one needle among needles where it may keep few: the question first, or last.

Every sentence of a text is a needle, and the budget lets a fifth of the segments be kept at eight
windows. Read behind its question, the right one can be told; with the question at the end, nothing
tells it, and what is found is by chance what was kept. An episode is worth the evidence in the
window, as in `learn_system`.
"""

from __future__ import annotations

import time
from typing import Any, Literal

import torch

from cdrmix.reasoning.lessons import Lessons
from cdrmix.reasoning.memory_reader import MemoryReader
from cdrmix.reasoning.policy import roll_out
from tools.benchmark.learn_system import (
    Fetching,
    lessons_of,
    small_reader,
    train_joint,
    train_policy,
)
from tools.benchmark.timing import report

Question = Literal["first", "last"]
TASK = "needle_haystack"
BUDGET = 8  # writes and retrievals of a text
TRAINED_RATIOS = (1, 2, 4, 8)
RATIO = 8
JOINT_STEPS = 150
ITERATIONS = 40
NUM_LESSONS = 8  # of 16 texts


def learn(
    seed: int,
    question: Question,
    *,
    steps: int = JOINT_STEPS,
    iterations: int = ITERATIONS,
    num_lessons: int = NUM_LESSONS,
) -> dict[str, Any]:
    """Share of texts of eight windows whose needle is found, and that of segments kept at most."""
    began = time.process_time()
    reader, lessons, config = small_reader(
        seed,
        training={"tasks": (TASK,), "length_ratios": TRAINED_RATIOS, "question": question},
        policy={"step_budget": BUDGET},
    )
    train_joint(reader, lessons, config, steps=steps)
    train_policy(reader, lessons, config, iterations=iterations)
    training = lessons.training.model_copy(update={"length_ratios": (RATIO,)})
    found = _found(reader, lessons_of(training, seed), num_lessons)
    return {"question": question, "seed": seed, **found, "seconds": time.process_time() - began}


@torch.no_grad()
def _found(reader: MemoryReader, lessons: Lessons, count: int) -> dict[str, float]:
    """Greedy episodes on unseen texts."""
    found, kept = [], []
    for number in range(count):
        lesson = lessons.lesson("policy", 10_000 + number)
        episodes = Fetching(reader, lesson)
        final = roll_out(episodes, reader.policy, episodes.start(), generator=None).final
        found.append(final.earned.mean())
        # one operation is the retrieval
        kept.append(((BUDGET - 1) / lesson.texts.num_segments).clamp(max=1).mean())
    columns = {"found": found, "kept at most": kept}
    return {name: float(torch.stack(values).mean()) for name, values in columns.items()}


def measure(rounds: int) -> dict[str, Any]:
    """Both places of the question, for so many seeds."""
    questions: tuple[Question, ...] = ("first", "last")
    learned = [learn(seed, question) for seed in range(rounds) for question in questions]
    return {"rounds": rounds, "learned": learned}


def show(result: dict[str, Any]) -> None:
    """Print the rows."""
    for row in result["learned"]:
        print(row)


if __name__ == "__main__":
    report(measure, show, rounds=3, description=__doc__)
