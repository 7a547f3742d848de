"""Flags that several verbs share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeAlias

# argparse has no public name for it, and its class cannot be indexed where Python runs.
Verbs: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_config_flags(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Adds the flags of a verb that reads a configuration: --config FILE, --set PATH=VALUE."""
    parser.add_argument("--config", metavar="FILE", required=required, help="YAML configuration")
    value = "override one value, such as training.seed=7; may be repeated"
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
