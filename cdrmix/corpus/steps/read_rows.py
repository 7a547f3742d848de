"""Rows of files that hold many texts: JSON, JSON lines, CSV, tar, Parquet and Arrow.

Tar files are read as WebDataset lays them out: consecutive members with one name and several
endings are one sample, such as `a/0001.txt` with the text and `a/0001.json` with its fields.
Memory is bounded by the largest document allowed, whatever a file claims about its size.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import tarfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO

from cdrmix.corpus.source import SourceConfig, SourceFile
from cdrmix.corpus.steps.read_bytes import Unreadable, bounded_lines, missing_extra, open_bytes
from cdrmix.corpus.steps.read_text import decoded
from cdrmix.data.document import joined, reserved_in

# number, text, metadata
Row = tuple[int, str, dict[str, Any]]
# (row, reason in a few words, detail)
Refuse = Callable[[int, str, str], None]
_Reader = Callable[[Path, SourceConfig, Refuse], Iterator[tuple[int, Any]]]
_JSON_CHUNK_CHARACTERS = 2**20
_ARROW_BATCH_ROWS = 64
# Limit on rows that are decoded together, in multiples of `max_document_bytes`.
_BATCH_DOCUMENTS = 8
# Text is seldom compressed to a hundredth of its size.
_MAX_EXPANSION = 1_000
_TEXT_ENDING = "txt"
_FIELDS_ENDING = "json"
# Long names and pax fields precede the member that they are about, and tarfile reads them whole.
_MAX_HEADER_BYTES = 2**20
_HEADER_TYPES = {
    *(tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE),
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
}


def read_rows(file: SourceFile, source: SourceConfig, refuse: Refuse) -> Iterator[Row]:
    """Reads the rows of a file that hold a text.

    Args:
        refuse: called for each row that cannot be used.
    Raises:
        Unreadable: if the rest of the file cannot be read.
        OSError: if it cannot be opened.
    """
    readers: dict[str, _Reader] = {
        "json": _json_file,
        "jsonl": _json_lines,
        "csv": partial(_csv_rows, delimiter=","),
        "tsv": partial(_csv_rows, delimiter="\t"),
        "parquet": _parquet_rows,
        "tar": _tar_samples,
        "arrow": _arrow_rows,
    }
    return texts(readers[file.kind](file.path, source, refuse), source, refuse)


def texts(
    objects: Iterable[tuple[int, Any]], source: SourceConfig, refuse: Refuse
) -> Iterator[Row]:
    """Turns numbered objects with texts in the fields that the source names into rows.

    The parts of a chain of thought become one text.
    """
    for row, value in objects:
        if not isinstance(value, dict):
            refuse(row, "not an object", f"a JSON {type(value).__name__}")
            continue
        try:
            parts = []
            for name in source.text_fields:
                part = _field(value, name)
                if part is None:
                    known = ", ".join(map(str, list(value)[:20]))
                    raise Unreadable(f"no text in field '{name}'", f"its fields: {known}")
                if not isinstance(part, str):
                    detail = f"it holds a {type(part).__name__}"
                    raise Unreadable(f"field '{name}' holds no text", detail)
                parts.append(part)
            text = parts[0]
            if source.chain_of_thought is not None:
                prompt, thought, answer = parts
                if not prompt.strip() or not answer.strip():
                    raise Unreadable("empty prompt or answer")
                for part in parts:
                    # The names join the parts, and would take the text apart elsewhere.
                    if reserved := reserved_in(part):
                        raise Unreadable("name of a special token in the text", reserved)
                text = joined(prompt, thought, answer)
        except Unreadable as error:
            refuse(row, error.reason, error.detail)
            continue
        # Under the last part of their names: a step looks for `url`, wherever it is nested.
        fields = ((name, _field(value, name)) for name in source.metadata_fields)
        yield row, text, {name.rpartition(".")[2]: v for name, v in fields if v is not None}


def _field(value: dict[str, Any], name: str) -> Any:
    """Value of a field, None if it is missing; dots lead into objects."""
    inner: Any = value.get(name)  # a column of a table may have a dot in its name
    if inner is None:
        inner = value
        for key in name.split("."):
            inner = inner.get(key) if isinstance(inner, dict) else None
    return inner


def _json_lines(path: Path, source: SourceConfig, refuse: Refuse) -> Iterator[tuple[int, Any]]:
    limit = source.max_document_bytes
    with open_bytes(path) as file:
        for row, line in enumerate(bounded_lines(file, limit)):
            if line is None:
                refuse(row, "line longer than max_document_bytes", f"more than {limit} bytes")
                continue
            if line.isspace():
                continue
            try:
                value = json.loads(decoded(line, source.encoding, source.encoding_errors))
            except Unreadable as error:
                refuse(row, error.reason, error.detail)
            except ValueError as error:
                refuse(row, "invalid JSON", str(error))
            except RecursionError:
                refuse(row, "invalid JSON", "nested too deeply")
            else:
                yield row, value


def _json_file(path: Path, source: SourceConfig, refuse: Refuse) -> Iterator[tuple[int, Any]]:
    """Reads the elements of a .json file's list, or its values one after the other."""
    with open_bytes(path) as file:
        errors = "strict" if source.encoding_errors == "set_aside" else "replace"
        reader = io.TextIOWrapper(file, source.encoding, errors=errors)
        try:
            yield from enumerate(_json_values(reader.read, source.max_document_bytes))
        except UnicodeDecodeError as error:
            raise Unreadable(f"invalid {source.encoding}", error.reason) from None


