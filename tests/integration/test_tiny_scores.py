"""Short forms of the tiny variants score as they did: tests/data/scores.json.

`python -m tests.tiny_scores` writes the table anew, after a change that is meant to change them.
"""

from pathlib import Path

import pytest

from tests.harness import run_ranks
from tests.tiny_scores import FORMS, SEEDS, interval, make_data, outside, scores_of


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    make_data(folder)
    return folder


@pytest.mark.parametrize("name", FORMS)
def test_a_short_form_scores_as_it_did(name: str, made: Path, run_dir: Path) -> None:
    seed = max(SEEDS) + 1  # none of those that made the table
    (scores,) = run_ranks(scores_of, 1, name, made, run_dir, seed, timeout=300)
    assert outside(name, scores) == []


def test_scores_outside_and_missing_ones_are_named() -> None:
    low, high = interval([1.0, 1.02, 0.98])
    assert low < 0.9 and high > 1.1
    found = outside("core-tiny", {"held-out loss": 7.7, "recall": 1.0})
    assert "core-tiny: recall is only in the run" in found
    assert "core-tiny: bits per byte is only in the table" in found
    assert any(line.startswith("core-tiny: held-out loss is 7.7000, expected is") for line in found)
