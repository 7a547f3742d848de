"""Scores of short forms of the tiny variants, and the table that they are held against.

A short form keeps the architecture, the optimizer and the objectives of a shipped configuration and
trains for seconds on text made here, which no version of Python changes. The table,
tests/data/scores.json, has an interval for each score, from several seeds.

python -m tests.tiny_scores    trains each form with each seed, and writes the table anew
"""

from __future__ import annotations

import json
import math
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from cdrmix.data.sample import build_sample
from tests.harness import ROOT, run_ranks
from tests.small_run import overrides, start

TABLE = ROOT / "tests" / "data" / "scores.json"
SEEDS = tuple(range(1, 6))
# Half of the width in standard deviations: a new seed is outside once in some thousands of times.
_WIDTH = 5.0
_LEAST_SHARE = 0.01  # of the score: other processors round otherwise
_VOCABULARY = 4096  # of both configurations
_SYLLABLES = (
    "ba be bi bo bu da de di do du ka ke ki ko ku la le li lo lu ma me mi mo mu na ne ni no"
)
_NUM_QUESTIONS = 64


@dataclass(frozen=True)
class Form:
    """Short form of a shipped configuration."""

    config: str
    settings: tuple[str, ...]
    answers: bool = False  # questions of several choices too


_SHORT = (
    "training.sequence_length=128",
    "evaluation.every_steps=null",
    "evaluation.sample_tokens=0",
    "evaluation.baselines=false",
    "checkpoint.every_steps=null",
)
FORMS = {
    # Stage A of cdrmix-reason-tiny has the same model and training.
    "core-tiny": Form(
        "model_configs/cdrmix-core-tiny.yaml",
        (
            *_SHORT,
            "training.max_steps=25",
            "training.warmup_steps=5",
            "evaluation.final_tokens=8192",
        ),
        answers=True,
    ),
    "moe5b-tiny": Form(
        "model_configs/cdrmix-moe5b-tiny.yaml",
        (
            *_SHORT,
            "training.max_steps=6",
            "training.warmup_steps=1",
            "training.global_batch_size=2",
            "training.sequence_length=64",
            "evaluation.final_tokens=512",
        ),
    ),
}


class Text:
    """Functions over a made vocabulary, in which words are as frequent as those of a language."""

    def __init__(self, seed: int) -> None:
        vocabulary = random.Random(0)
        syllables = _SYLLABLES.split()
        self._draw = random.Random(seed)
        self.words = [
            "".join(vocabulary.choice(syllables) for _ in range(vocabulary.randint(2, 4)))
            for _ in range(1_500)
        ]
        self._weights = [1 / (rank + 5) for rank in range(len(self.words))]

    def word(self) -> str:
        return self._draw.choices(self.words, self._weights)[0]

    def sentence(self) -> str:
        return " ".join(self.word() for _ in range(self._draw.randint(4, 9)))

    def function(self) -> list[str]:
        """Lines of a function."""
        first, second, made = self.word(), self.word(), self.word()
        return [
            f"def {self.word()}_{first}({first}, {second}):",
            f'    """{self.sentence()}."""',
            f"    {made} = {first}.{self.word()}({second})",
            f"    if {made} is None:",
            f"        return {second}",
            f"    for {self.word()} in range({self._draw.randint(2, 40)}):",
            f"        {made} += {self.word()}({first}, {second})",
            f"    return {made}",
        ]


def make_sources(folder: Path) -> None:
    """Writes files of Python, the same bytes everywhere."""
    text = Text(seed=1)
    for number in range(60):
        lines = [f'"""{text.sentence()}."""', "", f"import {text.word()}", ""]
        for _ in range(40):
            lines += ["", *text.function(), ""]
        package = folder / text.words[number % 7]
        package.mkdir(parents=True, exist_ok=True)
        (package / f"{text.words[number]}.py").write_text("\n".join(lines), encoding="utf-8")


_QUESTIONS = """\
task: word_order
dataset_path: json
dataset_kwargs: {data_files: {test: questions.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
target_delimiter: ""
num_fewshot: 0
metric_list: [{metric: acc}]
"""


