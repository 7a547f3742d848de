"""A step that Muon's check looks at, without a run around it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cdrmix.hooks import RunView, StepFigures


@contextlib.contextmanager
def checked_step(engine: Any, config: Any, *, tensor_ranks: int = 1) -> Iterator[None]:
    """Has the check look at the step inside the context."""
    from cdrmix.engines.optimizer_check import OptimizerCheck

    check = OptimizerCheck(tensor_ranks=tensor_ranks)
    place = {"rank": 0, "world_size": 1, "num_steps": 1, "step": 0}
    check.on_start(RunView(directory=Path(), config=config, stage="a", engine=engine, **place))
    check.on_batch({})
    skipped = engine.skipped_steps
    yield
    check.on_step(1, StepFigures(0.0, 0.0, engine.skipped_steps > skipped))
