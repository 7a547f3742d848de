"""Runs one task through the steps of one pass: reads, changes and writes its documents.

A result is a folder that appears by one rename, so a folder that exists is complete. It depends on
the task and the steps only, not on the process that made it or on the time.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TextIO

from cdrmix import log
from cdrmix.corpus.plugin_step import PluginStep
from cdrmix.corpus.recipe_steps import Numbered, StepConfig, make_step
from cdrmix.corpus.source import SetAside, SourceConfig, SourceFile
from cdrmix.corpus.steps.read import SHARD_NAME, read_file, read_shard
from cdrmix.corpus.text_source import read_part
from cdrmix.corpus.time_limit import TimeLimit, TooSlow
from cdrmix.data.document import Document, Step, parted
from cdrmix.data.folders import new_folder, open_new
from cdrmix.data.shards import write_file
from cdrmix.hooks.plugin import check_code

DOCUMENTS_FILE = "documents.jsonl"
DROPPED_FILE = "dropped.jsonl"
RECORD_FILE = "record.json"
# The report shows examples of each reason; all dropped text would be as large as the corpus.
_SAMPLES_PER_REASON = 3
_SAMPLE_CHARACTERS = 500
_logger = log.get_logger(__name__)


@dataclass(frozen=True)
class Task:
    """Documents that one process reads, passes through the steps and encodes.

    Attributes:
        files: files to read, in order; none for a part of a stream.
        shard: (number, of how many) part of a stream; None for files.
        key: hash of all inputs (hex).
        parts: names of parts of a user's source, in order; none for others.
    """

    source: SourceConfig
    files: tuple[SourceFile, ...]
    shard: tuple[int, int] | None
    key: str
    parts: tuple[str, ...] = ()

    def read(
        self,
        set_aside: SetAside,
        *,
        left_out: Collection[str] = (),
        begin: Callable[[str], None] = lambda name: None,
    ) -> Iterator[Document]:
        """Reads the documents of the task, in order.

        Args:
            set_aside: called for each input that cannot be read, or takes too long.
            left_out: names of files, parts, or of the shard, that ended a process and are not read.
            begin: called with each name before it is read.
        """
        parts: Iterator[tuple[str, Iterator[Document]]]
        if self.shard is not None:
            stream = read_shard(self.source, *self.shard, set_aside)
            parts = iter([(SHARD_NAME.format(self.shard[0]), stream)])
        elif self.parts:
            parts = ((part, read_part(self.source, part, set_aside)) for part in self.parts)
        else:
            parts = ((file.name, read_file(file, self.source, set_aside)) for file in self.files)
        for name, documents in parts:
            if name in left_out:
                set_aside(name, None, "ended the process that read it", "most likely by its size")
                continue
            begin(name)
            # Catches the time of reading only: an exception in a step is not raised in here.
            try:
                yield from documents
            except TooSlow as error:
                set_aside(name, None, "takes too long to read", str(error))


# A step over the corpus, its place in the recipe, and the file with its decision on one task.
Decision = tuple[int, StepConfig, Path]


@dataclass(frozen=True)
class TaskJob:
    """One task and the steps of one pass.

    Attributes:
        before: result of the pass before; None: the task is read from its source.
        decision: of a step over the corpus, carried out first.
        notes_of: step over the corpus that takes notes last; None at the end.
        out: folder of the result, named by a hash of all its inputs.
        keep_dropped: write all dropped documents whole, not a few excerpts.
        code: classes of a user's, each with the digest of its code when the build began.
    """

    task: Task
    before: Path | None
    decision: Decision | None
    steps: tuple[Numbered, ...]
    notes_of: StepConfig | None
    out: Path
    keep_dropped: bool
    code: tuple[tuple[str, str | None], ...] = ()

    def is_done(self) -> bool:
        """Returns True if the result exists."""
        return self.out.is_dir()

    def beside(self, kind: Literal["reading", "left_out"]) -> Path:
        """Returns a file beside the result; it outlives a killed process.

        `reading` holds the name of the input that is being read, `left_out` the names of inputs
        that ended a process and are not read again.
        """
        return self.out.with_name(f".{self.out.name}.{kind}")

    def left_out(self) -> list[str]:
        """Returns the names of the inputs that are not read again."""
        file = self.beside("left_out")
        return json.loads(file.read_bytes()) if file.exists() else []


class _Failed(Exception):
    """Steps of a user's have failed on documents: reason and detail of each, by its id."""

    def __init__(self, documents: dict[str, tuple[str, str]]) -> None:
        super().__init__(documents)
        self.documents = documents


