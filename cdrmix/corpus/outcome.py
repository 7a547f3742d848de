"""The outcome of a data build: rows of each source from reading to tokens, as text and as JSON.

A source that ends with nothing is nearly always a mistake in the recipe, such as a wrong
`text_field`, so it stops the build before anything is encoded, unless the source allows it.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cdrmix import log
from cdrmix.corpus.recipe import Recipe
from cdrmix.corpus.source import SourceConfig, SourceListing
from cdrmix.corpus.task_run import Task, read_record
from cdrmix.data.shards import Manifest
from cdrmix.errors import DataError

_SHOWN_REASONS = 3
# Held out and asked for differ by more than this factor: worth a warning.
_FAR_OFF = 2.0
_logger = log.get_logger(__name__)


@dataclass
class SourceOutcome:
    """Counts of one source.

    Attributes:
        parts: files that were found, or parts of a stream.
        is_stream: the source is read as a stream, which has no files.
        num_bytes: size of the files as they lie on the disk; 0 for a stream.
        documents: read, before the first step.
        set_aside: rows and files that could not be read, or took too long, by reason.
        late: those of `set_aside` that are among `documents`, as a later pass set them aside.
        details: example of what each reason of `set_aside` is about.
        dropped: documents by step, then by reason.
        out: documents after the last step.
    """

    source: SourceConfig
    parts: int = 0
    is_stream: bool = False
    num_bytes: int = 0
    documents: int = 0
    late: int = 0
    set_aside: Counter[str] = field(default_factory=Counter)
    details: dict[str, str] = field(default_factory=dict)
    dropped: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    out: int = 0

    def add(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Adds the records of one task, pass by pass."""
        first = records[0]  # counts what was read before its first step, if it has one
        self.documents += first["steps"][0]["in"] if first["steps"] else first["documents"]
        self.out += records[-1]["documents"]
        self.late += sum(entry["count"] for record in records[1:] for entry in record["set_aside"])
        for record in records:
            for entry in record["set_aside"]:
                self.set_aside[entry["reason"]] += entry["count"]
                self.details.setdefault(entry["reason"], entry["detail"])
            for step in record["steps"]:
                self.dropped[step["name"]].update(step["dropped"])

    def as_json(self, tokens: int) -> dict[str, Any]:
        """Returns the counts as in report.json: `rows` are those set aside, dropped and left.

        Args:
            tokens: of all splits.
        """
        dropped = {name: counts.total() for name, counts in self.dropped.items() if counts.total()}
        # Sorted where workers may find the reasons in any order: equal builds have equal reports.
        return {
            "name": self.source.name,
            "domain": self.source.domain,
            "files": self.parts,
            "rows": self.documents + self.set_aside.total() - self.late,
            "bytes": None if self.is_stream else self.num_bytes,
            "set_aside": dict(sorted(self.set_aside.items())),
            "dropped": dropped,
            "documents": self.out,
            "tokens": tokens,
        }

    def summary(self) -> str:
        """Returns files, documents read, set aside and dropped, and documents out, as one line."""
        parts = _number(self.parts, "part" if self.is_stream else "file")
        dropped = {name: counts.total() for name, counts in self.dropped.items() if counts.total()}
        by_step = "; ".join(
            f"{name} {count:,}: {_reasons(self.dropped[name])}" for name, count in dropped.items()
        )
        set_aside = _reasons(self.set_aside)
        return (
            f"{parts}, {_number(self.documents, 'document')} read, "
            f"{self.set_aside.total():,} set aside{f' ({set_aside})' if set_aside else ''}, "
            f"{sum(dropped.values()):,} dropped{f' ({by_step})' if by_step else ''}, "
            f"{self.out:,} out"
        )

    def problem(self) -> str:
        """Says that nothing is left of the source, its most frequent reason and what to try."""
        is_plugin = self.source.is_plugin
        place = self.source.type if is_plugin else f"path {self.source.path}"
        return (
            f"source '{self.source.name}' (domain {self.source.domain}, {place}): "
            f"no document is left of it: {self.summary()}. {self._cause()} If nothing is what you "
            "expect of it, set allow_empty: true on this source."
        )

    def _cause(self) -> str:
        counts = Counter({("", reason): count for reason, count in self.set_aside.items()})
        for step, reasons in self.dropped.items():
            counts.update({(step, reason): count for reason, count in reasons.items()})
        if not counts and self.source.is_plugin:
            return "It gives no rows; see its options."
        if not counts:
            return "Its files hold no document; see its path, skip, subset and split."
        [((step, reason), count)] = counts.most_common(1)
        if step:
            return (
                f"Most frequent reason: {step}: {reason} ({count:,}). Change the parameters of the "
                f"step '{step}', or name in its `domains` only the domains that it is for."
            )
        detail = f"; {self.details[reason]}" if self.details.get(reason) else ""
        return f"Most frequent reason: {reason} ({count:,}{detail}). {self._advice(reason)}"

    def _advice(self, reason: str) -> str:
        """Returns what to try against a reason of setting aside."""
        if reason.startswith(("no text in field", "no column", "field '", "not an object")):
            parts = "prompt, thought and answer of chain_of_thought"
            key = "text_field" if self.source.chain_of_thought is None else parts
            return f"Set {key} of the source to the field that holds the text."
        if reason.startswith("cannot be read: Permission"):
            return "Give this user the right to read it (chmod u+r), or build as its owner."
        if reason.startswith(("invalid", "NUL")):
            return "Set encoding of the source, or encoding_errors: replace, or correct the files."
        if "max_document_bytes" in reason:
            return "Raise max_document_bytes of the source."
        return "Look at these files, and at the keys of the source."


