"""A folder of well-known tasks in the files in which they are published: two rows each, by hand.

Right answers name an apple, wrong ones do not.
"""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any


def _lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _cells(rows: list[list[str]]) -> str:
    file = io.StringIO()
    csv.writer(file).writerows(rows)
    return file.getvalue()


def _science(*questions: tuple[str, list[str], str]) -> str:
    return _lines(
        [
            {
                "id": f"q{number}",
                "question": {
                    "stem": stem,
                    "choices": [
                        {"text": t, "label": x} for t, x in zip(texts, "ABCD", strict=False)
                    ],
                },
                "answerKey": key,
            }
            for number, (stem, texts, key) in enumerate(questions)
        ]
    )


_TASKS: dict[str, dict[str, str]] = {
    "lambada": {
        "lambada_test.jsonl": _lines(
            [
                {"text": "she went to the tree and under it lay a red apple"},
                {"text": "he asked for fruit, and was given an apple"},
            ]
        )
    },
    "mmlu": {
        "data/test/anatomy_test.csv": _cells(
            [
                ["What is round?", "stone, grey", "apple", "leaf", "hand", "B"],
                ["What is eaten?", "a bone", "a nail", "a rib", "apple", "D"],
            ]
        ),
        "data/test/astronomy_test.csv": _cells(
            [["What fell on the head of Newton?", "apple", "Mars", "a comet", "the moon", "A"]]
        ),
        "data/dev/anatomy_dev.csv": _cells([["Q", "a", "b", "c", "d", "A"]]),
    },
    "hellaswag": {
        "hellaswag_val.jsonl": _lines(
            [
                {
                    "ind": number,
                    "activity_label": "Picking fruit",
                    "ctx_a": "A man climbs a ladder.",
                    "ctx_b": "the man",
                    "ctx": "A man climbs a ladder. the man",
                    "split": "val",
                    "endings": ["sings [loudly].", "sleeps.", "falls.", "swims."][:place]
                    + ["picks an apple."]
                    + ["sings.", "sleeps.", "falls.", "swims."][place + 1 :],
                    "label": place,
                }
                for number, place in enumerate((2, 0))
            ]
        )
    },
    "arc": {
        "ARC-V1-Feb2018-2/ARC-Easy/ARC-Easy-Test.jsonl": _science(
            ("Which grows on a tree?", ["an apple", "a stone", "a fish", "a car"], "A"),
            ("Which is sweet?", ["salt", "a nail", "an apple"], "C"),
        ),
        "ARC-V1-Feb2018-2/ARC-Easy/ARC-Easy-Train.jsonl": "not read\n",
        "ARC-V1-Feb2018-2/ARC-Challenge/ARC-Challenge-Test.jsonl": _science(
            ("Which holds seeds?", ["a stone", "an apple", "a spoon", "a cloud"], "B"),
            ("Which browns in air?", ["a brick", "glass", "gold", "an apple"], "D"),
        ),
    },
    "openbookqa": {
        "OpenBookQA-V1-Sep2018/Data/Main/test.jsonl": _science(
            ("a horse likes", ["an apple", "a shoe", "a hat", "a bell"], "A"),
            ("a cake may be made of", ["sand", "an apple", "clay", "tin"], "B"),
        )
    },
    "piqa": {
        "physicaliqa-train-dev/valid.jsonl": _lines(
            [
                {"goal": "make juice", "sol1": "press a stone", "sol2": "press an apple"},
                {"goal": "bake a pie", "sol1": "cut an apple", "sol2": "cut a rope"},
            ]
        ),
        "physicaliqa-train-dev/valid-labels.lst": "1\n0\n",
    },
    "winogrande": {
        "winogrande_1.1/dev.jsonl": _lines(
            [
                {
                    "qID": "a-1",
                    "sentence": "He ate fruit and no stone, as the _ was soft.",
                    "option1": "rock",
                    "option2": "apple",
                    "answer": "2",
                },
                {
                    "qID": "a-2",
                    "sentence": "The _ fell from the tree.",
                    "option1": "apple",
                    "option2": "house",
                    "answer": "1",
                },
            ]
        ),
        "winogrande_1.1/train_xs.jsonl": "not read\n",
    },
    "boolq": {
        "BoolQ/val.jsonl": _lines(
            [
                {"passage": "An apple is a fruit.", "question": "is it a fruit", "answer": True},
                {"passage": "A stone is hard.", "question": "is it a fruit", "answer": False},
            ]
        )
    },
}


def write_published(folder: Path, *, only: str | None = None) -> None:
    """Writes the files of all tasks, or of one, as their archives unpack."""
    for name, files in _TASKS.items():
        if only in (None, name):
            for path, text in files.items():
                place = folder / path
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_text(text)
