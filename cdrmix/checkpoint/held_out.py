"""Scores of the checkpoints in a folder, and the best of these. No torch.

A score is the held-out loss, or a row of a suite of evaluations. `held_out.json` stands beside the
checkpoints, because the end of a run is evaluated when its last checkpoint has its name. It lists
scores by step and digest of the manifest: what is said of a checkpoint that was removed, set aside
or saved again does not count for another of that step. Losses over different text do not compare,
nor do scores over other examples, so each comes with their number: an evaluation of so many reads
the same ones each time.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cdrmix.checkpoint.candidates import step_folders, step_of
from cdrmix.checkpoint.files import MANIFEST_FILE, damage, digest, read_json, retried
from cdrmix.errors import StateError, TrainingError
from cdrmix.log import get_logger
from cdrmix.monitoring.sinks import write_json_atomic
from cdrmix.monitoring.suite_results import lower_is_better

logger = get_logger(__name__)

HELD_OUT_FILE = "held_out.json"
LOSS = "loss"  # held-out loss, as evaluation.best_by names it


class Score(NamedTuple):
    """Measure of a model by which the best checkpoint is found.

    Attributes:
        value: nats per token of the held-out loss, else the score of a row.
        examples: tokens predicted for the loss, else examples of the row (count); 0 in records of
            earlier versions, which did not tell.
        by: `loss`, or SUITE/TASK/METRIC.
    """

    value: float
    examples: int
    by: str = LOSS

    @property
    def rank(self) -> float:
        """Number that is the lower the better the score."""
        return self.value if lower_is_better(self.by.rpartition("/")[2]) else -self.value

    def compares_with(self, other: Score) -> bool:
        """True for the same measure over as many examples."""
        return (self.by, self.examples) == (other.by, other.examples)

    def as_json(self) -> dict[str, Any]:
        """Returns the members of an entry of the record."""
        if self.by == LOSS:
            return {"loss": self.value, "tokens": self.examples}
        return {"by": self.by, "score": self.value, "examples": self.examples}


class ScoredCheckpoint(NamedTuple):
    """Entry of the record: a checkpoint, named by step and sha256 of its manifest, hex."""

    step: int
    manifest: str
    score: Score


def recorded_scores(root: Path) -> list[ScoredCheckpoint]:
    """Reads the scores of the checkpoints that are in `root` now, by step.

    Raises:
        StateError: if the record is damaged.
        InfrastructureError: if the file system does not answer at present.
    """
    path = root / HELD_OUT_FILE
    try:
        entries = [_entry(each) for each in read_json(path)["checkpoints"]]
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
    return sorted(each for each in entries if each[:2] in there)


def _entry(content: Mapping[str, Any]) -> ScoredCheckpoint:
    if "by" in content:
        value, examples, by = content["score"], content["examples"], content["by"]
    else:
        value, examples, by = content["loss"], content.get("tokens", 0), LOSS
    score = Score(float(value), int(examples), str(by))
    return ScoredCheckpoint(int(content["step"]), str(content["manifest"]), score)


def manifest_digest(checkpoint: Path) -> str | None:
    """sha256 of a checkpoint's manifest, hex; None without one. Raises InfrastructureError if the
    file system does not answer at present."""
    path = checkpoint / MANIFEST_FILE
    try:
        return retried(lambda: digest(path), path)
    except OSError:
        return None


def best_checkpoint(root: Path) -> ScoredCheckpoint | None:
    """Finds the checkpoint in `root` with the best score, whole by the sizes of its files, of those
    with the measure of the newest over as many examples; None if none was evaluated. Raises as
    `recorded_scores`."""
    whole = [
        each
        for each in recorded_scores(root)
        if not damage(root / str(each.step), with_digests=False)
    ]
    if not whole:
        return None
    alike = [each for each in whole if each.score.compares_with(whole[-1].score)]
    return min(alike, key=lambda each: (each.score.rank, each.step))


def score_of(checkpoint: Path) -> Score | None:
    """Score of a checkpoint, by the record beside it; None if that tells none."""
    try:
        scored = recorded_scores(checkpoint.parent)
    except TrainingError as error:
        logger.warning("warning: %s", error)
        return None
    this = checkpoint.name, manifest_digest(checkpoint)
    for each in scored:
        if (str(each.step), each.manifest) == this:
            return each.score
    return None


def record_score(root: Path, new: ScoredCheckpoint) -> None:
    """Adds an evaluation to the record, which leaves out those of checkpoints that are gone.

    The checkpoint need not have its name yet: until then the entry counts for nothing. Raises
    StateError if the record cannot be written, InfrastructureError as above.
    """
    try:
        entries = recorded_scores(root)
    except StateError as error:
        logger.warning("warning: %s", error)
        entries = []
    others = [each for each in entries if each[:2] != new[:2]]
    content = [
        {"step": each.step, "manifest": each.manifest, **each.score.as_json()}
        for each in sorted([*others, new])
    ]
    write_json_atomic(root / HELD_OUT_FILE, {"checkpoints": content})
