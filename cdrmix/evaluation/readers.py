"""A trained Stage B as one plain reader: for evaluation and for reading what is given to it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cdrmix.checkpoint import engine_state
from cdrmix.checkpoint.reader import CheckpointReader
from cdrmix.config.reasoning import StageBConfig
from cdrmix.errors import StateError
from cdrmix.evaluation.trained import Trained, load_trained
from cdrmix.reasoning.lessons import Lessons
from cdrmix.reasoning.parts import is_stage_b, logical_name
from cdrmix.reasoning.reader import MemoryReader


@dataclass(frozen=True)
class TrainedReader:
    """A reader of one checkpoint.

    Attributes:
        trained: its backbone, configuration and tokenizer.
        reader: evaluation mode.
        lessons: tasks and texts in its tokens.
    """

    trained: Trained
    reader: MemoryReader
    lessons: Lessons


def load_reader(source: Path, *, accept_threshold: float | None = None) -> TrainedReader:
    """Load the newest checkpoint under `source` that verifies.

    Args:
        source: a run directory or a checkpoint.
        accept_threshold: advantage from which a branch is accepted; None: the run's.
    Raises:
        StateError: if there is none, or it has not come to Stage B.
        DataError: if its tokenizer cannot be read.
    """
    trained = load_trained(source)
    stage_b = trained.config.stage_b
    with CheckpointReader(trained.checkpoint) as checkpoint:
        if stage_b is None or not any(map(is_stage_b, checkpoint.names())):
            raise StateError(
                f"{source}: step {trained.step} has no memory to read with. Memory is trained in "
                "Stage B: train a reasoning variant (cdrmix-reason-*) with training.stage all or b"
            )
        if accept_threshold is not None:
            policy = stage_b.policy.model_copy(update={"accept_threshold": accept_threshold})
            stage_b = stage_b.model_copy(update={"policy": policy})
        lessons = make_lessons(trained, stage_b)
        reader = MemoryReader(
            trained.model, stage_b, window_tokens=lessons.window_tokens, marks=lessons.marks
        )
        reader.to(trained.model.device)
        engine_state.load_module(reader, checkpoint, logical_name)
    return TrainedReader(trained, reader.eval(), lessons)


def make_lessons(trained: Trained, stage_b: StageBConfig) -> Lessons:
    """Tasks in the tokens of a trained model, without plain text."""
    training = stage_b.training
    return Lessons(
        training,
        trained.config.training.seed,
        training.window_tokens or trained.config.training.sequence_length,
        trained.tokenizer,
    )
