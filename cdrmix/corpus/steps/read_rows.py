"""Rows of files that hold many texts: JSON, JSON lines, CSV, tar, Parquet and Arrow.

Memory is bounded by the largest document allowed, whatever a file claims about its size.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import tarfile
from collections.abc import Callable, Iterator
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO

from cdrmix.corpus.source import SourceConfig, SourceFile
from cdrmix.corpus.steps.read_bytes import Unreadable, bounded_lines, from_extra, open_bytes
from cdrmix.corpus.steps.read_text import decoded
from cdrmix.data.document import joined, reserved_in

# Number of each row and its value: an object, the text and metadata of a whole file, or an
# `Unreadable` if it cannot be used.
Rows = Iterator[tuple[int, Any]]
_JSON_CHUNK_CHARACTERS = 2**20
_ARROW_BATCH_ROWS = 64
# Limit on rows that are decoded together, in multiples of `max_document_bytes`.
_BATCH_DOCUMENTS = 8
# Text is seldom compressed to a hundredth of its size.
_MAX_EXPANSION = 1_000
# Of a row without the text that was asked for: a hint, and not all that the row holds.
_SHOWN_FIELDS = 20
_SHOWN_PATHS = 5
_SHOWN_DEPTH = 4
_TEXT_ENDING = "txt"
_FIELDS_ENDING = "json"
# Long names and pax fields precede the member that they are about, and tarfile reads them whole.
_MAX_HEADER_BYTES = 2**20
_HEADER_TYPES = {
    *(tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE),
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
}


def read_rows(file: SourceFile, source: SourceConfig) -> Rows:
    """Reads the rows of a file; raises Unreadable if the rest of it cannot be read."""
    readers: dict[str, Callable[[Path, SourceConfig], Rows]] = {
        "json": _json_file,
        "jsonl": _json_lines,
        "csv": partial(_csv_rows, delimiter=","),
        "tsv": partial(_csv_rows, delimiter="\t"),
        "tar": _tar_samples,
        "parquet": partial(_table_rows, kind="parquet"),
        "arrow": partial(_table_rows, kind="arrow"),
    }
    return readers[file.kind](file.path, source)


def text_and_metadata(value: Any, source: SourceConfig) -> tuple[str, dict[str, Any]]:
    """Text and metadata of a row: its fields that the source names; Unreadable if there is none.

    The parts of a chain of thought become one text.
    """
    if isinstance(value, Unreadable):
        raise value
    if isinstance(value, tuple):
        return value
    if not isinstance(value, dict):
        raise Unreadable("not an object", f"a JSON {type(value).__name__}")
    parts = []
    for name in source.text_fields:
        part = _field(value, name)
        if part is None:
            known = ", ".join(map(str, list(value)[:_SHOWN_FIELDS]))
            detail = f"its fields: {known}{_inside(_text_paths(value))}"
            raise Unreadable(f"no text in field '{name}'", detail)
        if not isinstance(part, str):
            inside = _inside(_text_paths(part, f"{name}.")) if isinstance(part, dict) else ""
            detail = f"it holds a {type(part).__name__}{inside}"
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
    # Under the last part of their names: a step looks for `url`, wherever it is nested.
    fields = ((name, _field(value, name)) for name in source.metadata_fields)
    return text, {name.rpartition(".")[2]: found for name, found in fields if found is not None}


def _text_paths(value: dict[str, Any], start: str = "", depth: int = 0) -> Iterator[str]:
    """Paths of the texts inside of a row's objects, as `text_field` takes them."""
    for key, inner in value.items():
        if "." in key:  # a path with it would lead elsewhere
            continue
        if isinstance(inner, dict) and depth < _SHOWN_DEPTH:
            yield from _text_paths(inner, f"{start}{key}.", depth + 1)
        elif isinstance(inner, str) and start:
            yield f"{start}{key}"


def _inside(paths: Iterator[str]) -> str:
    found = ", ".join(itertools.islice(paths, _SHOWN_PATHS))
    return f"; text inside: {found}" if found else ""


def _too_long(what: str, limit: int) -> Unreadable:
    return Unreadable(f"{what} longer than max_document_bytes", f"more than {limit} bytes")


def _field(value: dict[str, Any], name: str) -> Any:
    """Value of a field, None if it is missing; dots lead into objects."""
    inner: Any = value.get(name)  # a column of a table may have a dot in its name
    if inner is None:
        inner = value
        for key in name.split("."):
            inner = inner.get(key) if isinstance(inner, dict) else None
    return inner


