"""Reference of the configuration: docs/configuration.md, and `cdrmix config --explain KEY`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from cdrmix.config.load import load_config, shipped
from cdrmix.config.model import DERIVED_MODEL_FIELDS
from cdrmix.config.plugin import NameOrPlugin
from cdrmix.config.problems import alternatives, bounds, item_of, nearest_paths, section_of
from cdrmix.config.resuming_rules import when_resumed
from cdrmix.config.schema import Config
from cdrmix.config.section import Section
from cdrmix.errors import ConfigError

_TYPES = {int: "whole number", float: "number", bool: "true or false", str: "text"}
# In brackets in a description, or else as its first word.
_BRACKETS = re.compile(
    r"\(((?:ratio|count|tokens|samples|ranks|features|optimizer steps|steps|per step|bytes|seconds"
    r"|windows|nats|return|L2|batches of rollouts|standard deviations)\b[^),]*)"
)
_FIRST_WORD = re.compile(
    r"(?:Length in |Optimizer )?(?:Ranks|Samples|Tokens|Minutes|Batches|Steps|Rollouts)", re.I
)

# Of keys that say nothing in cdrmix-reason-tiny.yaml; the others have the values there.
_EXAMPLES: dict[str, Any] = {
    "model.moe": {"expert_hidden_size": 256},
    "model.kind": "rwkx",
    "model.path": "/models/llama-3.2-1b",
    "model.lora": {"rank": 16},
    "model.lora.alpha": 32.0,
    "model.lora.target_modules": ["q_proj", "v_proj"],
    "model.remote_code": ["0" * 64],
    "model.mixer_options": {"my_blocks:RunningMean": {"heads": 4}},
    "stage_b": None,
    "parallel.data": 8,
    "parallel.expert": 8,
    "training.total_tokens": 300_000_000_000,
    "training.micro_batch_size": 4,
    "training.sequence_checkpoint_tokens": 1_024,
    "training.start_from": "experiments/first",
    "training.hold_learning_rate": 0.002,
    "training.settle_steps": 200,
    "resources.memory_share": 0.8,
    "resources.prefetch_batches": 4,
    "resources.reader_threads": 2,
    "resources.queue_size": 1_000,
    "resources.probe": "again",
    "training.memory_share": 0.8,
    "data.prefetch_batches": 4,
    "checkpoint.retention": {"use": "my_rules:Weekly"},
    "checkpoint.retention.use": "my_rules:Weekly",
    "checkpoint.retention.options": {"days": 7},
    "training.schedule_options": {"period_steps": 1_000},
    "data.path": "/data/my-shards",
    "data.recipe": "python",
    "data.mixture": {"phases": [{"weights": {"code": 2, "prose": 1}}]},
    "data.mixture.temperature": 2.0,
    "data.mixture.phases": [{"samples": 1_000}, {"weights": {"code": 1}}],
    "data.mixture.phases[].weights": {"code": 2, "prose": 1},
    "data.mixture.phases[].tokens": 1_000_000_000,
    "data.mixture.phases[].samples": 1_000,
    "data.mixture.phases[].change": "linear",
    "data.token_weights": {"prompt": 0.5},
    "hooks": [{"use": "my_hooks:GradientNoise"}],
    "hooks[].use": "my_hooks:GradientNoise",
    "hooks[].options": {"every_steps": 10},
    "optimizer.options": {"momentum": 0.9},
    "objectives.plugins": [{"use": "my_losses:Confidence"}],
    "objectives.plugins[].use": "my_losses:Confidence",
    "objectives.plugins[].options": {"margin": 0.1},
    "objectives.plugins[].weight": 0.1,
    "objectives.plugins[].name": "confidence",
    "monitoring.trackers": ["tensorboard", {"use": "wandb", "options": {"mode": "online"}}],
    "monitoring.trackers[].use": "mlflow",
    "monitoring.trackers[].options": {"project": "rwkx"},
    "profile": {"steps": [10, 13]},
    "profile.steps": [10, 13],
    "evaluation.suites": [{"name": "zero-shot", "tasks": "/data/tasks"}],
    "evaluation.suites[].name": "zero-shot",
    "evaluation.suites[].every_steps": 5_000,
    "evaluation.suites[].tasks": "/data/tasks",
    "evaluation.suites[].options": {"num_fewshot": 5},
    "evaluation.best_by": "zero-shot/hellaswag/acc_norm",
    "checkpoint.every_minutes": 30.0,
    "checkpoint.auto_range": [5, 60],
    "checkpoint.background": True,
    "checkpoint.replica": "/scratch/replica",
    "checkpoint.tiers": {"memory": {"every_steps": 50}},
    "checkpoint.tiers.memory": {"every_steps": 50},
    "checkpoint.tiers.memory.every_steps": 50,
    "checkpoint.tiers.local": {"path": "/nvme/checkpoints"},
    "checkpoint.tiers.local.path": "/nvme/checkpoints",
    "checkpoint.tiers.local.every_steps": 200,
    "checkpoint.tiers.archive": {"path": "s3://bucket/runs"},
    "checkpoint.tiers.archive.path": "s3://bucket/runs",
    "checkpoint.tiers.archive.every_steps": 10_000,
    "checkpoint.tiers.archive.keep": 2,
    "cpt": {"replay": {"source": "/data/old-shards"}},
    "cpt.replay": {"fraction": 0.1, "source": "/data/old-shards"},
    "cpt.replay.source": "/data/old-shards",
    "cpt.replay.fraction": 0.1,
    "cpt.replay.self_document_tokens": 2_048,
    "cpt.forgetting.data": ["/data/old-shards", "/data/old-code"],
    "cpt.forgetting.every_steps": 200,
    "cpt.forgetting.stop_above": 0.5,
    "failures.per_device_hour": 2e-5,
    "failures.stall_seconds": 2.0,
    "failures.write_bytes_per_second": 2e10,
    "failures.restart_seconds": 300.0,
    "launch.environment": {"NCCL_DEBUG": "INFO"},
    "stage_b.run": "experiments/first",
    "stage_b.pipeline": 2,
}
# A list's entries cannot be set alone.
_ENTRY = "[]"

_HEAD = """\
# Configuration

