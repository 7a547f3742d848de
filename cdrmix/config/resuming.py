"""Configuration of a run that is started or resumed: the run's own, with changes that are allowed
then (`resuming_rules.py`)."""

from __future__ import annotations

import contextlib
import errno
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from cdrmix.config.hugging_face import BASE_FOLDER, CONFIG_FILE
from cdrmix.config.load import (
    ABSENT,
    LAYOUT,
    changed_keys,
    given_layout,
    load_config,
    resolve,
    shipped_text,
    with_absolute_paths,
    with_layout,
)
from cdrmix.config.plugin_folder import PLUGINS
from cdrmix.config.redaction import REDACTED, redacted
from cdrmix.config.resuming_rules import REFUSED, ResumedChange, rule_of
from cdrmix.config.schema import (
    Config,
    ParallelConfig,
    TrainingConfig,
    with_named_recomputation,
)
from cdrmix.config.section import Section
from cdrmix.config.yaml_text import parse_yaml
from cdrmix.errors import ConfigError, InfrastructureError
from cdrmix.log import get_logger

logger = get_logger(__name__)

SNAPSHOT = "config_snapshot.yaml"
_STATE = "state.json"  # of a checkpoint
_MANIFEST = "manifest.json"  # likewise
_MOST_KEYS = 6  # of a line of the log
_MOST_LETTERS = 60  # of a value in it

Change: TypeAlias = tuple[str, Any, Any]  # dotted path, old and new value


def resumed_run(resume: str) -> Path | None:
    """Run directory that --resume PATH goes on in, unless --run-dir names another.

    None for auto, never, and checkpoints outside of a run directory, as in checkpoint.replica or an
    archive.
    """
    if resume in ("never", "auto") or "://" in resume:
        return None
    source = Path(resume)
    if (source / SNAPSHOT).exists() or (source / "checkpoints").is_dir():
        return source
    if source.name == "checkpoints":
        return source.parent
    if source.parent.name == "checkpoints":
        return source.parent.parent
    has_checkpoint = (source / _MANIFEST).exists() or _newest_state(source) is not None
    return None if has_checkpoint else source


def config_of_start(
    config: Path | None,
    overrides: Sequence[str],
    *,
    run_dir: Path | None,
    resume: str,
    check: Callable[[Config], object] = lambda config: None,
    is_quiet: bool = False,
) -> Config:
    """Returns the configuration of a start: of a new run, or of one that goes on.

    A run that is resumed goes on with its own configuration, and only overrides change it; values
    of a file that differ are left, with a warning. The layout alone is taken from a file: it goes
    with the machines of a start.

    Args:
        config: --config; may be left out where a run is resumed.
        overrides: --set, `a.b=value` each.
        run_dir: --run-dir.
        resume: --resume: never, auto, or a run directory or checkpoint.
        check: raises an error of the configuration of a run that goes on, before a word is said
            of what has changed: beside an error, it would read as if the change were taken.
        is_quiet: log nothing, as on all ranks but the first.
    Raises:
        ConfigError: if file or overrides are wrong, none is given for a new run, a key changes that
            cannot, a password is missing that the run directory does not hold, or the run directory
            cannot be read.
        InfrastructureError: if its file system does not answer for now.
    """
    if resume == "auto" and run_dir is None:
        raise ConfigError("--resume auto: needs --run-dir, the directory to go on in")
    with _readable(run_dir if resume == "auto" else resume):
        own = _own(run_dir, resume)
    if own is None:
        if config is None:
            raise _no_file(run_dir, resume)
        return _of_new_run(config, overrides, is_quiet=is_quiet)
    given = load_config(config, overrides) if config is not None else None
    kept = _without_code_within(own, overrides)
    values = _without_defaults_of_layout(kept)
    if given is not None:
        asks_for_stage = any(each.partition("=")[0] == "training.stage" for each in overrides)
        kept = _completed(kept, given, takes_stage_b=asks_for_stage)
        # The layout goes with the machines of this start, not with the run.
        values = with_layout(kept, given_layout(given))
    before = resolve(kept, place=str(own.place), trusted=True)
    try:
        resolved = resolve(values, overrides, place=str(own.place), trusted=True)
    except ConfigError:
        _refuse_model(before, overrides, own)
        raise
    _refuse_redacted(resolved, own)
    changes = _allowed_changes(before, resolved, own)
    check(resolved)
    if is_quiet:
        return resolved
    _tell(changes, resolved, overrides)
    if given is not None:
        _tell_not_taken(given, resolved, config=config, own=own)
    return resolved


