"""Times of a plan, as people read them."""

import pytest

from cdrmix.planning.cost import time_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.00234, "2.3 ms"),
        (0.0178, "18 ms"),
        (0.9996, "1 s"),
        (2.34, "2.3 s"),
        (9.96, "10 s"),
        (119, "119 s"),
        (4_030, "67 minutes"),
        (7_200, "2 hours"),
        (100_000, "28 hours"),
        (28.7 * 86_400, "29 days"),
        (2.44 * 86_400, "2.4 days"),
        (22_268.7 * 86_400, "61 years"),
        (1.2e6 * 365.25 * 86_400, "1,200,000 years"),
    ],
)
def test_a_time_is_told_in_the_unit_that_people_use_for_it(seconds: float, text: str) -> None:
    assert time_text(seconds) == text