def _number(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _reasons(counts: Counter[str]) -> str:
    """Returns the most frequent reasons with their counts."""
    shown = [f"{reason} {count:,}" for reason, count in counts.most_common(_SHOWN_REASONS)]
    more = len(counts) - len(shown)
    return ", ".join([*shown, f"{more} more"] if more > 0 else shown)


def source_outcomes(
    recipe: Recipe,
    listings: Mapping[str, SourceListing],
    tasks: Sequence[Task],
    results: Sequence[Sequence[Path]],
) -> list[SourceOutcome]:
    """Counts what became of each source, in the order of the recipe.

    Args:
        listings: of the sources with files, by name.
        results: result folders of each pass, by task.
    """
    outcomes = {source.name: SourceOutcome(source) for source in recipe.sources}
    for name, listing in listings.items():
        outcomes[name].parts = len(listing.files) + len(listing.unreadable)
        outcomes[name].num_bytes = sum(file.state[0] for file in listing.files)
        outcomes[name].set_aside.update(reason for _, reason in listing.unreadable)
        for file, reason in listing.unreadable:
            outcomes[name].details.setdefault(reason, file)
    for task, *folders in zip(tasks, *results, strict=True):
        outcome = outcomes[task.source.name]
        if not task.files:
            outcome.is_stream = True
            outcome.parts += len(task.parts) or 1
        outcome.add([read_record(folder) for folder in folders])
    return list(outcomes.values())


def check_something_is_left(outcomes: Iterable[SourceOutcome], out: Path) -> None:
    """Raises a DataError if a source, or the whole corpus, has no document left.

    Args:
        out: folder of the build, for the message.
    """
    outcomes = list(outcomes)
    empty = [outcome for outcome in outcomes if not outcome.out]
    refused = [outcome for outcome in empty if not outcome.source.allow_empty]
    if refused:
        problems = "\n".join(outcome.problem() for outcome in refused)
        raise DataError(
            f"{problems}\nCorrect this and start again; work in {out} that still fits is used."
        )
    if len(empty) == len(outcomes):
        counts = "; ".join(f"{each.source.name}: {each.summary()}" for each in outcomes)
        raise DataError(
            f"{out}: no document is left of the corpus, of which allow_empty: true allows every "
            f"source to be empty. {counts}. Look at the sources and steps of the recipe."
        )


def log_outcomes(outcomes: Iterable[SourceOutcome], tokens: Mapping[str, int], out: Path) -> None:
    """Logs a line per source, and the command that shows more.

    Args:
        tokens: of all splits, by name of the source.
        out: the finished folder.
    """
    for outcome in outcomes:
        name = outcome.source.name
        count = tokens.get(name, 0)
        # Nothing left is allowed here, but not to be overlooked.
        tell = _logger.info if outcome.out else _logger.warning
        tell("data build: source %s: %s, %s", name, outcome.summary(), _number(count, "token"))
    _logger.info("data build: examples of each reason: cdrmix data inspect %s", out)


def log_domains(domains: Iterable[str], manifest: Manifest) -> None:
    """Warns of each domain with nothing to train on; tells of those with nothing held out."""
    domains = sorted(set(domains))
    documents: Counter[tuple[str, str]] = Counter()
    for shard in manifest.shards:
        documents[shard.domain, shard.split] += shard.documents
    for domain in domains:
        num_held_out = documents[domain, "validation"]
        if documents[domain, "train"]:
            continue
        why = "its sources are empty, as allow_empty allows"
        if num_held_out:
            why = (
                f"all of it, {_number(num_held_out, 'document')}, was held out; add documents or "
                "lower shards.validation_share"
            )
        _logger.warning("data build: no document of domain %s is left to train on: %s", domain, why)
    unseen = [d for d in domains if documents[d, "train"] and not documents[d, "validation"]]
    # Without anything held out at all, `log_held_out` tells more.
    if unseen and "validation" in manifest.splits:
        _logger.info(
            "data build: no document of domain %s was held out, so evaluations have no loss of it; "
            "raise shards.validation_share or add documents",
            ", ".join(unseen),
        )


def held_out(sizes: Mapping[str, tuple[int, int]], share: float) -> dict[str, float]:
    """Returns the share that was asked for and what was held out, as in report.json.

    Args:
        sizes: (documents, tokens) by split.
        share: `shards.validation_share` of the recipe.
    """
    documents, tokens = sizes["validation"]
    num_documents, num_tokens = map(sum, zip(*sizes.values(), strict=True))
    return {
        "validation_share": share,
        "documents": documents,
        "tokens": tokens,
        "share_of_documents": documents / max(1, num_documents),
        "share_of_tokens": tokens / max(1, num_tokens),
    }


def log_held_out(found: Mapping[str, float]) -> None:
    """Logs the share that was asked for and those that were held out, as `held_out` gives them."""
    share = found["validation_share"]
    if not found["documents"]:
        _logger.warning(
            "warning: data build: no document was held out, and training will refuse the data set; "
            "raise shards.validation_share above %g, or add documents",
            share,
        )
        return
    # Documents are drawn one by one: a few of them, or a long one, hold out more or less.
    is_far_off = not share / _FAR_OFF <= found["share_of_tokens"] <= share * _FAR_OFF
    advice = "; whole documents are drawn by hash, so a long one, or few of them, weigh much"
    _logger.log(
        logging.WARNING if is_far_off else logging.INFO,
        "data build: shards.validation_share %.3g %%: held out %s (%.3g %%) with %.3g %% of the "
        "tokens%s",
        100 * share,
        _number(int(found["documents"]), "document"),
        100 * found["share_of_documents"],
        100 * found["share_of_tokens"],
        advice if is_far_off else "",
    )
