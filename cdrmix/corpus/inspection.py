"""Report of a data build: written beside the shards, read again by `cdrmix data inspect`.

`inspect_folder` gives plain values, which are its JSON; `Inspection` is their typed form, from
which `cdrmix.corpus.inspection_page` writes the table and the page.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fileinput import FileInput
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from cdrmix.config.load import config_hash
from cdrmix.corpus.recipe import Recipe, recipe_yaml
from cdrmix.corpus.source import SourceListing
from cdrmix.corpus.steps.read_bytes import bounded_lines
from cdrmix.corpus.task_run import DROPPED_FILE, Task, close_synced, read_record
from cdrmix.data.mixture import SEQUENCE_LENGTH, built_mixture, mixture_course
from cdrmix.data.shards import (
    ShardInfo,
    check_regular,
    read_manifest,
    read_regular,
    unreadable,
    write_file,
)
from cdrmix.errors import DataError

REPORT_FILE = "report.json"
RECIPE_FILE = "recipe.yaml"
SET_ASIDE_FILE = "set_aside.jsonl"
_SAMPLES_PER_REASON = 3
_MAX_REPORT_BYTES = 2**28
# A dropped document is kept whole where the recipe asks for it, with JSON's escapes.
_MAX_ENTRY_BYTES = 2**30
# A task and its results, stage by stage.
Results = tuple[Any, ...]


def lineage(
    recipe: Recipe,
    name: str,
    tasks: Sequence[Task],
    records: Sequence[dict[str, Any]],
    shards: Sequence[tuple[ShardInfo, dict[str, int]]],
) -> dict[str, Any]:
    """Describes the origin of the tokens for the manifest; equal builds have equal values.

    Args:
        name: name of the recipe: that of its file, without the suffix.
        records: record of each task's last stage.
        shards: every shard, with its documents by source.
    """
    sources: dict[str, dict[str, Any]] = {}
    for source in recipe.sources:
        its_records = [r for task, r in zip(tasks, records, strict=True) if task.source == source]
        # Tasks stand in the order of the recipe, whichever worker was done first.
        digests = "".join(record["sha256"] for record in its_records)
        sources[source.name] = {
            "type": source.type,
            "domain": source.domain,
            "documents": sum(record["documents"] for record in its_records),
            "text_bytes": sum(record["text_bytes"] for record in its_records),
            "sha256": hashlib.sha256(digests.encode()).hexdigest(),
        }
    origin: dict[str, Any] = {
        "recipe": name,
        "recipe_hash": config_hash(recipe),
        "sources": sources,
        "shards": {shard.stem: documents for shard, documents in shards},
    }
    if recipe.mixture is not None:
        origin["mixture"] = recipe.mixture.model_dump(mode="json")
    if recipe.fim is not None and recipe.fim.window_tokens is not None:
        # Training cuts each domain by itself, as the documents were placed.
        origin["fim_window_tokens"] = recipe.fim.window_tokens
    return origin


@dataclass(frozen=True)
class BuildOutcome:
    """Input and outcome of a build, plain values of report.json.

    Attributes:
        sources: what became of each source, as `SourceOutcome.as_json` gives it.
        held_out: the share that was asked for and what was held out.
        fim: documents drawn for infilling, by what became of them; None without infilling.
    """

    sources: Sequence[Mapping[str, Any]]
    held_out: Mapping[str, float]
    fim: Mapping[str, int] | None


def write_build_report(
    out: Path,
    *,
    key: str,
    recipe: Recipe,
    listings: Mapping[str, SourceListing],
    results: Sequence[Results],
    decisions: Mapping[int, Any],
    outcome: BuildOutcome,
    ngrams: Mapping[str, Any],
) -> None:
    """Writes report.json, recipe.yaml, and the documents dropped and files set aside.

    Args:
        key: digest of everything that the build follows from.
        decisions: findings of the steps over the whole corpus, by number of the step.
        outcome: of all sources together.
        ngrams: statistics of the training tokens by domain, from `cdrmix.corpus.encode`.
    """
    write_file(out / RECIPE_FILE, recipe_yaml(recipe).encode())
    _write_dropped(out / DROPPED_FILE, results, whole=recipe.keep_dropped)
    records = [(task, [read_record(folder) for folder in folders]) for task, *folders in results]
    set_aside: list[dict[str, Any]] = [
        {"source": source, "file": name, "reason": reason, "row": None, "detail": "", "count": 1}
        for source, listing in listings.items()
        for name, reason in listing.unreadable
    ]
    histograms: dict[str, Any] = {name: defaultdict(Counter) for name in ("lengths", "languages")}
    num_read = 0
    for task, of_task in records:
        first = of_task[0]  # with the number before the first step, if there is one
        num_read += first["steps"][0]["in"] if first["steps"] else first["documents"]
        for name, by_domain in histograms.items():
            by_domain[task.source.domain].update(of_task[-1][name])
        for record in of_task:
            set_aside += [{"source": task.source.name} | entry for entry in record["set_aside"]]
    content = "".join(json.dumps(entry) + "\n" for entry in set_aside)
    write_file(out / SET_ASIDE_FILE, content.encode())
    reasons: Counter[str] = Counter()
    for entry in set_aside:
        reasons[entry["reason"]] += entry["count"]
    others = {name: _sorted(listing.other_kinds) for name, listing in listings.items()}
    report = {
        "key": key,
        "recipe_hash": config_hash(recipe),
        "read": {
            "documents": num_read,
            "set_aside": _sorted(reasons),
            "other_kinds": {name: kinds for name, kinds in others.items() if kinds},
        },
        "sources": list(outcome.sources),
        "held_out": dict(outcome.held_out),
        "steps": _step_counts(recipe, records, decisions),
    }
    if outcome.fim is not None:
        report["fim"] = dict(outcome.fim)
    for name, by_domain in histograms.items():
        report[name] = {domain: _sorted(counts) for domain, counts in sorted(by_domain.items())}
    report["ngrams"] = {domain: values for domain, values in ngrams.items() if values}
    write_file(out / REPORT_FILE, (json.dumps(report, indent=2) + "\n").encode())


def _write_dropped(path: Path, results: Sequence[Results], *, whole: bool) -> None:
    """Writes the documents that the steps dropped, `whole` or an example of each reason."""
    paths = [folder / DROPPED_FILE for _, *folders in results for folder in folders]
    with FileInput(paths, encoding="utf-8") as lines, path.open("w", encoding="utf-8") as file:
        # Enough to judge a step by; the dropped text of a large corpus fills a disk.
        examples = (f"{json.dumps(entry)}\n" for entry in first_of_each(map(json.loads, lines)))
        file.writelines(lines if whole else examples)
        close_synced(file)


def _sorted(counts: Mapping[str, int]) -> dict[str, int]:
    # Equal builds write equal bytes, on any number of workers.
    return dict(sorted(counts.items()))


def _step_counts(
    recipe: Recipe,
    records: Sequence[tuple[Task, list[dict[str, Any]]]],
    decisions: Mapping[int, Any],
) -> list[dict[str, Any]]:
    """Sums documents in, out and dropped by reason of each step, over all tasks and by domain."""
    steps: list[dict[str, Any]] = [
        {"name": step.name, "in": 0, "out": 0, "dropped": Counter(), "by_domain": {}}
        for step in recipe.stages
    ]
    for task, of_task in records:
        for counts in (counts for record in of_task for counts in record["steps"]):
            step = steps[counts["number"]]
            zeros = {"in": 0, "out": 0, "dropped": Counter()}
            for total in (step, step["by_domain"].setdefault(task.source.domain, zeros)):
                total["in"] += counts["in"]
                total["out"] += counts["out"]
                total["dropped"].update(counts["dropped"])
    for number, findings in decisions.items():
        steps[number]["found"] = findings
    return steps


def first_of_each(entries: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields the first few dropped documents of each step, reason and domain."""
    counts: Counter[tuple[int, str, str]] = Counter()
    for entry in entries:
        kind = (entry["step"], entry["reason"], entry["domain"])
        counts[kind] += 1
        if counts[kind] <= _SAMPLES_PER_REASON:
            yield entry


