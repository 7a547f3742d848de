"""What a run's faults have cost: steps done twice, and time in which nothing was trained."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class StartRecord:
    """One start of a run, as starts.jsonl keeps it.

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


def append_start(path: Path, start: StartRecord) -> list[StartRecord]:
    """Add a start to the file of a run; all of its starts, in order."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(start.to_json()) + "\n")
    lines = path.read_text(encoding="utf-8").splitlines()
    return [StartRecord.from_json(json.loads(line)) for line in lines]


def goodput(starts: Sequence[StartRecord]) -> dict[str, float]:
    """Share of the trained steps that were not done twice, and what restarting cost.

    Args:
        starts: of one run, in order; the last one reached its end.
    Returns:
        productive_steps, redone_steps, share (productive over both, ratio), starts (count),
        seconds from the first beginning to the end, and seconds_between_starts of them.
    """
    trained = sum(start.step - start.resumed_at for start in starts)
    productive = starts[-1].step - starts[0].resumed_at
    pauses = [
        (after.began - before.ended).total_seconds()
        for before, after in zip(starts, starts[1:], strict=False)
    ]
    return {
        "productive_steps": productive,
        "redone_steps": trained - productive,
        "share": productive / trained if trained else 1.0,
        "starts": len(starts),
        "seconds": (starts[-1].ended - starts[0].began).total_seconds(),
        "seconds_between_starts": sum(pauses),
    }
