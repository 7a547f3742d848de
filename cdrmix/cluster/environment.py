"""The variables that ranks on other hosts get: DeepSpeed's launcher reads them from a file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from cdrmix.errors import ConfigError

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*")
# What a shell reads between double quotes, which is where DeepSpeed puts an unusual value.
_SPECIAL = re.compile(r'([\\"$`])')


def write_environment_file(
    path: Path, *, inherited: Sequence[Path], variables: Mapping[str, str]
) -> None:
    """Write the file that DeepSpeed's launcher (0.19.8, launcher/runner.py) reads.

    Args:
        path: file to write.
        inherited: the user's own .deepspeed_env files, as far as they exist; their lines go first,
            without the blank lines and comments that the launcher fails on.
        variables: added, so that each value arrives as it is.
    Raises:
        ConfigError: if a line of the user's is no NAME=VALUE.
    """
    lines = [line for file in inherited if file.is_file() for line in _assignments(file)]
    for name, value in variables.items():
        lines.append(name + "=" + _SPECIAL.sub(r"\\\1", value))
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _assignments(path: Path) -> list[str]:
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        text = line.strip().removeprefix("export ").strip()
        if not text or text.startswith("#"):
            continue
        if not _ASSIGNMENT.fullmatch(text):
            raise ConfigError(f"{path}:{number}: {text!r} is not NAME=VALUE")
        found.append(text)
    return found
