"""Part of a report on profiles of steps: phases, kernels and collectives of each profiled rank.

templates/profile.html lays it out.
"""

from __future__ import annotations

import json
from typing import Any

from cdrmix.monitoring.recorded_run import RecordedRun

_MOST = 8  # profiles on a page


def profile_report(run: RecordedRun) -> dict[str, Any] | None:
    """Describes the profiles in a run directory; None for a run without any.

    `profiles` have a title, the files beside them, and rows that end in a share for a bar: `phases`
    (phase, times, seconds, of the window), `kernels` (name, calls, seconds, share, of the dearest)
    and `communication` (collective, calls, bytes, seconds, of the longest). `problems` are messages
    on files that cannot be read.
    """
    profiles = []
    problems = []
    paths = sorted((run.folder / "profile").glob("rank*_steps_*.json"), key=_place)
    for path in paths[:_MOST]:
        try:
            profiles.append(_described(json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, KeyError, TypeError) as error:
            problems.append(f"profile/{path.name} cannot be read: {error}")
    if not profiles and not problems:
        return None
    return {"profiles": profiles, "problems": problems, "num_hidden": len(paths[_MOST:])}


def _place(path: Any) -> list[int]:
    """Rank and first step of a profile's name, which sort as numbers."""
    digits = "".join(letter if letter.isdigit() else " " for letter in path.stem)
    return [int(number) for number in digits.split()]


def _described(found: dict[str, Any]) -> dict[str, Any]:
    first, last = found["steps"]
    seconds = found["seconds"]
    steps = f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"
    dearest = max((row["share"] for row in found["kernels"]), default=0.0)
    longest = max((row["seconds"] for row in found["communication"]), default=0.0)
    return {
        "title": f"Rank {found['rank']}, {steps}",
        "seconds": seconds,
        "device": found["device"],
        "files": [name for name in (found["trace"], found["memory_snapshot"]) if name],
        "flops": found["flops"],
        "phases": [
            (row["phase"], row["calls"], row["seconds"], min(row["seconds"] / seconds, 1.0))
            for row in found["phases"]
        ],
        "kernels": [
            (
                *(row["name"], row.get("shapes"), row["calls"], row["seconds"], row["share"]),
                row["share"] / dearest if dearest else 0.0,
            )
            for row in found["kernels"]
        ],
        "communication": [
            (
                *(row["collective"], row["calls"], row["bytes"], row["seconds"]),
                row["seconds"] / longest if longest else 0.0,
            )
            for row in found["communication"]
        ],
    }
