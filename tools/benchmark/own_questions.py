"""Stage B on questions of a user's own, as docs/reasoning.md tells it: from commands to scores.

`write_notes` makes the file: 200 rows, ten questions about each of 20 minutes of meetings. Minutes
name ten of twelve files and put each in one of eight places at random, so that nothing but the text
tells where it is. Both commands are those of the page, on two ranks.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tools.benchmark.timing import report

FILES = (
    *("Alder", "Birch", "Cedar", "Dogwood", "Elm", "Fir"),
    *("Ginkgo", "Hazel", "Juniper", "Larch", "Maple", "Poplar"),
)
PLACES = (
    *("north store", "south store", "east wing", "west wing"),
    *("cellar", "reading room", "blue cabinet", "green cabinet"),
)
FILES_OF_MINUTES = 10
NUM_MINUTES = 20
NUM_REMARKS = 32  # sentences beside those about files
PEOPLE = ("Ada", "Bob", "Cleo", "Dan", "Eve", "Fay")
REMARKS = (
    "{name} opened the meeting and welcomed everybody.",
    "{name} asked for a shorter report next month.",
    "The budget was read out and nobody objected.",
    "{name} will call the printer about the poster.",
    "There was some talk about the heating.",
    "{name} thanked {other} for the flowers.",
    "The next meeting is on a Tuesday.",
    "{name} and {other} will share a car.",
    "A window on the first floor does not close.",
    "{name} was late because of the train.",
)


def write_notes(file: Path, minutes: Path, *, seed: int = 0) -> None:
    """Writes the rows, and further minutes that are in none of them."""
    rng = random.Random(seed)
    rows = []
    for _ in range(NUM_MINUTES):
        text, statements = _minutes(rng)
        rows += [
            {
                "task": "notes",
                "length_ratio": 4,
                "text": text,
                "question": f"Where is the {name} file kept?",
                "answers": [place],
                "match": "exact",
                "evidence": [_statement(name, place)],
            }
            for name, place in statements.items()
        ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    minutes.write_text(_minutes(rng)[0] + "\n", encoding="utf-8")


def _statement(name: str, place: str) -> str:
    return f"The {name} file is kept in the {place}."


def _minutes(rng: random.Random) -> tuple[str, dict[str, str]]:
    """Text, and the place of each file that it names."""
    statements = {name: rng.choice(PLACES) for name in rng.sample(FILES, FILES_OF_MINUTES)}
    sentences = [_statement(*each) for each in statements.items()]
    for _ in range(NUM_REMARKS):
        name, other = rng.sample(PEOPLE, 2)
        sentences.append(rng.choice(REMARKS).format(name=name, other=other))
    rng.shuffle(sentences)
    return " ".join(sentences), statements


def run_commands(place: Path) -> list[dict[str, Any]]:
    """Runs Stage A and Stage B on the notes in a folder; returns the rows of `reasoning.json`."""
    shared = ("--config", "model_configs/cdrmix-reason-tiny.yaml", "--nproc", "2")
    stage_a = ("training.stage=a", "evaluation.baselines=false")
    training = {
        "task_file": place / "notes.jsonl",
        "task_file_share": 1,
        "lessons_per_step": 2,
        "texts_per_lesson": 4,
        "memory_steps": 40,
        "adapter_steps": 0,
        "joint_steps": 170,
        "policy_steps": 100,
    }
    stage_b = [f"stage_b.training.{name}={value}" for name, value in training.items()]
    stage_b += ["training.stage=b", f"stage_b.run={place / 'a'}"]
    stage_b += ["evaluation.reasoning_examples=20"]
    for run, flags, settings in (
        ("a", ["--max-steps", "250"], stage_a),
        ("notes", [], stage_b),
    ):
        command = [str(Path(sys.executable).with_name("cdrmix")), "train", *shared]
        command += ["--run-dir", str(place / run), *flags]
        for setting in settings:
            command += ["--set", setting]
        subprocess.run(command, check=True, stdout=sys.stderr)
    found = json.loads((place / "notes" / "reasoning.json").read_text(encoding="utf-8"))
    return [row for row in found["rows"] if row["task"] == "notes"]


def measure(rounds: int) -> dict[str, Any]:
    """Scores on held-out rows beside their controls, one file a round."""
    learned = []
    for seed in range(rounds):
        with tempfile.TemporaryDirectory() as name:
            place = Path(name)
            write_notes(place / "notes.jsonl", place / "minutes.txt", seed=seed)
            began = time.monotonic()
            (row,) = run_commands(place)
            learned.append({"file": seed, "row": row, "seconds": time.monotonic() - began})
    return {"rounds": rounds, "learned": learned}


def show(result: dict[str, Any]) -> None:
    """Print the rows."""
    for each in result["learned"]:
        print(each)


if __name__ == "__main__":
    report(measure, show, rounds=3, description=__doc__)
