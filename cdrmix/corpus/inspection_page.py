"""report.html of a data build: one self-contained page, from what `cdrmix data inspect` knows.

It takes that as plain values, so that monitoring and data stay strangers to each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from cdrmix.monitoring import page
from cdrmix.monitoring.plots import Curve, line_plot
from cdrmix.monitoring.sinks import write_text_atomic

DATA_PAGE = "report.html"
_MAX_ROWS = 200  # shards and set-aside files of a large corpus go into thousands
_MAX_LANGUAGES = 12
_MAX_CURVES = 12  # domains
Values = Mapping[str, Any]


def write_data_page(folder: Path, inspected: Values) -> Path:
    """Write `report.html` into a built folder and give its path.

    Args:
        folder: a built folder; its recipe.yaml is shown, where it has one.
        inspected: what `cdrmix.corpus.inspection.inspect_folder` gives.
    Raises:
        StateError: if the page cannot be written.
    """
    name = folder.resolve().name
    recipe = folder / "recipe.yaml"
    recipe_text = recipe.read_text(encoding="utf-8") if recipe.is_file() else ""
    parts = [
        _header(name, inspected),
        _tiles(inspected),
        _steps(inspected),
        _domains(inspected),
        _mixture(inspected["mixture"]),
        _histograms(inspected),
        _duplicates(inspected.get("steps", [])),
        _entropy(inspected),
        _dropped(inspected["dropped"]),
        _set_aside(inspected["set_aside"]),
        _lineage(inspected),
        _recipe(recipe_text),
    ]
    path = folder / DATA_PAGE
    write_text_atomic(path, page.document(f"{name} · CDRmix data", parts))
    return path


def _header(name: str, inspected: Values) -> str:
    sources = inspected["source"].get("sources", {})
    recipe = inspected["source"].get("recipe_hash")
    of = f"{_plural(len(sources), 'source')}: {', '.join(sources)}" if sources else "token shards"
    return (
        f"<header><h1>{page.text(name)}</h1>"
        f"<p>{page.text(of)}{page.text(f' · recipe {recipe}' if recipe else '')}</p></header>"
    )


def _tiles(inspected: Values) -> str:
    total = {
        split: {unit: _total(inspected, split, unit) for unit in ("tokens", "text_bytes")}
        for split in ("train", "validation")
    }
    tokens = total["train"]["tokens"] + total["validation"]["tokens"]
    text_bytes = total["train"]["text_bytes"] + total["validation"]["text_bytes"]
    items = [
        ("Training", page.compact(total["train"]["tokens"]), "tokens"),
        ("Held out", page.compact(total["validation"]["tokens"]), "tokens"),
        ("Bytes per token", f"{text_bytes / max(1, tokens):.2f}", "of UTF-8 text"),
        ("Vocabulary", f"{inspected['vocab_size']:,}", "slots"),
    ]
    if "steps" in inspected:
        read = inspected["read"]["documents"]
        kept = sum(source["documents"] for source in inspected["source"]["sources"].values())
        aside = sum(inspected["read"]["set_aside"].values())
        items += [
            ("Documents kept", page.compact(kept), f"of {read:,}, {kept / max(1, read):.1%}"),
            ("Set aside", page.compact(aside), "could not be read"),
        ]
    return page.tiles(items)


def _total(inspected: Values, split: str, unit: str) -> int:
    return sum(splits.get(split, {}).get(unit, 0) for splits in inspected["tokens"].values())


def _steps(inspected: Values) -> str:
    """Documents in and out of each step, with the reasons of those that went no further."""
    if "steps" not in inspected:
        return page.section("Steps", page.missing("This folder has no report of a build."))
    read = inspected["read"]
    left = read["documents"]
    rows = [page.row("<b>read</b>", "", f"{left:,}", "", "", page.bar(min(left, 1), own=True))]
    rows += _reason_rows(read["set_aside"], 0)
    for step in inspected["steps"]:
        left -= step["in"] - step["out"]
        some = step["by_domain"].keys() < inspected["tokens"].keys()
        domains = f" {', '.join(step['by_domain'])} only" if some else ""
        rows.append(_step_row(step, domains, left / max(1, read["documents"])))
        rows += _reason_rows(step["dropped"], step["in"])
    others = [
        f"{source}: {', '.join(f'{count:,} {suffix}' for suffix, count in kinds.items())}"
        for source, kinds in read["other_kinds"].items()
    ]
    passed_over = page.details("Files of kinds that are not read", page.bullets(others))
    head = ("step and reason", "in", "out", "dropped", "of those in", "")
    table = page.table(head, rows, "counts")
    return page.section("Documents, step by step", table, passed_over if others else "")


def _step_row(step: Values, domains: str, share_left: float) -> str:
    """A step's counts, and a bar of what is left of the whole corpus after it."""
    dropped = step["in"] - step["out"]
    return page.row(
        f"<b>{page.text(step['name'])}</b><i>{page.text(domains)}</i>",
        f"{step['in']:,}",
        f"{step['out']:,}",
        f"{dropped:,}" if dropped else "",
        "",
        page.bar(share_left, own=True),
    )