def read_report(folder: Path) -> dict[str, Any]:
    """Reads the report of a built folder; empty for one that `cdrmix data build` did not make.

    Raises:
        DataError: if it is damaged.
    """
    path = folder / REPORT_FILE
    try:
        report: dict[str, Any] = json.loads(read_regular(path, _MAX_REPORT_BYTES))
    except FileNotFoundError:
        return {}
    except PermissionError as error:
        raise DataError(unreadable(path, error)) from error
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read: {error}. Build the folder again.") from error
    if not isinstance(report, dict):
        raise DataError(f"{path}: holds no JSON object. Build the folder again.")
    return report


@dataclass(frozen=True)
class DuplicateCluster:
    """Documents that are duplicates of each other, and the first of them."""

    documents: int
    first: str


@dataclass(frozen=True)
class Clusters:
    """Clusters of one kind; `sizes` counts them by their number of documents."""

    clusters: int
    dropped: int
    sizes: dict[str, int]
    largest: list[DuplicateCluster]


@dataclass(frozen=True)
class Findings:
    """Findings of a step over the whole corpus; `pages` and `hosts` are of web addresses."""

    documents: int = 0
    pages: int | None = None
    hosts: int = 0
    exact: Clusters | None = None
    near: Clusters | None = None

    def clusters(self) -> dict[str, Clusters]:
        """Returns clusters by kind."""
        kinds = {"exact": self.exact, "near": self.near}
        return {kind: clusters for kind, clusters in kinds.items() if clusters}


