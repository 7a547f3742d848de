"""`cdrmix data`: token shards, from sources onwards."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from cdrmix.errors import EXIT_STOPPED_BY_SIGNAL
from cdrmix.verbs.flags import at_least

if TYPE_CHECKING:
    from cdrmix.verbs.flags import Verbs


def add_data(verbs: Verbs) -> None:
    """`cdrmix data build|inspect|verify|export|sample`: token shards, from sources onwards."""
    parser = verbs.add_parser("data", help="build, inspect, verify and export token shards")
    kinds = parser.add_subparsers(title="what", metavar="WHAT", required=True)
    for add_kind in (
        *(_add_data_build, _add_data_inspect, _add_data_verify, _add_data_export),
        _add_data_sample,
    ):
        add_kind(kinds)


def _add_data_build(kinds: Verbs) -> None:
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

    def run(arguments: argparse.Namespace) -> None:
        from cdrmix.corpus.build import build_dataset
        from cdrmix.corpus.inspection import inspect_folder
        from cdrmix.corpus.inspection_page import write_data_page
        from cdrmix.corpus.remote_jobs import available_cores

        out = arguments.out or Path("data") / arguments.config.stem
        workers = available_cores() if arguments.workers is None else arguments.workers
        if wrong := [option for option in arguments.sbatch if "=" not in option]:
            parser.error(f"--sbatch {wrong[0]}: give OPTION=VALUE")
        sbatch = dict(option.lstrip("-").split("=", 1) for option in arguments.sbatch)
        # TERM stops a build as Ctrl-C does: at once, with its workers. INT itself may be ignored,
        # as a shell has it for what it starts in the background.
        stops = (signal.SIGTERM, signal.SIGINT)
        before = {number: signal.signal(number, signal.default_int_handler) for number in stops}
        try:
            build_dataset(
                arguments.config, out, workers=workers, engine=arguments.engine, sbatch=sbatch
            )
        except KeyboardInterrupt:
            print(f"stopped; start again to go on from what is in {out}", file=sys.stderr)
            raise SystemExit(EXIT_STOPPED_BY_SIGNAL) from None
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        write_data_page(out, inspect_folder(out))
        print(out)

    parser.set_defaults(run=run)


def _add_data_inspect(kinds: Verbs) -> None:
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


def _add_data_verify(kinds: Verbs) -> None:
    parser = kinds.add_parser("verify", help="compare every file of a folder with its manifest")
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder of token shards")

    def run(arguments: argparse.Namespace) -> None:
        from cdrmix.data.shards import read_manifest, verify_shards

        manifest = read_manifest(arguments.folder)
        verify_shards(arguments.folder, manifest)
        tokens = sum(split.tokens for split in manifest.splits.values())
        print(f"{arguments.folder}: {len(manifest.shards)} shards, {tokens:,} tokens: as written")

    parser.set_defaults(run=run)


def _add_data_export(kinds: Verbs) -> None:
    parser = kinds.add_parser("export", help="write the texts behind token shards as tar files")
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder of token shards")
    parser.add_argument(
        "--out", type=Path, metavar="TARS", required=True, help="folder to make, of WebDataset tars"
    )

    def run(arguments: argparse.Namespace) -> None:
        from cdrmix.corpus.encode import export_tars

        num_documents = export_tars(arguments.folder, arguments.out)
        print(f"{arguments.out}: {num_documents:,} documents")

    parser.set_defaults(run=run)


def _add_data_sample(kinds: Verbs) -> None:
    parser = kinds.add_parser(
        "sample", help="build the sample corpus from the text that ships with Python"
    )
    parser.add_argument(
        "--vocab-size", type=int, default=4096, help="slots of its tokenizer; default 4096"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder to make; default data/sample-<vocab size>"
    )

    def run(arguments: argparse.Namespace) -> None:
        from cdrmix.data.sample import build_sample

        out = arguments.out or Path("data") / f"sample-{arguments.vocab_size}"
        build_sample(out, arguments.vocab_size)
        print(out)

    parser.set_defaults(run=run)
