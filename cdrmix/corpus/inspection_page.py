"""A built folder as people see it: a table for a terminal, and report.html.

Both are written from one `Inspection`; templates/inspection.html lays the page out.
"""

from __future__ import annotations

import math
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from itertools import groupby, pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from cdrmix.corpus.inspection import RECIPE_FILE, SET_ASIDE_FILE, Inspection, parse_inspection
from cdrmix.data.shards import MANIFEST_FILE
from cdrmix.monitoring.page import Figure, compact, render
from cdrmix.monitoring.plots import Curve, line_plot
from cdrmix.monitoring.sinks import write_text_atomic

DATA_PAGE = "report.html"
# Limits of the page: shards and set-aside files of a large corpus go into thousands.
_MAX_ROWS = 200
_MAX_LANGUAGES = 12
_MAX_CURVES = 12  # domains
# Limits of the table, which should fit on a few screens.
_TABLE_WIDTH = 80
# Of the table of sources; all columns together are as wide as the table.
_NAME_WIDTH = 14
_SOURCE_COLUMNS = {
    "files": 8,
    "rows": 12,
    "set aside": 11,
    "dropped": 11,
    "documents": 12,
    "tokens": 12,
}
_TABLE_ROWS = 20
_TABLE_CLUSTERS = 3
_TABLE_CHARACTERS = 160
_LENGTH_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))


def inspection_table(inspected: Mapping[str, Any]) -> str:
    """Formats what `inspect_folder` gives as a table for a terminal."""
    inspection = parse_inspection(inspected)
    lines = [f"{'domain':<16}{'split':<12}{'tokens':>16}{'documents':>14}{'bytes of text':>18}"]
    for domain, splits in sorted(inspection.tokens.items()):
        lines += [
            f"{domain:<16}{split:<12}{amount['tokens']:>16,}{amount['documents']:>14,}"
            f"{amount['text_bytes']:>18,}"
            for split, amount in splits.items()
        ]
    lines += _source_lines(inspection)
    lines += _step_lines(inspection)
    if inspection.mixture is not None:
        lines += _mixture_lines(inspection.mixture)
    if inspection.lineage is not None:
        shards = inspection.lineage.shards
        recipe = inspection.lineage.recipe_hash
        lines += ["", f"Shards, all of recipe {recipe}, and their documents by source:"]
        lines += [
            f"  {stem}: {', '.join(f'{name} {count:,}' for name, count in documents.items())}"
            for stem, documents in [*shards.items()][:_TABLE_ROWS]
        ]
        if len(shards) > _TABLE_ROWS:
            lines.append(f"  and {len(shards) - _TABLE_ROWS:,} more; see {MANIFEST_FILE}")
    if inspection.dropped:
        lines += ["", "Dropped, for example:"]
    for entry in inspection.dropped:
        excerpt = " ".join(entry.text.split())[:_TABLE_CHARACTERS]
        lines += [f"  {entry.name}: {entry.reason}: {entry.id}", f"    {excerpt}"]
    # Names and texts are of anybody, and a terminal obeys control characters.
    return "".join(
        c if c == "\n" or c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in "\n".join(lines)
    )


def _source_lines(inspection: Inspection) -> Iterator[str]:
    """A row for each source, with the reasons below it, in at most `_TABLE_WIDTH` columns."""
    if inspection.sources:
        yield ""
        titles = "".join(f"{title:>{width}}" for title, width in _SOURCE_COLUMNS.items())
        yield f"{'source':<{_NAME_WIDTH}}{titles}"
    for source in inspection.sources:
        counts = {
            "files": source.files,
            "rows": source.rows,
            "set aside": sum(source.set_aside.values()),
            "dropped": sum(source.dropped.values()),
            "documents": source.documents,
            "tokens": source.tokens,
        }
        name = source.name
        if len(name) >= _NAME_WIDTH:
            yield from _wrapped(name, "")
            name = ""
        columns = _SOURCE_COLUMNS.items()
        numbers = "".join(
            f"{_short(counts[title], width - 1):>{width}}" for title, width in columns
        )
        yield f"{name:<{_NAME_WIDTH}}{numbers}"
        for what, reasons in (("set aside", source.set_aside), ("dropped", source.dropped)):
            if reasons:
                frequent = sorted(reasons.items(), key=lambda item: -item[1])
                listed = ", ".join(f"{reason} {count:,}" for reason, count in frequent)
                yield from _wrapped(f"{what}: {listed}", "  ")
    if (held_out := inspection.held_out) is not None:
        yield ""
        yield from _wrapped(
            f"Held out: shards.validation_share {100 * held_out.validation_share:.3g} % was asked "
            f"for; drawn were {100 * held_out.share_of_documents:.3g} % of the documents "
            f"({held_out.documents:,}) with {100 * held_out.share_of_tokens:.3g} % of the tokens "
            f"({held_out.tokens:,}).",
            "",
        )
    if inspection.fim is not None:
        amounts = ", ".join(f"{what} {count:,}" for what, count in inspection.fim.items())
        yield from _wrapped(f"Training documents for infilling: {amounts or 'none'}.", "")


