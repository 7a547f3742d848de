"""The uninterrupted run that runs of this folder are compared with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import run_ranks
from tests.small_run import arguments, overrides, start

STEPS = 60


@pytest.fixture(scope="session")
def uninterrupted(small_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directory of an uninterrupted run of STEPS steps on two ranks of one host.

    One for all files: what their settings add (steps of saves, a deadline, variables of the
    launcher, and the degree that one host gets anyway) changes no result.
    """
    run_dir = tmp_path_factory.mktemp("uninterrupted") / "run"
    settings = ("checkpoint.every_steps=10", "evaluation.every_steps=null")
    flags = arguments(small_corpus, run_dir, *overrides(settings), "--max-steps", str(STEPS))
    assert run_ranks(start, 2, flags) == [0, 0]
    return run_dir
