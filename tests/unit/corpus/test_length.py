"""Documents of some lengths."""

import pytest

from cdrmix.corpus.steps.normalise import Length
from cdrmix.errors import ConfigError
from tests.unit.corpus.document_steps import reason_for, run


@pytest.mark.parametrize(
    ("length", "reason"), [(2, "too short"), (3, None), (5, None), (6, "too long")]
)
def test_both_limits_are_kept(length: int, reason: str | None) -> None:
    assert reason_for(Length(min_characters=3, max_characters=5), length * "ü") == reason


def test_without_limits_everything_passes_and_impossible_ones_are_refused() -> None:
    assert run(Length(), []) == ([], [])
    assert reason_for(Length(min_characters=2), 10**6 * "a") is None
    for limits in ({"min_characters": 5, "max_characters": 4}, {"min_characters": -1}):
        with pytest.raises(ConfigError, match="leave nothing"):
            Length(**limits)