def _short(count: int, width: int) -> str:
    """Writes a count in full if it fits, else in three digits."""
    full = f"{count:,}"
    return full if len(full) <= width else compact(count)


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, _TABLE_WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  ")


def _step_lines(inspection: Inspection) -> Iterator[str]:
    read = inspection.read
    if read is None:
        return
    yield ""
    yield f"{'step':<28}{'in':>14}{'out':>14}"
    yield f"{'read':<28}{'':>14}{read.documents:>14,}"
    yield from _reason_lines(read.set_aside)
    for source, kinds in read.other_kinds.items():
        counts = ", ".join(f"{count:,} {suffix}" for suffix, count in kinds.items())
        yield f"  {source}: files of other kinds: {counts}"
    for step in inspection.steps:
        yield f"{step.name:<28}{step.entered:>14,}{step.out:>14,}"
        yield from _reason_lines(step.dropped)
    if inspection.set_aside:
        yield ""
        yield "Set aside:"
    for entry in inspection.set_aside[:_TABLE_ROWS]:
        row = "" if entry.row is None else f", row {entry.row}"
        more = f" (and {entry.count - 1:,} more)" if entry.count > 1 else ""
        detail = f" ({entry.detail})" if entry.detail else ""
        yield f"  {entry.source}/{entry.file}{row}: {entry.reason}{detail}{more}"
    if len(inspection.set_aside) > _TABLE_ROWS:
        yield f"  and {len(inspection.set_aside) - _TABLE_ROWS:,} more; see {SET_ASIDE_FILE}"
    for step in inspection.steps:
        if step.findings.pages is not None:
            counts = f"{step.findings.pages:,} pages of {step.findings.hosts:,} hosts"
            yield ""
            yield f"{step.name}: {step.findings.documents:,} documents with an address, {counts}"
        for kind, clusters in step.findings.clusters().items():
            if clusters.clusters:
                yield ""
                yield f"{step.name}, clusters of {kind} duplicates: {clusters.clusters:,}"
                for size, count in clusters.sizes.items():
                    plural = "" if count == 1 else "s"
                    yield f"  {count:,} cluster{plural} of {size.replace('-', ' to ')} documents"
                for cluster in clusters.largest[:_TABLE_CLUSTERS]:
                    yield f"  {cluster.documents:,} documents, first {cluster.first}"


def _reason_lines(reasons: Mapping[str, int]) -> Iterator[str]:
    for reason, count in sorted(reasons.items(), key=lambda item: -item[1]):
        yield f"  {reason:<40}{count:>16,}"


def _mixture_lines(course: Mapping[str, Any]) -> Iterator[str]:
    yield ""
    length = course["sequence_length"]
    if "problem" in course:
        yield f"Mixture, in samples of {length} tokens:"
        yield f"  cannot be drawn: {course['problem']}"
        return
    yield f"Mixture, in samples of {length} tokens; shares of the samples:"
    yield f"{'':<16}{'asked':>10}{'drawn':>10}{'samples':>16}{'epochs':>10}"
    phases = course["phases"]
    stretches = [
        (_phase_title(phase, number, len(phases)), phase)
        for number, phase in enumerate(phases, start=1)
    ]
    if len(stretches) > 1:
        stretches.append((f"all phases, {course['samples']:,} samples", course["whole"]))
    for title, stretch in stretches:
        yield from _wrapped(title, "")
        for name, share in stretch["domains"].items():
            available = course["available"][name]
            epochs = f"{share['samples'] / available:.2f}" if available else "-"
            yield (
                f"  {name:<14}{share['asked']:>10.4f}{share['drawn']:>10.4f}"
                f"{share['samples']:>16,}{epochs:>10}"
            )


