"""Finds what belongs to a trained model: its checkpoint, its configuration and its tokenizer.

A checkpoint may be of an untrusted author. Its configuration describes the model, but no URL in it
is opened, nothing is written to its paths, and its tokenizer is checked by digest.

torch is imported by what reads a checkpoint alone: verbs ask here first if there is one.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from cdrmix.checkpoint.candidates import candidates, step_folders
from cdrmix.checkpoint.files import read_json
from cdrmix.checkpoint.held_out import LOSS, best_checkpoint
from cdrmix.cluster.start_records import recorded_data
from cdrmix.config.load import SAMPLE
from cdrmix.config.schema import Config
from cdrmix.data.shards import read_manifest
from cdrmix.data.tokenizer_base import TOKENIZER_FILE
from cdrmix.errors import ConfigError, DataError, StateError
from cdrmix.log import get_logger
from cdrmix.planning.counts import trained_params

if TYPE_CHECKING:
    from cdrmix.checkpoint.checkpoint_file import CheckpointFile
    from cdrmix.checkpoint.store import FoundCheckpoint

logger = get_logger(__name__)


def checkpoint_place(source: Path, which: str) -> Path:
    """Place in which `newest_checkpoint` finds the checkpoint that a user means.

    Args:
        source: a run directory, or for `last` a checkpoint too.
        which: `last`, the newest that verifies; `best`, that with the lowest held-out loss, or the
            best score by `evaluation.best_by`; or the step of one.
    Raises:
        StateError: if there is none of that step, or none was evaluated.
    """
    if which == "last":
        return source
    _refuse_data_set(source)
    if not source.is_dir():
        raise StateError(f"{source}: there is no such folder. Give a run directory")
    root = source / "checkpoints"
    wanted = "the best checkpoint" if which == "best" else f"step {which}"
    if not root.is_dir():
        _refuse_export(source)
        raise StateError(
            f"{source}: has no checkpoints folder to look for {wanted} in. Give the run directory, "
            "or this checkpoint without --checkpoint"
        )
    if which == "best":
        best = best_checkpoint(root)
        if best is None:
            raise _nothing_evaluated(source)
        return root / str(best.step)
    folder = root / which
    if folder.is_dir():
        return folder
    steps = sorted(int(path.name) for path in root.iterdir() if re.fullmatch(r"\d+", path.name))
    there = f"has checkpoints of steps {', '.join(map(str, steps))}" if steps else "has none"
    raise StateError(f"{source}: has no checkpoint of step {which}; it {there}. Try last")


def _nothing_evaluated(source: Path) -> StateError:
    """Error of a run without a best checkpoint, with the settings that made it so."""
    settings = "evaluation.every_steps, checkpoint.every_steps"
    folders = step_folders(source / "checkpoints")
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        config = read_json(folders[0] / "state.json")["config"] if folders else {}
        if config["checkpoint"].get("keep_best") is False:
            return StateError(
                f"{source}: has no best checkpoint, because checkpoint.keep_best is false. Give "
                "--checkpoint last, or the step of one"
            )
        if (by := config["evaluation"].get("best_by", LOSS)) != LOSS:
            return StateError(
                f"{source}: has no best checkpoint by evaluation.best_by = {by}: none is of a step "
                "with such a row, see train.log. Give --checkpoint last, or the step of one"
            )
        keys = [f"{section}.every_steps" for section in ("evaluation", "checkpoint")]
        values = [config[key.partition(".")[0]]["every_steps"] for key in keys]
        settings = ", ".join(f"{key}: {value}" for key, value in zip(keys, values, strict=True))
    return StateError(
        f"{source}: has no best checkpoint: no evaluation fell on a saved step ({settings}), and "
        "the run has not come to its end, which is evaluated. Give --checkpoint last, or the step "
        "of one"
    )


def check_holds_checkpoint(source: Path) -> None:
    """Raises StateError if nothing in a run directory or checkpoint looks like one; no torch."""
    _refuse_data_set(source)
    if not candidates(source):
        raise _no_checkpoint(source)


def _no_checkpoint(source: Path) -> StateError:
    _refuse_export(source)
    return StateError(
        f"{source}: holds no checkpoint. Give a run directory that has trained to its first "
        "save, or one of its checkpoints/<step> folders"
    )


def newest_checkpoint(source: Path) -> FoundCheckpoint:
    """Finds the newest checkpoint under `source` that verifies, and warns of those passed over.

    Args:
        source: a run directory or a checkpoint.
    Raises:
        StateError: if there is none, or `source` is a data set.
    """
    _refuse_data_set(source)
    from cdrmix.checkpoint.store import find_newest

    newest = find_newest(source)
    if newest is None:
        raise _no_checkpoint(source)
    for name, reason in newest.skipped:
        logger.warning("skipped checkpoint %s: %s", name, reason)
    return newest


def _refuse_data_set(folder: Path) -> None:
    # Its manifest.json has the name of a checkpoint's, and would count as a damaged one.
    try:
        read_manifest(folder)
    except DataError:
        return
    raise StateError(
        f"{folder}: is a data set, not a run. Give a run directory or one of its "
        "checkpoints/<step> folders; `cdrmix data inspect` describes a data set"
    )


def _refuse_export(folder: Path) -> None:
    """Says of a folder without checkpoints what it is, where `cdrmix export` may have made it."""
    if (folder / "config.json").is_file():
        raise StateError(
            f"{folder}: holds no checkpoint: it is a model for transformers, which loads it; "
            "`cdrmix evaluate` takes it too. Give the run directory that it was exported from"
        )
    if (folder / "MANIFEST.json").is_file():
        raise StateError(
            f"{folder}: holds no checkpoint: it is an export for other programs, which load it. "
            "Give the run directory that it was exported from"
        )


def config_of(reader: CheckpointFile, *, base: Path | None = None) -> Config:
    """Reads the configuration of a checkpoint, whose model is no larger than what is saved there.

    Args:
        base: folder of the base of its adapters, in place of the one that the run has read.
    Raises:
        StateError: if there is none, or one that this version or the checkpoint does not fit, or
            `base` is given for a run without adapters.
    """
    from cdrmix.checkpoint.base_model import base_folder, run_of

    path = reader.path / "state.json"
    try:
        config = Config.model_validate(reader.state["config"])
    except KeyError:
        raise StateError(f"{path}: tells no configuration. Give a checkpoint of a run") from None
    except (ValidationError, ConfigError) as error:
        raise StateError(
            f"{path}: its configuration is not one of this version: {error}. Use the version "
            "that environment.json of its run directory names"
        ) from error
    if base is not None:
        if config.model.lora is None:
            raise StateError(
                f"{reader.path}: has all weights of its model, and no adapters that need a base. "
                "Leave out --base"
            )
        model = config.model.model_copy(update={"path": str(base)})
        config = config.model_copy(update={"model": model})
    if config.model.kind == "hf":
        # In the place of a folder that may have gone, or be another by now.
        folder = base_folder(config.model, run_of(reader.path))
        model = config.model.model_copy(update={"path": str(folder)})
        config = config.model_copy(update={"model": model})
    # Checked before a model is made: a configuration of terabytes would take all memory.
    names = reader.names()
    shapes = (reader.shape(name, reader.content_kind(name)) for name in names)
    available = sum(map(math.prod, shapes))
    # of adapters alone: the frozen rest is in the folder of the base
    needed = trained_params(config.model)
    if needed > available:
        raise StateError(
            f"{path}: its configuration has {needed:,} parameters, and the checkpoint holds "
            f"{available:,}. Give the checkpoint of one run, as it was saved"
        )
    return config


def tokenizer_of(checkpoint: Path, state: dict[str, Any], config: Config) -> tuple[Path, str]:
    """Finds the tokenizer of a checkpoint, checked against the digest there.

    Gives the folder that holds it and the sha256 of its file, hex.
    """
    # A tokenizer of the same size but other merges would give wrong text without any error.
    expected = state.get("tokenizer")
    folders = [checkpoint, checkpoint.parent]
    if checkpoint.parent.name == "checkpoints":
        folders.append(checkpoint.parent.parent)
    # Run directories of older versions hold none: their data set does.
    if (data := local_data(config, checkpoint)) is not None:
        folders.append(data)
    for folder in folders:
        path = folder / TOKENIZER_FILE
        if not path.is_file():
            continue
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        if expected is None:
            logger.warning("warning: %s: does not tell its tokenizer; taking %s", checkpoint, path)
        elif digest != expected:
            raise StateError(
                f"{path}: is not the tokenizer of {checkpoint}: sha256 {digest[:12]} here, "
                f"{str(expected)[:12]} there. Put the tokenizer.json of its run directory or data "
                f"set into {checkpoint}"
            )
        return folder, digest
    raise StateError(
        f"{checkpoint}: its tokenizer is in none of {', '.join(map(str, folders))}. Put the "
        f"tokenizer.json of its run directory or data set into {checkpoint}"
    )


def local_data(config: Config, checkpoint: Path) -> Path | None:
    """Returns the folder that the newest start of a checkpoint's run has read, wherever this
    process runs; None if the data set is behind a URL. Runs of earlier versions have no record."""
    if "://" in config.data.path:
        return None
    is_in_run = checkpoint.parent.name == "checkpoints"
    recorded = recorded_data(checkpoint.parent.parent) if is_in_run else None
    if recorded is not None:
        return recorded
    if config.data.path == SAMPLE:
        # The folder of `cdrmix data sample`; it is read if it is there, and never built.
        return Path("data") / f"sample-{config.model.vocab_size}"
    return Path(config.data.path)
