"""Held-out losses of the checkpoints in a folder, and the best of these. No torch.

`held_out.json` stands beside the checkpoints, because the end of a run is evaluated when its last
checkpoint has its name. It lists losses by step and digest of the manifest: what is said of a
checkpoint that was removed, set aside or saved again does not count for another of that step.
Losses over different text do not compare, so each comes with its number of tokens: an evaluation of
so many tokens reads the same ones each time.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from cdrmix.checkpoint.candidates import step_folders, step_of
from cdrmix.checkpoint.files import MANIFEST_FILE, damage, digest, read_json, retried
from cdrmix.errors import StateError, TrainingError
from cdrmix.log import get_logger
from cdrmix.monitoring.sinks import write_json_atomic

logger = get_logger(__name__)

HELD_OUT_FILE = "held_out.json"


class HeldOutLoss(NamedTuple):
    """Loss on held-out text, nats per token, and the number of tokens predicted there."""

    loss: float
    tokens: int


class HeldOut(NamedTuple):
    """Evaluation of a checkpoint."""

    step: int
    manifest: str  # sha256 of its manifest, hex
    loss: float  # nats per token
    tokens: int  # predicted; 0 in records of earlier versions, which did not tell


def held_out_losses(root: Path) -> list[HeldOut]:
    """Reads the losses of the checkpoints that are in `root` now, the lowest first.

    Raises:
        StateError: if the record is damaged.
        InfrastructureError: if the file system does not answer at present.
    """
    path = root / HELD_OUT_FILE
    try:
        entries = [
            HeldOut(
                *(int(each["step"]), str(each["manifest"])),
                *(float(each["loss"]), int(each.get("tokens", 0))),
            )
            for each in read_json(path)["checkpoints"]
        ]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StateError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StateError(
            f"{path}: not a record of held-out losses ({type(error).__name__}: {error}). Remove "
            "it: the next evaluated checkpoint begins a new one"
        ) from error
    there = {(step_of(folder), manifest_digest(folder)) for folder in step_folders(root)}
    valid = [each for each in entries if (each.step, each.manifest) in there]
    return sorted(valid, key=lambda each: (each.loss, each.step))


def manifest_digest(checkpoint: Path) -> str | None:
    """sha256 of a checkpoint's manifest, hex; None without one. Raises InfrastructureError if the
    file system does not answer at present."""
    path = checkpoint / MANIFEST_FILE
    try:
        return retried(lambda: digest(path), path)
    except OSError:
        return None


def best_checkpoint(root: Path) -> HeldOut | None:
    """Finds the checkpoint in `root` with the lowest loss, whole by the sizes of its files, of
    those evaluated on as many tokens as the newest; None if none was. Raises as
    `held_out_losses`."""
    whole = [
        each
        for each in held_out_losses(root)
        if not damage(root / str(each.step), with_digests=False)
    ]
    if not whole:
        return None
    newest = max(whole, key=lambda each: each.step)
    return next(each for each in whole if each.tokens == newest.tokens)


def loss_of(checkpoint: Path) -> HeldOutLoss | None:
    """Held-out loss of a checkpoint, by the record beside it; None if that tells none."""
    try:
        losses = held_out_losses(checkpoint.parent)
    except TrainingError as error:
        logger.warning("warning: %s", error)
        return None
    this = checkpoint.name, manifest_digest(checkpoint)
    for each in losses:
        if (str(each.step), each.manifest) == this:
            return HeldOutLoss(each.loss, each.tokens)
    return None


def record_held_out(root: Path, new: HeldOut) -> None:
    """Adds an evaluation to the record, which leaves out those of checkpoints that are gone.

    The checkpoint need not have its name yet: until then the entry counts for nothing. Raises
    StateError if the record cannot be written, InfrastructureError as above.
    """
    try:
        entries = held_out_losses(root)
    except StateError as error:
        logger.warning("warning: %s", error)
        entries = []
    others = [each for each in entries if each[:2] != new[:2]]
    listed = sorted([*others, new], key=lambda each: (each.loss, each.step))
    content = {"checkpoints": [each._asdict() for each in listed]}
    write_json_atomic(root / HELD_OUT_FILE, content)
