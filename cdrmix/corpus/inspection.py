"""What a data build did: written beside the shards.

What `cdrmix data inspect` tells of a built folder: plain values, and a table for people.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cdrmix.config.load import config_hash
from cdrmix.corpus.recipe import Recipe, recipe_yaml
from cdrmix.corpus.source import SourceListing
from cdrmix.corpus.stage import DROPPED_FILE, close_synced, read_record
from cdrmix.corpus.steps.read_bytes import bounded_lines
from cdrmix.corpus.tasks_of_sources import Task
from cdrmix.data.mixed import SEQUENCE_LENGTH, built_mixture, mixture_course
from cdrmix.data.shards import (
    MANIFEST_FILE,
    ShardInfo,
    check_regular,
    read_manifest,
    read_regular,
    write_file,
)
from cdrmix.errors import DataError

REPORT_FILE = "report.json"
RECIPE_FILE = "recipe.yaml"
SET_ASIDE_FILE = "set_aside.jsonl"
_SAMPLES_PER_REASON = 3
_MAX_REPORT_BYTES = 2**28
# A task and its results, stage by stage.
Results = tuple[Any, ...]


def lineage(
    recipe: Recipe,
    name: str,
    tasks: Sequence[Task],
    records: Sequence[dict[str, Any]],
    shards: Sequence[tuple[ShardInfo, dict[str, int]]],
) -> dict[str, Any]:
    """Where the tokens are from, for the manifest: plain values, equal for equal builds.

    Args:
        name: of the recipe, its file's without the suffix.
        records: of each task's last stage.
        shards: every shard, and its documents by source.
    """
    sources: dict[str, dict[str, Any]] = {}
    for source in recipe.sources:
        own = [r for task, r in zip(tasks, records, strict=True) if task.source == source]
        digests = "".join(record["sha256"] for record in own)
        sources[source.name] = {
            "type": source.type,
            "domain": source.domain,
            "documents": sum(record["documents"] for record in own),
            "text_bytes": sum(record["text_bytes"] for record in own),
            "sha256": hashlib.sha256(digests.encode()).hexdigest(),
        }
    found: dict[str, Any] = {
        "recipe": name,
        "recipe_hash": config_hash(recipe),
        "sources": sources,
        "shards": {shard.stem: documents for shard, documents in shards},
    }
    if recipe.mixture is not None:
        found["mixture"] = recipe.mixture.model_dump(mode="json")
    return found


def write_build_report(
    out: Path,
    *,
    key: str,
    recipe: Recipe,
    found: Mapping[str, SourceListing],
    results: Sequence[Results],
    decisions: Mapping[int, Any],
    ngrams: Mapping[str, Any],
) -> None:
    """Write report.json, recipe.yaml, and what was dropped and set aside.

    Args:
        key: names what the build followed from.
        found: what was met where files were looked for, by source.
        results: (task, folder of its first stage, of its second, ...) each.
        decisions: what steps over the corpus found, by number of the step.
        ngrams: what `cdrmix.corpus.encode` found in the training tokens, by domain.
    """
    write_file(out / RECIPE_FILE, recipe_yaml(recipe).encode())
    with (out / DROPPED_FILE).open("w", encoding="utf-8") as file:
        lines = _lines(folder / DROPPED_FILE for _, *folders in results for folder in folders)
        if not recipe.keep_dropped:
            first = first_of_each(map(json.loads, lines))
            lines = (f"{json.dumps(entry)}\n" for entry in first)
        file.writelines(lines)
        close_synced(file)
    set_aside = list(_set_aside(found, results))
    content = "".join(json.dumps(entry) + "\n" for entry in set_aside)
    write_file(out / SET_ASIDE_FILE, content.encode())
    report = {
        "key": key,
        "recipe_hash": config_hash(recipe),
        "read": _read_counts(found, results, set_aside),
        "steps": _step_counts(recipe, results, decisions),
        "lengths": _summed(results, "lengths"),
        "languages": _summed(results, "languages"),
        "ngrams": {domain: found for domain, found in ngrams.items() if found},
    }
    write_file(out / REPORT_FILE, (json.dumps(report, indent=2) + "\n").encode())


def _read_counts(
    found: Mapping[str, SourceListing], results: Sequence[Results], set_aside: list[dict[str, Any]]
) -> dict[str, Any]:
    reasons: Counter[str] = Counter()
    for entry in set_aside:
        reasons[entry["reason"]] += entry["count"]
    return {
        "documents": sum(_num_read(read_record(result[1])) for result in results),
        "set_aside": dict(sorted(reasons.items())),
        "other_kinds": {
            source: dict(sorted(met.other_kinds.items()))
            for source, met in found.items()
            if met.other_kinds
        },
    }


def _num_read(first_record: dict[str, Any]) -> int:
    steps = first_record["steps"]
    return int(steps[0]["in"] if steps else first_record["documents"])


def _step_counts(
    recipe: Recipe, results: Sequence[Results], decisions: Mapping[int, Any]
) -> list[dict[str, Any]]:
    """In, out and reasons of each step over all tasks, and by domain."""
    steps: list[dict[str, Any]] = [
        {"name": step.name, "in": 0, "out": 0, "dropped": {}, "by_domain": {}}
        for step in recipe.steps
    ]
    for task, *folders in results:
        for counts in (counts for folder in folders for counts in read_record(folder)["steps"]):
            step = steps[counts["number"]]
            domain = step["by_domain"].setdefault(
                task.source.domain, {"in": 0, "out": 0, "dropped": {}}
            )
            for total in (step, domain):
                total["in"] += counts["in"]
                total["out"] += counts["out"]
                for reason, count in counts["dropped"].items():
                    total["dropped"][reason] = total["dropped"].get(reason, 0) + count
    for number, found in decisions.items():
        steps[number]["found"] = found
    return steps


def _summed(results: Sequence[Results], name: str) -> dict[str, dict[str, int]]:
    """A histogram of the documents that are left, by domain."""
    summed: dict[str, Counter[str]] = defaultdict(Counter)
    for task, *folders in results:
        summed[task.source.domain].update(read_record(folders[-1])[name])
    return {domain: dict(sorted(counts.items())) for domain, counts in sorted(summed.items())}


def _set_aside(
    found: Mapping[str, SourceListing], results: Sequence[Results]
) -> Iterator[dict[str, Any]]:
    for source, met in found.items():
        for file, reason in met.unreadable:
            yield {
                "source": source,
                "file": file,
                "reason": reason,
                "row": None,
                "detail": "",
                "count": 1,
            }
    for task, *folders in results:
        for entry in (entry for folder in folders for entry in read_record(folder)["set_aside"]):
            yield {"source": task.source.name} | entry


def _lines(paths: Iterable[Path]) -> Iterator[str]:
    for path in paths:
        with path.open(encoding="utf-8") as file:
            yield from file


def first_of_each(entries: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Those of dropped documents that are the first of their step, reason and domain."""
    num_kept: Counter[tuple[int, str, str]] = Counter()
    for entry in entries:
        kind = (entry["step"], entry["reason"], entry["domain"])
        num_kept[kind] += 1
        if num_kept[kind] <= _SAMPLES_PER_REASON:
            yield entry


