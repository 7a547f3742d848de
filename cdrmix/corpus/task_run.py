"""What a process does with one task: read, step and write its documents.

A result is a folder that appears whole or not at all, so that its being there is the mark of
completion. It follows from the task and the steps alone, not from who made it or when.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from cdrmix import log
from cdrmix.corpus.build_tasks import Deadline, Task, TooSlow
from cdrmix.corpus.recipe import StepConfig, make_step
from cdrmix.data.document import Document, Step, parted
from cdrmix.data.folders import new_folder, open_new
from cdrmix.data.shards import write_file

DOCUMENTS_FILE = "documents.jsonl"
DROPPED_FILE = "dropped.jsonl"
RECORD_FILE = "record.json"
_SAMPLES_PER_REASON = 3
_SAMPLE_CHARACTERS = 500
_logger = log.get_logger(__name__)


@dataclass(frozen=True)
class TaskJob:
    """One task on its way through consecutive steps.

    Attributes:
        before: result of the stage before; None: the task is read from its source.
        decision: (number in the recipe, step over the corpus, its decision on this task), carried
            out first.
        steps: (number in the recipe, step) each.
        notes_of: step over the corpus that takes notes last; None at the end.
        out: folder of the result, named by what it follows from.
        keep_dropped: keep dropped documents whole, all of them.
    """

    task: Task
    before: Path | None
    decision: tuple[int, StepConfig, Path] | None
    steps: tuple[tuple[int, StepConfig], ...]
    notes_of: StepConfig | None
    out: Path
    keep_dropped: bool

    def is_done(self) -> bool:
        """Whether the result is there."""
        return self.out.is_dir()

    @property
    def mark(self) -> Path:
        """File that names what is being read; it outlives a process that is killed."""
        return self.out.with_name(f".{self.out.name}.reading")

    @property
    def left_out(self) -> Path:
        """File with the names of what is not read because it ended a process."""
        return self.out.with_name(f".{self.out.name}.left_out")

    @property
    def notes(self) -> Path:
        """Where the step over the corpus puts its notes."""
        return notes_path(self.out)


def notes_path(out: Path) -> Path:
    """The notes of a result; named by the task, since those of all tasks are looked at together."""
    return out / f"{out.name}.notes"


@dataclass
class StepCounts:
    """Documents in and out of one step over one task, and why the others went no further."""

    number: int
    name: str
    documents_in: int = 0
    documents_out: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    def as_json(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "name": self.name,
            "in": self.documents_in,
            "out": self.documents_out,
            "dropped": dict(sorted(self.dropped.items())),
        }


class _Dropped:
    """Writes down what was dropped: everything, or an excerpt of the first of each reason."""

    def __init__(self, file: TextIO, *, keep_all: bool) -> None:
        self._file = file
        self._keep_all = keep_all
        self._num_kept: Counter[tuple[int, str]] = Counter()

    def add(self, counts: StepCounts, document: Document, reason: str) -> None:
        self._num_kept[counts.number, reason] += 1
        if not self._keep_all and self._num_kept[counts.number, reason] > _SAMPLES_PER_REASON:
            return
        text = document.text if self._keep_all else document.text[:_SAMPLE_CHARACTERS]
        entry = {
            "step": counts.number,
            "name": counts.name,
            "reason": reason,
            "id": document.id,
            "domain": document.domain,
            "metadata": document.metadata,
            "text": text,
        }
        self._file.write(json.dumps(entry) + "\n")


def run_task(job: TaskJob) -> None:
    """Do a job whose result is not there yet.

    A document that a step takes too long for is set aside. What the steps had of the task is lost
    with it, so the job begins again without it.

    Raises:
        DataError: what the user can mend: a missing package, a connection that stays broken.
        OSError: if the result cannot be written.
    """
    if job.is_done():
        return
    slow: dict[str, str] = {}  # ids of such documents, and what is told of each
    while not job.is_done():
        documents = _Timed(slow)
        try:
            with documents.deadline:
                _run_without(slow, documents, job)
        except TooSlow as error:
            if documents.now is None or documents.now in slow:
                raise  # it is none of the documents
            _logger.warning("%s: set aside: %s", documents.now, error)
            slow[documents.now] = str(error)
        finally:
            job.mark.unlink(missing_ok=True)


class _Timed:
    """Passes documents on, each with a time of its own; leaves out those that had theirs."""

    def __init__(self, slow: Collection[str]) -> None:
        self.deadline = Deadline()
        self.now: str | None = None  # id of the document that the steps have
        self._slow = slow

    def __call__(self, documents: Iterable[Document]) -> Iterator[Document]:
        for document in documents:
            if document.id not in self._slow:
                self.now = document.id
                self.deadline.begin()
                yield document
                self.now = None
            self.deadline.begin()


def leave_out_last(job: TaskJob) -> bool:
    """Leave out what a job was reading when its process was killed.

    Returns:
        True if there is such a file, so that the job can be run again without it.
    """
    if job.before is not None or not job.mark.exists():
        return False
    name = json.loads(job.mark.read_bytes())
    write_file(job.left_out, json.dumps([*_left_out(job), name]).encode())
    job.mark.unlink()
    _logger.warning(
        "%s/%s: ended the process that read it, twice; it is set aside", job.task.source.name, name
    )
    return True


def _left_out(job: TaskJob) -> list[str]:
    try:
        names: list[str] = json.loads(job.left_out.read_bytes())
    except FileNotFoundError:
        return []
    return names


def _run_without(slow: Mapping[str, str], timed: _Timed, job: TaskJob) -> None:
    with (
        new_folder(job.out) as folder,
        (folder / DROPPED_FILE).open("w", encoding="utf-8") as dropped_file,
    ):
        set_aside = _SetAsideCounts()
        for document_id, why in slow.items():
            file, _, row = document_id.removeprefix(f"{job.task.source.name}/").rpartition("#")
            set_aside(file, int(row), "takes too long", why)
        dropped = _Dropped(dropped_file, keep_all=job.keep_dropped)
        all_counts: list[StepCounts] = []
        if job.before is None:
            documents = job.task.read(
                set_aside,
                left_out=_left_out(job),
                begin=lambda name: _write_mark(job.mark, name),
            )
        else:
            documents = read_documents(job.before, job.task)
        documents = timed(documents)
        for number, name, step in _steps(job, folder):
            counts = StepCounts(number, name)
            in_parts = job.task.source.chain_of_thought is not None
            documents = _through(documents, step, counts, dropped, in_parts=in_parts)
            # The pass that takes notes drops nothing and is not a step of the recipe.
            all_counts += [counts] if number >= 0 else []
        record = _write_documents(folder / DOCUMENTS_FILE, documents)
        _sync_file(dropped_file)
        _check_complete(all_counts)
        record["steps"] = [counts.as_json() for counts in all_counts]
        record["set_aside"] = set_aside.as_json()
        write_file(folder / RECORD_FILE, json.dumps(record, sort_keys=True).encode())


def _write_mark(path: Path, name: str) -> None:
    # Not synced: it has to outlive the process, not the machine.
    with open_new(path) as file:
        file.write(json.dumps(name).encode())


def _steps(job: TaskJob, folder: Path) -> Iterator[tuple[int, str, Step]]:
    if job.decision is not None:
        number, config, path = job.decision
        yield number, config.name, make_step(config).after(path)
    for number, config in job.steps:
        yield number, config.name, make_step(config)
    if job.notes_of is not None:
        yield -1, "notes", make_step(job.notes_of).before(folder / job.notes.name)


def _through(
    documents: Iterable[Document],
    step: Step,
    counts: StepCounts,
    dropped: _Dropped,
    *,
    in_parts: bool,
) -> Iterator[Document]:
    """What a step passes on; of documents in parts, those whose parts it has kept apart."""
    taken: Document | None = None

    def counted() -> Iterator[Document]:
        nonlocal taken
        for document in documents:
            counts.documents_in += 1
            taken = document
            yield document

    def drop(document: Document, reason: str) -> None:
        counts.dropped[reason] += 1
        dropped.add(counts, document, reason)

    try:
        for document in step(counted(), drop):
            if in_parts and parted(document.text) is None:
                drop(document, "parts of the chain of thought lost")
                continue
            counts.documents_out += 1
            yield document
    except Exception as error:
        # A fault of ours in one of 10^9 documents is to be found again.
        if taken is not None and not getattr(error, "__notes__", None):
            error.add_note(f"step {counts.name}, which took document {taken.id} last")
        raise


def _check_complete(all_counts: list[StepCounts]) -> None:
    for counts in all_counts:
        accounted = counts.documents_out + counts.dropped.total()
        assert counts.documents_in == accounted, (
            f"step {counts.name} took {counts.documents_in} documents and gave or dropped "
            f"{accounted}"
        )


class _SetAsideCounts:
    """What could not be read, by file and reason: the first of them whole, then a count."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str], dict[str, Any]] = {}

    def __call__(self, file: str, row: int | None, reason: str, detail: str) -> None:
        entry = self._entries.setdefault(
            (file, reason),
            {"file": file, "reason": reason, "row": row, "detail": detail, "count": 0},
        )
        entry["count"] += 1

    def as_json(self) -> list[dict[str, Any]]:
        return list(self._entries.values())


