"""The verbs `cdrmix watch` and `cdrmix serve`: runs as they go, in a terminal and as pages."""

from __future__ import annotations

import argparse
from pathlib import Path

from cdrmix.verbs.flags import Verbs, at_least


def add_watch(verbs: Verbs) -> None:
    """`cdrmix watch RUN_DIR ...`: a live view of runs in the terminal."""
    parser = verbs.add_parser(
        "watch",
        help="a live view of runs in the terminal",
        description="Shows loss, speed, memory, routing, health, and the time left of a run as it "
        "goes; several as a table. A run may begin later, and be resumed meanwhile. Ctrl-C ends "
        "it. Where stdout is no terminal, a line is printed for each run that has news.",
    )
    flag = parser.add_argument
    flag("runs", type=Path, metavar="RUN_DIR", nargs="+", help="run directory")
    flag("--once", action="store_true", help="print the runs as they are now, and end")
    flag("--json", action="store_true", help="print one JSON object on a line each time")
    seconds = "time between two looks at the files; default 2"
    flag("--interval", type=at_least(0.1), metavar="SECONDS", default=2.0, help=seconds)
    parser.set_defaults(run=_watch)


def _watch(arguments: argparse.Namespace) -> None:
    from cdrmix.live.watch import watch, watched

    runs = watched(arguments.runs, may_wait=not arguments.once)
    watch(runs, once=arguments.once, as_json=arguments.json, interval=arguments.interval)


def add_serve(verbs: Verbs) -> None:
    """`cdrmix serve RUNS_DIR`: local pages of all runs."""
    parser = verbs.add_parser(
        "serve",
        help="local pages of all runs, with their pictures, followed as they go",
        description="Serves a table of all runs below a folder, a page with pictures for each, and "
        "comparisons side by side, to browsers on this machine alone. Nothing is written and "
        "nothing is loaded from elsewhere. Needs the [serve] extra.",
    )
    flag = parser.add_argument
    flag("runs_dir", type=Path, metavar="RUNS_DIR", help="folder with run directories")
    port = "port on 127.0.0.1; 0 takes a free one; default 8265"
    flag("--port", type=int, metavar="N", default=8265, help=port)
    host = "127.0.0.1 or localhost: others are refused, and the way to come from elsewhere is told"
    flag("--host", default="127.0.0.1", help=host)
    parser.set_defaults(run=_serve)


def _serve(arguments: argparse.Namespace) -> None:
    from cdrmix.live.server import serve

    serve(arguments.runs_dir, host=arguments.host, port=arguments.port)
