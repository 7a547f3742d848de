"""Numbers that verbs take as flags."""

import argparse

import pytest

from cdrmix.verbs.flags import at_least


def test_a_flags_number_is_of_its_type_and_not_below_the_lowest() -> None:
    assert at_least(1)("1") == 1
    assert at_least(0.0)("0.25") == 0.25
    for lowest, text in ((1, "0"), (0, "-1"), (0.0, "-0.001"), (0.0, "nan")):
        with pytest.raises(argparse.ArgumentTypeError, match=f"given {text}, allowed .* from"):
            at_least(lowest)(text)
    with pytest.raises(ValueError):  # which argparse tells as an invalid value
        at_least(1)("1.5")
