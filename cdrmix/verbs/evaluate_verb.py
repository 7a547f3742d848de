"""The verb `cdrmix evaluate`: a suite of evaluations on a trained model, in one process.

`launch/evaluate.py` takes the same flags on many ranks.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cdrmix.config.evaluation import SUITE_NAMES, SuiteName
from cdrmix.config.plugin import is_plugin
from cdrmix.config.plugin_folder import use_plugin_folder
from cdrmix.config.yaml_text import parse_scalar
from cdrmix.errors import ConfigError
from cdrmix.evaluation.suite import Request, suite_of
from cdrmix.verbs.flags import (
    Verbs,
    add_base_flag,
    add_branch_flags,
    add_checkpoint_flag,
    add_plugins_flag,
    add_weights_flag,
    at_least,
)

_SUITES = (
    "perplexity: held-out loss (default); zero-shot: tasks of lm-evaluation-harness; code: "
    "programs, run in a sandbox; infill: lines of held-out documents, left out and written by the "
    "model; reasoning: tasks by length, with the backbone alone beside it, stored as "
    "RUN_DIR/reasoning.json; routing: use of the experts; package.module:Name: a suite of yours"
)
# Flags that some suites alone take.
_SUITES_OF_FLAGS: dict[str, tuple[SuiteName, ...]] = {
    "data": ("perplexity", "infill", "routing"),
    "max_tokens": ("perplexity", "routing"),
    "examples": ("infill", "reasoning"),
    "tasks": ("perplexity", "zero-shot", "code", "reasoning"),
    "write_tasks": ("reasoning",),
    "controls": ("reasoning",),
    "held_out_wording": ("reasoning",),
    "lengths": ("reasoning",),
    "branches": ("reasoning",),
    "accept_threshold": ("reasoning",),
    "execute_code": ("code",),
    "sandbox": ("code",),
    "base": ("perplexity", "zero-shot", "code", "infill", "routing"),
    "weights": ("perplexity", "zero-shot", "code", "infill", "routing"),
}
# Those of them that a suite of a user's may read.
_OF_PLUGINS = ("data", "examples", "tasks", "execute_code", "sandbox", "base", "weights")
# Flags that become options of the suite.
_OPTIONS = (
    "max_tokens",
    "write_tasks",
    "controls",
    "held_out_wording",
    "lengths",
    "branches",
    "accept_threshold",
)


def add_evaluate(verbs: Verbs) -> None:
    """`cdrmix evaluate RUN_DIR|EXPORT --suite NAME`."""
    parser = verbs.add_parser(
        "evaluate",
        help="scores of a trained model by a suite: held-out loss, tasks, code, routing",
        description="Loads a run, an export or a Hugging Face model, asks the suite, and prints a "
        "table of scores with 95 % intervals. The result is kept in the evaluations folder of a "
        "run directory. On many devices: deepspeed launch/evaluate.py, with the same flags.",
    )
    add_evaluation_flags(parser)
    parser.set_defaults(run=partial(_evaluate, parser))


def add_evaluation_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say what is judged, and by what."""
    flag = parser.add_argument
    places = "run directory, checkpoint, folder of cdrmix export, or of a Hugging Face model"
    flag("source", type=Path, metavar="RUN_DIR", help=places)
    flag("--suite", type=_suite, metavar="NAME", default="perplexity", help=_SUITES)
    add_plugins_flag(parser)
    add_checkpoint_flag(parser)
    add_base_flag(parser)
    add_weights_flag(parser)
    folder = "built folder, or its URL, with held-out text; default: that of the training"
    flag("--data", metavar="DIR", help=folder)
    tasks = "tasks of your own: a folder, or a file with a JSON object per line"
    flag("--tasks", type=Path, metavar="PATH", help=tasks)
    flag("--limit", type=at_least(1), metavar="N", help="most examples of each task")
    flag("--seed", type=at_least(0), default=0, help="of what the suite draws; default 0")
    flag("--max-tokens", type=at_least(1), help="most held-out tokens read")
    flag("--examples", type=at_least(1), metavar="N", help="the same as --limit")
    flag("--write-tasks", type=Path, metavar="FILE", help="write the suite's tasks to a file")
    rivals = "answer the same texts without memory, from all of them, at random and more"
    flag("--controls", action="store_true", help=rivals)
    unseen = "texts of names, sentences and questions that training made none of"
    flag("--held-out-wording", action="store_true", help=unseen)
    windows = "lengths of the texts, in windows; default: 1 2 4 8 16"
    flag("--lengths", type=at_least(1), nargs="+", metavar="N", help=windows)
    add_branch_flags(parser)
    run = "run the programs that the model writes, in a sandbox"
    flag("--execute-code", action="store_true", help=run)
    boxes = "kernel: rules of the Linux kernel (default); bwrap: bubblewrap, to be installed"
    flag("--sandbox", choices=("kernel", "bwrap"), help=boxes)
    option = "an option of the suite; a wrong name lists those that there are; repeatable"
    flag("--option", metavar="NAME=VALUE", action="append", default=[], help=option)
    samples = "samples of a forward pass, which changes nothing but the time; default 8"
    flag("--batch-size", type=at_least(1), default=8, metavar="N", help=samples)
    longest = "most tokens of an input; default: as in the training"
    flag("--max-length", type=at_least(8), metavar="N", help=longest)
    flag("--json", action="store_true", help="print one JSON object")
    flag("--out", type=Path, metavar="FILE", help="write the result there too, as JSON")