def run_task(job: TaskJob) -> None:
    """Runs a job, unless its result exists.

    A document that a step takes too long for, or that a user's step fails on, is set aside. The
    exception ends the steps with all that they hold of the task, so the job starts again without
    that document.

    Raises:
        DataError: if code of a user's has changed since the build began.
    """
    check_code(job.code)
    unfit: dict[str, tuple[str, str]] = {}  # reason and message of each such document, by id
    while not job.is_done():
        timed = TimeLimit(unfit)
        try:
            with timed:
                _run_once(job, timed, unfit)
        except TooSlow as error:
            if timed.now is None or timed.now in unfit:
                raise  # no document is the cause
            _logger.warning("%s: set aside: %s", timed.now, error)
            unfit[timed.now] = ("takes too long", str(error))
        except _Failed as failed:
            name, (reason, detail) = next(iter(failed.documents.items()))
            more = f", as are {len(failed.documents) - 1} more" * (len(failed.documents) > 1)
            _logger.warning("%s: set aside: %s: %s%s", name, reason, detail, more)
            unfit |= failed.documents
        finally:
            job.beside("reading").unlink(missing_ok=True)


def leave_out_last(job: TaskJob) -> bool:
    """Leaves out the input that a job was reading when its process was killed; False if none."""
    mark = job.beside("reading")
    if job.before is not None or not mark.exists():
        return False
    # Only reading leaves a mark: a later pass has no part of a file that it could leave out.
    name = json.loads(mark.read_bytes())
    write_file(job.beside("left_out"), json.dumps([*job.left_out(), name]).encode())
    mark.unlink()
    _logger.warning(
        "%s/%s: ended the process that read it, twice; it is set aside", job.task.source.name, name
    )
    return True


def _run_once(job: TaskJob, timed: TimeLimit, unfit: Mapping[str, tuple[str, str]]) -> None:
    """Runs the steps of a job over all documents but the unfit ones, and writes the result."""
    # One entry per file and reason: the first row in detail, then a count. A damaged file of
    # 10^8 rows must not give a report of that size.
    unread: dict[tuple[str, str], dict[str, Any]] = {}

    def set_aside(file: str, row: int | None, reason: str, detail: str) -> None:
        new = {"file": file, "reason": reason, "row": row, "detail": detail, "count": 0}
        unread.setdefault((file, reason), new)["count"] += 1

    def write_mark(name: str) -> None:
        # Not synced: it must outlive the process, not the machine.
        with open_new(job.beside("reading")) as file:
            file.write(json.dumps(name).encode())

    for document_id, (reason, detail) in unfit.items():
        file, _, row = document_id.removeprefix(f"{job.task.source.name}/").rpartition("#")
        set_aside(file, int(row), reason, detail)
    if job.before is None:
        documents = job.task.read(set_aside, left_out=job.left_out(), begin=write_mark)
    else:
        documents = read_documents(job.before, job.task)
    documents = timed(documents)
    with (
        new_folder(job.out) as folder,
        (folder / DROPPED_FILE).open("w", encoding="utf-8") as drops,
    ):
        all_counts: list[dict[str, Any]] = []

        def counted(number: int, name: str, step: Step) -> Iterator[Document]:
            counts = {"number": number, "name": name, "in": 0, "out": 0, "dropped": Counter()}
            all_counts.append(counts)
            return _apply(step, documents, job, counts, drops)

        if job.decision is not None:
            number, config, decision = job.decision
            documents = counted(number, config.name, make_step(config).after(decision))
        steps = [make_step(config) for _, config in job.steps]
        for (number, config), step in zip(job.steps, steps, strict=True):
            documents = counted(number, config.name, step)
        if job.notes_of is not None:
            take_notes = make_step(job.notes_of).before(folder / f"{job.out.name}.notes")
            documents = counted(-1, "notes", take_notes)
        # All generators so far: this loop alone moves documents, one at a time, through all steps.
        record = _write_documents(folder / DOCUMENTS_FILE, documents)
        close_synced(drops)
        failures = [step.failures for step in steps if isinstance(step, PluginStep)]
        if any(failures):
            raise _Failed(dict(chain.from_iterable(each.items() for each in failures)))
        # Taking notes drops nothing and is not a step of the recipe, so it is not counted.
        record["steps"] = [counts for counts in all_counts if counts["number"] >= 0]
        for counts in record["steps"]:
            accounted = counts["out"] + counts["dropped"].total()
            assert counts["in"] == accounted, (
                f"step {counts['name']} took {counts['in']} documents and gave or dropped "
                f"{accounted}"
            )
        record["set_aside"] = list(unread.values())
        write_file(folder / RECORD_FILE, json.dumps(record, sort_keys=True).encode())