def _reason_rows(reasons: Mapping[str, int], of: int) -> Iterable[str]:
    for reason, count in sorted(reasons.items(), key=lambda item: -item[1]):
        share = f"{count / of:.2%}" if of else "set aside"
        yield page.row(f"<i>{page.text(reason)}</i>", "", "", f"{count:,}", f"<i>{share}</i>", "")


def _domains(inspected: Values) -> str:
    all_tokens = {
        domain: sum(counts["tokens"] for counts in splits.values())
        for domain, splits in inspected["tokens"].items()
    }
    total = max(1, sum(all_tokens.values()))
    rows = []
    for domain, tokens in sorted(all_tokens.items(), key=lambda item: -item[1]):
        splits = inspected["tokens"][domain]
        documents, text_bytes = (
            sum(counts[unit] for counts in splits.values()) for unit in ("documents", "text_bytes")
        )
        held_out = splits.get("validation", {}).get("tokens", 0)
        rows.append(
            page.row(
                f"<b>{page.text(domain)}</b>",
                f"{tokens:,}",
                f"{tokens / total:.1%}",
                f"{held_out:,}",
                f"{documents:,}",
                f"{text_bytes / max(1, tokens):.2f}",
                page.bar(tokens / total, own=True),
            )
        )
    head = ("domain", "tokens", "share", "held out", "documents", "bytes/token", "")
    return page.section("Tokens per domain", page.table(head, rows, "counts"))


def _mixture(course: Values | None) -> str:
    title = "Mixture: asked for and drawn"
    if course is None:
        text = "The recipe asks for none: every sample is drawn once per epoch."
        return page.section(title, page.missing(text))
    if "problem" in course:
        return page.section(title, page.note(f"It cannot be drawn: {course['problem']}", "bad"))
    tables = []
    phases = course["phases"] if len(course["phases"]) > 1 else []
    for number, phase in enumerate(phases):
        samples = phase["stop"] - phase["start"]
        changing = "" if phase["change"] == "step" else f", {phase['change']} change"
        tables.append(
            page.details(
                f"Phase {number + 1}: {samples:,} samples{changing}",
                _shares(phase["domains"], course["available"]),
            )
        )
    note = (
        f"Over {course['samples']:,} samples of {course['sequence_length']:,} tokens: all phases, a"
        " last one without a length for as many samples as there are. Drawn is the order that"
        " training follows, not an estimate; a run with its own data.mixture follows that instead."
    )
    whole = _shares(course["whole"]["domains"], course["available"])
    drawing = _shares_over_time(course) if phases else ""
    return page.section(title, whole, drawing, *tables, page.note(note))


def _shares(domains: Mapping[str, Values], available: Mapping[str, int]) -> str:
    rows = []
    for name, share in sorted(domains.items(), key=lambda item: -item[1]["asked"]):
        epochs = f"{share['samples'] / available[name]:.2f}" if available[name] else "–"
        cells = (f"{share['asked']:.2%}", f"{share['drawn']:.2%}", f"{share['samples']:,}", epochs)
        name_cell = f"<b>{page.text(name)}</b>"
        rows.append(page.row(name_cell, *cells, page.bar(share["drawn"], own=True)))
    head = ("domain", "asked", "drawn", "samples", "epochs", "")
    return page.table(head, rows, "counts")