def asked_of(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> Any:
    """Evaluation that the flags ask for, an `Asked`; the parser's error where they do not go
    together.

    Raises:
        ConfigError: if an option is not one of the suite.
    """
    from cdrmix.sessions.evaluation import Asked

    suite: SuiteName = arguments.suite
    use_plugin_folder(arguments.plugins)
    for name, suites in _SUITES_OF_FLAGS.items():
        takes = name in _OF_PLUGINS if is_plugin(suite) else suite in suites
        if _is_given(getattr(arguments, name)) and not takes:
            flag = f"--{name.replace('_', '-')}"
            parser.error(f"{flag} goes with --suite {' and '.join(suites)}")
    if arguments.accept_threshold is not None and not arguments.branches:
        parser.error("--accept-threshold goes with --branches")
    if arguments.limit and arguments.examples:
        parser.error("--limit and --examples are the same: give one of them")
    limit = arguments.limit or arguments.examples
    chosen = limit or arguments.write_tasks or arguments.lengths
    if suite == "reasoning" and arguments.tasks and chosen:
        parser.error(
            "--tasks reads every row of its file, without --examples, --lengths or --write-tasks"
        )
    if suite == "infill" and limit == 1:
        parser.error("--suite infill needs --examples 2 or more: suffixes are swapped")
    options = {name: getattr(arguments, name) for name in _OPTIONS}
    options = {name: value for name, value in options.items() if _is_given(value)}
    request = Request(
        tasks=arguments.tasks,
        limit=limit,
        data=arguments.data,
        seed=arguments.seed,
        execute_code=arguments.execute_code,
        sandbox=arguments.sandbox or "kernel",
        options=options | _given_options(suite, arguments.option),
    )
    return Asked(
        suite=suite,
        request=request,
        source=arguments.source,
        checkpoint=arguments.checkpoint,
        weights=arguments.weights,
        base=arguments.base,
        batch_size=arguments.batch_size,
        max_length=arguments.max_length,
        out=arguments.out,
    )


def _is_given(value: object) -> bool:
    return value is not None and value is not False  # 0 is given


def _suite(name: str) -> str:
    if name not in SUITE_NAMES and not is_plugin(name):
        known = ", ".join((*SUITE_NAMES, "package.module:Name"))
        # In argparse's words, of which the parser makes a near choice.
        raise argparse.ArgumentTypeError(f"invalid choice: {name!r} (choose from {known})")
    return name


def _given_options(suite: SuiteName, words: Sequence[str]) -> dict[str, Any]:
    """Values of --option by name; those of a suite are its own business."""
    known: dict[str, str] = getattr(suite_of(suite), "options", {}) if words else {}
    options = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name not in known:
            there = "; ".join(f"{each}: {meaning}" for each, meaning in known.items())
            raise ConfigError(
                f"--option {word}: --suite {suite} takes no such NAME=VALUE. "
                + (f"It takes {there}" if there else "It takes none")
            )
        options[name] = parse_scalar(value)
    return options


def _evaluate(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    from cdrmix.sessions.evaluation import evaluate_whole, keep

    asked = asked_of(parser, arguments)
    measured = evaluate_whole(asked)
    # Printed first: the run directory may be read-only, and a suite takes minutes.
    print_result(measured.result, as_json=arguments.json)
    keep(measured, asked.out)


def print_result(result: Any, *, as_json: bool) -> None:
    """Prints a `SuiteResult` as a table for a person, or as one JSON object."""
    print(json.dumps(result.as_json()) if as_json else result.table(), flush=True)
