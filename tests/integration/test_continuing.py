"""What a model forgets that is trained on, with and without replay: the tool of `make cpt`."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from pathlib import Path

from tests.harness import run_ranks
from tests.small_run import start
from tools.continue_tiny import Outcome, continue_from, table, train_base, write_data

# Measures at the end alone.
QUIET = {"cpt.forgetting.every_steps": 1000, "evaluation.sample_tokens": 1}


def trained(argv: Sequence[str]) -> None:
    assert run_ranks(start, 1, [*argv], timeout=300) == [0]


def test_replay_keeps_what_the_base_knew_and_costs_little_of_what_is_new(tmp_path: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        data = write_data(tmp_path / "data")
        base = train_base(tmp_path, data[0], 160, trained, {"evaluation.sample_tokens": 1})
        without, with_replay = (
            continue_from(base, tmp_path, data, share, 120, trained, QUIET) for share in (0, 0.25)
        )
    assert without.old_before == with_replay.old_before < 2.7, "the base has learned"
    shown = table([without, with_replay])
    assert with_replay.forgetting <= 0.25, shown
    assert without.forgetting >= 1.0, (
        f"without replay nothing is forgotten, which proves nothing\n{shown}"
    )
    assert abs(without.gain - with_replay.gain) <= 0.06, shown


def test_the_table_has_a_row_for_each_share() -> None:
    lines = table(
        [Outcome(0.0, 2.0, 3.5, 4.0, 2.25), Outcome(0.25, 2.0, 2.0, 4.0, 2.5)]
    ).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["0%", "2.000", "3.500", "+1.500", "4.000", "2.250", "1.750"],
        ["25%", "2.000", "2.000", "+0.000", "4.000", "2.500", "1.500"],
    ]
