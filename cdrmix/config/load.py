"""YAML file and overrides -> Config; Config -> resolved YAML, hash and differences."""

from __future__ import annotations

import datetime
import difflib
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cdrmix.config.model import Section
from cdrmix.config.problems import (
    Keys,
    Problem,
    alternatives,
    field_at,
    is_nullable,
    shown,
    validate,
)
from cdrmix.config.redaction import redacted
from cdrmix.config.schema import Config
from cdrmix.config.yaml_text import dump_yaml, parse_scalar, parse_yaml
from cdrmix.errors import ConfigError

ABSENT = "(absent)"


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Config of a YAML file, with overrides applied.

    Args:
        path: YAML file.
        overrides: `a.b=value` each, value a YAML scalar; later ones win. Sections that are null or
            absent in the file are made; `model.moe=null` removes one.

    Raises:
        ConfigError: naming every problem of the file and the overrides, one to a line.
    """
    path = Path(path)
    values = parse_yaml(read_config_text(path), place=str(path))
    origins: dict[Keys, str] = {}
    for override in overrides:
        values = _overridden(values, override, origins)
    config, problems = validate(values, Config)
    if config is None:
        raise ConfigError("\n".join(_placed(problem, path, origins) for problem in problems))
    return config


def read_config_text(path: Path, *, folder: str = "model_configs") -> str:
    """Text of a file.

    Args:
        folder: shipped folder whose files are named when this one does not exist.
    Raises:
        ConfigError: if it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file. {_shipped_configs(path, folder)}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text ({error.reason} at {error.start})") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def _shipped_configs(wanted: Path, folder: str) -> str:
    files = {file.stem: file for file in sorted(shipped(folder).glob("*.yaml"))}
    near = difflib.get_close_matches(wanted.stem, files, n=1)
    advice = f"Did you mean {files[near[0]]}? " if near else ""
    return f"{advice}Shipped in {shipped(folder)}: {', '.join(files)}"


def shipped(folder: str) -> Path:
    """Folder of files that ship with the package, such as `model_configs` or `ds_configs`.

    In a wheel it lies inside the package, in a checkout beside it.
    """
    package = Path(__file__).parents[1]
    for place in (package / folder, package.parent / folder):
        if place.is_dir():
            return place
    raise FileNotFoundError(f"{folder} is missing from the installation at {package}")


def _overridden(values: Any, override: str, origins: dict[Keys, str]) -> Any:
    """`values` with one override in it; `origins` learns what came from it."""
    dotted, separator, text = override.partition("=")
    keys = tuple(key.strip() for key in dotted.split("."))
    if not separator or not all(keys):
        raise ConfigError(
            f"--set {override}: not an override. Give PATH=VALUE, such as training.seed=7"
        )
    place = f"--set {'.'.join(keys)}"
    values = dict(values) if isinstance(values, dict) else {}
    section = values
    made = None
    for depth, key in enumerate(keys[:-1], start=1):
        inner = section.get(key)
        if inner is not None and not isinstance(inner, dict):
            where = ".".join(keys[:depth])
            raise ConfigError(f"{place}: {where} = {shown(inner)} is a value, not a section")
        made = made or (keys[:depth] if inner is None else None)
        section[key] = dict(inner or {})
        section = section[key]
    section[keys[-1]] = _override_value(keys, text)
    origins[made or keys] = place
    return values


def _override_value(keys: Keys, text: str) -> Any:
    """Scalar of an override; for a field that takes text, `=8` means the text 8."""
    value = parse_scalar(text)
    field = field_at(keys)
    if field is None or str not in alternatives(field.annotation) or isinstance(value, str):
        return value
    return None if value is None and is_nullable(field) else text


def _placed(problem: Problem, file: Path, origins: dict[Keys, str]) -> str:
    """One line of a report: the file or override that a problem comes from, path, text."""
    path = problem.path
    dotted = ".".join(problem.path)
    above = [keys for keys in origins if path[: len(keys)] == keys]
    below = [
        origin
        for keys, origin in origins.items()
        if keys[: len(path)] == path and keys[-1] in problem.text
    ]
    beside = f" with {' '.join(below)}" if below else ""
    place = origins[max(above, key=len)] if above else f"{file}{beside}"
    told = place == f"--set {dotted}"
    return f"{place}: {problem.text}" if told or not path else f"{place}: {dotted}: {problem.text}"


def resolved_yaml(config: Section) -> str:
    """The whole config as YAML, defaults and derived values in it; loads to an equal config."""
    return dump_yaml(config.model_dump())


def snapshot_yaml(config: Section) -> str:
    """The same for files that are shown and handed on: without secrets, so that they are to be
    given again where a run starts from it."""
    return dump_yaml(redacted(config.model_dump()))


def config_hash(config: Section) -> str:
    """First 12 hex digits of the sha256 of the config as canonical JSON."""
    text = json.dumps(config.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def new_run_dir(config: Section) -> Path:
    """experiments/<UTC timestamp>-<hash>, the run directory where none is given; not made here."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    return Path("experiments") / f"{now}-{config_hash(config)}"


def changed_keys(
    old: Config | dict[str, Any], new: Config | dict[str, Any]
) -> list[tuple[str, Any, Any]]:
    """Values that differ, as (dotted path, old, new), sorted by path; ABSENT stands for no key.

    A section that came, went or became null is one entry. In a whole configuration, optional fields
    that a version did not have yet stand at their defaults: they change nothing.
    """
    before, after = (_as_json(side) for side in (old, new))
    return list(_differences(before, after, ()))


def _as_json(side: Config | dict[str, Any]) -> dict[str, Any]:
    config = validate(side, Config)[0] if isinstance(side, dict) else side
    if config is None:  # a part of a configuration, or one with fields that are no more
        assert isinstance(side, dict), "a Config is valid"
        return side
    # As JSON, because a checkpoint is read from it: there a tuple is a list.
    return config.model_dump(mode="json")


def _differences(old: Any, new: Any, path: Keys) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new}):
            yield from _differences(old.get(key, ABSENT), new.get(key, ABSENT), (*path, key))
    elif old != new:
        yield ".".join(path), old, new


def schema_json() -> str:
    """JSON schema of a config file, as editors read it to complete and to check."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return json.dumps(schema | Config.model_json_schema(), indent=2) + "\n"