def _json_values(read: Callable[[int], str], limit: int) -> Iterator[Any]:
    """Parses values of JSON text piece by piece; at most one value is in memory.

    Raises:
        Unreadable: at invalid JSON, at a value longer than `limit` characters, and at an end
            inside a value or list.
    """
    decoder = json.JSONDecoder()
    text = read(_JSON_CHUNK_CHARACTERS).removeprefix("\ufeff")
    place = 0
    at_end = False
    in_list = False
    at_start = True  # only there a bracket opens the list of values; further on it is a value
    while True:
        while place < len(text) and text[place] in " \t\r\n,":
            place += 1
        if place < len(text) and at_start and text[place] == "[":
            in_list = True
            at_start = False
            place += 1
            continue
        if place < len(text) and in_list and text[place] == "]":
            return
        try:
            value, end = decoder.raw_decode(text, place)
            # A number at the end of the text read so far may go on.
            complete = at_end or end < len(text)
            problem = ""
        except RecursionError:
            raise Unreadable("invalid JSON", "nested too deeply") from None
        except ValueError as error:
            complete = False
            problem = str(error)
        if complete:
            at_start = False
            place = end
            yield value
        elif at_end:
            if place < len(text) or in_list:
                raise Unreadable("invalid JSON", problem or "it ends inside a list")
            return
        elif len(text) - place > limit:
            raise Unreadable("value longer than max_document_bytes", f"more than {limit}")
        else:
            # Twice as much as before, so that a long value is not parsed too many times.
            more = read(max(_JSON_CHUNK_CHARACTERS, len(text) - place))
            text = text[place:] + more
            place = 0
            at_end = not more


def _csv_rows(
    path: Path, source: SourceConfig, refuse: Refuse, *, delimiter: str
) -> Iterator[tuple[int, Any]]:
    """Reads the rows of a table with a header as objects."""
    limit = source.max_document_bytes
    csv.field_size_limit(limit)

    def lines(file: BinaryIO) -> Iterator[str]:
        for number, line in enumerate(bounded_lines(file, limit)):
            # Past either, the reader cannot tell any more where rows begin.
            if line is None:
                detail = f"more than {limit} bytes"
                raise Unreadable("line longer than max_document_bytes", detail)
            if b"\0" in line:
                raise Unreadable("NUL characters", f"line {number + 1}")
            yield decoded(line, source.encoding, source.encoding_errors)

    with open_bytes(path) as file:
        reader = csv.reader(lines(file), delimiter=delimiter, strict=True)
        try:
            header = next(reader, [])
            if missing := [name for name in source.text_fields if name not in header]:
                columns = ", ".join(header[:20])[:500]
                detail = f"its columns: {columns}" if header else "the file is empty"
                raise Unreadable(f"no column '{missing[0]}'", detail)
            for row, values in enumerate(reader):
                if len(values) == len(header):
                    yield row, dict(zip(header, values, strict=True))
                elif values:
                    counts = f"{len(values)} values, {len(header)} columns"
                    refuse(row, "row does not fit the header", counts)
        except csv.Error as error:
            raise Unreadable("invalid CSV", f"line {reader.line_num}: {error}") from None


