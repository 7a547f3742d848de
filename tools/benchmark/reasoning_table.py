"""Stage B as a whole, from text to table, beside its rivals.

`cdrmix-reason-tiny`, as a user runs it, for so many seeds. What counts are texts of eight windows,
512 tokens, in the wording of training and in two that training makes none of, and of 16 and 32
windows, where the budget does not allow to write all. They are answered by the agent, by its
backbone alone and by all columns of `cdrmix.stage_b.controls`. Choices were made on texts of seed
0; these are of another. `whole` and `state` are there twice: as the backbone stands, which learned
on windows alone, and trained. A trained rival begins as the backbone of the finished reader, so
that it has seen all that the reader learned from, and then learns from `RIVAL_SHARE` of as many
tokens more to answer texts of 1 to 8 windows.
"""

from __future__ import annotations

import copy
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from cdrmix.config.reasoning import Phase
from cdrmix.errors import DataError
from cdrmix.models.state_rows import moved
from cdrmix.network import free_port
from cdrmix.reasoning.carried_state import carry
from cdrmix.reasoning.lessons import Lesson, Lessons
from cdrmix.reasoning.memory_reader import MemoryReader
from cdrmix.reasoning.own_tasks import target
from cdrmix.reasoning.segments import window_tokens
from cdrmix.reasoning.tasks import HELD_OUT, TRAINED, Example
from cdrmix.stage_b.answer_rows import rows_with_answers
from cdrmix.stage_b.controls import Answers, Controls, summary
from cdrmix.stage_b.long_context import TrainedReader, load_reader, score_examples, suite
from cdrmix.stage_b.phases import answer_loss, grade_by
from tools.benchmark.timing import report

TASKS = ("needle_keys", "variable_tracking")
LENGTH_RATIO = 8
RATIOS = (1, 2, 4, 8)  # of the rivals' texts
LONG_RATIOS = (16, 32)
NUM_EVALUATED = 128
NUM_LONG = 64
TEXT_SEED = 1
# Made after the forms of training were chosen, which was done with an eye on `HELD_OUT` and on two
# that stood here before.
SECOND = HELD_OUT._replace(
    needles=("Remember {digits} as the code for {word}.",),
    ask_needles=(("Give me the code for {words}.", "Give me the codes for {words}."),),
    copies=("{new} is another name for {old}.", "Pour {old} out over {new}."),
    ask_copies=("Which entries contain {value}?",),
    fillers=(
        "The bells of {word} rang all morning.",
        "Every ship to {word} was late.",
        "Few people read about {word}.",
        "Her uncle grew up near {word}.",
        "In spring {word} smells of rain.",
    ),
)
WORDINGS = {"trained": TRAINED, "held-out": HELD_OUT, "second": SECOND}
Rival = Literal["whole", "state"]
RIVALS: tuple[Rival, ...] = ("whole", "state")
RIVAL_RATE = 3.2e-3  # as the backbone's in Stage B
RIVAL_WARMUP = 20
RIVAL_BATCH = 32
RIVAL_SHARE = 0.4


def train_tiny(run_dir: Path, seed: int) -> float:
    """Trains `cdrmix-reason-tiny` on two ranks; returns the seconds of wall time."""
    command = [
        str(Path(sys.executable).with_name("deepspeed")),
        *("--num_gpus", "2", "--master_port", str(free_port())),
        *("--log_level", "error", "launch/train.py"),
        *("--config", "model_configs/cdrmix-reason-tiny.yaml", "--run-dir", str(run_dir)),
        *("--set", f"training.seed={seed}"),
    ]
    began = time.monotonic()
    subprocess.run(command, check=True, stdout=sys.stderr)
    return time.monotonic() - began


def columns(loaded: TrainedReader, *, num_evaluated: int = NUM_EVALUATED) -> dict[str, Any]:
    """Scores of the agent, of the backbone alone and of all controls: wording -> task -> column."""
    return {name: _scored(loaded, _texts(loaded.lessons, num_evaluated, name)) for name in WORDINGS}


