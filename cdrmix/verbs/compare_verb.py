"""The verb `cdrmix compare`: sets runs and results of evaluations side by side."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from cdrmix.verbs.flags import Verbs


def add_compare(verbs: Verbs) -> None:
    """`cdrmix compare RUN RUN ...`: scores with intervals, a column for each run."""
    parser = verbs.add_parser(
        "compare",
        help="scores of runs and evaluated models side by side",
        description="Prints what `cdrmix evaluate` has stored under runs, or written by --out "
        "FILE, and the runs' own figures: a row for each task and metric, a column for each "
        "model, the best one marked. Rows that were measured with other settings are told apart.",
    )
    flag = parser.add_argument
    runs = "run directory, or file that `cdrmix evaluate --out FILE` has written"
    flag("runs", type=Path, metavar="RUN", nargs="+", help=runs)
    suite = "compare this suite alone, or `run`, the figures of the runs; repeatable"
    flag("--suite", dest="suites", metavar="NAME", action="append", default=[], help=suite)
    flag("--out", type=Path, metavar="PAGE", help="write a page with pictures to this .html file")
    flag("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_compare)


def _compare(arguments: argparse.Namespace) -> None:
    from cdrmix.log import columns
    from cdrmix.monitoring.comparison import compare

    compared = compare(arguments.runs, arguments.suites)
    if arguments.out is not None:
        # Only here: the drawing library takes a second to import.
        from cdrmix.monitoring.comparison_page import write_comparison

        write_comparison(arguments.out, compared)
    if arguments.json:
        print(json.dumps(compared.as_json()))
        return
    print(compared.table(columns(sys.stdout)))
    if arguments.out is not None:
        print(f"\n{arguments.out}")
