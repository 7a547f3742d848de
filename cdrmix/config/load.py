"""Loads a Config from YAML and overrides; writes it as YAML, hashes it, compares two."""

from __future__ import annotations

import datetime
import difflib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, get_origin

from pydantic.fields import FieldInfo

from cdrmix.config.cpt import SELF
from cdrmix.config.model import DERIVED_MODEL_FIELDS
from cdrmix.config.plugin_folder import with_plugin_folder, with_used_plugins
from cdrmix.config.problems import (
    Keys,
    alternatives,
    field_at,
    item_of,
    section_of,
    shown,
    validate,
)
from cdrmix.config.redaction import redacted
from cdrmix.config.resources import older_names
from cdrmix.config.schema import Config, ParallelConfig
from cdrmix.config.section import Section
from cdrmix.config.yaml_text import dump_yaml, parse_scalar, parse_yaml
from cdrmix.errors import ConfigError
from cdrmix.log import get_logger

logger = get_logger(__name__)

ABSENT = "(absent)"
# Name of the sample corpus in data.path.
SAMPLE = "sample"
_PATHS = (
    *(("model", "path"), ("data", "path"), ("training", "start_from")),
    *(("stage_b", "run"), ("checkpoint", "replica")),
)
# Keys that the plan chooses where they are not given.
LAYOUT = (
    *(("parallel", axis) for axis in ParallelConfig.model_fields),
    *(("training", key) for key in (
        "micro_batch_size", "activation_checkpointing", "sequence_checkpoint_tokens"
    )),
)  # fmt: skip


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Loads a YAML file and applies overrides. These are `a.b=value` each, value a YAML scalar or,
    for a list or section, YAML in [] or {}; later ones win. Sections that are null or absent in the
    file are created; `model.moe=null` removes one. Raises ConfigError with every problem of file
    and overrides, one to a line."""
    path = Path(path)
    values = parse_yaml(read_config_text(path), place=str(path))
    if isinstance(values, dict) and "sources" in values and "model" not in values:
        raise ConfigError(
            f"{path}: is a data recipe, not the configuration of a model. Build it with `cdrmix "
            f"data build --config {path} --out DIR`, and give --set data.path=DIR. Shipped "
            f"configurations are in {shipped('model_configs')}"
        )
    return resolve(with_plugin_folder(values, path), overrides, place=str(path), trusted=True)


def resolve(
    values: Any, overrides: Sequence[str] = (), *, place: str, trusted: bool = False
) -> Config:
    """Applies overrides to the plain values of `place`, a file or other origin. Where these are
    `trusted`, the modules of their folder of plug-ins become importable; a checkpoint may be of
    anyone. Raises ConfigError as `load_config` does."""
    origins: dict[Keys, str] = {}
    for override in overrides:
        values = _overridden(values, override, origins)
    config, problems = validate(with_used_plugins(values) if trusted else values, Config)
    if config is not None:
        for older, name in older_names(values).items():
            _tell_older_name(older, name)
        return config
    lines = []
    for problem in problems:
        keys = problem.path
        dotted = ".".join(keys)
        # An override is to blame if it set the value or a section around it; the longest path says
        # most: `model.moe.top_k` before `model.moe`. Otherwise the file is, beside the overrides
        # that the message names.
        if above := [each for each in origins if keys[: len(each)] == each]:
            blamed = origins[max(above, key=len)]
        else:
            inside = [each for each in origins if each[: len(keys)] == keys]
            below = [origins[each] for each in inside if each[-1] in problem.text]
            blamed = f"{place} with {' '.join(below)}" if below else place
        has_path = blamed == f"--set {dotted}" or not keys
        lines.append(
            f"{blamed}: {problem.text}" if has_path else f"{blamed}: {dotted}: {problem.text}"
        )
    raise ConfigError("\n".join(lines))


@cache  # once a process, which may resolve several configurations
def _tell_older_name(older: str, name: str) -> None:
    logger.info("%s is an older name of %s, which has its value", older, name)


def read_config_text(path: Path, *, folder: str = "model_configs") -> str:
    """Reads the text of a file. Raises ConfigError if it cannot be read, listing the shipped files
    of `folder` if it does not exist."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        files = _shipped_files(folder)
        near = difflib.get_close_matches(path.stem, files, n=1)
        advice = f"Did you mean {files[near[0]]}? " if near else ""
        raise ConfigError(f"{path}: no such file. {advice}{shipped_text(folder)}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text ({error.reason} at {error.start})") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def shipped_text(folder: str = "model_configs") -> str:
    """Lists the shipped YAML files of `folder` in a line, for messages."""
    return f"Shipped in {shipped(folder)}: {', '.join(_shipped_files(folder))}"


