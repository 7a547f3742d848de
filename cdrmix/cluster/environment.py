"""Variables of the ranks: those of the configuration, and the file of DeepSpeed's launcher."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from cdrmix.cluster.handover import write_private
from cdrmix.config.redaction import REDACTED
from cdrmix.config.schema import Config
from cdrmix.errors import ConfigError
from cdrmix.log import get_logger

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
    home, here = Path.home() / ".deepspeed_env", Path.cwd() / ".deepspeed_env"
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
