"""What a run directory tells about its run, whether it finished, still goes on, or died."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from pydantic import ValidationError

from cdrmix.config.redaction import redacted
from cdrmix.config.schema import Config
from cdrmix.config.yaml_text import dump_yaml
from cdrmix.errors import StateError
from cdrmix.monitoring.sinks import read_metrics


@dataclass(frozen=True)
class RecordedRun:
    """What a run directory holds. `problems` names, by file, what could not be read."""

    folder: Path
    records: list[dict[str, float]]
    summary: Mapping[str, Any]
    plan: Mapping[str, Any]
    environment: Mapping[str, Any]
    health: Mapping[str, Any]
    reasoning: Mapping[str, Any]
    config_text: str
    config: Config | None
    problems: Mapping[str, str]

    @property
    def last_step(self) -> int:
        """Steps completed, as far as logged."""
        logged = int(self.records[-1]["step"]) if self.records else 0
        return max(logged, self.summary.get("steps") or 0)

    @property
    def num_steps(self) -> int | None:
        """Planned length in steps, Stage B's among them; None when the config cannot be read."""
        in_all = (self.plan.get("stage_b") or {}).get("num_steps")
        if in_all is not None:
            return int(in_all)
        return None if self.config is None else self.config.training.num_steps

    @property
    def is_stage_b_alone(self) -> bool:
        """Whether it starts from the Stage A of another run and logged steps of its own only."""
        names = {name for line in self.records for name in line}
        in_stage_b = any(name.startswith(("stage_b/", "policy/")) for name in names)
        return in_stage_b and "loss" not in names

    @property
    def reasoning_rows(self) -> Sequence[Mapping[str, Any]]:
        """Rows of the reasoning suite: those of the run's end, else those stored since."""
        at_the_end = (self.summary.get("stage_b") or {}).get("reasoning")
        return at_the_end or self.reasoning.get("rows") or []

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of one metric, where it was logged."""
        points = [(line["step"], line[name]) for line in self.records if name in line]
        both = np.array(points, dtype=np.float64).reshape(-1, 2)
        return both[:, 0], both[:, 1]

    def validation_losses(self) -> tuple[np.ndarray, np.ndarray]:
        """Steps and losses of the evaluations on the way and of the final one."""
        steps, losses = self.series("eval/loss")
        final = (self.summary.get("evaluation") or {}).get("loss")
        step = self.summary.get("steps")
        if final is None or step is None or step in steps:
            return steps, losses
        return np.append(steps, float(step)), np.append(losses, float(final))

    def latest(self, name: str) -> float | None:
        """The last logged value of a metric."""
        return next((line[name] for line in reversed(self.records) if name in line), None)


def read_run(run_dir: Path) -> RecordedRun:
    """Read what there is of a run directory.

    Raises:
        StateError: if there is no metrics.jsonl.
    """
    metrics = run_dir / "metrics.jsonl"
    if not metrics.is_file():
        raise StateError(
            f"{metrics}: not found. A report is made of a run directory, which holds metrics.jsonl "
            "from the first logged step on."
        )
    problems: dict[str, str] = {}
    config_text, config = _read_config(run_dir / "config_snapshot.yaml", problems)
    return RecordedRun(
        folder=run_dir,
        records=read_metrics(metrics),
        summary=_read_json(run_dir / "metrics.json", problems),
        plan=_read_json(run_dir / "plan.json", problems),
        environment=_read_json(run_dir / "environment.json", problems),
        health=_read_json(run_dir / "health.json", problems),
        reasoning=_read_json(run_dir / "reasoning.json", problems),
        config_text=config_text,
        config=config,
        problems=problems,
    )


def _read_json(path: Path, problems: dict[str, str]) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        problems[path.name] = f"{path.name} is missing."
        return {}
    except (OSError, ValueError) as error:
        problems[path.name] = f"{path.name} cannot be read: {error}"
        return {}
    if not isinstance(found, dict):
        problems[path.name] = f"{path.name} does not hold an object."
        return {}
    return found


def _read_config(path: Path, problems: dict[str, str]) -> tuple[str, Config | None]:
    text = ""
    try:
        text = path.read_text(encoding="utf-8")
        values = yaml.safe_load(text)
        config = Config.model_validate(values)
        shown = redacted(values)  # a snapshot of an earlier version holds secrets
        return (text if shown == values else dump_yaml(shown)), config
    except FileNotFoundError:
        problems[path.name] = f"{path.name} is missing."
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValidationError) as error:
        problems[path.name] = f"{path.name} cannot be read: {error}"
    return text, None
