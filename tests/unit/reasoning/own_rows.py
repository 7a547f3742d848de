"""Rows of a user's file of tasks, for tests of what learns from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

NAMES = ("Ada", "Bob", "Cleo", "Dan", "Eve", "Fay", "Gus", "Hal")


def row(number: int, **changed: Any) -> dict[str, Any]:
    """A row of one fact among others; its text has more segments than a lesson takes."""
    name = NAMES[number % len(NAMES)]
    facts = [f"Room {place} is that of number {number}." for place in range(30)]
    fact = f"{name} keeps key {1000 + number}."
    made = {
        "task": "keys",
        "length_ratio": 4,
        "text": " ".join([*facts[:20], fact, *facts[20:]]),
        "question": f"Which key has {name}?",
        "answers": [str(1000 + number)],
        "match": "any",
        "evidence": [fact],
    }
    made |= changed
    return {key: value for key, value in made.items() if value is not None}


def write_rows(path: Path, count: int = 20, **changed: Any) -> Path:
    """Writes rows to a file."""
    path.write_text("".join(json.dumps(row(number, **changed)) + "\n" for number in range(count)))
    return path
