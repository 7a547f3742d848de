"""Flags that several verbs share."""

from __future__ import annotations

import argparse
import difflib
import math
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from cdrmix.errors import ConfigError, StateError

# argparse has no public name for it, and its class cannot be indexed where Python runs.
Verbs: TypeAlias = "argparse._SubParsersAction[Parser]"


# Names of other trainers for verbs.
_COMMON_VERBS = {
    **dict.fromkeys(("pretrain", "finetune", "run", "start", "fit"), "train"),
    **dict.fromkeys(("eval", "test", "benchmark"), "evaluate"),
    **dict.fromkeys(("infer", "predict", "chat"), "generate"),
}


class Parser(argparse.ArgumentParser):
    """Parser that says what a misspelt verb, choice or flag may mean; so do its subparsers.

    Flags cannot be shortened: a flag that is added later would change the meaning of a script.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        """As argparse.ArgumentParser, but for `allow_abbrev`."""
        super().__init__(*args, **{"allow_abbrev": False, **settings})
        self._words: list[str] = []

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Ends with code 2 where an argument is unknown: as the verb that has no such flag, where
        argparse would show the usage of the whole program."""
        self._words = list(args or ())
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {shlex.join(unknown)}")
        return known, unknown

    def error(self, message: str) -> NoReturn:
        """Prints usage and message, with a near choice or flag, and exits with code 2."""
        # argparse has no hook but its message, and quotes the choices in some versions of Python.
        wrong = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)$", message)
        if wrong:
            choices = [choice.strip(" '") for choice in wrong[2].split(",")]
            meant = {choice: choice for choice in choices}
            meant |= {name: verb for name, verb in _COMMON_VERBS.items() if verb in choices}
            near = difflib.get_close_matches(wrong[1].lower(), meant, n=1)
            message += f". Did you mean '{meant[near[0]]}'?" if near else ""
        # A flag that is missing may stand there misspelt.
        elif message.startswith(("unrecognized arguments", "the following arguments are required")):
            hints = self._hints()
            message += f". {' '.join(hints)}" if hints else ""
        super().error(message)

    def _hints(self) -> list[str]:
        """Tells what each unknown flag of the command line may mean."""
        hints = []
        for word, following in zip(self._words, [*self._words[1:], "--"], strict=False):
            flag, equals, value = word.partition("=")
            if word == "--":
                break
            if flag.startswith("--") and flag not in self._option_string_actions:
                if not equals and not following.startswith("-"):
                    value = following
                hints.append(self._meant(flag[2:].replace("_", "-").lower(), value))
        return [hint for hint in hints if hint]

    def _meant(self, name: str, value: str) -> str:
        """Tells what a flag without its dashes may mean; empty where nothing is near."""
        own = [flag for flag in self._option_string_actions if flag.startswith("--")]
        meant = self._meant_elsewhere(value)
        meant |= {flag[2:]: f"Did you mean {flag}?" for flag in own}
        longer = [flag for flag in own if flag[2:].startswith(name)]
        if longer and name not in meant:
            return f"Did you mean {' or '.join(longer)}?"
        # A name that is there is its own nearest.
        near = difflib.get_close_matches(name, meant, n=1, cutoff=0.7)
        return meant[near[0]] if near else ""

    def _meant_elsewhere(self, value: str) -> dict[str, str]:
        """Names of sbatch's options and of keys, and how --option and --set are given them."""
        meant = {}
        if "--option" in self._option_string_actions:
            from cdrmix.cluster.sbatch_options import NAMES, OF_FLAGS

            for name in NAMES:
                given = shlex.quote(f"{name}={value}" if value else name)
                meant[name] = f"Did you mean --option {given}?"
            meant |= {name: advice[0].upper() + advice[1:] for name, advice in OF_FLAGS.items()}
        if "--set" in self._option_string_actions:
            from cdrmix.config.common_names import COMMON_NAMES

            keys = {key.rpartition(".")[2]: key for key in COMMON_NAMES.values()} | COMMON_NAMES
            for name, key in keys.items():
                given = shlex.quote(f"{key}={value or 'VALUE'}")
                meant[name.replace("_", "-")] = f"Did you mean --set {given}?"
        return meant


class RankParser(argparse.ArgumentParser):
    """Parser of one rank's command line, with the flags that launchers add to it.

    It raises errors, for the script to print once and not on every rank.
    """

    def __init__(self, **settings: Any) -> None:
        """As argparse.ArgumentParser."""
        super().__init__(**settings)
        # The environment holds the same numbers.
        for flag in ("--local_rank", "--local-rank"):
            self.add_argument(flag, type=int, default=0, help=argparse.SUPPRESS)
        self.add_argument("--deepspeed_mpi", action="store_true", help=argparse.SUPPRESS)

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError."""
        raise ConfigError(f"{message}. Try --help")


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


def add_checkpoint_flag(parser: argparse.ArgumentParser) -> None:
    """Adds --checkpoint, which is None where it is not given."""
    which = (
        "`last`, the newest that is whole (default), `best`, that with the lowest held-out loss, "
        "or the step of one in the run directory"
    )
    parser.add_argument("--checkpoint", type=_which, metavar="best|last|STEP", help=which)


def add_weights_flag(parser: argparse.ArgumentParser) -> None:
    """Adds --weights, which is None where it is not given."""
    average = (
        "`trained` (default), or `ema`, the average of the weights that a run with "
        "training.ema_decay keeps"
    )
    parser.add_argument("--weights", choices=("trained", "ema"), help=average)


def add_base_flag(parser: argparse.ArgumentParser) -> None:
    """Adds --base, which is None where it is not given."""
    folder = (
        "folder of the base of a run with model.lora, if it is no longer where the run has read "
        "it; compared by its digest"
    )
    parser.add_argument("--base", type=Path, metavar="DIR", help=folder)


def check_run(place: Path) -> None:
    """Refuses a run directory or checkpoint that is not there, before torch is imported for it."""
    if not place.exists():
        raise StateError(
            f"{place}: there is no such folder, and it holds no checkpoint. Give a run directory, "
            "or one of its checkpoints/<step> folders"
        )


def add_plugins_flag(parser: argparse.ArgumentParser) -> None:
    """Adds --plugins, which is None where it is not given.

    The folder that a checkpoint names is not taken: it may be of anyone.
    """
    folder = "folder of Python files of yours, whose classes a suite or a model names"
    parser.add_argument("--plugins", type=_folder, metavar="DIR", help=folder)


def add_branch_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of acting by branches, of a reasoning model."""
    flag = parser.add_argument
    flag(
        "--branches",
        action="store_true",
        help="have the memory agent try its likeliest actions in one batch and take the first that "
        "its value head accepts, instead of the likeliest",
    )
    least = "advantage from which a branch is accepted; default: accept_threshold of the run"
    flag("--accept-threshold", type=at_least(-math.inf), metavar="A", help=least)


def _folder(text: str) -> Path:
    path = Path(text).absolute()
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{path}: there is no such folder")
    return path


def _which(text: str) -> str:
    if text in ("best", "last"):
        return text
    if not re.fullmatch(r"\d{1,18}", text):
        raise argparse.ArgumentTypeError(f"given {text}, allowed is best, last or the step of one")
    return str(int(text))