class _TarMember(tarfile.TarInfo):
    """Member of an archive whose headers may lie about their size."""

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        # The hook that tarfile's source names for subclasses. A ReadError ends the reading;
        # tarfile takes a HeaderError at the first member for an empty archive.
        if self.type in _HEADER_TYPES and self.size > _MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {self.size} bytes")
        member: tarfile.TarInfo = super()._proc_member(archive)  # type: ignore[misc]
        return member


def _tar_samples(path: Path, source: SourceConfig, refuse: Refuse) -> Iterator[tuple[int, Any]]:
    """Reads samples: fields of the `.json` member, and the `.txt` in the source's text field.

    A sample cut off by a damage is left out: members of it may be missing.

    Raises:
        Unreadable: if the rest of the file cannot be read.
    """
    members_of = itertools.groupby(_tar_members(path, source.max_document_bytes), itemgetter(0))
    for row, (key, members) in enumerate(members_of):
        contents = {ending: content for _, ending, content in members}
        texts_of: dict[str, str] = {}
        try:
            endings = [e for e in (_TEXT_ENDING, _FIELDS_ENDING) if e in contents]
            if not endings:
                raise Unreadable("no .txt or .json in the sample", f"it has {', '.join(contents)}")
            for ending in endings:
                content = contents[ending]
                if content is None:
                    detail = f".{ending}: {source.max_document_bytes}"
                    raise Unreadable("member larger than max_document_bytes", detail)
                texts_of[ending] = decoded(content, source.encoding, source.encoding_errors)
            fields = json.loads(texts_of.get(_FIELDS_ENDING, "{}"))
            if not isinstance(fields, dict):
                detail = f".{_FIELDS_ENDING}: a JSON {type(fields).__name__}"
                raise Unreadable("not an object", detail)
        except Unreadable as error:
            refuse(row, error.reason, f"{key}: {error.detail}")
        except (ValueError, RecursionError) as error:
            refuse(row, "invalid JSON", f"{key}: {error}")
        else:
            if _TEXT_ENDING in texts_of:
                fields[source.text_field] = texts_of[_TEXT_ENDING]
            yield row, fields


def _tar_members(path: Path, limit: int) -> Iterator[tuple[str, str, bytes | None]]:
    """Reads the files of an archive: name up to its first dot, ending, and content.

    The content is None in a file larger than `limit` bytes or of an ending that is not used.
    """
    try:
        with (
            open_bytes(path) as file,
            tarfile.open(fileobj=file, mode="r|", tarinfo=_TarMember) as archive,
        ):
            while (member := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]  # it would keep all
                folder, _, name = member.name.rpartition("/")
                key, _, ending = name.partition(".")
                if not member.isfile() or not key or not ending:
                    continue
                content: bytes | None = None
                stream = archive.extractfile(member)
                if (
                    ending in (_TEXT_ENDING, _FIELDS_ENDING)
                    and member.size <= limit
                    and stream is not None
                ):
                    content = stream.read()
                yield f"{folder}/{key}", ending, content
    except tarfile.TarError as error:
        raise Unreadable("damaged tar", str(error)) from None
    except RecursionError:
        raise Unreadable("damaged tar", "headers of headers") from None