def read_report(folder: Path) -> dict[str, Any]:
    """The report of a built folder; empty for one that `cdrmix data build` did not make.

    Raises:
        DataError: if it is damaged.
    """
    path = folder / REPORT_FILE
    try:
        report: dict[str, Any] = json.loads(read_regular(path, _MAX_REPORT_BYTES))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read: {error}. Build the folder again.") from error
    if not isinstance(report, dict):
        raise DataError(f"{path}: holds no JSON object. Build the folder again.")
    return report


_SHOWN_SET_ASIDE = 20
_SHOWN_SHARDS = 20
_SHOWN_CLUSTERS = 3
_SHOWN_CHARACTERS = 160
# A dropped document is kept whole where the recipe asks for it, with JSON's escapes.
_MAX_ENTRY_BYTES = 2**30


def inspect_folder(folder: Path, *, sequence_length: int = SEQUENCE_LENGTH) -> dict[str, Any]:
    """Everything that is known about a built folder, as plain values.

    Args:
        sequence_length: of the samples that a mixture is shown by (tokens).
    Raises:
        DataError: if it is not a built folder.
    """
    try:
        return _inspected(folder, sequence_length)
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        # Its files of JSON may be of somebody else.
        raise DataError(
            f"{folder / REPORT_FILE}: not a report of this version, or {SET_ASIDE_FILE} and "
            f"{DROPPED_FILE} beside it are not its own ({type(error).__name__}: {error}). "
            "Build the folder again."
        ) from error


