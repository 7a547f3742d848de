"""The verb `cdrmix data`: builds, inspects, verifies and exports token shards, and reads tasks.

The modules that do the work are imported when a verb runs: the help must not wait for them.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from cdrmix.errors import EXIT_STOPPED_BY_SIGNAL
from cdrmix.verbs.flags import Verbs, at_least

# Keys of `READERS` in reasoning/public_tasks.py, which the help must not wait for.
TASK_FORMATS = ("squad", "hotpotqa", "musique", "babilong", "ruler")


def add_data(verbs: Verbs) -> None:
    """Adds `cdrmix data build|inspect|verify|export|sample|tasks`."""
    parser = verbs.add_parser("data", help="build, inspect, verify and export token shards")
    kinds = parser.add_subparsers(title="what", metavar="WHAT", required=True)
    _add_build(kinds)

    def inspect(arguments: argparse.Namespace) -> None:
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

    content = "what a folder holds, and what was dropped and why"
    flag = _of_folder(kinds, "inspect", inspect, content)
    flag("--json", action="store_true", help="print one JSON object")
    length = "tokens per sample that a mixture is counted in; default 256"
    flag("--sequence-length", type=at_least(1), default=256, metavar="T", help=length)

    def verify(arguments: argparse.Namespace) -> None:
        from cdrmix.data.shards import read_manifest, verify_shards

        manifest = read_manifest(arguments.folder, given_as="DIR")
        verify_shards(arguments.folder, manifest)
        tokens = sum(split.tokens for split in manifest.splits.values())
        print(f"{arguments.folder}: {len(manifest.shards)} shards, {tokens:,} tokens: as written")

    _of_folder(kinds, "verify", verify, "compare every file of a folder with its manifest")

    def export(arguments: argparse.Namespace) -> None:
        from cdrmix.corpus.encode import export_tars

        num_documents = export_tars(arguments.folder, arguments.out)
        print(f"{arguments.out}: {num_documents:,} documents")

    flag = _of_folder(kinds, "export", export, "write the texts behind token shards as tar files")
    tars = "folder to make, of WebDataset tars"
    flag("--out", type=Path, metavar="TARS", required=True, help=tars)

    def sample(arguments: argparse.Namespace) -> None:
        from cdrmix.data.sample import build_sample

        out = arguments.out or Path("data") / f"sample-{arguments.vocab_size}"
        build_sample(out, arguments.vocab_size)
        print(out)

    corpus = "build the sample corpus from the text that ships with Python"
    parser = kinds.add_parser("sample", help=corpus)
    parser.set_defaults(run=sample)
    flag = parser.add_argument
    flag("--vocab-size", type=int, default=4096, help="slots of its tokenizer; default 4096")
    default = "folder to make; default data/sample-<vocab size>"
    flag("--out", type=Path, metavar="DIR", help=default)
    _add_tasks(kinds)


def _add_tasks(kinds: Verbs) -> None:
    parser = kinds.add_parser(
        "tasks",
        help="make a file of reasoning tasks from one of a published data set",
        description="Writes the questions of a published file, which is on this machine, as rows "
        "for stage_b.training.task_file and for --tasks of `cdrmix evaluate --suite reasoning`.",
    )
    flag = parser.add_argument
    flag("--format", choices=TASK_FORMATS, required=True, help="format of the file")
    flag("--file", type=Path, metavar="FILE", required=True, help="file to read")
    flag("--out", type=Path, metavar="TASKS", required=True, help="file to write, JSONL")
    flag("--limit", type=at_least(1), metavar="N", help="most rows; default all")
    window = (
        "length_ratio is the length of a text in such windows, guessed at four characters a token, "
        "as a power of two; default 1 for all"
    )
    flag("--window-tokens", type=at_least(1), metavar="W", help=window)

    def run(arguments: argparse.Namespace) -> None:
        from cdrmix.reasoning.public_tasks import convert
        from cdrmix.reasoning.task_files import write_examples

        found = convert(
            arguments.format,
            arguments.file,
            window_tokens=arguments.window_tokens,
            limit=arguments.limit,
        )
        write_examples(arguments.out, found.examples)
        left_out = ""
        if found.num_unanswerable:
            left_out = f"; {found.num_unanswerable:,} questions without an answer left out"
        print(f"{arguments.out}: {len(found.examples):,} rows{left_out}")

    parser.set_defaults(run=run)


def _of_folder(
    kinds: Verbs, name: str, run: Callable[[argparse.Namespace], None], text: str
) -> Callable[..., argparse.Action]:
    """Adds a verb about a built folder, with `text` as its help; returns what adds its flags."""
    parser = kinds.add_parser(name, help=text)
    parser.set_defaults(run=run)
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder of token shards")
    return parser.add_argument


def _add_build(kinds: Verbs) -> None:
    parser = kinds.add_parser(
        "build",
        help="build token shards from the sources of a recipe",
        description="Builds the recipe's token shards into a folder that data.path can name. "
        "Start it again after an interruption: what is done is not done again.",
    )
    flag = parser.add_argument
    flag("--config", type=Path, metavar="FILE", required=True, help="YAML recipe")
    flag("--out", type=Path, metavar="DIR", help="folder to make; default data/<name of FILE>")
    workers = "processes, or most jobs at a time of another engine; default all cores"
    flag("--workers", type=int, metavar="N", help=workers)
    flag(
        "--engine",
        choices=("local", "slurm", "ray"),
        default="local",
        help="what runs the jobs: processes of this machine (default), arrays of SLURM tasks by "
        "datatrove, or a Ray cluster; nodes share the folders of sources and result",
    )
    sbatch = "option of sbatch, such as partition=cpu or time=02:00:00; may be repeated"
    flag("--sbatch", metavar="OPTION=VALUE", action="append", default=[], help=sbatch)

    def run(arguments: argparse.Namespace) -> None:
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
        # TERM stops a build as Ctrl-C does: at once, with its workers. INT is set too, since a
        # shell lets commands in the background ignore it.
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

    parser.set_defaults(run=run)