def long_columns(loaded: TrainedReader, *, num_evaluated: int = NUM_LONG) -> dict[str, Any]:
    """The same in the wording of training at longer texts: length in windows -> task -> column."""
    return {
        f"{ratio}": _scored(loaded, _texts(loaded.lessons, num_evaluated, "trained", ratio))
        for ratio in LONG_RATIOS
    }


def _scored(loaded: TrainedReader, examples: Sequence[Example]) -> dict[str, Any]:
    rows = score_examples(loaded.reader, loaded.lessons, examples, controls=True).rows
    found: dict[str, Any] = {row.task: row.as_json()["controls"] for row in rows}
    for row in rows:
        found[row.task]["backbone"] = {"score": row.backbone_score, "n": row.n}
    return found


def _texts(lessons: Lessons, count: int, wording: str, ratio: int = LENGTH_RATIO) -> list[Example]:
    return suite(
        *(lessons, TASKS),
        length_ratios=(ratio,),
        num_examples=count,
        seed=TEXT_SEED,
        wording=WORDINGS[wording],
    )


def train_rival(loaded: TrainedReader, rival: Rival, *, num_tokens: int, seed: int) -> MemoryReader:
    """Returns a copy of a reader whose backbone was taught the answers at full length.

    `state` reads a text window by window, and is corrected through all of them. Lengths enter one
    after the other over the first half, as those of the policy's phase do.
    """
    reader = copy.deepcopy(loaded.reader).train()
    backbone = reader.backbone.requires_grad_(True)
    optimizer = torch.optim.AdamW(backbone.parameters(), weight_decay=0)
    step = 0
    done = 0
    while done < num_tokens:
        share = done / num_tokens
        entered = RATIOS[: 1 + int(min(2 * share, 0.999) * len(RATIOS))]
        ratio = entered[step % len(entered)]
        examples = _rival_examples(loaded.lessons, f"{seed}/{rival}", step, ratio)
        loss, read = rival_loss(reader, loaded.lessons, rival, examples)
        for group in optimizer.param_groups:
            group["lr"] = RIVAL_RATE * min((step + 1) / RIVAL_WARMUP, 1, max(0.05, 2 - 2 * share))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(backbone.parameters(), 1.0)
        optimizer.step()
        step += 1
        done += read
    return reader.eval()


def _rival_examples(lessons: Lessons, seed: str, step: int, ratio: int) -> list[Example]:
    """A batch of one length; a task without room in it takes a longer one."""
    examples = []
    for place in range(RIVAL_BATCH):
        number = step * RIVAL_BATCH + place
        for longer in range(ratio, 2 * LENGTH_RATIO):
            try:
                task = TASKS[number % len(TASKS)]
                examples.append(lessons.example(task, seed, number, longer))
            except DataError:
                continue
            break
    return examples


def rival_loss(
    reader: MemoryReader, lessons: Lessons, rival: Rival, examples: Sequence[Example]
) -> tuple[Tensor, int]:
    """Nats per token of the answers, and the tokens that were read."""
    encode = lessons.tokenizer.encode
    marks = lessons.marks
    texts = [[id for part in lessons.segments(each.text) for id in part] for each in examples]
    questions = [encode(each.question) for each in examples]
    answers = [(*encode(target(each)), marks.stop) for each in examples]
    state = None
    if rival == "state":
        state = carry(reader.backbone, texts, window_tokens=reader.window_tokens)
        windows = [window_tokens([], question, marks) for question in questions]
    else:
        pairs = zip(texts, questions, strict=True)
        windows = [window_tokens([text], question, marks) for text, question in pairs]
    tokens, labels = rows_with_answers(windows, answers, reader.backbone.device)
    hidden = reader.backbone(tokens, state=state).hidden
    read = sum(map(len, windows)) + (sum(map(len, texts)) if rival == "state" else 0)
    return answer_loss(reader, hidden, labels), read


