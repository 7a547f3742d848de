"""Runs one task through the steps of one pass: reads, changes and writes its documents.

A result is a folder that appears by one rename, so a folder that exists is complete. It depends on
the task and the steps only, not on the process that made it or on the time.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal, Self, TextIO

from cdrmix import log
from cdrmix.corpus.recipe import Numbered, StepConfig, make_step
from cdrmix.corpus.source import SetAside, SourceConfig, SourceFile
from cdrmix.corpus.steps.read import SHARD_NAME, read_file, read_shard
from cdrmix.data.document import Document, Step, parted
from cdrmix.data.folders import new_folder, open_new
from cdrmix.data.shards import write_file

DOCUMENTS_FILE = "documents.jsonl"
DROPPED_FILE = "dropped.jsonl"
RECORD_FILE = "record.json"
# The report shows examples of each reason; all dropped text would be as large as the corpus.
_SAMPLES_PER_REASON = 3
_SAMPLE_CHARACTERS = 500
# The slowest steps read some hundred kB of ordinary text a second, and documents have 32 MiB at
# most unless a recipe allows more.
DOCUMENT_SECONDS = 300.0
_logger = log.get_logger(__name__)


class TooSlow(Exception):
    """A document took longer than allowed; raised at any place in the code."""


@dataclass(frozen=True)
class Task:
    """Documents that one process reads, passes through the steps and encodes.

    Attributes:
        files: files to read, in order; none for a part of a stream.
        shard: (number, of how many) part of a stream; None for files.
        key: hash of all inputs (hex).
    """

    source: SourceConfig
    files: tuple[SourceFile, ...]
    shard: tuple[int, int] | None
    key: str

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
            left_out: names of files, or of the shard, that ended a process and are not read.
            begin: called with each name before it is read.
        """
        parts: Iterator[tuple[str, Iterator[Document]]]
        if self.shard is not None:
            stream = read_shard(self.source, *self.shard, set_aside)
            parts = iter([(SHARD_NAME.format(self.shard[0]), stream)])
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
    """

    task: Task
    before: Path | None
    decision: Decision | None
    steps: tuple[Numbered, ...]
    notes_of: StepConfig | None
    out: Path
    keep_dropped: bool

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


class TimeLimit:
    """Passes documents on, leaves out slow ones, and raises `TooSlow` at one that takes too long.

    Limits the time as a context manager only. Counts processor time of this process, so a busy
    machine or a slow disk changes nothing. Python delivers signals to its main thread only: there
    is no limit in another thread.
    """

    def __init__(self, slow: Collection[str], seconds: float = DOCUMENT_SECONDS) -> None:
        self.now: str | None = None  # id of the document in the steps
        self._slow = slow
        self._seconds = seconds
        self._is_usable = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Self:
        def raise_too_slow(number: int, frame: FrameType | None) -> None:
            raise TooSlow(f"more than {self._seconds:g} s of processor time")

        if self._is_usable:
            self._before = signal.signal(signal.SIGVTALRM, raise_too_slow)
            self._begin()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._is_usable:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, self._before)

    def _begin(self) -> None:
        """Starts the time of the next document."""
        if self._is_usable:
            # Repeated: Python ignores an exception that is raised in a destructor.
            signal.setitimer(signal.ITIMER_VIRTUAL, self._seconds, self._seconds)

    def __call__(self, documents: Iterable[Document]) -> Iterator[Document]:
        for document in documents:
            if document.id not in self._slow:
                self.now = document.id
                self._begin()
                yield document
                # Too much time from here on is that of reading, which `Task.read` sets aside.
                self.now = None
            # Also before the next one is read, which has a limit of its own.
            self._begin()


def run_task(job: TaskJob) -> None:
    """Runs a job, unless its result exists.

    A document that a step takes too long for is set aside. The exception ends the steps with all
    that they hold of the task, so the job starts again without that document.
    """
    slow: dict[str, str] = {}  # id and message of each such document
    while not job.is_done():
        timed = TimeLimit(slow)
        try:
            with timed:
                _run_once(job, timed, slow)
        except TooSlow as error:
            if timed.now is None or timed.now in slow:
                raise  # no document is the cause
            _logger.warning("%s: set aside: %s", timed.now, error)
            slow[timed.now] = str(error)
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


def _run_once(job: TaskJob, timed: TimeLimit, slow: Mapping[str, str]) -> None:
    """Runs the steps of a job over all documents but the slow ones, and writes the result."""
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

    for document_id, message in slow.items():
        file, _, row = document_id.removeprefix(f"{job.task.source.name}/").rpartition("#")
        set_aside(file, int(row), "takes too long", message)
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
        for number, config in job.steps:
            documents = counted(number, config.name, make_step(config))
        if job.notes_of is not None:
            take_notes = make_step(job.notes_of).before(folder / f"{job.out.name}.notes")
            documents = counted(-1, "notes", take_notes)
        # All generators so far: this loop alone moves documents, one at a time, through all steps.
        record = _write_documents(folder / DOCUMENTS_FILE, documents)
        close_synced(drops)
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