def _parquet_rows(path: Path, source: SourceConfig, refuse: Refuse) -> Iterator[tuple[int, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise missing_extra(str(path), "pyarrow") from None
    with ExitStack() as stack:
        try:
            file = stack.enter_context(pyarrow.parquet.ParquetFile(path))
            columns = _columns(file.schema_arrow.names, source)
            batch_rows = _parquet_batch_rows(file.metadata, columns, source)
            batches = file.iter_batches(batch_rows, columns=columns)
            yield from _rows_of_batches(batches, source, refuse)
        except pyarrow.ArrowException as error:
            raise Unreadable("damaged parquet", str(error)) from None


def _parquet_batch_rows(metadata: Any, columns: list[str], source: SourceConfig) -> int:
    """Number of rows of a parquet file to decode together.

    A value that stands once in a column's dictionary may be that of every row: a file of 750 bytes
    holds 64 rows of 10 MB. So each row is taken to be as large as the largest column chunk.

    Raises:
        Unreadable: if a chunk expands beyond all measure, as a page is decompressed at once.
    """
    limit = _BATCH_DOCUMENTS * source.max_document_bytes
    largest = 1
    for group in range(metadata.num_row_groups):
        chunks = (metadata.row_group(group).column(i) for i in range(metadata.num_columns))
        for chunk in chunks:
            path = chunk.path_in_schema
            if path not in columns and path.partition(".")[0] not in columns:
                continue
            size = chunk.total_uncompressed_size
            if size > limit and size > _MAX_EXPANSION * chunk.total_compressed_size:
                raise Unreadable("expands too much", f"{size} bytes in column {path}")
            largest = max(largest, size)
    return min(_ARROW_BATCH_ROWS, max(1, limit // largest))


def _arrow_rows(path: Path, source: SourceConfig, refuse: Refuse) -> Iterator[tuple[int, Any]]:
    """Reads the rows of an Arrow file in either format; `datasets` writes the streaming one."""
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError:
        raise missing_extra(str(path), "pyarrow") from None
    with ExitStack() as stack:
        try:
            file = stack.enter_context(pyarrow.memory_map(str(path)))
            try:
                batches: Any = stack.enter_context(pyarrow.ipc.open_stream(file))
                names = batches.schema.names
            except pyarrow.ArrowInvalid:
                whole = stack.enter_context(pyarrow.ipc.open_file(file))
                batches = (whole.get_batch(i) for i in range(whole.num_record_batches))
                names = whole.schema.names
            columns = _columns(names, source)
            selected = (batch.select(columns) for batch in batches)
            yield from _rows_of_batches(selected, source, refuse)
        except pyarrow.ArrowException as error:
            raise Unreadable("damaged arrow", str(error)) from None


def _columns(names: list[str], source: SourceConfig) -> list[str]:
    """Columns of a table that hold the fields that the source names.

    Raises:
        Unreadable: if one with text is missing.
    """

    def column(field: str) -> str:
        return field if field in names else field.partition(".")[0]

    if missing := [field for field in source.text_fields if column(field) not in names]:
        columns = ", ".join(names[:20])
        raise Unreadable(f"no column '{missing[0]}'", f"its columns: {columns}")
    fields = map(column, (*source.text_fields, *source.metadata_fields))
    return [name for name in dict.fromkeys(fields) if name in names]


def _rows_of_batches(
    batches: Iterable[Any], source: SourceConfig, refuse: Refuse
) -> Iterator[tuple[int, Any]]:
    """Rows as Python objects, a few at a time: a batch of a file on disk may be large."""
    limit = source.max_document_bytes
    row = 0
    for batch in batches:
        # Where a few rows may be large, or the same bytes stand behind all of them (dictionaries,
        # views), one at a time: each may be as large as the whole batch.
        together = _BATCH_DOCUMENTS * limit // max(1, batch.nbytes)
        rows = min(_ARROW_BATCH_ROWS, max(1, together))
        for start in range(0, batch.num_rows, rows):
            for value in batch.slice(start, rows).to_pylist():
                parts = [_field(value, name) for name in source.text_fields]
                if any(
                    isinstance(part, str) and len(part.encode(errors="surrogatepass")) > limit
                    for part in parts
                ):
                    refuse(row, "row longer than max_document_bytes", f"more than {limit} bytes")
                else:
                    yield row, value
                row += 1