@dataclass(frozen=True)
class InspectedStep:
    """Documents that went into a step and came out of it, and those dropped, by reason."""

    name: str
    entered: Annotated[int, Field(alias="in")]
    out: int
    dropped: dict[str, int]
    by_domain: dict[str, Any] = field(default_factory=dict)
    findings: Annotated[Findings, Field(alias="found")] = field(default_factory=Findings)


@dataclass(frozen=True)
class ReadCounts:
    """Documents read; set aside, by reason; and files of other kinds, by source and suffix."""

    documents: int
    set_aside: dict[str, int]
    other_kinds: dict[str, dict[str, int]]


@dataclass(frozen=True)
class SourceCounts:
    """Rows of a source from reading to tokens: set aside, dropped, or a document that is left.

    Attributes:
        files: read or set aside, or parts of a stream.
        bytes: size of the files; None for a stream.
        set_aside: rows and files, by reason.
        dropped: documents, by step.
        tokens: of all splits, with the end of each document.
    """

    name: str
    domain: str
    files: int
    rows: int
    bytes: int | None
    set_aside: dict[str, int]
    dropped: dict[str, int]
    documents: int
    tokens: int


@dataclass(frozen=True)
class HeldOut:
    """Share of the documents that was asked for, and what was held out of documents and tokens."""

    validation_share: float
    documents: int
    tokens: int
    share_of_documents: float
    share_of_tokens: float


@dataclass(frozen=True)
class Source:
    """A source of the recipe and the documents of it that are left."""

    type: str
    domain: str
    documents: int
    text_bytes: int
    sha256: str


@dataclass(frozen=True)
class Lineage:
    """Sources by name, and the documents of each shard by source."""

    recipe_hash: str
    sources: dict[str, Source]
    shards: dict[str, dict[str, int]]


@dataclass(frozen=True)
class SetAside:
    """A file, or a row of one, that could not be read; `count` is of rows with that reason."""

    source: str
    file: str
    reason: str
    detail: str
    count: int
    row: int | None


@dataclass(frozen=True)
class Dropped:
    """An example of a document that a step dropped."""

    step: int
    name: str
    reason: str
    id: str
    domain: str
    text: str


@dataclass(frozen=True)
class Ngrams:
    """Entropy of n-grams of a domain (bits), by n, over so many tokens."""

    tokens: int
    entropy_bits: dict[str, float]