def _shipped_files(folder: str) -> dict[str, Path]:
    return {file.stem: file for file in sorted(shipped(folder).glob("*.yaml"))}


def shipped(folder: str) -> Path:
    """Finds a folder of shipped files, such as `model_configs` or `ds_configs`. It is inside the
    package in a wheel, and next to it in a checkout."""
    package = Path(__file__).parents[1]
    for place in (package / folder, package.parent / folder):
        if place.is_dir():
            return place
    raise FileNotFoundError(f"{folder} is missing from the installation at {package}")


def _overridden(values: Any, override: str, origins: dict[Keys, str]) -> Any:
    """Returns `values` with one override applied, and records its keys in `origins`."""
    dotted, separator, text = override.partition("=")
    keys = tuple(key.strip() for key in dotted.split("."))
    if not separator or not all(keys):
        raise ConfigError(
            f"--set {override}: not an override. Give PATH=VALUE, such as training.seed=7"
        )
    place = f"--set {'.'.join(keys)}"
    # Sections on the way are copied: YAML anchors make one mapping of several sections.
    values = dict(values) if isinstance(values, dict) else {}
    section = values
    created = None  # the outermost section that the file lacks
    for depth, key in enumerate(keys[:-1], start=1):
        inner = section.get(key)
        field = field_at(keys[:depth])
        if field is not None and item_of(field.annotation) is not None:
            where = ".".join(keys[:depth])
            raise ConfigError(f"{place}: {where} is a list. Set the whole: --set '{where}=[...]'")
        if inner is not None and not isinstance(inner, dict):
            where = ".".join(keys[:depth])
            raise ConfigError(f"{place}: {where} = {shown(inner)} is a value, not a section")
        created = created or (keys[:depth] if inner is None else None)
        section[key] = dict(inner or {})
        section = section[key]
    section[keys[-1]] = _override_value(text, field_at(keys), place)
    # What a section that the override creates still lacks is reported at the override, too.
    origins[created or keys] = place
    return values


def _override_value(text: str, field: FieldInfo | None, place: str) -> Any:
    """Returns the value that the text of an override means to its field; None for an unknown key.
    ConfigError for a list or section that is not YAML."""
    kinds = alternatives(field.annotation) if field is not None else ()
    if text.lstrip()[:1] in ("[", "{") and str not in kinds:
        # Not of keys that are unknown, such as names of variables: their texts stay as they are.
        is_nested = any(section_of(kind) or get_origin(kind) in (dict, tuple) for kind in kinds)
        if is_nested:
            value = parse_yaml(text, place=place)
            _check_colons(value, place)
            return value
    value = parse_scalar(text)
    if str in kinds and not isinstance(value, str) and not (value is None and NoneType in kinds):
        return text  # `=8` is the text 8 for a field that takes text
    return value


def _check_colons(value: Any, place: str) -> None:
    """Refuses `{a:1}`, which YAML reads as a key 'a:1' without a value."""
    if isinstance(value, list):
        for entry in value:
            _check_colons(entry, place)
    for key, inner in value.items() if isinstance(value, dict) else ():
        name, colon, rest = str(key).partition(":")
        if colon and inner is None:
            raise ConfigError(
                f"{place}: '{key}' is a key without a value. Put a blank behind the colon: "
                f"{{{name}: {rest}}}"
            )
        _check_colons(inner, place)


def snapshot_yaml(config: Config) -> str:
    """Writes the values of `kept_values` as YAML."""
    return dump_yaml(kept_values(config))


def kept_values(config: Config, *, mode: str = "python") -> dict[str, Any]:
    """Returns the values with which a run goes on, plain or for JSON as `mode` says ("json").

    Paths are absolute, and secrets are left out: they are to be set anew. So are the keys of the
    layout that were not given: the plan chooses them anew, by the devices that the start finds, and
    would take a default that stands there for the user's wish.
    """
    values = with_absolute_paths(redacted(config.model_dump(mode=mode)))
    return with_layout(values, given_layout(config))


def given_layout(config: Config) -> dict[tuple[str, str], Any]:
    """Returns the keys of the layout that were given, with their values."""
    return {
        (section, key): getattr(getattr(config, section), key)
        for section, key in LAYOUT
        if key in getattr(config, section).model_fields_set
    }