def make_questions(folder: Path) -> None:
    """Writes a task of the harness: which of four orders of its words is the next line."""
    folder.mkdir()
    text = Text(seed=2)  # no function of the training
    draw = random.Random(3)
    rows = []
    for number in range(_NUM_QUESTIONS):
        lines = text.function()
        place = (3, 5, 6)[number % 3]  # lines of four words or more
        words = lines[place].split()
        indent = lines[place][: -len(lines[place].lstrip())]
        orders = [words]
        while len(orders) < 4:
            order = draw.sample(words, len(words))
            orders += [order] if order not in orders else []
        choices = [f"{indent}{' '.join(order)}\n" for order in orders]
        answer = number % 4
        choices[0], choices[answer] = choices[answer], choices[0]
        beginning = "\n".join([*lines[:place], ""])
        rows.append(json.dumps({"text": beginning, "choices": choices, "answer": answer}) + "\n")
    (folder / "questions.jsonl").write_text("".join(rows), encoding="utf-8")
    (folder / "word_order.yaml").write_text(_QUESTIONS, encoding="utf-8")


def make_data(folder: Path) -> None:
    """Makes the built folder `data` and the folder `questions`."""
    make_sources(folder / "sources")
    build_sample(folder / "data", _VOCABULARY, stdlib=folder / "sources")
    make_questions(folder / "questions")


def scores_of(name: str, made: Path, run_dir: Path, seed: int) -> dict[str, float]:
    """Trains a short form on one rank, and measures it; what `make_data` makes is in `made`."""
    form = FORMS[name]
    settings = [*form.settings, f"data.path={made / 'data'}", f"training.seed={seed}"]
    command = ["--config", str(ROOT / form.config), *overrides(settings)]
    assert start([*command, "--run-dir", str(run_dir)]) == 0
    summary = json.loads((run_dir / "metrics.json").read_text())
    held_out = summary["evaluation"]
    entropies = [layer["routing_entropy_bits"] for layer in held_out["layers"]]
    scores = {
        "held-out loss": held_out["loss"],
        "bits per byte": held_out["bits_per_byte"],
        "routing entropy, mean": statistics.mean(entropies),
        "routing entropy, least": min(entropies),
    }
    if "ema_evaluation" in summary:
        scores["held-out loss of the average"] = summary["ema_evaluation"]["loss"]
    if form.answers:
        scores |= _answers(run_dir, made / "questions")
    return scores


def _answers(run_dir: Path, questions: Path) -> dict[str, float]:
    from cdrmix.evaluation.suite import Request
    from cdrmix.sessions.evaluation import Asked, evaluate_whole

    found = evaluate_whole(Asked("zero-shot", Request(tasks=questions), run_dir))
    rows = found.result.rows
    return {f"zero-shot {row.task} {row.metric}": row.score for row in rows if row.metric == "acc"}


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Ends between which the score of a new seed is expected."""
    spread = statistics.stdev(values) * math.sqrt(1 + 1 / len(values))
    middle = statistics.mean(values)
    half = max(_WIDTH * spread, _LEAST_SHARE * abs(middle))
    return middle - half, middle + half


def outside(name: str, scores: dict[str, float]) -> list[str]:
    """Names the scores of a form that are outside of their intervals, or missing, in words."""
    table: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))[name]
    found = []
    for score in table.keys() | scores.keys():
        if score not in table or score not in scores:
            found.append(f"{name}: {score} is only in the {'run' if score in scores else 'table'}")
        elif not table[score]["low"] <= scores[score] <= table[score]["high"]:
            ends = f"{table[score]['low']:.4f} to {table[score]['high']:.4f}"
            found.append(f"{name}: {score} is {scores[score]:.4f}, expected is {ends}")
    return sorted(found)


def main() -> int:
    """Writes the table anew."""
    table: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder)
        make_data(made)
        for name in FORMS:
            of_seeds = []
            for seed in SEEDS:
                arguments = (name, made, made / f"{name}-{seed}", seed)
                of_seeds += run_ranks(scores_of, 1, *arguments, timeout=300)
                print(name, seed, of_seeds[-1], flush=True)
            table[name] = {
                score: dict(zip(("low", "high"), (round(end, 5) for end in ends), strict=True))
                for score in of_seeds[0]
                for ends in [interval([each[score] for each in of_seeds])]
            }
    TABLE.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    # By its name, under which the ranks can import it.
    sys.exit(import_module("tests.tiny_scores").main())
