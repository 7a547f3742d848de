"""Contents of a run directory, of a run that finished, still goes on, or died."""

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
    """Contents of a run directory; `problems` says, by file, why one could not be read."""

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
        """Completed steps, as far as they are logged."""
        logged = int(self.records[-1]["step"]) if self.records else 0
        return max(logged, self.summary.get("steps") or 0)

    @property
    def num_steps(self) -> int | None:
        """Planned steps, those of Stage B included; None when the configuration cannot be read."""
        # The plan counts the steps of both stages; the configuration has those of each.
        both_stages = (self.plan.get("stage_b") or {}).get("num_steps")
        if both_stages is not None:
            return int(both_stages)
        return None if self.config is None else self.config.training.num_steps

    @property
    def has_stage_b_steps(self) -> bool:
        """True where a step of Stage B was logged."""
        names = (name for line in self.records for name in line)
        return any(name.startswith(("stage_b/", "policy/")) for name in names)

    @property
    def is_stage_b_alone(self) -> bool:
        """True where only steps of Stage B were logged: Stage A was another run."""
        return self.has_stage_b_steps and self.latest("loss") is None

    @property
    def reasoning_rows(self) -> Sequence[Mapping[str, Any]]:
        """Rows of the reasoning suite: those of the end of the run, else those stored since."""
        final_rows = (self.summary.get("stage_b") or {}).get("reasoning")
        return final_rows or self.reasoning.get("rows") or []

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns steps and values of a metric, where it was logged."""
        points = [(line["step"], line[name]) for line in self.records if name in line]
        both = np.array(points, dtype=np.float64).reshape(-1, 2)
        return both[:, 0], both[:, 1]

    def validation_losses(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns steps and losses of all evaluations, the final one included."""
        steps, losses = self.series("eval/loss")
        final = (self.summary.get("evaluation") or {}).get("loss")
        step = self.summary.get("steps")
        # An evaluation of the last step on the way is the same point of the curve.
        if final is None or step is None or step in steps:
            return steps, losses
        return np.append(steps, float(step)), np.append(losses, float(final))

    def latest(self, name: str) -> float | None:
        """Returns the last logged value of a metric."""
        return next((line[name] for line in reversed(self.records) if name in line), None)


def read_run(run_dir: Path) -> RecordedRun:
    """Reads the files of a run directory that are there; StateError without a metrics.jsonl."""
    metrics = run_dir / "metrics.jsonl"
    if not metrics.is_file():
        raise StateError(
            f"{metrics}: not found. A report is made of a run directory, which holds metrics.jsonl "
            "from the first logged step on."
        )
    # A live run or one that died lacks some files: each is a problem to name, and no error.
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
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        problems[path.name] = f"{path.name} is missing."
        return {}
    except (OSError, ValueError) as error:
        problems[path.name] = f"{path.name} cannot be read: {error}"
        return {}
    if not isinstance(content, dict):
        problems[path.name] = f"{path.name} does not hold an object."
        return {}
    return content


def _read_config(path: Path, problems: dict[str, str]) -> tuple[str, Config | None]:
    text = ""
    try:
        text = path.read_text(encoding="utf-8")
        values = yaml.safe_load(text)
        config = Config.model_validate(values)
        public_values = redacted(values)  # a snapshot of an earlier version holds secrets
        return (text if public_values == values else dump_yaml(public_values)), config
    except FileNotFoundError:
        problems[path.name] = f"{path.name} is missing."
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValidationError) as error:
        problems[path.name] = f"{path.name} cannot be read: {error}"
    return text, None
