"""The starts of a run that `cdrmix launch` made, as starts.jsonl keeps them."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

STARTS = "starts.jsonl"


@dataclass(frozen=True)
class StartRecord:
    """One start of a run.

    Attributes:
        began, ended: wall clock.
        hosts: their names; none is this machine.
        exit_code, reason: how it ended.
        resumed_at: step of the checkpoint that it began from.
        step: last step that any rank reached.
    """

    began: datetime
    ended: datetime
    hosts: tuple[str, ...]
    exit_code: int
    reason: str
    resumed_at: int
    step: int

    def to_json(self) -> dict[str, Any]:
        """As a line of the file."""
        times = {name: getattr(self, name).isoformat() for name in ("began", "ended")}
        return asdict(self) | times

    @classmethod
    def from_json(cls, line: dict[str, Any]) -> StartRecord:
        """From a line of the file."""
        times = {name: datetime.fromisoformat(line[name]) for name in ("began", "ended")}
        return cls(**(line | times | {"hosts": tuple(line["hosts"])}))


def append_start(run_dir: Path, start: StartRecord) -> None:
    """Add a start to those of a run."""
    with (run_dir / STARTS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(start.to_json()) + "\n")


def read_starts(run_dir: Path) -> list[StartRecord]:
    """All starts of a run, in order; none where `cdrmix launch` made none.

    A line that was not written whole, as on a full disk, is no start: nothing depends on it.
    """
    path = run_dir / STARTS
    if not path.is_file():
        return []
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            found.append(StartRecord.from_json(json.loads(line)))
    return found