def _without_code_within(own: _Own, overrides: Sequence[str]) -> dict[str, Any]:
    """Returns a run's values without a folder of plug-ins that lies in the run itself; refuses one
    if no override names another: run directories are handed on, and must not run code."""
    folder = own.values.get(PLUGINS)
    within = own.place.parent.resolve()
    if not isinstance(folder, str) or not Path(folder).expanduser().resolve().is_relative_to(
        within
    ):
        return own.values
    if not any(each.partition("=")[0] == PLUGINS for each in overrides):
        raise ConfigError(
            f"{own.place}: plugins = {folder} lies in the run itself, which may be of anyone. Look "
            "at its code, copy the folder to another place, and give --set plugins=DIR"
        )
    return {**own.values, PLUGINS: None}


def _completed(kept: dict[str, Any], given: Config, *, takes_stage_b: bool) -> dict[str, Any]:
    """Returns a run's values with what they lack taken from a file: the secrets, and Stage B where
    it begins on the Stage A of a run without it."""
    values = given.model_dump()
    made: dict[str, Any] = _filled(kept, values)
    if takes_stage_b and made.get("stage_b") is None and given.stage_b is not None:
        made = {**made, "stage_b": values["stage_b"]}
    return made


def _without_defaults_of_layout(values: dict[str, Any]) -> dict[str, Any]:
    """Leaves out the layout's defaults from a snapshot of an earlier version, which has them all:
    they were not given, or say what the plan would choose."""
    if not all(key in (values.get(section) or {}) for section, key in LAYOUT):
        return values
    sections: dict[str, type[Section]] = {"parallel": ParallelConfig, "training": TrainingConfig}
    values = values | {"training": with_named_recomputation(values["training"])}
    layout = {
        (section, key): values[section][key]
        for section, key in LAYOUT
        if values[section][key] != sections[section].model_fields[key].default
    }
    return with_layout(values, layout)


def _no_file(run_dir: Path | None, resume: str) -> ConfigError:
    if resume not in ("never", "auto"):
        return ConfigError(
            f"--resume {resume}: no checkpoint or run directory there, whose configuration would "
            "be taken. Give the path of one; a new run takes --config FILE"
        )
    why = ""
    if resume == "auto":
        why = f"; --resume auto: {run_dir} holds no run yet, whose own would be taken"
    own = ". A run to go on with has its own: give --run-dir DIR --resume auto"
    advice = own if resume == "never" else ""
    return ConfigError(f"--config FILE: missing{why}. {shipped_text()}{advice}")


