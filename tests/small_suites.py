"""Suites for runs of tests: they read held-out text, draw random numbers, and fail on request."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch

from cdrmix import runtime
from cdrmix.data.token_dataset import TokenDataset
from cdrmix.errors import DataError
from cdrmix.evaluation.perplexity import evaluate
from cdrmix.evaluation.suite import SUITES, Judged, Request
from cdrmix.monitoring.suite_results import Row, SuiteResult

# Made scores by step, of which a run keeps the best.
MADE = {2: 0.2, 4: 0.9, 6: 0.5, 8: 0.1}


class HeldOut:
    """Loss on a few held-out tokens, a draw from each generator, and a made score."""

    options = {"window": "tokens of an input"}

    def check(self, request: Request) -> None:
        """Raises DataError where the task file is missing."""
        if request.tasks is not None and not request.tasks.is_file():
            raise DataError(f"{request.tasks}: there is no such file of tasks")

    def measure(self, judged: Judged, request: Request) -> SuiteResult:
        """Judges a model, and leaves its mode and all generators in disorder."""
        assert judged.data is not None and judged.step is not None
        judged.model.eval()
        dataset = TokenDataset(judged.data, "validation", judged.max_length)
        found = evaluate(
            judged.model,
            dataset,
            max_tokens=4 * judged.max_length,
            batch_size=judged.batch_size,
            topology=judged.topology,
        )
        drawn = random.random(), float(np.random.random()), float(torch.rand(()))
        rows = [
            Row("text", "nats_per_token", found.loss, found.loss - 1, found.loss + 1, found.tokens),
            Row("made", "pass@1", MADE[judged.step], None, None, request.limit or 0),
            *(Row("drawn", f"number_{n}", each, None, None, 1) for n, each in enumerate(drawn)),
        ]
        return SuiteResult("infill", rows, judged.source, judged.step, judged.weights)


class Failing(HeldOut):
    """Fails in three ways, by the step: on rank 0, which tells the others; on each; and not."""

    def measure(self, judged: Judged, request: Request) -> SuiteResult:
        """Raises DataError behind step 3, ValueError behind step 6."""
        if judged.step == 3:
            raise runtime.first_rank_does(lambda: _refuse(request.tasks))
        if judged.step == 6:
            raise ValueError("a fault of the suite")
        rows = [Row("text", "acc", 0.5, 0.4, 0.6, 10)]
        return SuiteResult("routing", rows, judged.source, judged.step, judged.weights)


def _refuse(path: Path | None) -> Exception:
    raise DataError(f"{path}: is no file of tasks")


def install() -> None:
    """Has runs of this process take these suites by the names of real ones."""
    SUITES["infill"] = (__name__, "HeldOut")
    SUITES["routing"] = (__name__, "Failing")