def _json_lines(path: Path, source: SourceConfig) -> Rows:
    limit = source.max_document_bytes
    with open_bytes(path) as file:
        for row, line in enumerate(bounded_lines(file, limit)):
            if line is None:
                yield row, _too_long("line", limit)
            if line is None or line.isspace():
                continue
            try:
                value = json.loads(decoded(line, source.encoding, source.encoding_errors))
            except Unreadable as error:
                value = error
            except ValueError as error:
                value = Unreadable("invalid JSON", str(error))
            except RecursionError:
                value = Unreadable("invalid JSON", "nested too deeply")
            yield row, value


def _json_file(path: Path, source: SourceConfig) -> Rows:
    """Reads the elements of a .json file's list, or its values one after the other."""
    with open_bytes(path) as file:
        errors = "strict" if source.encoding_errors == "set_aside" else "replace"
        reader = io.TextIOWrapper(file, source.encoding, errors=errors)
        try:
            yield from enumerate(_json_values(reader.read, source.max_document_bytes))
        except UnicodeDecodeError as error:
            raise Unreadable(f"invalid {source.encoding}", error.reason) from None


def _json_values(read: Callable[[int], str], limit: int) -> Iterator[Any]:
    """Parses values of JSON text piece by piece; at most one value is in memory."""
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


def _csv_rows(path: Path, source: SourceConfig, *, delimiter: str) -> Rows:
    """Reads the rows of a table with a header as objects."""
    limit = source.max_document_bytes
    csv.field_size_limit(limit)

    def lines(file: BinaryIO) -> Iterator[str]:
        for number, line in enumerate(bounded_lines(file, limit)):
            # Past either, the reader cannot tell any more where rows begin.
            if line is None:
                raise _too_long("line", limit)
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
                    detail = f"{len(values)} values, {len(header)} columns"
                    yield row, Unreadable("row does not fit the header", detail)
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


def _tar_samples(path: Path, source: SourceConfig) -> Rows:
    """Reads samples as WebDataset lays them out: consecutive members with one name and several
    endings, `a/0001.txt` with the text and `a/0001.json` with fields.

    A sample cut off by a damage is left out: members of it may be missing.
    """
    members_of = itertools.groupby(_tar_members(path, source.max_document_bytes), itemgetter(0))
    for row, (key, members) in enumerate(members_of):
        contents = {ending: content for _, ending, content in members}
        try:
            value: Any = _tar_sample(contents, source)
        except Unreadable as error:
            value = Unreadable(error.reason, f"{key}: {error.detail}")
        except (ValueError, RecursionError) as error:
            value = Unreadable("invalid JSON", f"{key}: {error}")
        yield row, value


def _tar_sample(contents: dict[str, bytes | None], source: SourceConfig) -> dict[str, Any]:
    """Fields of a sample, from the contents of its members by their endings."""
    endings = [ending for ending in (_TEXT_ENDING, _FIELDS_ENDING) if ending in contents]
    if not endings:
        raise Unreadable("no .txt or .json in the sample", f"it has {', '.join(contents)}")
    texts: dict[str, str] = {}
    for ending in endings:
        content = contents[ending]
        if content is None:
            detail = f".{ending}: {source.max_document_bytes}"
            raise Unreadable("member larger than max_document_bytes", detail)
        texts[ending] = decoded(content, source.encoding, source.encoding_errors)
    fields = json.loads(texts.get(_FIELDS_ENDING, "{}"))
    if not isinstance(fields, dict):
        raise Unreadable("not an object", f".{_FIELDS_ENDING}: a JSON {type(fields).__name__}")
    if _TEXT_ENDING in texts:
        fields[source.text_field] = texts[_TEXT_ENDING]
    return fields


