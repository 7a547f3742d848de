"""Lines of docs/benchmarks.md about checkpoints."""

from __future__ import annotations

from typing import Any


def checkpoint_rows(result: dict[str, Any]) -> list[str]:
    """Seconds for which a save stalls training, in the background and without."""
    rows = [
        "Wall time on one rank, to a local disk. The first save in the background also allocates "
        "the memory that it copies to.",
        "",
        "| state | MB | synchronous save, ms | stall of one in the background, ms | of synchronous "
        "| demanded | first one, ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for state in result["states"]:
        seconds = state["seconds"]
        ratio = state["background_over_synchronous"]
        rows.append(
            f"| {state['name']} | {state['bytes'] / 1e6:.0f} | {1e3 * seconds['synchronous']:.0f} "
            f"| {1e3 * seconds['background']:.1f} | {ratio:.1%} | at most 10 % "
            f"| {1e3 * seconds['first in the background']:.0f} |"
        )
    return rows


def tier_rows(result: dict[str, Any]) -> list[str]:
    """Stall of a save with tiers and without, and time to read a checkpoint from each tier."""
    kinds = list(result["states"][0]["stall_seconds"])
    places = list(result["states"][0]["read_seconds"])
    heads = [f"stall, {kind}, ms" for kind in kinds] + [f"read, {place}, ms" for place in places]
    rows = [
        "Wall time on one rank, medians. Reading is listing, digests and loading; an archive is "
        "copied first. Files are in the page cache.",
        "",
        f"| state | {' | '.join(heads)} |",
        f"|---{'|---' * len(heads)}|",
    ]
    for state in result["states"]:
        times = [*state["stall_seconds"].values(), *state["read_seconds"].values()]
        shown = " | ".join(f"{1e3 * seconds:.1f}" for seconds in times)
        rows.append(f"| {state['name']} | {shown} |")
    return rows