Generated by `cdrmix config --reference > docs/configuration.md` from the descriptions in
`cdrmix/config`. `cdrmix config --explain KEY` prints the same for one key or section, and
`cdrmix config --config FILE` a configuration with every default and derived value.

A file of `model_configs` holds these keys as YAML. `--set PATH=VALUE` overrides one of them; lists
and sections are YAML, too: `--set 'data.mixture={temperature: 2}'`. An entry of a list, `[]` in a
path below, cannot be set alone: set the whole list.

* **default**: a `required` key has none; inside a section that is null by default, it is required
  once the section is there. A `derived` one follows from other keys.
* **when resumed**: a run that is resumed goes on with its own configuration; `--config` may be left
  out, and values of a file that differ are not taken. `--set` changes a key: with `may change` the
  run goes on with the new value and tells the change. With `refused` it ends with exit code 2 and
  the difference, before anything is loaded into the model.
"""


@dataclass(frozen=True)
class KeyEntry:
    """One key of the reference, all in words for people."""

    path: str  # dotted; `[]` stands for any entry of a list
    type: str
    unit: str  # empty where the value has none
    default: str
    allowed: str
    resumed: str  # whether it may differ from a checkpoint's
    example: str
    meaning: str

    def as_text(self) -> str:
        """Returns the entry in a paragraph."""
        rows = {
            "type": self.type,
            "unit": self.unit or "none",
            "default": self.default,
            "allowed": self.allowed,
            "when resumed": self.resumed,
            "example": self._setting(),
        }
        lines = [f"  {name + ':':<14}{value}" for name, value in rows.items()]
        return "\n".join([self.path, f"  {self.meaning}", *lines])

    def as_row(self) -> str:
        """Returns the entry as a row of a Markdown table."""
        cells = (
            f"`{self.path}`",
            *(self.type, self.unit, f"`{self.default}`", self.allowed, self.resumed),
            *(f"`{self.example}`", self.meaning),
        )
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    def _setting(self) -> str:
        if _ENTRY in self.path:
            return f"{self.path.rpartition('.')[2]}: {self.example}, in an entry of the list"
        setting = f"{self.path}={self.example}"
        return f"--set '{setting}'" if re.search(r"[^\w.=/+-]", setting) else f"--set {setting}"


@dataclass(frozen=True)
class Group:
    """A section of the reference; the first one, without a path, has the keys outside of any."""

    path: str
    meaning: str
    entries: tuple[KeyEntry, ...]


def groups() -> list[Group]:
    """Returns all sections in the order of the schema, those inside of others after them."""
    example = load_config(shipped("model_configs") / "cdrmix-reason-tiny.yaml")
    return list(_groups(Config, "", example.model_dump(mode="json")))


def _groups(section: type[Section], path: str, example: Any) -> Iterator[Group]:
    entries, inner = [], []
    for key, field in section.model_fields.items():
        dotted = f"{path}.{key}" if path else key
        within = example.get(key) if isinstance(example, dict) else None
        below, item = section_of(field.annotation), section_of(item_of(field.annotation))
        is_section = below is not None and item is None
        # Sections that are always there have nothing to say but their keys.
        if not is_section or NoneType in alternatives(field.annotation):
            entries.append(_entry(section, dotted, key, field, within))
        if below is not None and is_section:
            inner.append(_groups(below, dotted, within))
        elif item is not None:
            inner.append(_groups(item, f"{dotted}{_ENTRY}", None))
    yield Group(path, " ".join((section.__doc__ or "").split()), tuple(entries))
    for each in inner:
        yield from each


def _entry(section: type[Section], path: str, key: str, field: FieldInfo, example: Any) -> KeyEntry:
    default = field.get_default(call_default_factory=True, validated_data={})
    if field.is_required():
        is_derived = section is Config.model_fields["model"].annotation
        shown = "derived" if is_derived and key in DERIVED_MODEL_FIELDS else "required"
    else:
        shown = _as_yaml(_plain(default))
    if path in _EXAMPLES:
        example = _EXAMPLES[path]
    elif example is None:
        example = _plain(default)
    meaning = field.description or ""
    kind, limits = _kind(field)
    return KeyEntry(
        path,
        kind,
        _unit(meaning, section.__doc__ or "", kind),
        shown,
        limits,
        when_resumed(path.replace(_ENTRY, "")),
        _as_yaml(example),
        meaning,
    )


def _kind(field: FieldInfo) -> tuple[str, str]:
    """Returns type and allowed values of a field."""
    kinds = [kind for kind in alternatives(field.annotation) if kind is not NoneType]
    limits = bounds(field)
    words = [str(kind) for kind in kinds if isinstance(kind, str | int)]
    item = item_of(field.annotation)
    if names := [each for each in field.metadata if isinstance(each, NameOrPlugin)]:
        kind, limits = "choice", names[0].allowed.removeprefix("one of ")
    elif len(words) == len(kinds):
        kind, limits = "choice", ", ".join(words)
    elif item is not None:
        inner = alternatives(item)
        choices = [str(each) for each in inner if isinstance(each, str)]
        kind = (
            "list of sections" if section_of(item) else f"list of {_TYPES.get(inner[0], 'text')}s"
        )
        limits = f"one or more of {', '.join(choices)}" if choices else "one or more"
    elif section_of(field.annotation) is not None:
        kind, limits = "section", "its keys, below"
    elif get_origin(kinds[0]) is dict:
        values = alternatives(get_args(kinds[0])[1])
        kind = (
            f"section of names with {' or '.join(_TYPES.get(each, 'any value') for each in values)}"
        )
    else:
        kind = _TYPES[kinds[0]]
        limits = " or ".join([*filter(None, [limits]), *words])
    limits = limits or "any"
    if NoneType in alternatives(field.annotation):
        limits += ", or null"
    return kind, limits


def _unit(meaning: str, of_section: str, kind: str) -> str:
    if "number" not in kind:
        return ""
    found = _BRACKETS.search(meaning)
    if found:
        return found[1]
    first = _FIRST_WORD.match(meaning)
    if first:
        return first[0].lower().removeprefix("length in ")
    shared = _BRACKETS.search(of_section)
    return shared[1] if shared else ""


def _plain(value: Any) -> Any:
    if isinstance(value, Section):
        return value.model_dump(mode="json", exclude_defaults=True)
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


def _as_yaml(value: Any) -> str:
    # JSON is YAML, but text of a value of --set needs no quotes.
    return value if isinstance(value, str) and value else json.dumps(value)


def reference_markdown() -> str:
    """Returns docs/configuration.md."""
    lines = [_HEAD]
    for group in groups():
        title = f"`{group.path}`" if group.path else "Outside of sections"
        lines += [f"## {title}", "", group.meaning, ""]
        if group.entries:
            names = ("key", "type", "unit", "default", "allowed", "when resumed", "example")
            lines += ["| " + " | ".join((*names, "meaning")) + " |", "|---" * 8 + "|"]
            lines += [entry.as_row() for entry in group.entries]
            lines.append("")
    return "\n".join(lines)


def explain(key: str) -> str:
    """Returns the reference of a key, or of a section and all keys inside. Raises ConfigError for
    an unknown one, naming the keys that it may mean."""
    # An entry's index is any entry: data.mixture.phases.0.weights.
    wanted = re.sub(r"\.\d+(?=\.|$)|\[\d*\]", "", key.strip().strip("."))
    blocks = []
    for group in groups():
        path = group.path.replace(_ENTRY, "")
        is_inside = path == wanted or path.startswith(f"{wanted}.")
        if is_inside and wanted:
            blocks.append(f"{group.path}: {group.meaning}")
        for entry in group.entries:
            if wanted and (is_inside or entry.path.replace(_ENTRY, "") == wanted):
                blocks.append(entry.as_text())
    if blocks:
        return "\n\n".join(blocks)
    near = nearest_paths(wanted)
    advice = (
        f"Did you mean {' or '.join(near)}?" if near else f"Try {', '.join(Config.model_fields)}"
    )
    raise ConfigError(f"--explain {key}: no such key. {advice}")