@contextlib.contextmanager
def _readable(place: Path | str | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        is_mistake = error.errno in (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)
        kind = ConfigError if is_mistake else InfrastructureError
        raise kind(f"{place}: cannot be read ({error.strerror})") from error


class _Own(NamedTuple):
    """A run's own configuration."""

    values: dict[str, Any]
    place: Path  # file that holds it
    stage: str | None  # of its newest checkpoint, a or b; None without one


def _own(run_dir: Path | None, resume: str) -> _Own | None:
    """Reads the configuration of the run to go on with; None if there is none."""
    if resume == "never" or "://" in resume:
        return None
    run = run_dir if resume == "auto" else resumed_run(resume)
    place = run_dir if resume == "auto" else Path(resume)
    assert place is not None, "checked by the caller"
    newest = _newest_state(place)
    stage = None if newest is None else str(newest.values.get("stage", "a"))
    if run is not None and (run / SNAPSHOT).is_file():
        values = parse_yaml(_text(run / SNAPSHOT), place=str(run / SNAPSHOT))
        if isinstance(values, dict):
            return _Own(_with_kept_base(values, run), run / SNAPSHOT, stage)
    # a checkpoint that was copied out of its run, or a run that has lost its snapshot
    if newest is not None and isinstance(newest.values.get("config"), dict):
        return _Own(newest.values["config"], newest.path, stage)
    return None


def _with_kept_base(values: dict[str, Any], run: Path) -> dict[str, Any]:
    """Values that name what a run keeps of its Hugging Face model where the folder has gone.

    That is enough for a model that is trained whole: its checkpoints hold all weights.
    """
    model = values.get("model")
    if not isinstance(model, dict) or model.get("kind") != "hf" or model.get("lora") is not None:
        return values
    kept = run / BASE_FOLDER
    if (Path(str(model.get("path"))) / CONFIG_FILE).exists() or not (kept / CONFIG_FILE).exists():
        return values
    return {**values, "model": {**model, "path": str(kept.absolute())}}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None


class _State(NamedTuple):
    """A checkpoint's state.json."""

    path: Path
    values: dict[str, Any]


def _newest_state(source: Path) -> _State | None:
    """Newest state.json in a run directory or checkpoint; None without one."""
    for inner in (source / "checkpoints", source):
        folders = []
        with contextlib.suppress(OSError):
            folders = [each for each in inner.iterdir() if each.name.isdecimal()]
        for folder in sorted(folders, key=lambda each: int(each.name), reverse=True):
            if (state := _state_in(folder)) is not None:
                return state
    return _state_in(source)


def _state_in(checkpoint: Path) -> _State | None:
    # A damaged one is told by the ranks, which verify each file.
    with contextlib.suppress(OSError, ValueError):
        values = json.loads((checkpoint / _STATE).read_text(encoding="utf-8"))
        if isinstance(values, dict):
            return _State(checkpoint / _STATE, values)
    return None


def _filled(values: Any, given: Any) -> Any:
    """Returns a run's values with those that a snapshot leaves out taken from a file, where the
    file has the same but for the secret."""
    if isinstance(values, dict) and isinstance(given, dict):
        return {key: _filled(value, given.get(key)) for key, value in values.items()}
    if isinstance(values, list) and isinstance(given, list | tuple) and len(values) == len(given):
        return [_filled(value, each) for value, each in zip(values, given, strict=True)]
    if isinstance(values, str) and REDACTED in values and isinstance(given, str):
        # all of a variable is left out, and of a URL user and password
        is_same = values in (REDACTED, redacted({"url": given})["url"])
        return given if is_same else values
    return values


def _refuse_redacted(config: Config, own: _Own) -> None:
    """Raises ConfigError for a URL without its password, and options without their secrets.
    Variables of `launch.environment` come from the environment, where a launcher needs them."""
    if REDACTED in config.data.path:
        raise ConfigError(
            f"data.path = {config.data.path}: {own.place} holds no passwords. Give --config with "
            "the file of the run's first start, or --set data.path=URL"
        )
    classes = {"hooks": config.hooks, "monitoring.trackers": config.monitoring.trackers or ()}
    for key, entries in classes.items():
        for entry in entries:
            if REDACTED in json.dumps(entry.options):
                raise ConfigError(
                    f"{key}, {entry.use}: {own.place} holds no secrets of its options. Give "
                    "--config with the file of the run's first start, or have the class read them "
                    "from the environment"
                )


def _refuse_model(before: Config, overrides: Sequence[str], own: _Own) -> None:
    """Raises ConfigError for an override of a key that cannot change, where its value does not fit
    those that follow from others: these stand in a run's own configuration, too."""
    if own.stage is None:
        return
    for override in overrides:
        path, _, text = override.partition("=")
        key = path.strip()
        if rule_of(key) is not REFUSED or text.lstrip()[:1] in ("{", "["):
            continue
        old: Any = before.model_dump()
        for part in key.split("."):
            if isinstance(old, dict):
                old = old.get(part, ABSENT)
            elif old != ABSENT:  # null, in place of a section
                old = None
        new = parse_yaml(text, place=f"--set {key}")
        if old not in (ABSENT, new):  # a misspelt key is told as such
            raise ConfigError(_refusal(key, old, new, own))


def _refusal(key: str, old: Any, new: Any, own: _Own) -> str:
    rule = rule_of(key)
    only = "" if rule is REFUSED else f" ({rule.text})"
    return (
        f"{key}: {_shown(old)} -> {_shown(new)}: cannot change when the run of {own.place} is "
        f"resumed{only}. Leave it as it is, or begin a new run"
    )


def _allowed_changes(before: Config, resolved: Config, own: _Own) -> list[Change]:
    """Lists the changes by overrides; raises ConfigError for one that cannot be."""
    changes = _changes(before, resolved)
    for key, old, new in changes:
        rule = rule_of(key)
        resumed = ResumedChange(own.stage, old, new, resolved)
        # without a checkpoint the run begins again, and may do so with other values
        if own.stage is not None and (rule is REFUSED or rule.refused(resumed)):
            raise ConfigError(_refusal(key, old, new, own))
    return changes


def _of_new_run(file: Path, overrides: Sequence[str], *, is_quiet: bool) -> Config:
    config = load_config(file, overrides)
    if not is_quiet:
        _tell_of_steps(config, overrides)
    return config


def _tell_of_steps(config: Config, overrides: Sequence[str]) -> None:
    """Warns of a number of steps, as --max-steps, that a run of Stage B alone does not count."""
    is_given = any(each.partition("=")[0] == "training.max_steps" for each in overrides)
    if is_given and config.training.stage == "b":
        logger.warning(
            "warning: --max-steps, or training.max_steps, counts steps of Stage A, which this run "
            "has none of. Those of Stage B are its phases': --set "
            "stage_b.training.policy_steps=N, and memory_steps, adapter_steps, joint_steps"
        )


def _tell(changes: Sequence[Change], config: Config, overrides: Sequence[str]) -> None:
    _tell_of_steps(config, overrides)
    free = [change for change in changes if rule_of(change[0]).kind == "free"]
    altering = [change for change in changes if change not in free]
    if altering:
        logger.warning("warning: changed since the run's last start: %s", told(altering))
    if free:
        logger.info("changed since the run's last start: %s", told(free))


def _tell_not_taken(given: Config, resolved: Config, *, config: Path | None, own: _Own) -> None:
    changes = _changes(given, resolved)
    if not changes:
        return
    rows = [f"{key} = {_shown(new)}, not {_shown(old)}" for key, old, new in changes[:_MOST_KEYS]]
    more = f", and {len(changes) - _MOST_KEYS} more" if len(changes) > _MOST_KEYS else ""
    logger.warning(
        "warning: --config %s: values that differ from the run's own (%s) are not taken: %s%s. "
        "To change them give --set KEY=VALUE",
        *(config, own.place, "; ".join(rows), more),
    )


def _changes(old: Config, new: Config) -> list[Change]:
    return changes_between(old.model_dump(mode="json"), new.model_dump(mode="json"))


def changes_between(old: dict[str, Any], new: dict[str, Any]) -> list[Change]:
    """Lists the values that differ between two dumped configurations of a run, without secrets; a
    path is compared as the folder that it leads to from here."""
    before, after = (with_absolute_paths(redacted(side)) for side in (old, new))
    return changed_keys(before, after)


def told(changes: Sequence[Change]) -> str:
    """Writes changes in one line, a few of many."""
    rows = [f"{key}: {_shown(old)} -> {_shown(new)}" for key, old, new in changes[:_MOST_KEYS]]
    more = f"; and {len(changes) - _MOST_KEYS} more" if len(changes) > _MOST_KEYS else ""
    return "; ".join(rows) + more


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _MOST_LETTERS else f"{text[: _MOST_LETTERS - 3]}..."
