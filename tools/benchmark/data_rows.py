"""Lines of docs/benchmarks.md about reading data for training."""

from __future__ import annotations

from typing import Any


def loader_rows(result: dict[str, Any]) -> list[str]:
    """The loader beside other readers."""
    demanded = {"MMapIndexedDataset": "1.5", "WebDataset": "4", "arrow": "5"}
    rows = [
        "| reader | million tokens per CPU second | the loader is times as fast | demanded |",
        "|---|---|---|---|",
    ]
    for name, rate in result["million_tokens_per_cpu_second"].items():
        ratio = f"{result['over_peer'][name]:.2f}" if name in result["over_peer"] else ""
        rows.append(f"| {name} | {rate:.0f} | {ratio} | {demanded.get(name, '200 M')} |")
    return rows + not_compared(result)


def not_compared(result: dict[str, Any]) -> list[str]:
    """The line that names peers which are not installed, if any."""
    missing = ", ".join(result["not_installed"])
    return ["", f"Not compared, because not installed: {missing}."] if missing else []


def reading_rows(result: dict[str, Any]) -> list[str]:
    """Steps that wait for a disk, with reading ahead adapted and without."""
    rows = [
        f"{result['steps']} steps that compute for 20 ms; throttled, each read of a batch waits "
        "for 90 ms first. Times are of all steps, those before an adaptation included.",
        "",
        "| reading | ms a step | of the unthrottled | demanded | at the end |",
        "|---|---|---|---|---|",
    ]
    demanded = {"throttled, adapted": "at most 1.1"}
    for name, milliseconds in result["milliseconds"].items():
        rows.append(
            f"| {name} | {milliseconds:.1f} | {result['over_unthrottled'][name]:.2f} "
            f"| {demanded.get(name, '')} | {result['at_end'][name]} |"
        )
    return rows
