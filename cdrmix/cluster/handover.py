"""Arguments and variables of a start's ranks, in a private file that all hosts see.

A command line passes shells on its way (pdsh gives its words to one on each host, unquoted) and is
shown by ps to every user. So the launcher's holds neither values of the user's nor secrets: each
rank begins as launch/rank.py, which takes them from the file and becomes the script.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from cdrmix.errors import EXIT_USER_ERROR

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