def _shares_over_time(course: Values) -> str:
    """A picture per domain: share asked for and drawn, over the samples of the run."""
    parts = course["parts"]
    places = np.array([(part["start"] + part["stop"]) / 2 for part in parts])
    figures = []
    for number, name in enumerate([*course["whole"]["domains"]][:_MAX_CURVES]):
        asked, drawn = (
            np.array([100 * part["domains"][name][kind] for part in parts])
            for kind in ("asked", "drawn")
        )
        drawing = line_plot(
            f"share-{number}",
            [Curve("drawn", places, drawn, "c1"), Curve("asked", places, asked, "c2")],
            label=f"Share of {name} over the samples of a run",
            text="{:.3g}%".format,
            limits=(0, None),
        )
        figures.append(page.figure(name, "share over samples", drawing))
    return page.panels(*figures)


def _histograms(inspected: Values) -> str:
    if "lengths" not in inspected:
        return ""
    lengths = _by_length(inspected["lengths"])
    languages = _summed(inspected["languages"])
    if "unknown" in languages:
        languages["not looked at"] = languages.pop("unknown")
    return page.section(
        "Lengths and languages",
        page.panels(
            page.figure("Length", "documents, by bytes of text", _bars(lengths)),
            page.figure(
                "Language",
                "documents, as the step language found",
                _bars(_most_frequent(languages))
                if languages.keys() - {"not looked at"}
                else page.missing("The recipe has no step language."),
            ),
        ),
        *(
            page.details(
                f"Lengths in {domain}", _bars(_by_length({domain: inspected["lengths"][domain]}))
            )
            for domain in inspected["lengths"]
            if len(inspected["lengths"]) > 1
        ),
    )