def _inspected(folder: Path, sequence_length: int) -> dict[str, Any]:
    manifest = read_manifest(folder)
    tokens: dict[str, dict[str, dict[str, int]]] = {}
    for shard in manifest.shards:
        counts = tokens.setdefault(shard.domain, {}).setdefault(
            shard.split, {"tokens": 0, "documents": 0, "text_bytes": 0}
        )
        for name in counts:
            counts[name] += getattr(shard, name)
    report = read_report(folder)
    mixture = built_mixture(manifest)
    set_aside = _entries(folder / SET_ASIDE_FILE) if report else iter(())
    dropped = first_of_each(_entries(folder / DROPPED_FILE)) if report else iter(())
    return {
        "tokens": tokens,
        "vocab_size": manifest.vocab_size,
        "source": manifest.source,
        "shards": [shard.model_dump(exclude={"bin", "idx"}) for shard in manifest.shards],
        "mixture": mixture and mixture_course(manifest, mixture, sequence_length=sequence_length),
        "set_aside": list(set_aside),
        "dropped": sorted(dropped, key=lambda entry: (entry["step"], entry["reason"])),
    } | {name: value for name, value in report.items() if name != "key"}


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines beside the shards.

    Raises:
        DataError: if it is missing or damaged.
    """
    try:
        check_regular(path)
        with path.open("rb") as file:
            for line in bounded_lines(file, _MAX_ENTRY_BYTES):
                if line is None:
                    raise ValueError(f"a line of more than {_MAX_ENTRY_BYTES} bytes")
                yield json.loads(line)
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read: {error}. Build the folder again.") from error


def inspection_table(inspected: Mapping[str, Any]) -> str:
    """A table of what `inspect_folder` found, for a terminal.

    Raises:
        DataError: if a part of it is of another kind than a build writes.
    """
    try:
        text = "\n".join(_table_lines(inspected))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise DataError(
            f"{REPORT_FILE}: not a report of this version ({type(error).__name__}: {error}). "
            "Build the folder again."
        ) from error
    # Names and texts are of anybody, and a terminal obeys control characters.
    return "".join(c if c == "\n" or c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _table_lines(inspected: Mapping[str, Any]) -> list[str]:
    lines = [*_token_lines(inspected["tokens"])]
    if "steps" in inspected:
        lines += ["", *_step_lines(inspected)]
        lines += _cluster_lines(inspected["steps"])
    if inspected["mixture"]:
        lines += ["", *_mixture_lines(inspected["mixture"])]
    if "shards" in inspected["source"]:
        lines += ["", *_lineage_lines(inspected)]
    if inspected["dropped"]:
        lines += ["", "Dropped, for example:"]
        for entry in inspected["dropped"]:
            text = " ".join(entry["text"].split())[:_SHOWN_CHARACTERS]
            lines += [f"  {entry['name']}: {entry['reason']}: {entry['id']}", f"    {text}"]
    return lines


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


def _cluster_lines(steps: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for step in steps:
        if "pages" in step.get("found", {}):
            yield ""
            yield f"{step['name']}: {_address_counts(step['found'])}"
        for kind in ("exact", "near"):
            clusters = step.get("found", {}).get(kind)
            if clusters and clusters["clusters"]:
                yield ""
                yield f"{step['name']}, clusters of {kind} duplicates: {clusters['clusters']:,}"
                sizes = ", ".join(f"{n:,} of {size}" for size, n in clusters["sizes"].items())
                yield f"  documents in each: {sizes}"
                for largest in clusters["largest"][:_SHOWN_CLUSTERS]:
                    yield f"  {largest['documents']:,} documents, first {largest['first']}"


def _address_counts(found: Mapping[str, int]) -> str:
    counts = f"{found['pages']:,} pages of {found['hosts']:,} hosts"
    return f"{found['documents']:,} documents with an address, {counts}"


def _mixture_lines(course: Mapping[str, Any]) -> Iterator[str]:
    if "problem" in course:
        yield f"Mixture, in sequences of {course['sequence_length']} tokens:"
        yield f"  cannot be drawn: {course['problem']}"
        return
    yield (
        f"{'mixture':<16}{'asked':>10}{'drawn':>10}{'samples':>16}{'epochs':>10}   "
        f"in sequences of {course['sequence_length']} tokens"
    )
    for number, phase in enumerate(course["phases"]):
        yield f"phase {number + 1}, {phase['stop'] - phase['start']:,} samples, {phase['change']}"
        yield from _share_lines(phase["domains"], course["available"])
    if len(course["phases"]) > 1:
        yield f"together, {course['samples']:,} samples"
        yield from _share_lines(course["whole"]["domains"], course["available"])


def _share_lines(
    domains: Mapping[str, Mapping[str, float]], available: Mapping[str, int]
) -> Iterator[str]:
    for name, share in domains.items():
        epochs = f"{share['samples'] / available[name]:.2f}" if available[name] else "-"
        yield (
            f"  {name:<14}{share['asked']:>10.4f}{share['drawn']:>10.4f}"
            f"{share['samples']:>16,}{epochs:>10}"
        )


def _lineage_lines(inspected: Mapping[str, Any]) -> Iterator[str]:
    source = inspected["source"]
    yield f"Shards, all of recipe {source['recipe_hash']}, and their documents by source:"
    for stem, documents in [*source["shards"].items()][:_SHOWN_SHARDS]:
        yield f"  {stem}: {', '.join(f'{name} {n:,}' for name, n in documents.items())}"
    hidden = len(source["shards"]) - _SHOWN_SHARDS
    if hidden > 0:
        yield f"  and {hidden:,} more; see {MANIFEST_FILE}"


def _reason_lines(reasons: Mapping[str, int]) -> Iterator[str]:
    for reason, count in sorted(reasons.items(), key=lambda item: -item[1]):
        yield f"  {reason:<40}{count:>16,}"
