"""The verb `cdrmix data`: builds, inspects, verifies and exports token shards.

The modules that do the work are imported when a verb runs: the help must not wait for them.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cdrmix.errors import EXIT_STOPPED_BY_SIGNAL
from cdrmix.verbs.flags import at_least

if TYPE_CHECKING:
    from cdrmix.verbs.flags import Verbs


def add_data(verbs: Verbs) -> None:
    """Adds `cdrmix data build|inspect|verify|export|sample`."""
    parser = verbs.add_parser("data", help="build, inspect, verify and export token shards")
    kinds = parser.add_subparsers(title="what", metavar="WHAT", required=True)
    _add_build(kinds)
    _add_inspect(kinds)

    verify_parser = kinds.add_parser(
        "verify", help="compare every file of a folder with its manifest"
    )
    verify_parser.add_argument("folder", type=Path, metavar="DIR", help="folder of token shards")

    def verify(arguments: argparse.Namespace) -> None:
        from cdrmix.data.shards import read_manifest, verify_shards

        manifest = read_manifest(arguments.folder)
        verify_shards(arguments.folder, manifest)
        tokens = sum(split.tokens for split in manifest.splits.values())
        print(f"{arguments.folder}: {len(manifest.shards)} shards, {tokens:,} tokens: as written")

    verify_parser.set_defaults(run=verify)

    export_parser = kinds.add_parser(
        "export", help="write the texts behind token shards as tar files"
    )
    export_parser.add_argument("folder", type=Path, metavar="DIR", help="folder of token shards")
    export_parser.add_argument(
        "--out", type=Path, metavar="TARS", required=True, help="folder to make, of WebDataset tars"
    )

    def export(arguments: argparse.Namespace) -> None:
        from cdrmix.corpus.encode import export_tars

        num_documents = export_tars(arguments.folder, arguments.out)
        print(f"{arguments.out}: {num_documents:,} documents")

    export_parser.set_defaults(run=export)

    sample_parser = kinds.add_parser(
        "sample", help="build the sample corpus from the text that ships with Python"
    )
    sample_parser.add_argument(
        "--vocab-size", type=int, default=4096, help="slots of its tokenizer; default 4096"
    )
    sample_parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder to make; default data/sample-<vocab size>"
    )

    def sample(arguments: argparse.Namespace) -> None:
        from cdrmix.data.sample import build_sample

        out = arguments.out or Path("data") / f"sample-{arguments.vocab_size}"
        build_sample(out, arguments.vocab_size)
        print(out)

    sample_parser.set_defaults(run=sample)


def _add_build(kinds: Verbs) -> None:
    parser = kinds.add_parser(
        "build",
        help="build token shards from the sources of a recipe",
        description="Builds the recipe's token shards into a folder that data.path can name. "
        "Start it again after an interruption: what is done is not done again.",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", required=True, help="YAML recipe")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder to make; default data/<name of FILE>"
    )
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="processes, or most jobs at a time of another engine; default all cores",
    )
    parser.add_argument(
        "--engine",
        choices=("local", "slurm", "ray"),
        default="local",
        help="what runs the jobs: processes of this machine (default), arrays of SLURM tasks by "
        "datatrove, or a Ray cluster; nodes share the folders of sources and result",
    )
    parser.add_argument(
        "--sbatch",
        metavar="OPTION=VALUE",
        action="append",
        default=[],
        help="option of sbatch, such as partition=cpu or time=02:00:00; may be repeated",
    )

    parser.set_defaults(run=partial(_build, parser))


def _build(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    from cdrmix.corpus.build import build_dataset
    from cdrmix.corpus.inspection import inspect_folder
    from cdrmix.corpus.inspection_page import write_data_page

    # By the parser, so that it ends as any wrong flag does, before files are touched.
    if wrong := [option for option in arguments.sbatch if "=" not in option]:
        parser.error(f"--sbatch {wrong[0]}: give OPTION=VALUE")
    out = arguments.out or Path("data") / arguments.config.stem
    # Containers and batch systems give a process fewer cores than the machine has.
    cores = len(os.sched_getaffinity(0))
    workers = cores if arguments.workers is None else arguments.workers
    sbatch = dict(option.lstrip("-").split("=", 1) for option in arguments.sbatch)
    # TERM stops a build as Ctrl-C does: at once, with its workers. INT is set too, since a shell
    # lets commands in the background ignore it.
    stops = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, signal.default_int_handler) for number in stops}
    try:
        build_dataset(
            arguments.config, out, workers=workers, engine=arguments.engine, sbatch=sbatch
        )
    except KeyboardInterrupt:
        print(f"stopped; start again to continue from the work in {out}", file=sys.stderr)
        raise SystemExit(EXIT_STOPPED_BY_SIGNAL) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    # The page is no part of the data set: the manifest does not name it.
    write_data_page(out, inspect_folder(out))
    print(out)


def _add_inspect(kinds: Verbs) -> None:
    parser = kinds.add_parser("inspect", help="what a folder holds, and what was dropped and why")
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder of token shards")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--sequence-length",
        type=at_least(1),
        default=256,
        metavar="T",
        help="tokens per sample that a mixture is counted in; default 256",
    )

    def run(arguments: argparse.Namespace) -> None:
        from cdrmix.corpus.inspection import inspect_folder
        from cdrmix.corpus.inspection_page import DATA_PAGE, inspection_table

        folder = arguments.folder
        inspected = inspect_folder(folder, sequence_length=arguments.sequence_length)
        page = str(folder / DATA_PAGE) if (folder / DATA_PAGE).is_file() else None
        if arguments.json:
            print(json.dumps(inspected | {"page": page}))
            return
        print(inspection_table(inspected))
        if page:
            print(f"\nAs a page: {page}")

    parser.set_defaults(run=run)
