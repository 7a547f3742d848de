"""The `cdrmix` command. Each verb parses its flags and calls one function of the package.

A new verb is a function `add_<verb>(verbs)` that makes its parser and sets `run`, and a name in
`VERBS`. What a user got wrong reaches stderr as a message, here and nowhere else in the verbs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cdrmix import __version__, log
from cdrmix.errors import EXIT_DONE, EXIT_STOPPED_BY_SIGNAL, EXIT_USER_ERROR, TrainingError

if TYPE_CHECKING:
    from cdrmix.planning.cluster import Cluster

    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code of the process.

    Args:
        argv: arguments after the program name; those of the process when left out.
    """
    arguments = _parser().parse_args(argv)
    log.configure()
    try:
        arguments.run(arguments)
        sys.stdout.flush()
    except TrainingError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # The reader of our output left (`cdrmix config ... | head`); nothing is left to say to it,
        # and Python must not try again while it shuts down.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cdrmix", description="Trains RWKX-V language models under the DeepSpeed launcher."
    )
    parser.add_argument("--version", action="version", version=f"cdrmix {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for add_verb in VERBS:
        add_verb(verbs)
    return parser


def add_config_flags(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """The flags of every verb that reads a configuration: --config FILE and --set PATH=VALUE."""
    parser.add_argument("--config", metavar="FILE", required=required, help="YAML configuration")
    parser.add_argument(
        "--set",
        metavar="PATH=VALUE",
        dest="overrides",
        action="append",
        default=[],
        help="override one value, such as training.seed=7; may be repeated",
    )


def _from(lowest: int | float) -> Callable[[str], int | float]:
    """Reads a flag's number of the same type as `lowest`, and not below it."""

    def number(text: str) -> int | float:
        value = type(lowest)(text)
        if not value >= lowest:  # so that it refuses nan
            raise argparse.ArgumentTypeError(f"given {text}, allowed is a number from {lowest}")
        return value

    return number


def add_config(verbs: Verbs) -> None:
    """`cdrmix config`: print the resolved configuration, or the schema of configurations."""
    parser = verbs.add_parser(
        "config", help="print a configuration with every default and derived value, or the schema"
    )
    parser.add_argument(
        "--schema", action="store_true", help="print the JSON schema, for editors to complete by"
    )
    add_config_flags(parser, required=False)

    def run(arguments: argparse.Namespace) -> None:
        from cdrmix.config.load import load_config, resolved_yaml, schema_json

        if arguments.schema == bool(arguments.config):
            parser.error("give --config FILE or --schema")
        if arguments.schema:
            print(schema_json(), end="")
        else:
            print(resolved_yaml(load_config(arguments.config, arguments.overrides)), end="")

    parser.set_defaults(run=run)


def add_plan(verbs: Verbs) -> None:
    """`cdrmix plan`: lay a run out on a cluster, before it is queued."""
    parser = verbs.add_parser(
        "plan",
        help="profile, degrees, memory and time of a run on a cluster, without a GPU",
        description="Compares all legal layouts of a configuration on a cluster by memory and time "
        "and picks one, with its reasons. Degrees and batch sizes that are given are kept.",
    )
    add_config_flags(parser)
    _add_cluster_flags(parser)
    parser.add_argument(
        "--explain", action="store_true", help="also every buffer, what is exchanged, assumptions"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")

    def run(arguments: argparse.Namespace) -> None:
        from cdrmix.config.load import load_config
        from cdrmix.planning.plan import as_text, plan

        config = load_config(arguments.config, arguments.overrides)
        made = plan(config, _cluster(arguments))
        print(
            json.dumps(made.to_json())
            if arguments.json
            else as_text(made, explain=arguments.explain)
        )

    parser.set_defaults(run=run)


def _add_cluster_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nodes", type=int, metavar="N", required=True, help="number of nodes")
    parser.add_argument(
        "--gpus-per-node", type=int, metavar="G", required=True, help="devices, and ranks, of each"
    )
    parser.add_argument(
        "--gpu", metavar="PRESET", help="a100-80, h100-80, h200-141, mi300x-192, rtx4090-24 or cpu"
    )
    parser.add_argument(
        "--gpu-memory-gib", type=float, metavar="M", help="memory of a device as torch reports it"
    )


def _cluster(arguments: argparse.Namespace) -> Cluster:
    from cdrmix.planning.cluster import make_cluster

    return make_cluster(
        nodes=arguments.nodes,
        gpus_per_node=arguments.gpus_per_node,
        gpu=arguments.gpu,
        gpu_memory_gib=arguments.gpu_memory_gib,
    )


def add_rehearse(verbs: Verbs) -> None:
    """`cdrmix rehearse`: run a plan's layout, shrunk, on this machine's processors."""
    parser = verbs.add_parser(
        "rehearse",
        help="run the layout of a plan, shrunk, on this machine, against one process",
        description="Plans a run as `cdrmix plan` does, shrinks the plan to at most 8 processes "
        "with every axis kept, trains, saves, resumes, and compares with one process. Says what "
        "was exercised and what was not.",
    )
    add_config_flags(parser)
    _add_cluster_flags(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")

    def run(arguments: argparse.Namespace) -> None:
        from cdrmix.config.load import load_config
        from cdrmix.engines.rehearse import rehearse

        config = load_config(arguments.config, arguments.overrides)
        rehearsed = rehearse(config, _cluster(arguments))
        print(json.dumps(rehearsed.to_json()) if arguments.json else rehearsed.as_text())
        if not rehearsed.passed:
            raise SystemExit(1)

    parser.set_defaults(run=run)


def add_launch(verbs: Verbs) -> None:
    """`cdrmix launch`: train, and start again what is lost."""
    parser = verbs.add_parser(
        "launch",
        help="train under the deepspeed launcher, restarted where it is lost",
        description="Starts the deepspeed launcher on this machine or on the hosts of a hostfile, "
        "watches it, and starts a lost run again from its newest checkpoint. TERM, INT and USR1 "
        "save and stop.",
    )
    add_config_flags(parser)
    parser.add_argument(
        "--hostfile", type=Path, metavar="HOSTS", help="lines NAME slots=N; default this machine"
    )
    parser.add_argument(
        "--nproc", type=_from(1), metavar="N", help="ranks on each host; default one per device"
    )
    parser.add_argument(
        "--max-restarts", type=_from(0), default=3, metavar="R", help="restarts; default 3"
    )
    parser.add_argument("--profile", help="DeepSpeed profile by name or JSON file; else chosen")
    parser.add_argument("--run-dir", type=Path, help="default: experiments/<UTC time>-<hash>")
    parser.add_argument(
        "--resume", default="never", metavar="auto|never|PATH", help="of the first start"
    )
    parser.add_argument("--max-steps", type=_from(1), help="short for training.max_steps=N")

    def run(arguments: argparse.Namespace) -> None:
        from cdrmix.cluster.launch import launch, make_job

        overrides = list(arguments.overrides)
        if arguments.max_steps is not None:
            overrides.append(f"training.max_steps={arguments.max_steps}")
        job = make_job(
            config=Path(arguments.config),
            overrides=overrides,
            hostfile=arguments.hostfile,
            ranks_per_host=arguments.nproc,
            max_restarts=arguments.max_restarts,
            profile=arguments.profile,
            run_dir=arguments.run_dir,
            resume=arguments.resume,
        )
        code = launch(job)
        if code != EXIT_DONE:
            raise SystemExit(code)

    parser.set_defaults(run=run)


def add_slurm(verbs: Verbs) -> None:
    """`cdrmix slurm`: write a batch script for a run, and queue it."""
    parser = verbs.add_parser(
        "slurm",
        help="write a batch script for a run, and queue it with --submit",
        description="Writes RUN_DIR/job.sbatch: the run saves before its time limit, goes back to "
        "the queue and goes on. Configuration and layout are checked before.",
    )
    add_config_flags(parser)
    parser.add_argument("--nodes", type=_from(1), metavar="N", required=True, help="nodes")
    parser.add_argument(
        "--gpus-per-node", type=_from(1), metavar="G", default=8, help="devices, and ranks, of each"
    )
    parser.add_argument("--cpu", action="store_true", help="ranks on CPUs: ask for no devices")
    parser.add_argument(
        "--starter",
        choices=("srun", "deepspeed"),
        default="srun",
        help="srun: a task per rank; deepspeed: its launcher on each node; default srun",
    )
    parser.add_argument("--time", default="24:00:00", help="time limit; default 24:00:00")
    parser.add_argument(
        "--max-restarts", type=_from(0), default=3, metavar="R", help="requeues of a lost run"
    )
    parser.add_argument(
        "--chain",
        type=_from(1),
        default=1,
        metavar="K",
        help="an array of K jobs, one after the other, in place of requeueing at the time limit",
    )
    parser.add_argument(
        "--option",
        dest="options",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="further option of sbatch, such as partition=gpu; may be repeated",
    )
    parser.add_argument("--profile", help="DeepSpeed profile by name or JSON file; else chosen")
    parser.add_argument("--run-dir", type=Path, help="default: experiments/<UTC time>-<hash>")
    parser.add_argument("--submit", action="store_true", help="queue it, and print its number")

    def run(arguments: argparse.Namespace) -> None:
        from cdrmix.cluster.slurm import make_batch, submit, write_script

        batch = make_batch(
            config=Path(arguments.config),
            overrides=arguments.overrides,
            profile=arguments.profile,
            run_dir=arguments.run_dir,
            nodes=arguments.nodes,
            ranks_per_node=arguments.gpus_per_node,
            on_cpu=arguments.cpu,
            starter=arguments.starter,
            time_limit=arguments.time,
            max_restarts=arguments.max_restarts,
            chain=arguments.chain,
            options=arguments.options,
        )
        script = write_script(batch)
        print(submit(script) if arguments.submit else script)

    parser.set_defaults(run=run)


def add_doctor(verbs: Verbs) -> None:
    """`cdrmix doctor`: is this machine, or are the hosts of a hostfile, ready for a run?"""
    parser = verbs.add_parser(
        "doctor",
        help="check this machine, or every host of a hostfile, before a run",
        description="Versions, devices, clocks, network, shared folder, free space, leftovers of "
        "earlier runs, and an all-reduce of 100 MB. Ends with 2 where something fails.",
    )
    parser.add_argument(
        "--hostfile", type=Path, metavar="HOSTS", help="lines NAME slots=N; default this machine"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("experiments"),
        metavar="DIR",
        help="where runs are written, which all hosts must see; default experiments",
    )
    parser.add_argument(
        "--nproc", type=_from(1), metavar="N", help="ranks of the all-reduce on each host"
    )
    parser.add_argument("--no-all-reduce", action="store_true", help="start no ranks")
    parser.add_argument(
        "--remove-leftovers",
        action="store_true",
        help="first end and delete what earlier runs of yours left",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON list")

    def run(arguments: argparse.Namespace) -> None:
        from cdrmix.cluster.doctor import as_json, as_table, examine, is_ready, remove_leftovers
        from cdrmix.cluster.hosts import read_hostfile

        hosts = read_hostfile(arguments.hostfile) if arguments.hostfile else []
        if arguments.remove_leftovers:
            for removed in remove_leftovers(hosts):
                print(f"removed {removed}", file=sys.stderr)
        findings = examine(
            hosts,
            folder=arguments.folder,
            ranks_per_host=arguments.nproc,
            with_all_reduce=not arguments.no_all_reduce,
        )
        print(as_json(findings) if arguments.json else as_table(findings))
        if not is_ready(findings):
            raise SystemExit(EXIT_USER_ERROR)

    parser.set_defaults(run=run)


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
        from cdrmix.data.build import build_dataset
        from cdrmix.data.inspection import inspect_folder
        from cdrmix.data.pool import available_cores
        from cdrmix.monitoring.data_page import write_data_page

        out = arguments.out or Path("data") / arguments.config.stem
        workers = available_cores() if arguments.workers is None else arguments.workers
        if wrong := [option for option in arguments.sbatch if "=" not in option]:
            parser.error(f"--sbatch {wrong[0]}: give OPTION=VALUE")
        sbatch = dict(option.lstrip("-").split("=", 1) for option in arguments.sbatch)
        # TERM stops a build as Ctrl-C does: at once, with its workers.
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            build_dataset(
                arguments.config, out, workers=workers, engine=arguments.engine, sbatch=sbatch
            )
        except KeyboardInterrupt:
            print(f"stopped; start again to go on from what is in {out}", file=sys.stderr)
            raise SystemExit(EXIT_STOPPED_BY_SIGNAL) from None
        finally:
            signal.signal(signal.SIGTERM, before)
        write_data_page(out, inspect_folder(out))
        print(out)

    parser.set_defaults(run=run)


def _add_data_inspect(kinds: Verbs) -> None:
    parser = kinds.add_parser("inspect", help="what a folder holds, and what was dropped and why")
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder of token shards")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--sequence-length",
        type=_from(1),
        default=256,
        metavar="T",
        help="tokens per sample that a mixture is counted in; default 256",
    )

    def run(arguments: argparse.Namespace) -> None:
        from cdrmix.data.inspection import inspect_folder, inspection_table
        from cdrmix.monitoring.data_page import DATA_PAGE

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
        from cdrmix.data.export_tar import export_tars

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


def add_generate(verbs: Verbs) -> None:
    """`cdrmix generate RUN_DIR`: go on from a prompt."""
    parser = verbs.add_parser("generate", help="continue a text with a trained model")
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="run directory or checkpoint")
    parser.add_argument("--prompt", default="", help="text to go on from; default none")
    parser.add_argument("--max-new-tokens", type=_from(1), default=128, help="default 128")
    parser.add_argument(
        "--temperature", type=_from(0.0), default=0.8, help="0 takes the likeliest; default 0.8"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling; default 0")
    _add_memory_flags(parser)

    def run(arguments: argparse.Namespace) -> None:
        if arguments.memory:
            _answer_with_memory(arguments)
            return
        if arguments.file or arguments.question or arguments.show_memory:
            parser.error("--file, --question and --show-memory go with --memory")
        from cdrmix.evaluation.trained import continue_text

        text = continue_text(
            arguments.run_dir,
            arguments.prompt,
            max_new_tokens=arguments.max_new_tokens,
            temperature=arguments.temperature,
            seed=arguments.seed,
        )
        print(arguments.prompt + text)

    parser.set_defaults(run=run)


def _add_memory_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--memory",
        action="store_true",
        help="read the prompt, or --file, however long, and answer --question from memory: the "
        "likeliest answer of a reasoning model after Stage B",
    )
    parser.add_argument("--file", type=Path, metavar="TEXT", help="text to read, in place of it")
    parser.add_argument("--question", default="", help="what is asked behind the text")
    parser.add_argument(
        "--show-memory", action="store_true", help="first what was written, retrieved and dropped"
    )


def _answer_with_memory(arguments: argparse.Namespace) -> None:
    from cdrmix.evaluation.answering import answer_from, read_text

    text = read_text(arguments.file) if arguments.file else arguments.prompt
    answered = answer_from(arguments.run_dir, text, arguments.question)
    if arguments.show_memory:
        print(answered.memory_lines() + "\n")
    print(answered.answer)


def add_evaluate(verbs: Verbs) -> None:
    """`cdrmix evaluate RUN_DIR`: held-out loss of a trained model, or its reasoning."""
    parser = verbs.add_parser(
        "evaluate",
        help="held-out loss and routing of a trained model, or how it reasons over long texts",
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="run directory or checkpoint")
    parser.add_argument(
        "--max-tokens", type=_from(1), help="most tokens read; default: as at the end of the run"
    )
    parser.add_argument(
        "--suite",
        choices=("text", "reasoning"),
        default="text",
        help="text: held-out loss (default); reasoning: tasks by length, with the backbone alone "
        "beside it, stored as RUN_DIR/reasoning.json",
    )
    parser.add_argument(
        "--examples",
        type=_from(1),
        default=32,
        metavar="N",
        help="texts of each task and length in the reasoning suite; default 32",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")

    def run(arguments: argparse.Namespace) -> None:
        if arguments.suite == "reasoning":
            from cdrmix.evaluation.long_context import as_json, evaluate_reasoning, table

            rows = evaluate_reasoning(arguments.run_dir, num_examples=arguments.examples)
            print(as_json(rows) if arguments.json else table(rows))
            return
        from cdrmix.evaluation.trained import evaluate_run

        evaluation = evaluate_run(arguments.run_dir, max_tokens=arguments.max_tokens)
        print(json.dumps(evaluation.as_json()) if arguments.json else evaluation.table())

    parser.set_defaults(run=run)


def add_report(verbs: Verbs) -> None:
    """`cdrmix report RUN_DIR`: write report.html anew."""
    parser = verbs.add_parser("report", help="write the report of a run, also of one still going")
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="run directory")

    def run(arguments: argparse.Namespace) -> None:
        from cdrmix.monitoring.report import write_report

        print(write_report(arguments.run_dir))

    parser.set_defaults(run=run)


VERBS: tuple[Callable[[Verbs], None], ...] = (
    add_config,
    add_plan,
    add_rehearse,
    add_launch,
    add_slurm,
    add_doctor,
    add_data,
    add_generate,
    add_evaluate,
    add_report,
)

if __name__ == "__main__":
    sys.exit(main())