def with_layout(values: dict[str, Any], layout: Mapping[tuple[str, str], Any]) -> dict[str, Any]:
    """Returns the values of a configuration with these keys of the layout, and no others."""
    made = dict(values)
    for section in {section for section, _ in LAYOUT}:
        others = {k: v for k, v in made.get(section, {}).items() if (section, k) not in LAYOUT}
        given = {key: value for (place, key), value in layout.items() if place == section}
        made[section] = others | given
    return made


def with_absolute_paths(values: dict[str, Any]) -> dict[str, Any]:
    """Makes the paths of a dumped configuration absolute that a run reads or writes again when it
    is resumed, from the present folder. `sample` and URLs stay as they are."""
    made = dict(values)
    for section, key in _PATHS:
        path = values[section].get(key) if isinstance(values.get(section), dict) else None
        if isinstance(path, str) and path != SAMPLE and "://" not in path:
            # not resolved: a link may be what leads to the same folder on other hosts
            made[section] = {**values[section], key: os.path.abspath(path)}
    if isinstance(cpt := values.get("cpt"), dict):
        made["cpt"] = _with_absolute_old_data(cpt)
    checkpoint = made.get("checkpoint")
    if isinstance(checkpoint, dict) and isinstance(tiers := checkpoint.get("tiers"), dict):
        made["checkpoint"] = {**checkpoint, "tiers": _with_absolute_tiers(tiers)}
    return made


def _with_absolute_tiers(tiers: dict[str, Any]) -> dict[str, Any]:
    made = dict(tiers)
    for tier, key in (("memory", "folder"), ("local", "path"), ("archive", "path")):
        path = tiers[tier].get(key) if isinstance(tiers.get(tier), dict) else None
        if isinstance(path, str) and "://" not in path:
            made[tier] = {**tiers[tier], key: os.path.abspath(path)}
    return made


def _with_absolute_old_data(cpt: dict[str, Any]) -> dict[str, Any]:
    made = dict(cpt)
    replay, forgetting = cpt.get("replay"), cpt.get("forgetting")
    if isinstance(replay, dict) and isinstance(replay.get("source"), str):
        source = replay["source"]
        made["replay"] = {**replay, "source": SELF if source == SELF else os.path.abspath(source)}
    if isinstance(forgetting, dict) and isinstance(forgetting.get("data"), list | tuple):
        folders = [os.path.abspath(folder) for folder in forgetting["data"]]
        made["forgetting"] = {**forgetting, "data": type(forgetting["data"])(folders)}
    return made


def config_hash(config: Section) -> str:
    """Returns the first 12 hex digits of the sha256 of the config as canonical JSON."""
    # sorted and compact, so that the hash depends on values alone
    text = json.dumps(config.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def new_run_dir(config: Section) -> Path:
    """Names the default run directory, experiments/<UTC timestamp>-<hash>, without creating it."""
    # UTC: hosts in several time zones sort their runs alike.
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    return Path("experiments") / f"{now}-{config_hash(config)}"


def changed_keys(
    old: Config | dict[str, Any], new: Config | dict[str, Any]
) -> list[tuple[str, Any, Any]]:
    """Lists the values that differ, as (dotted path, old, new), sorted by path. ABSENT stands for a
    missing key. A section that came, went or became null is one entry. Optional fields that a whole
    old configuration lacks have their defaults: they are no change."""
    sides = []
    for side in (old, new):
        config = validate(side, Config)[0] if isinstance(side, dict) else side
        # JSON, because a checkpoint's copy is read from JSON, where a tuple is a list. What is no
        # config is a part of one, or has fields that no longer exist.
        sides.append(side if config is None else config.model_dump(mode="json"))
    return list(_differences(sides[0], sides[1], ()))


def _differences(old: Any, new: Any, path: Keys) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new}):
            yield from _differences(old.get(key, ABSENT), new.get(key, ABSENT), (*path, key))
    elif old != new:
        yield ".".join(path), old, new


def schema_json() -> str:
    """Returns the JSON schema of a config file, for completion and checks in editors."""
    schema: dict[str, Any] = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    schema |= Config.model_json_schema()
    # pydantic requires the derived fields too, which a file may leave out, and of a Hugging Face
    # model the folder tells all sizes
    model = schema["$defs"]["ModelConfig"]
    sizes = [key for key in model.pop("required") if key not in DERIVED_MODEL_FIELDS]
    is_hf = {"properties": {"kind": {"const": "hf"}}, "required": ["kind"]}
    model |= {"if": is_hf, "then": {"required": ["path"]}, "else": {"required": sizes}}
    return json.dumps(schema, indent=2) + "\n"
