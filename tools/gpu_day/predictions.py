"""Predictions for a GPU before one was there, held against what is measured."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_FILE = Path(__file__).with_name("predictions.json")


def read_predictions() -> list[dict[str, Any]]:
    """Predictions: stage, row, figure, unit, expected, the range low to high, and the source."""
    predictions: list[dict[str, Any]] = json.loads(_FILE.read_text(encoding="utf-8"))
    return predictions


def judge(
    results: Mapping[str, Mapping[str, Any]], predictions: Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Each prediction with `measured` and `verdict`: right, WRONG, or not measured.

    A prediction is right where the figure lies within its range.
    """
    judged = []
    for prediction in predictions:
        rows = results.get(prediction["stage"], {}).get("rows", [])
        figures = [
            row.get(prediction["figure"]) for row in rows if row["name"] == prediction["row"]
        ]
        measured = next((each for each in figures if isinstance(each, (int, float))), None)
        verdict = "not measured"
        if measured is not None:
            is_right = prediction["low"] <= measured <= prediction["high"]
            verdict = "right" if is_right else "WRONG"
        judged.append({**prediction, "measured": measured, "verdict": verdict})
    return judged


def prediction_rows(judged: Iterable[Mapping[str, Any]]) -> list[str]:
    """A table of judged predictions, and the list of those that were wrong."""
    rows = [
        "| stage | what | expected (range), one H200 | measured | | ground |",
        "|---|---|---|---|---|---|",
    ]
    wrong = []
    for each in judged:
        unit = each["unit"]
        guess = f"{each['expected']:g} ({each['low']:g} to {each['high']:g}) {unit}"
        measured = "" if each["measured"] is None else f"{each['measured']:.4g}"
        what = f"{each['row']}: {each['figure'].replace('_', ' ')}"
        rows.append(
            f"| {each['stage']} | {what} | {guess} | {measured} | {each['verdict']} "
            f"| {each['source']} |"
        )
        if each["verdict"] == "WRONG":
            wrong.append(f"- {what}: {measured}, expected {guess}")
    return rows + (["", "Predictions that were wrong:", "", *wrong] if wrong else [])