def _apply(
    step: Step, documents: Iterable[Document], job: TaskJob, counts: dict[str, Any], drops: TextIO
) -> Iterator[Document]:
    """Passes documents through a step, counts them, and writes what it drops to `drops`."""
    last: Document | None = None

    def counted() -> Iterator[Document]:
        nonlocal last
        for document in documents:
            counts["in"] += 1
            last = document
            yield document

    def drop(document: Document, reason: str) -> None:
        counts["dropped"][reason] += 1
        if not job.keep_dropped and counts["dropped"][reason] > _SAMPLES_PER_REASON:
            return
        entry = {
            "step": counts["number"],
            "name": counts["name"],
            "reason": reason,
            "id": document.id,
            "domain": document.domain,
            "metadata": document.metadata,
            "text": document.text if job.keep_dropped else document.text[:_SAMPLE_CHARACTERS],
        }
        drops.write(json.dumps(entry) + "\n")

    try:
        for document in step(counted(), drop):
            # A step changes text as a whole and may delete the marks between prompt and thought.
            if job.task.source.chain_of_thought is not None and parted(document.text) is None:
                drop(document, "parts of the chain of thought lost")
                continue
            counts["out"] += 1
            yield document
    except Exception as error:
        # Without the id, a defect at one of 10^9 documents could not be found again. Only the
        # innermost step adds it: the exception passes through all steps after it.
        if last is not None and not getattr(error, "__notes__", None):
            error.add_note(f"step {counts['name']}, which took document {last.id} last")
        raise


def _write_documents(path: Path, documents: Iterable[Document]) -> dict[str, Any]:
    """Writes documents as lines of JSON and returns their counts and digest."""
    digest = hashlib.sha256()
    num_documents = 0
    text_bytes = 0
    lengths: Counter[int] = Counter()
    languages: Counter[str] = Counter()
    with path.open("wb") as file:
        for document in documents:
            entry = {"id": document.id, "text": document.text, "metadata": document.metadata}
            line = json.dumps(entry, ensure_ascii=False).encode() + b"\n"
            file.write(line)
            digest.update(line)  # lets the manifest name the corpus by its content
            size = len(document.text.encode())
            num_documents += 1
            text_bytes += size
            lengths[size.bit_length()] += 1
            languages[str(document.metadata.get("language", "unknown"))] += 1
        close_synced(file)
    return {
        "documents": num_documents,
        "text_bytes": text_bytes,
        "sha256": digest.hexdigest(),
        "lengths": {f"< {2**power} bytes": lengths[power] for power in sorted(lengths)},
        "languages": dict(sorted(languages.items())),
    }


def read_documents(folder: Path, task: Task) -> Iterator[Document]:
    """Reads the documents of a result."""
    with (folder / DOCUMENTS_FILE).open("rb") as file:
        for line in file:
            entry = json.loads(line)
            # Source and domain are those of the task, so the lines do not repeat them.
            yield Document(
                text=entry["text"],
                id=entry["id"],
                source=task.source.name,
                domain=task.source.domain,
                metadata=entry["metadata"],
            )


def document_id(folder: Path, row: int) -> str:
    """Returns the id of the document at a place of a result."""
    with (folder / DOCUMENTS_FILE).open("rb") as file:
        line = next(itertools.islice(file, row, None))
    return str(json.loads(line)["id"])


def read_record(folder: Path) -> dict[str, Any]:
    """Reads the counts of a result."""
    record: dict[str, Any] = json.loads((folder / RECORD_FILE).read_bytes())
    return record


def close_synced(file: Any) -> None:
    """Closes a file after its content is on the disk."""
    with file:
        file.flush()
        os.fsync(file.fileno())
