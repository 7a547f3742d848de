"""Arguments and variables of a start's ranks, in a private file that all hosts see.

A command line passes shells on its way (pdsh gives its words to one on each host, unquoted) and is
shown by ps to every user. So the launcher's holds neither values of the user's nor secrets: each
rank begins as launch/rank.py, which takes them from the file and becomes the script.

Variables of the ranks: those of the configuration, and the file of DeepSpeed's launcher.
"""

from __future__ import annotations

import json
import os
import platform
import re
import stat
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from cdrmix.config.redaction import REDACTED
from cdrmix.config.schema import Config
from cdrmix.errors import EXIT_USER_ERROR, ConfigError
from cdrmix.log import get_logger

FOLDER_VARIABLE = "CDRMIX_LAUNCH_FOLDER"
_FLAG = "--handed-over"
_FILE = "ranks.json"
# A file server may show a new file to other hosts some seconds late.
_SECONDS_TO_SEE = 20.0
# Variables of a rank that the launcher decides, whatever was asked for.
_OF_THE_LAUNCHER = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "CROSS_RANK"),
    *("CROSS_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
)


def hand_over(
    folder: Path, *, script: Path, arguments: Sequence[str], variables: Mapping[str, str]
) -> None:
    """Write what the ranks of a start take over.

    Args:
        folder: of this start alone, named by FOLDER_VARIABLE in the ranks' environment.
        script: which each rank becomes.
        arguments: its command line.
        variables: added to each rank's environment.
    """
    order = {"script": str(script), "arguments": [*arguments], "variables": {**variables}}
    write_private(folder / _FILE, json.dumps(order))


def write_private(path: Path, text: str) -> None:
    """Write a file that its owner alone can read, from its first byte on."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)


def become_rank() -> NoReturn:
    """Turn this process into the script that was handed over, with its variables."""
    folder = Path(os.environ.get(FOLDER_VARIABLE, ""))
    order = _order(folder)
    if order is None:
        host = platform.node()
        print(
            f"error: {host}: cannot read {folder / _FILE}, which was written for it. All hosts of "
            "a run must see its run directory. Try `cdrmix doctor --hostfile HOSTS --folder DIR`",
            file=sys.stderr,
        )
        sys.exit(EXIT_USER_ERROR)
    wanted = {n: v for n, v in order["variables"].items() if n not in _OF_THE_LAUNCHER}
    if "PATH" in wanted:  # the interpreter's programs (ninja, for one) are found all the same
        wanted["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), wanted["PATH"]])
    os.environ.update(wanted)
    # a new program, so that its loader and libraries see the variables from their beginning
    os.execv(sys.executable, [sys.executable, "-u", order["script"], _FLAG, *sys.argv[1:]])


def arguments_of(words: Sequence[str]) -> list[str]:
    """Command line of a script: the one that was handed over where it was started by `become_rank`,
    with what the launcher added."""
    if _FLAG not in words:
        return list(words)
    order = _order(Path(os.environ[FOLDER_VARIABLE]))
    assert order is not None, "read a moment ago by the same process"
    return [*order["arguments"], *(word for word in words if word != _FLAG)]


def _order(folder: Path) -> dict[str, Any] | None:
    deadline = time.monotonic() + _SECONDS_TO_SEE
    while True:
        try:
            order: dict[str, Any] = json.loads((folder / _FILE).read_text(encoding="utf-8"))
        except OSError:
            if not folder.name or time.monotonic() > deadline:
                return None
            time.sleep(0.5)
        else:
            return order


logger = get_logger(__name__)
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*")
# What a shell reads between double quotes, which is where DeepSpeed puts an unusual value.
_SPECIAL = re.compile(r'([\\"$`])')


def launch_environment(config: Config) -> dict[str, str]:
    """Variables of `launch.environment`, those that a snapshot left out taken from ours.

    Raises:
        ConfigError: naming what a snapshot left out and nobody gives.
    """
    variables = dict(config.launch.environment)
    redacted = [name for name, value in variables.items() if value == REDACTED]
    missing = [name for name in redacted if name not in os.environ]
    if missing:
        raise ConfigError(
            "\n".join(
                f"launch.environment.{name} = {REDACTED}: a snapshot holds no values. Give --set "
                f"launch.environment.{name}=VALUE, or export {name}"
                for name in missing
            )
        )
    return variables | {name: os.environ[name] for name in redacted}


def users_files() -> list[Path]:
    """The user's ~/.deepspeed_env, if there is one that nobody else may write.

    DeepSpeed also takes one of the present folder. Such a file may have come with somebody's
    checkout, and would choose libraries and programs for every rank, so here it is left aside.
    """
    home = Path.home() / ".deepspeed_env"
    here = Path.cwd() / ".deepspeed_env"
    if here != home and here.exists():
        logger.warning(
            "%s: not taken over, because it may have come with the checkout. Put its lines into "
            "~/.deepspeed_env, or into launch.environment of the configuration",
            here,
        )
    if not home.is_file():
        return []
    entry = home.stat()
    if entry.st_uid not in (os.getuid(), 0) or entry.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"{home}: others may write it, and it chooses programs for every rank. Try: chmod "
            f"go-w {home}"
        )
    return [home]


def write_environment_file(
    path: Path, *, inherited: Sequence[Path], variables: Mapping[str, str]
) -> None:
    """Write the file that DeepSpeed's launcher (0.19.8, launcher/runner.py) reads, for its user
    alone.

    It is read where pdsh starts the ranks, which replaces %n and the like in what it passes on.

    Args:
        path: file to write.
        inherited: the user's own .deepspeed_env files; their lines go first, without the blank
            lines and comments that the launcher fails on.
        variables: added, so that each value arrives as it is.
    Raises:
        ConfigError: if a line of the user's is no NAME=VALUE.
    """
    lines = [line for file in inherited for line in _assignments(file)]
    for name, value in variables.items():
        lines.append(name + "=" + _SPECIAL.sub(r"\\\1", value).replace("%", "%%"))
    write_private(path, "".join(f"{line}\n" for line in lines))


def _assignments(path: Path) -> list[str]:
    assignments = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        text = line.strip().removeprefix("export ").strip()
        if not text or text.startswith("#"):
            continue
        if not _ASSIGNMENT.fullmatch(text):
            raise ConfigError(f"{path}:{number}: not NAME=VALUE, as every line must be")
        assignments.append(text)
    return assignments
