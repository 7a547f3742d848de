"""Numbers that verbs take as flags, and misspelt verbs."""

import argparse

import pytest

from cdrmix import cli
from cdrmix.verbs.flags import at_least


def test_a_flags_number_is_of_its_type_and_not_below_the_lowest() -> None:
    assert at_least(1)("1") == 1
    assert at_least(0.0)("0.25") == 0.25
    for lowest, text in ((1, "0"), (0, "-1"), (0.0, "-0.001"), (0.0, "nan")):
        with pytest.raises(argparse.ArgumentTypeError, match=f"given {text}, allowed .* from"):
            at_least(lowest)(text)
    with pytest.raises(ValueError):  # which argparse tells as an invalid value
        at_least(1)("1.5")


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("trian", "train"),
        ("pretrain", "train"),
        ("fit", "train"),
        ("run", "train"),
        ("xyzzy", None),
        ("evalute", "evaluate"),
        ("Plan", "plan"),
        ("data bulid", "build"),
        ("evaluate --suite reasning run", "reasoning"),
    ],
)
def test_a_misspelt_verb_or_choice_is_led_to_the_near_one(
    line: str, meant: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(line.split())
    assert caught.value.code == 2
    told = capsys.readouterr().err
    assert "choose from" in told
    assert told.rstrip().endswith(f"Did you mean '{meant}'?" if meant else ")")
