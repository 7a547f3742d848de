"""Figures of a run as rows of a suite: losses, tokens, speed and size, from its run directory. No
torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cdrmix.errors import StateError
from cdrmix.monitoring.suite_results import Row, SuiteResult

RUN_FIGURES = "run"  # name of such rows, among those of suites


def figures_of_run(run_dir: Path) -> list[SuiteResult]:
    """Figures of a run by metrics.json, as results: of its weights, and of their average.

    Raises StateError if a file that is there is damaged.
    """
    summary = _json_object(run_dir / "metrics.json")
    if not summary:
        return []
    starts = sorted((run_dir / "starts").glob("*.json"))
    data = (_json_object(starts[-1]) if starts else {}).get("data") or {}
    results = []
    for weights, key in (("trained", "evaluation"), ("ema", "ema_evaluation")):
        held_out = summary.get(key) or {}
        rows = [
            _figure("held-out", name, held_out.get(name), held_out.get("tokens"))
            for name in ("loss", "perplexity", "bits_per_byte")
        ]
        if weights == "trained":
            rows += _sizes_of(run_dir, summary)
        own = [row for row in rows if row is not None]
        settings = {
            "data_digest": {"held-out": data.get("digest")},
            "tokens": {"held-out": held_out.get("tokens")},
            "tokenizer": data.get("tokenizer_sha256"),
            "machine": {"speed": _machine(run_dir)},
        }
        if own:
            step = summary.get("steps")
            results.append(SuiteResult(RUN_FIGURES, own, str(run_dir), step, weights, settings))
    return results


def _sizes_of(run_dir: Path, summary: Mapping[str, Any]) -> list[Row | None]:
    plan = _json_object(run_dir / "plan.json")
    return [
        _figure("training", "loss", summary.get("loss")),
        _figure("training", "tokens_seen", summary.get("tokens_seen")),
        _figure("speed", "tokens_per_second", summary.get("tokens_per_second_median")),
        _figure("model", "parameters", plan.get("total_params")),
        _figure("model", "active_parameters", plan.get("active_params")),
    ]


def _machine(run_dir: Path) -> str:
    """Kind and number of the devices that a run has trained on."""
    environment = _json_object(run_dir / "environment.json")
    devices = environment.get("devices") or []
    return ", ".join(map(str, devices)) or "not named"


def _figure(task: str, metric: str, value: Any, n: Any = None) -> Row | None:
    """Row of a value of metrics.json; None where it is missing or no number."""
    try:
        return Row(task, metric, float(value), None, None, int(n or 0))
    except (TypeError, ValueError):
        return None


def _json_object(path: Path) -> Mapping[str, Any]:
    """Reads an object; an empty one where there is no file. Raises StateError if it is damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__} in place of an object")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise StateError(
            f"{path}: cannot be read: {error}. Restore it, or move it away to compare the run "
            "without it"
        ) from error
    return content
