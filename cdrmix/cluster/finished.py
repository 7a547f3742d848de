"""The marker of a finished run: written after its last stage, removed where training goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cdrmix.config.schema import Config

MARKER = "finished.json"


def is_marked(run_dir: Path) -> bool:
    """Whether the run has ended its last stage, and nothing went on since."""
    return (run_dir / MARKER).is_file()


def is_at_its_end(run_dir: Path, config: Config) -> bool:
    """Whether nothing is left to train of what `config` asks for.

    A run of an earlier version has no marker: there the summary counts, unless a stage follows
    that one, which would have replaced it.
    """
    wants_stage_b = config.stage_b is not None and config.training.stage != "a"
    end = _parsed(run_dir / MARKER)
    if end is None:
        end = _parsed(run_dir / "metrics.json")
        if end is None or wants_stage_b:
            return False
        return int(end.get("steps", 0)) >= config.training.num_steps
    if wants_stage_b and end.get("stage") != "b":
        return False
    return end.get("stage") == "b" or int(end.get("step", 0)) >= config.training.num_steps


def _parsed(path: Path) -> dict[str, Any] | None:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) else None
