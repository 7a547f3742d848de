"""Arguments and variables of the ranks of a start, in private files that all hosts see.

A command line passes through shells (pdsh gives its words to one on each host, unquoted), and ps
shows it to every user. So the launcher's command line holds no values of the user and no secrets:
each rank begins as launch/rank.py, which reads them from a file and becomes the training script.
"""

import contextlib
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

logger = get_logger(__name__)

FOLDER_VARIABLE = "CDRMIX_LAUNCH_FOLDER"
_FLAG = "--handed-over"
_FILE = "ranks.json"
# A file server may show a new file to other hosts some seconds late.
_SECONDS_TO_SEE = 20.0
# Variables of a rank that the launcher alone sets.
_OF_THE_LAUNCHER = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "CROSS_RANK"),
    *("CROSS_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
)
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*")
# Special between a shell's double quotes, in which DeepSpeed puts an unusual value.
_SPECIAL = re.compile(r'([\\"$`])')


def write_private(path: Path, text: str) -> None:
    """Writes a file that its owner alone can read, from its first byte on."""
    # O_EXCL makes a new file, never one that somebody else has put there with other permissions
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)


def hand_over(
    folder: Path, *, script: Path, arguments: Sequence[str], variables: Mapping[str, str]
) -> None:
    """Writes the script, arguments and further variables of each rank.

    The folder is of this start alone, named by FOLDER_VARIABLE in the ranks' environment.
    """
    order = {"script": str(script), "arguments": [*arguments], "variables": {**variables}}
    write_private(folder / _FILE, json.dumps(order))


def become_rank() -> NoReturn:
    """Turns this process into the script that was handed over, with its variables."""
    folder = Path(os.environ.get(FOLDER_VARIABLE, ""))
    order = _order(folder)
    if order is None:
        print(
            f"error: {platform.node()}: cannot read {folder / _FILE}, which was written for it. "
            "All hosts of a run must see its run directory. Try `cdrmix doctor --hostfile HOSTS "
            "--folder DIR`",
            file=sys.stderr,
        )
        sys.exit(EXIT_USER_ERROR)
    variables = {n: v for n, v in order["variables"].items() if n not in _OF_THE_LAUNCHER}
    if "PATH" in variables:  # the interpreter's programs (such as ninja) must be found all the same
        programs = str(Path(sys.executable).parent)
        variables["PATH"] = os.pathsep.join([programs, variables["PATH"]])
    os.environ.update(variables)
    # a new program, so that its loader and libraries see the variables from their beginning
    os.execv(sys.executable, [sys.executable, "-u", order["script"], _FLAG, *sys.argv[1:]])


def arguments_of(words: Sequence[str]) -> list[str]:
    """Command line of a script that was started by `words`, without the program.

    After `become_rank` it is the one handed over, with the launcher's words.
    """
    if _FLAG not in words:
        return list(words)
    order = _order(Path(os.environ[FOLDER_VARIABLE]))
    assert order is not None, "read a moment ago by the same process"
    return [*order["arguments"], *(word for word in words if word != _FLAG)]


def _order(folder: Path) -> dict[str, Any] | None:
    deadline = time.monotonic() + _SECONDS_TO_SEE
    # without a folder this was not started by `cdrmix launch`, and no file will come
    while folder.name and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            order: dict[str, Any] = json.loads((folder / _FILE).read_text(encoding="utf-8"))
            return order
        time.sleep(0.5)
    return None


def train_arguments(config: Path, overrides: Sequence[str], profile: str | None) -> list[str]:
    """Command line of launch/train.py without --run-dir and --resume."""
    arguments = ["--config", str(config)]
    for override in overrides:
        arguments += ["--set", override]
    return arguments if profile is None else [*arguments, "--profile", profile]


def launch_environment(config: Config) -> dict[str, str]:
    """Variables of `launch.environment`; values left out of a snapshot come from this process.

    Raises ConfigError that names those which this process lacks too.
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
    """The user's ~/.deepspeed_env, if it exists; refused if others may write it.

    DeepSpeed also reads one in the current folder. That file may have come with somebody's
    checkout, and would choose libraries and programs for every rank, so it is ignored here.
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
    """Writes the private file of variables that DeepSpeed's launcher reads (0.19.8: runner.py).

    Lines of the user's own files go first, without the blank lines and comments that the launcher
    fails on; then the variables, escaped so that each value arrives unchanged. Raises ConfigError
    if a line of the user's is not NAME=VALUE.
    """
    lines = []
    for file in inherited:
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
            text = line.strip().removeprefix("export ").strip()
            if not text or text.startswith("#"):
                continue
            if not _ASSIGNMENT.fullmatch(text):
                raise ConfigError(f"{file}:{number}: not NAME=VALUE, as every line must be")
            lines.append(text)
    for name, value in variables.items():
        # pdsh replaces %n and the like in the command lines that it passes on
        lines.append(name + "=" + _SPECIAL.sub(r"\\\1", value).replace("%", "%%"))
    write_private(path, "".join(f"{line}\n" for line in lines))