def _by_length(by_domain: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """Counts by readable ranges, ascending, empty ones between others included."""
    counts = _summed(by_domain)
    limits = {int(label.split()[1]): count for label, count in counts.items()}
    if not limits:
        return {}
    powers = range(int(math.log2(min(limits))), int(math.log2(max(limits))) + 1)
    return {
        f"{_bytes(2**power // 2)} to {_bytes(2**power)}": limits.get(2**power, 0)
        for power in powers
    }


def _bytes(count: int) -> str:
    for size, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= size:
            return f"{count // size} {unit}"
    return f"{count} B"


def _summed(by_domain: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for counts in by_domain.values():
        for label, count in counts.items():
            total[label] = total.get(label, 0) + count
    return total


def _most_frequent(counts: Mapping[str, int]) -> dict[str, int]:
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    shown = dict(ordered[:_MAX_LANGUAGES])
    rest = ordered[_MAX_LANGUAGES:]
    return shown | ({f"{len(rest)} others": sum(count for _, count in rest)} if rest else {})


def _bars(counts: Mapping[str, int]) -> str:
    most = max([1, *counts.values()])
    rows = [
        page.row(page.text(label), f"{count:,}", page.bar(count / most, own=True))
        for label, count in counts.items()
    ]
    return page.table((), rows, "counts bars")


def _duplicates(steps: Sequence[Values]) -> str:
    parts = []
    for step in steps:
        found = step.get("found", {})
        if "pages" in found:
            unit = f"of {_plural(found['documents'], 'document')} with an address"
            counts = {name: found[name] for name in ("pages", "hosts")}
            parts.append(page.figure(step["name"], unit, _bars(counts)))
        for kind in ("exact", "near"):
            clusters = step.get("found", {}).get(kind)
            if clusters:
                parts.append(_clusters(f"{step['name']}, {kind}", clusters))
    if not parts:
        return page.section("Duplicate clusters", page.missing("No step looked for duplicates."))
    return page.section("Duplicate clusters", page.panels(*parts))


def _clusters(title: str, clusters: Values) -> str:
    found = _plural(clusters["clusters"], "cluster")
    unit = f"{found}, {_plural(clusters['dropped'], 'document')} dropped"
    if not clusters["clusters"]:
        return page.figure(title, unit, page.missing("None."))
    sizes = {f"of {size} documents": count for size, count in clusters["sizes"].items()}
    rows = [
        page.row(f"{largest['documents']:,}", page.text(largest["first"]))
        for largest in clusters["largest"]
    ]
    head = ("documents", "the first of them, which is kept")
    largest_table = page.details("Largest clusters", page.table(head, rows, "texts"))
    return page.figure(title, unit, _bars(sizes) + largest_table)


def _entropy(inspected: Values) -> str:
    found = inspected.get("ngrams")
    if not found:
        return ""
    rows = []
    for domain, values in sorted(found.items()):
        first, second, third = (values["entropy_bits"][n] for n in "123")
        cells = (first, second, third, second - first, third - second)
        looked_at = page.compact(values["tokens"])
        name_cell = f"<b>{page.text(domain)}</b>"
        rows.append(page.row(name_cell, *(f"{bits:.2f}" for bits in cells), looked_at))
    head = ("domain", "1 token", "2 tokens", "3 tokens", "2nd given 1st", "3rd given two", "seen")
    note = (
        "Bits, of the training tokens. Large domains are counted in windows spread evenly over "
        "them; what is seen bounds the entropy, so compare domains of which as many tokens are "
        "seen. A domain far below the others repeats itself."
    )
    title = "Entropy of n-grams"
    return page.section(title, page.table(head, rows, "counts plain"), page.note(note))


def _dropped(dropped: Sequence[Values]) -> str:
    title = "Examples of what was dropped"
    if not dropped:
        return page.section(title, page.missing("Nothing was dropped."))

    def kind(entry: Values) -> tuple[int, str, str]:
        return entry["step"], entry["name"], entry["reason"]

    groups = []
    for (_, name, reason), entries in groupby(sorted(dropped, key=kind), key=kind):
        shown = [_example(entry) for entry in entries]
        groups.append(page.details(f"{name}: {reason} ({len(shown)})", *shown))
    note = "The first of each step, reason and domain, as they were when they were dropped."
    return page.section(title, page.note(note), *groups)


def _example(entry: Values) -> str:
    where = f"<b>{page.text(entry['id'])}</b> · {page.text(entry['domain'])}"
    return f"<pre>{where}\n{page.text(entry['text'][:500])}</pre>"


def _set_aside(entries: Sequence[Values]) -> str:
    if not entries:
        return page.section("Set aside", page.missing("Everything could be read."))
    rows = [
        page.row(
            page.text(f"{entry['source']}/{entry['file']}"),
            page.text(entry["reason"]),
            page.text(entry["detail"]),
            f"{entry['count']:,}",
        )
        for entry in entries[:_MAX_ROWS]
    ]
    table = page.table(("file", "reason", "", "rows"), rows, "texts")
    title = f"Set aside: {_plural(len(entries), 'file')}"
    return page.section(
        title, page.details("Files and reasons", table, _cut(entries, "set_aside.jsonl"))
    )


def _lineage(inspected: Values) -> str:
    source = inspected["source"]
    if "sources" not in source:
        return page.section("Lineage", page.key_values(source))
    sources = [
        page.row(
            f"<b>{page.text(name)}</b>",
            page.text(found["type"]),
            page.text(found["domain"]),
            f"{found['documents']:,}",
            page.compact(found["text_bytes"]),
            f"<code>{page.text(found['sha256'][:16])}</code>",
        )
        for name, found in source["sources"].items()
    ]
    shards = [
        page.row(
            page.text(shard["stem"]),
            f"{shard['tokens']:,}",
            f"{shard['documents']:,}",
            f"<code>{page.text(source['recipe_hash'])}</code>",
            page.text(_counts(source["shards"].get(shard["stem"], {}))),
        )
        for shard in inspected["shards"][:_MAX_ROWS]
    ]
    head = ("source", "type", "domain", "documents", "bytes of text", "sha256 of what is left")
    shard_head = ("shard", "tokens", "documents", "recipe", "documents by source")
    return page.section(
        "Lineage",
        page.table(head, sources, "texts"),
        page.details(
            f"Shards: {len(inspected['shards']):,}",
            page.table(shard_head, shards, "texts"),
            _cut(inspected["shards"], "manifest.json"),
        ),
    )


def _recipe(text: str) -> str:
    if not text:
        return ""
    shown = page.details("recipe.yaml, every default filled in", f"<pre>{page.text(text)}</pre>")
    return page.section("Recipe", shown)


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())


def _cut(entries: Sequence[Any], file: str) -> str:
    hidden = len(entries) - _MAX_ROWS
    return page.note(f"And {hidden:,} more, in {file}.") if hidden > 0 else ""


def _plural(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
