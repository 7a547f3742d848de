"""The `cdrmix` command. Each verb parses its flags and calls one function of the package.

A new verb is a function `add_<verb>(verbs)` that makes its parser and sets `run`, and a name in
`VERBS`; those of data and clusters are in cdrmix/verbs. `main` alone prints errors of users. Verbs
import inside `run`, because torch takes seconds and `cdrmix --help` needs none of it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdrmix import __version__, log
from cdrmix.errors import EXIT_DONE, TrainingError
from cdrmix.planning.cluster import PRESETS
from cdrmix.verbs.cluster_verbs import add_doctor, add_launch, add_slurm, add_train
from cdrmix.verbs.compare_verb import add_compare
from cdrmix.verbs.data_verbs import add_data
from cdrmix.verbs.evaluate_verb import add_evaluate
from cdrmix.verbs.export_verb import add_export
from cdrmix.verbs.flags import (
    Parser,
    Verbs,
    add_base_flag,
    add_branch_flags,
    add_checkpoint_flag,
    add_config_flags,
    add_weights_flag,
    at_least,
    check_run,
)
from cdrmix.verbs.live_verbs import add_serve, add_watch
from cdrmix.verbs.plugins_verb import add_plugins
from cdrmix.verbs.track_verb import add_track

if TYPE_CHECKING:
    from cdrmix.config.schema import Config
    from cdrmix.planning.cluster import Cluster


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code of the process.

    Args:
        argv: arguments after the program name; those of the process when left out.
    """
    parser = Parser(
        prog="cdrmix", description="Trains RWKX-V language models under the DeepSpeed launcher."
    )
    parser.add_argument("--version", action="version", version=f"cdrmix {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for add_verb in VERBS:
        add_verb(verbs)
    arguments = parser.parse_args(argv)
    log.configure()
    try:
        arguments.run(arguments)
        sys.stdout.flush()
    except TrainingError as error:
        log.print_error(error)
        return error.exit_code
    except BrokenPipeError:
        # The reader of the output left (`cdrmix config ... | head`). Python would try to flush
        # stdout once more at exit, and fail with a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_DONE


def add_config(verbs: Verbs) -> None:
    """`cdrmix config`: print the resolved configuration, its schema, or its reference."""
    parser = verbs.add_parser(
        "config",
        help="print a configuration with every default and derived value, or what a key means",
    )
    flag = parser.add_argument
    flag("--schema", action="store_true", help="print the JSON schema, for editors to complete by")
    keys = "print the reference of all keys, docs/configuration.md"
    flag("--reference", action="store_true", help=keys)
    key = "print type, unit, default, range and meaning of a key, or of all keys of a section"
    flag("--explain", metavar="KEY", help=key)
    add_config_flags(parser, required=False)

    def run(arguments: argparse.Namespace) -> None:
        from cdrmix.config.load import load_config, schema_json
        from cdrmix.config.reference import explain, reference_markdown
        from cdrmix.config.yaml_text import dump_yaml

        given = (arguments.config, arguments.schema, arguments.reference, arguments.explain)
        if sum(value not in (None, False) for value in given) != 1:
            parser.error("give --config FILE or --schema or --reference or --explain KEY")
        if arguments.schema:
            print(schema_json(), end="")
        elif arguments.reference:
            print(reference_markdown(), end="")
        elif arguments.explain is not None:
            print(explain(arguments.explain))
        else:
            # with defaults and derived values: it loads to an equal configuration
            config = load_config(arguments.config, arguments.overrides)
            print(dump_yaml(config.model_dump()), end="")

    parser.set_defaults(run=run)


def add_plan(verbs: Verbs) -> None:
    """`cdrmix plan`: lay a run out on a cluster, before it is queued."""
    parser = verbs.add_parser(
        "plan",
        help="profile, degrees, memory and time of a run on a cluster, without a GPU",
        description="Compares all legal layouts of a configuration on a cluster by memory and time "
        "and picks one, with its reasons. Degrees and batch sizes that are given are kept. "
        "Exit code 2 where no layout fits, or Stage B does not: the nearest is printed, and what "
        "would have to change.",
    )
    _add_plan_flags(parser)
    flag = parser.add_argument
    flag("--explain", action="store_true", help="also every buffer, what is exchanged, assumptions")
    flag("--json", action="store_true", help="print one JSON object")
    rate = (
        "failures that interrupt the run per hour of each device, as failures.per_device_hour; "
        "default: a published rate"
    )
    flag("--failure-rate", metavar="R", help=rate)
    measured = "run directory whose times of saves and restarts are taken where no key gives them"
    flag("--measured", type=Path, metavar="RUN_DIR", help=measured)

    def run(arguments: argparse.Namespace) -> None:
        from cdrmix.planning.comparison import check_fits, compare, plan_text
        from cdrmix.planning.failures import expectation, failure_facts, measured_times

        if arguments.failure_rate is not None:
            arguments.overrides.append(f"failures.per_device_hour={arguments.failure_rate}")
        measured = arguments.measured and measured_times(arguments.measured)
        compared = compare(*_planned(arguments))
        told = None
        if compared.fits:
            told = expectation(compared.config, compared.cluster, compared.plan, measured)
        if arguments.json:
            values = compared.to_json() | {"goodput": told and told.to_json()}
            print(json.dumps(values), flush=True)
        else:
            facts = failure_facts(told, explain=arguments.explain) if told else ()
            print(
                plan_text(compared, explain=arguments.explain, facts=facts, stream=sys.stdout),
                flush=True,
            )
        check_fits(compared)  # the page first, which says why, and then exit code 2

    parser.set_defaults(run=run)


def _add_plan_flags(parser: argparse.ArgumentParser) -> None:
    add_config_flags(parser)
    flag = parser.add_argument
    flag("--nodes", type=int, metavar="N", required=True, help="number of nodes")
    devices = "devices, and ranks, of each"
    flag("--gpus-per-node", type=int, metavar="G", required=True, help=devices)
    *others, last = PRESETS
    flag("--gpu", metavar="PRESET", help=f"{', '.join(others)} or {last}")
    memory = (
        "memory of a device as torch reports it; without --gpu, the speed assumed is that of the "
        "smallest GPU above with as much"
    )
    flag("--gpu-memory-gib", type=float, metavar="M", help=memory)
    hosts = "memory of a node outside its devices; default: that of the preset"
    flag("--host-memory-gib", type=float, metavar="M", help=hosts)


def _planned(arguments: argparse.Namespace) -> tuple[Config, Cluster]:
    from cdrmix.config.load import load_config
    from cdrmix.hooks.source import check_sources
    from cdrmix.planning.cluster import make_cluster

    config = load_config(arguments.config, arguments.overrides)
    check_sources(config.hooks)
    names = ("nodes", "gpus_per_node", "gpu", "gpu_memory_gib", "host_memory_gib")
    return config, make_cluster(**{name: getattr(arguments, name) for name in names})


def add_rehearse(verbs: Verbs) -> None:
    """`cdrmix rehearse`: run a plan's layout, shrunk, on this machine's processors."""
    parser = verbs.add_parser(
        "rehearse",
        help="run the layout of a plan, shrunk, on this machine, against one process",
        description="Plans a run as `cdrmix plan` does, shrinks the plan to at most 8 processes "
        "with every axis kept, trains, saves, resumes, and compares with one process. Says what "
        "was exercised and what was not.",
    )
    _add_plan_flags(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")

    def run(arguments: argparse.Namespace) -> None:
        from cdrmix.sessions.rehearse import rehearse

        rehearsed = rehearse(*_planned(arguments))
        text = rehearsed.as_text(sys.stdout)
        print(json.dumps(rehearsed.to_json()) if arguments.json else text)
        if not rehearsed.passed:
            raise SystemExit(1)

    parser.set_defaults(run=run)


# Defaults of `cdrmix generate`. Flags default to None, which tells a flag that is not there from
# one that repeats the default: with --memory none is allowed.
_SAMPLING: dict[str, Any] = {"max_new_tokens": 128, "temperature": 0.8, "seed": 0}


def add_generate(verbs: Verbs) -> None:
    """`cdrmix generate RUN_DIR`: go on from a prompt."""
    parser = verbs.add_parser("generate", help="continue a text with a trained model")
    flag = parser.add_argument
    flag("run_dir", type=Path, metavar="RUN_DIR", help="run directory or checkpoint")
    add_checkpoint_flag(parser)
    add_base_flag(parser)
    add_weights_flag(parser)
    flag("--prompt", default="", help="text to go on from; default none")
    flag("--max-new-tokens", type=at_least(1), help="default 128")
    flag("--temperature", type=at_least(0.0), help="0 takes the likeliest; default 0.8")
    flag("--seed", type=int, help="seed of the sampling; default 0")
    ahead = (
        "take the likeliest text, several tokens in each pass: a model with model.mtp guesses "
        "ahead and verifies its guesses, and says how many held"
    )
    flag("--speculate", action="store_true", help=ahead)
    flag(
        "--memory",
        action="store_true",
        help="read the prompt, or --file, however long, and answer --question from memory: the "
        "likeliest answer of a reasoning model after Stage B",
    )
    flag("--file", type=Path, metavar="TEXT", help="text to read, in place of it")
    flag("--question", default="", help="what is asked behind the text")
    flag(
        "--index",
        type=Path,
        metavar="DIR",
        help="memory that lasts: what is written goes there, and answers come from what earlier "
        "texts left there too; with it a text or a question alone is enough",
    )
    flag("--faiss", action="store_true", help="search the index through FAISS ([faiss] extra)")
    flag("--show-memory", action="store_true", help="first what was written, retrieved and dropped")
    add_branch_flags(parser)
    parser.set_defaults(run=partial(_generate, parser))


def _generate(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    if arguments.accept_threshold is not None and not arguments.branches:
        parser.error("--accept-threshold goes with --branches")
    if arguments.faiss and not arguments.index:
        parser.error("--faiss goes with --index")
    flags = {name: getattr(arguments, name) for name in _SAMPLING}
    sampling = {name: value for name, value in flags.items() if value is not None}
    if not arguments.memory:
        of_memory = ("file", "question", "show_memory", "branches", "index")
        if any(getattr(arguments, flag) for flag in of_memory):
            parser.error(
                "--file, --question, --show-memory, --branches and --index go with --memory"
            )
        settings = _SAMPLING | sampling
        settings |= {"weights": arguments.weights or "trained"}
        if arguments.speculate:
            if arguments.temperature or arguments.base or arguments.seed is not None:
                parser.error(
                    "--speculate takes the likeliest text of a model of its own head: it goes "
                    "without --base and --seed, and with --temperature 0 alone"
                )
            settings = {name: settings[name] for name in ("max_new_tokens", "weights")}
            place = _checkpoint_place(arguments)
            from cdrmix.evaluation.trained import continue_speculating

            text = continue_speculating(place, arguments.prompt, **settings)
        else:
            place = _checkpoint_place(arguments)
            from cdrmix.evaluation.trained import continue_text

            text = continue_text(place, arguments.prompt, base=arguments.base, **settings)
        print(arguments.prompt + text)
        return
    if sampling or arguments.base or arguments.weights or arguments.speculate:
        parser.error(
            "--base, --weights, --max-new-tokens, --temperature, --seed and --speculate go without "
            "--memory"
        )
    place = _checkpoint_place(arguments)
    from cdrmix.stage_b.answering import Lasting, answer_with, read_question_text
    from cdrmix.stage_b.long_context import load_reader

    name = str(arguments.file or "the prompt")
    # The text first: a file that cannot be read is told before the reader is loaded.
    text = read_question_text(arguments.file) if arguments.file else arguments.prompt
    answer = answer_with(
        load_reader(place, accept_threshold=arguments.accept_threshold),
        text,
        arguments.question,
        branches=arguments.branches,
        lasting=Lasting(arguments.index, name, arguments.faiss) if arguments.index else None,
    )
    if arguments.show_memory:
        print(answer.memory_lines() + "\n")
    if arguments.question:
        print(answer.answer)
    elif not arguments.show_memory:
        print(f"{arguments.index}: {answer.index}")


def _checkpoint_place(arguments: argparse.Namespace) -> Path:
    """Place of the checkpoint that a verb is to load; refused before torch is imported if there is
    none."""
    from cdrmix.checkpoint.trained_run import check_holds_checkpoint, checkpoint_place

    check_run(arguments.run_dir)
    place = checkpoint_place(arguments.run_dir, arguments.checkpoint or "last")
    check_holds_checkpoint(place)
    return place


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
    add_train,
    add_launch,
    add_slurm,
    add_doctor,
    add_data,
    add_generate,
    add_evaluate,
    add_compare,
    add_track,
    add_watch,
    add_serve,
    add_export,
    add_report,
    add_plugins,
)

if __name__ == "__main__":
    sys.exit(main())
