"""What `cdrmix data inspect` tells of a built folder: plain values, and a table for people."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cdrmix.data.report import SET_ASIDE_FILE, first_of_each, read_lines, read_report
from cdrmix.data.shards import read_manifest
from cdrmix.data.stage import DROPPED_FILE

_SHOWN_SET_ASIDE = 20
_SHOWN_CHARACTERS = 160


def inspect_folder(folder: Path) -> dict[str, Any]:
    """Everything that is known about a built folder, as plain values.

    Raises:
        DataError: if it is not a built folder.
    """
    manifest = read_manifest(folder)
    tokens: dict[str, dict[str, dict[str, int]]] = {}
    for shard in manifest.shards:
        counts = tokens.setdefault(shard.domain, {}).setdefault(
            shard.split, {"tokens": 0, "documents": 0, "text_bytes": 0}
        )
        for name in counts:
            counts[name] += getattr(shard, name)
    report = read_report(folder)
    set_aside = read_lines([folder / SET_ASIDE_FILE] if report else [])
    dropped = first_of_each(read_lines([folder / DROPPED_FILE] if report else []))
    return {
        "tokens": tokens,
        "vocab_size": manifest.vocab_size,
        "source": manifest.source,
        "set_aside": [json.loads(line) for line in set_aside],
        "dropped": [json.loads(line) for line in dropped],
    } | {name: value for name, value in report.items() if name != "key"}


def inspection_table(inspected: Mapping[str, Any]) -> str:
    """What `inspect_folder` found, for people."""
    lines = [*_token_lines(inspected["tokens"])]
    if "steps" in inspected:
        lines += ["", *_step_lines(inspected)]
    if inspected["dropped"]:
        lines += ["", "Dropped, for example:"]
        for entry in inspected["dropped"]:
            text = " ".join(entry["text"].split())[:_SHOWN_CHARACTERS]
            lines += [f"  {entry['name']}: {entry['reason']}: {entry['id']}", f"    {text}"]
    return "\n".join(lines)


def _token_lines(tokens: Mapping[str, Any]) -> Iterator[str]:
    yield f"{'domain':<16}{'split':<12}{'tokens':>16}{'documents':>14}{'bytes of text':>18}"
    for domain, splits in sorted(tokens.items()):
        for split, counts in splits.items():
            yield (
                f"{domain:<16}{split:<12}{counts['tokens']:>16,}{counts['documents']:>14,}"
                f"{counts['text_bytes']:>18,}"
            )


def _step_lines(inspected: Mapping[str, Any]) -> Iterator[str]:
    read = inspected["read"]
    yield f"{'step':<28}{'in':>14}{'out':>14}"
    yield f"{'read':<28}{'':>14}{read['documents']:>14,}"
    yield from _reason_lines(read["set_aside"])
    for source, kinds in read["other_kinds"].items():
        shown = ", ".join(f"{count:,} {suffix}" for suffix, count in kinds.items())
        yield f"  {source}: files of other kinds: {shown}"
    for step in inspected["steps"]:
        yield f"{step['name']:<28}{step['in']:>14,}{step['out']:>14,}"
        yield from _reason_lines(step["dropped"])
    if inspected["set_aside"]:
        yield ""
        yield "Set aside:"
    for entry in inspected["set_aside"][:_SHOWN_SET_ASIDE]:
        row = "" if entry["row"] is None else f", row {entry['row']}"
        more = f" (and {entry['count'] - 1:,} more)" if entry["count"] > 1 else ""
        detail = f" ({entry['detail']})" if entry["detail"] else ""
        yield f"  {entry['source']}/{entry['file']}{row}: {entry['reason']}{detail}{more}"
    hidden = len(inspected["set_aside"]) - _SHOWN_SET_ASIDE
    if hidden > 0:
        yield f"  and {hidden:,} more; see {SET_ASIDE_FILE}"


def _reason_lines(reasons: Mapping[str, int]) -> Iterator[str]:
    for reason, count in sorted(reasons.items(), key=lambda item: -item[1]):
        yield f"  {reason:<40}{count:>16,}"