def _phase_title(phase: Mapping[str, Any], number: int, num_phases: int) -> str:
    """Says how long a phase is, and how its shares go, in plain words."""
    samples = f"{phase['stop'] - phase['start']:,} samples"
    length = samples if phase["has_end"] else "to the end of the run"
    shares = "the same shares throughout"
    if phase["change"] != "step":
        curve = {"linear": "in a straight line", "cosine": "along a cosine"}[phase["change"]]
        shares = f"from the shares of phase {number - 1} {curve} to its own; asked is the mean"
    shown = "" if phase["has_end"] else f"; shown for {samples}, as many as the data set has"
    name = f"phase {number}" if num_phases > 1 else "one phase"
    return f"{name}, {length}: {shares}{shown}"


def write_data_page(folder: Path, inspected: Mapping[str, Any]) -> Path:
    """Writes `report.html` into a built folder, from what `inspect_folder` gives; returns its path.

    Raises:
        StateError: if the page cannot be written.
    """
    inspection = parse_inspection(inspected)
    recipe = folder / RECIPE_FILE
    course = inspection.mixture or {}
    lengths = inspection.lengths or {}
    by_domain: dict[str, Counter[str]] = defaultdict(Counter)
    by_split: dict[str, Counter[str]] = defaultdict(Counter)
    for domain, splits in inspection.tokens.items():
        for split, amounts in splits.items():
            by_domain[domain].update(amounts)
            by_split[split].update(amounts)
    languages: Counter[str] = Counter()
    for counts in inspection.languages.values():
        languages.update(counts)
    if "unknown" in languages:
        languages["not looked at"] = languages.pop("unknown")
    by_language = languages.most_common()
    rare = by_language[_MAX_LANGUAGES:]
    others = {f"{len(rare)} others": sum(count for _, count in rare)} if rare else {}
    kind = attrgetter("step", "name", "reason")
    by_reason = groupby(sorted(inspection.dropped, key=kind), key=kind)
    page = render(
        "corpus/templates/inspection.html",
        name=folder.resolve().name,
        inspection=inspection,
        sources=inspected.get("sources") or [],
        held_out_asked=inspected.get("held_out"),
        by_domain=by_domain,
        training=by_split["train"],
        held_out=by_split["validation"],
        share_figures=_share_figures(course) if len(course.get("phases", [])) > 1 else [],
        lengths=_by_length(lengths),
        lengths_by_domain={name: _by_length({name: counts}) for name, counts in lengths.items()},
        languages=dict(by_language[:_MAX_LANGUAGES]) | others,
        searches=[
            step
            for step in inspection.steps
            if step.findings.pages is not None or step.findings.clusters()
        ],
        dropped_groups=[(name, reason, [*group]) for (_, name, reason), group in by_reason],
        recipe=recipe.read_text(encoding="utf-8") if recipe.is_file() else "",
        max_rows=_MAX_ROWS,
    )
    path = folder / DATA_PAGE
    write_text_atomic(path, page)
    return path


def _share_figures(course: Mapping[str, Any]) -> list[Figure]:
    """Draws the share of each domain, asked for and drawn, over the samples of the run."""
    places = np.array([(part["start"] + part["stop"]) / 2 for part in course["parts"]])
    figures = []
    for number, name in enumerate([*course["whole"]["domains"]][:_MAX_CURVES]):
        shares = [part["domains"][name] for part in course["parts"]]
        curves = [
            Curve(kind, places, np.array([100 * share[kind] for share in shares]), color)
            for kind, color in (("drawn", "c1"), ("asked", "c2"))
        ]
        label = f"Share of {name} over the samples of a run"
        drawing = line_plot(
            f"share-{number}", curves, label=label, text="{:.3g}%".format, limits=(0, None)
        )
        figures.append(Figure(name, "share over samples", drawing))
    return figures


def _by_length(by_domain: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """Counts documents by readable ranges, ascending, with the empty ones between others."""
    limits: Counter[int] = Counter()
    for counts in by_domain.values():
        for label, count in counts.items():  # "< 2048 bytes"; always a power of two
            limits[int(label.split()[1])] += count
    if not limits:
        return {}
    powers = range(int(math.log2(min(limits))), int(math.log2(max(limits))) + 1)
    written = []
    for size in (2 ** powers[0] // 2, *(2**power for power in powers)):
        factor, unit = next(each for each in _LENGTH_UNITS if size >= each[0] or each[0] == 1)
        written.append(f"{size // factor} {unit}")
    ranges = zip(pairwise(written), powers, strict=True)
    return {f"{low} to {high}": limits[2**power] for (low, high), power in ranges}