@dataclass(frozen=True)
class Inspection:
    """Everything that is known about a built folder.

    Attributes:
        tokens: counts of `tokens`, `documents` and `text_bytes`, by domain and split.
        source: origin of the tokens, as the manifest has it.
        shards: entries of the manifest.
        mixture: as `cdrmix.data.mixture.mixture_course` describes it.
        lineage: typed form of `source`; None where `cdrmix data build` did not make the folder.
        read, sources, held_out, fim, steps, lengths, languages, ngrams: from the report of a build;
            absent without one.
    """

    tokens: dict[str, dict[str, dict[str, int]]]
    vocab_size: int
    source: dict[str, Any]
    shards: list[dict[str, Any]]
    mixture: dict[str, Any] | None
    set_aside: list[SetAside]
    dropped: list[Dropped]
    lineage: Lineage | None = None
    read: ReadCounts | None = None
    sources: list[SourceCounts] = field(default_factory=list)
    held_out: HeldOut | None = None
    fim: dict[str, int] | None = None
    steps: list[InspectedStep] = field(default_factory=list)
    lengths: dict[str, dict[str, int]] | None = None
    languages: dict[str, dict[str, int]] = field(default_factory=dict)
    ngrams: dict[str, Ngrams] = field(default_factory=dict)


_ADAPTER = TypeAdapter(Inspection)


def parse_inspection(inspected: Mapping[str, Any]) -> Inspection:
    """Types the plain values of `inspect_folder`; a DataError if a build writes other kinds."""
    source = inspected["source"]
    lineage = source if {"sources", "shards"} <= source.keys() else None
    try:
        return _ADAPTER.validate_python({**inspected, "lineage": lineage})
    except ValidationError as error:
        first = error.errors()[0]
        raise DataError(
            f"{REPORT_FILE}: not a report of this version "
            f"({'.'.join(map(str, first['loc']))}: {first['msg']}). Build the folder again."
        ) from error


def inspect_folder(folder: Path, *, sequence_length: int = SEQUENCE_LENGTH) -> dict[str, Any]:
    """Collects everything that is known about a built folder, as plain values.

    Args:
        sequence_length: length of the samples that a mixture is counted in (tokens).
    Raises:
        DataError: if it is not a built folder.
    """
    try:
        manifest = read_manifest(folder, given_as="DIR")
        tokens: dict[str, dict[str, dict[str, int]]] = {}
        for shard in manifest.shards:
            counts = tokens.setdefault(shard.domain, {}).setdefault(
                shard.split, {"tokens": 0, "documents": 0, "text_bytes": 0}
            )
            for name in counts:
                counts[name] += getattr(shard, name)
        report = read_report(folder)
        dropped = first_of_each(_entries(folder / DROPPED_FILE)) if report else ()
        mixture = built_mixture(manifest)
        known: dict[str, Any] = {
            "tokens": tokens,
            "vocab_size": manifest.vocab_size,
            "source": manifest.source,
            "shards": [shard.model_dump(exclude={"bin", "idx"}) for shard in manifest.shards],
            "mixture": mixture
            and mixture_course(manifest, mixture, sequence_length=sequence_length),
            "set_aside": list(_entries(folder / SET_ASIDE_FILE)) if report else [],
            "dropped": sorted(dropped, key=lambda entry: (entry["step"], entry["reason"])),
        }
        report.pop("key", None)
        # A report of somebody else may use these names; the values of the manifest count.
        return known | report | known
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        # Its files of JSON may be of somebody else.
        raise DataError(
            f"{folder / REPORT_FILE}: not a report of this version, or {SET_ASIDE_FILE} and "
            f"{DROPPED_FILE} beside it are not its own ({type(error).__name__}: {error}). "
            "Build the folder again."
        ) from error


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the objects of a file of JSON lines beside the shards.

    Raises:
        DataError: if it is missing or damaged.
    """
    try:
        check_regular(path)  # opening a pipe would wait for its other end
        with path.open("rb") as file:
            for line in bounded_lines(file, _MAX_ENTRY_BYTES):
                if line is None:
                    raise ValueError(f"a line of more than {_MAX_ENTRY_BYTES} bytes")
                yield json.loads(line)
    except PermissionError as error:
        raise DataError(unreadable(path, error)) from error
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read: {error}. Build the folder again.") from error