@torch.no_grad()
def rival_scores(
    reader: MemoryReader, lessons: Lessons, rival: Rival, *, num_evaluated: int = NUM_EVALUATED
) -> dict[str, Any]:
    """Scores of a trained rival on the texts of `columns`: wording -> task -> score."""
    found: dict[str, Any] = {}
    for name in WORDINGS:
        examples = _texts(lessons, num_evaluated, name)
        found[name] = {}
        for task in TASKS:
            chosen = [each for each in examples if each.task == task]
            score = summary([_answered(reader, lessons, rival, chosen)])
            found[name][task] = {"score": score.score, "low": score.low, "high": score.high}
    return found


def _answered(
    reader: MemoryReader, lessons: Lessons, rival: Rival, examples: Sequence[Example]
) -> Answers:
    segments = [lessons.segments(each.text) for each in examples]
    texts = moved(
        lessons.texts(segments, [each.question for each in examples]), reader.backbone.device
    )
    grade = grade_by(examples, lessons.tokenizer)
    reading = reader.read(texts, plastic=False)
    answers = Controls(reader, lessons, examples, texts, reading, 0.0, grade).answers(rival)
    assert answers is not None, "of columns that need evidence alone"
    return answers


def stage_b_tokens(loaded: TrainedReader) -> int:
    """Tokens of tasks that the backbone read in the phases without episodes, by a few lessons of
    each; the corpus, which keeps its loss on plain text low, is not among them."""
    training = loaded.lessons.training
    total = 0.0
    phases: dict[Phase, int] = {
        "memory": training.memory_steps,
        "adapters": training.adapter_steps,
        "joint": training.joint_steps,
    }
    for phase, steps in phases.items():
        lessons = [loaded.lessons.lesson(phase, number) for number in range(4)]
        mean = sum(_lesson_tokens(loaded.reader, each) for each in lessons) / len(lessons)
        total += steps * training.lessons_per_step * mean
    return round(total)


def _lesson_tokens(reader: MemoryReader, lesson: Lesson) -> int:
    """Tokens of segments, of the windows at a retrieval and at the answer, and of drills."""
    rows = range(len(lesson.examples))
    windows = [
        reader.windows(lesson.texts, rows, chosen) for chosen in (lesson.found, lesson.gathered)
    ]
    total = int(lesson.texts.lengths.sum()) + sum(int(each.lengths.sum()) for each in windows)
    drills = sum(len(window) + len(answer) for window, answer in lesson.drills)
    return total + sum(map(len, lesson.answers)) + drills


def table(run_dir: Path, *, seed: int, share: float = RIVAL_SHARE) -> dict[str, Any]:
    """All columns of one run, on two processes; each trained rival reads `share` of
    `stage_b_tokens`."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        rivals = {name: pool.submit(_rival, run_dir, name, seed, share) for name in RIVALS}
        found = pool.submit(_all_columns, run_dir)
        trained = {name: rival.result() for name, rival in rivals.items()}
        return {"seed": seed, "trained": trained, "rival_share": share, **found.result()}


def _all_columns(run_dir: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    loaded = load_reader(run_dir)
    return {"columns": columns(loaded), "long": long_columns(loaded)}


def _rival(run_dir: Path, rival: Rival, seed: int, share: float) -> dict[str, Any]:
    torch.set_num_threads(1)
    loaded = load_reader(run_dir)
    num_tokens = round(share * stage_b_tokens(loaded))
    reader = train_rival(loaded, rival, num_tokens=num_tokens, seed=seed)
    return rival_scores(reader, loaded.lessons, rival)


def measure(rounds: int) -> dict[str, Any]:
    """The table of so many seeds; one takes about an hour on two cores."""
    rows = []
    for seed in range(rounds):
        with tempfile.TemporaryDirectory() as name:
            seconds = train_tiny(Path(name) / "run", seed)
            rows.append(table(Path(name) / "run", seed=seed) | {"seconds": seconds})
    return {"rounds": rounds, "tables": rows}


def show(result: dict[str, Any]) -> None:
    """Print the rows."""
    for row in result["tables"]:
        print(row)


if __name__ == "__main__":
    report(measure, show, rounds=1, description=__doc__)