def _write_documents(path: Path, documents: Iterable[Document]) -> dict[str, Any]:
    """Write documents, one JSON object to a line; counts and digest of them."""
    digest = hashlib.sha256()
    num_documents = text_bytes = 0
    lengths: Counter[int] = Counter()
    languages: Counter[str] = Counter()
    with path.open("wb") as file:
        for document in documents:
            entry = {"id": document.id, "text": document.text, "metadata": document.metadata}
            line = json.dumps(entry, ensure_ascii=False).encode() + b"\n"
            file.write(line)
            digest.update(line)
            size = len(document.text.encode())
            num_documents = num_documents + 1
            text_bytes = text_bytes + size
            lengths[size.bit_length()] += 1
            languages[str(document.metadata.get("language", "unknown"))] += 1
        _sync_file(file)
    return {
        "documents": num_documents,
        "text_bytes": text_bytes,
        "sha256": digest.hexdigest(),
        "lengths": {f"< {2**power} bytes": lengths[power] for power in sorted(lengths)},
        "languages": dict(sorted(languages.items())),
    }


def read_documents(folder: Path, task: Task) -> Iterator[Document]:
    """The documents of a result."""
    with (folder / DOCUMENTS_FILE).open("rb") as file:
        for line in file:
            entry = json.loads(line)
            yield Document(
                text=entry["text"],
                id=entry["id"],
                source=task.source.name,
                domain=task.source.domain,
                metadata=entry["metadata"],
            )


def document_id(folder: Path, row: int) -> str:
    """Id of one document of a result, by its place among them."""
    with (folder / DOCUMENTS_FILE).open("rb") as file:
        line = next(itertools.islice(file, row, None))
    return str(json.loads(line)["id"])


def read_record(folder: Path) -> dict[str, Any]:
    """Counts of a result."""
    record: dict[str, Any] = json.loads((folder / RECORD_FILE).read_bytes())
    return record


def close_synced(file: Any) -> None:
    """Close a file once it is on the disk."""
    with file:
        _sync_file(file)


def _sync_file(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
