"""Flags that several verbs share."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable
from typing import NoReturn, TypeAlias

# argparse has no public name for it, and its class cannot be indexed where Python runs.
Verbs: TypeAlias = "argparse._SubParsersAction[Parser]"


# Names of other trainers for verbs.
_COMMON_VERBS = {
    **dict.fromkeys(("pretrain", "finetune", "run", "start", "fit"), "train"),
    **dict.fromkeys(("eval", "test", "benchmark"), "evaluate"),
    **dict.fromkeys(("infer", "predict", "chat"), "generate"),
}


class Parser(argparse.ArgumentParser):
    """Parser that says which verb or choice a misspelt one may mean; so do its subparsers."""

    def error(self, message: str) -> NoReturn:
        """Prints usage and message, with a near choice, and exits with code 2."""
        # argparse has no hook but its message, and quotes the choices in some versions of Python.
        wrong = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)$", message)
        if wrong:
            choices = [choice.strip(" '") for choice in wrong[2].split(",")]
            meant = {choice: choice for choice in choices}
            meant |= {name: verb for name, verb in _COMMON_VERBS.items() if verb in choices}
            near = difflib.get_close_matches(wrong[1].lower(), meant, n=1)
            message += f". Did you mean '{meant[near[0]]}'?" if near else ""
        super().error(message)


def add_config_flags(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Adds the flags of a verb that reads a configuration: --config FILE, --set PATH=VALUE."""
    parser.add_argument("--config", metavar="FILE", required=required, help="YAML configuration")
    value = "override one value, such as training.seed=7, a list or section as YAML; repeatable"
    parser.add_argument(
        "--set", metavar="PATH=VALUE", dest="overrides", action="append", default=[], help=value
    )


def at_least(lowest: int | float) -> Callable[[str], int | float]:
    """Returns a reader of numbers of the type of `lowest`, and not below it."""

    def number(text: str) -> int | float:
        value = type(lowest)(text)
        # Not `value < lowest`, which is false for nan.
        if not value >= lowest:
            raise argparse.ArgumentTypeError(f"given {text}, allowed is a number from {lowest}")
        return value

    return number