def _tar_members(path: Path, limit: int) -> Iterator[tuple[str, str, bytes | None]]:
    """Reads the files of an archive: name up to its first dot, ending, and content.

    The content of a file larger than `limit` bytes, or of an ending that is not used, is None.
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
                is_used = ending in (_TEXT_ENDING, _FIELDS_ENDING) and member.size <= limit
                stream = archive.extractfile(member) if is_used else None
                yield f"{folder}/{key}", ending, None if stream is None else stream.read()
    except tarfile.TarError as error:
        raise Unreadable("damaged tar", str(error)) from None
    except RecursionError:
        raise Unreadable("damaged tar", "headers of headers") from None


def _table_rows(path: Path, source: SourceConfig, *, kind: str) -> Rows:
    """Rows as Python objects, a few at a time: a batch of a file on disk may be large."""
    pyarrow = from_extra("pyarrow", str(path))
    limit = source.max_document_bytes
    row = 0
    try:
        batches_of = _parquet_batches if kind == "parquet" else _arrow_batches
        for batch in batches_of(path, source):
            # Where a few rows may be large, or the same bytes stand behind all of them
            # (dictionaries, views), one at a time: each may be as large as the whole batch.
            together = _BATCH_DOCUMENTS * limit // max(1, batch.nbytes)
            rows = min(_ARROW_BATCH_ROWS, max(1, together))
            for start in range(0, batch.num_rows, rows):
                for value in batch.slice(start, rows).to_pylist():
                    parts = (_field(value, name) for name in source.text_fields)
                    texts = (part for part in parts if isinstance(part, str))
                    if any(len(text.encode(errors="surrogatepass")) > limit for text in texts):
                        yield row, _too_long("row", limit)
                    else:
                        yield row, value
                    row += 1
    except pyarrow.ArrowException as error:
        raise Unreadable(f"damaged {kind}", str(error)) from None


def _parquet_batches(path: Path, source: SourceConfig) -> Iterator[Any]:
    """Decodes so many rows together that they take bounded memory."""
    # A value that stands once in a column's dictionary may be that of every row: a file of 750
    # bytes holds 64 rows of 10 MB. So each row is taken to be as large as the largest chunk.
    limit = _BATCH_DOCUMENTS * source.max_document_bytes
    largest = 1
    with from_extra("pyarrow.parquet", str(path)).ParquetFile(path) as file:
        columns = _columns(file.schema_arrow, source)
        groups = map(file.metadata.row_group, range(file.metadata.num_row_groups))
        for chunk in (group.column(i) for group in groups for i in range(group.num_columns)):
            name = chunk.path_in_schema
            if name not in columns and name.partition(".")[0] not in columns:
                continue
            size = chunk.total_uncompressed_size
            # A page is decompressed at once.
            if size > limit and size > _MAX_EXPANSION * chunk.total_compressed_size:
                raise Unreadable("expands too much", f"{size} bytes in column {name}")
            largest = max(largest, size)
        rows = min(_ARROW_BATCH_ROWS, max(1, limit // largest))
        yield from file.iter_batches(rows, columns=columns)


def _arrow_batches(path: Path, source: SourceConfig) -> Iterator[Any]:
    """Reads an Arrow file in either format; `datasets` writes the streaming one."""
    pyarrow = from_extra("pyarrow", str(path))
    with pyarrow.memory_map(str(path)) as file:
        try:
            reader = pyarrow.ipc.open_stream(file)
            batches = iter(reader)
        except pyarrow.ArrowInvalid:
            reader = pyarrow.ipc.open_file(file)
            batches = map(reader.get_batch, range(reader.num_record_batches))
        with reader:
            columns = _columns(reader.schema, source)
            for batch in batches:
                yield batch.select(columns)


def _columns(schema: Any, source: SourceConfig) -> list[str]:
    """Columns of a table that hold the fields that the source names."""
    names: list[str] = schema.names
    fields = (*source.text_fields, *source.metadata_fields)
    column_of = {field: field if field in names else field.partition(".")[0] for field in fields}
    if missing := [field for field in source.text_fields if column_of[field] not in names]:
        columns = ", ".join(names[:_SHOWN_FIELDS])
        inside = _inside(_text_paths(_row_of(schema, range(len(names)))))
        raise Unreadable(f"no column '{missing[0]}'", f"its columns: {columns}{inside}")
    return [name for name in dict.fromkeys(column_of.values()) if name in names]


def _row_of(kind: Any, places: range, depth: int = 0) -> dict[str, Any]:
    """A row of a schema or a struct of Arrow, with empty texts and without other values."""
    row: dict[str, Any] = {}
    for field in map(kind.field, places):
        # By the type's name, as pyarrow is imported only where a table is read.
        if (name := str(field.type)).startswith("struct<") and depth < _SHOWN_DEPTH:
            row[field.name] = _row_of(field.type, range(field.type.num_fields), depth + 1)
        elif name in ("string", "large_string", "string_view"):
            row[field.name] = ""
    return row
