"""Tar files in WebDataset's way: consecutive members with one name and several endings are one
sample, such as `a/0001.txt` with the text and `a/0001.json` with what belongs to it.

Files of many texts: JSON, JSON lines, CSV, tar, Parquet and Arrow, a row at a time.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import tarfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from cdrmix.corpus.source import SourceConfig, SourceFile
from cdrmix.corpus.steps.read_bytes import Unreadable, bounded_lines, missing_extra, open_bytes
from cdrmix.corpus.steps.read_text import decoded
from cdrmix.data.document import joined, reserved_in

_TEXT = "txt"
_FIELDS = "json"
# Long names and pax fields precede the member that they are about, and tarfile reads them whole.
_MAX_HEADER_BYTES = 2**20
_HEADER_TYPES = {
    *(tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE),
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
}
Members = Iterator[tuple[str, str, bytes | None]]


class _Member(tarfile.TarInfo):
    """A member of an archive whose headers may lie about their size."""

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        # The place that tarfile's source names for other ways with kinds of members. A ReadError
        # ends the reading; tarfile takes a HeaderError at the first member for an empty archive.
        if self.type in _HEADER_TYPES and self.size > _MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {self.size} bytes")
        member: tarfile.TarInfo = super()._proc_member(archive)  # type: ignore[misc]
        return member


def tar_samples(
    path: Path, source: SourceConfig, refuse: Callable[[int, str, str], None]
) -> Iterator[tuple[int, Any]]:
    """Numbered objects: the sample's `.json`, with its `.txt` in the field that the source names.

    At a damage the sample that was being read is left out: members of it may be missing.

    Args:
        refuse: told of each sample that cannot be used (number, reason, what exactly).
    Raises:
        Unreadable: where the rest of the file cannot be read.
    """
    samples = itertools.groupby(_members(path, source.max_document_bytes), lambda found: found[0])
    for row, (key, members) in enumerate(samples):
        contents = {ending: content for _, ending, content in members}
        try:
            value = _sample(contents, source)
        except Unreadable as error:
            refuse(row, error.reason, f"{key}: {error.detail}")
        else:
            yield row, value


def _members(path: Path, limit: int) -> Members:
    """Name up to its first dot, ending, and content of each file; no content where it is larger
    than `limit` bytes, or of an ending that is not read."""
    try:
        with (
            open_bytes(path) as file,
            tarfile.open(fileobj=file, mode="r|", tarinfo=_Member) as archive,
        ):
            while (member := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]  # it would keep all
                folder, _, name = member.name.rpartition("/")
                key, _, ending = name.partition(".")
                if not member.isfile() or not key or not ending:
                    continue
                content: bytes | None = None
                opened = archive.extractfile(member)
                if ending in (_TEXT, _FIELDS) and member.size <= limit and opened is not None:
                    content = opened.read()
                yield f"{folder}/{key}", ending, content
    except tarfile.TarError as error:
        raise Unreadable("damaged tar", str(error)) from None
    except RecursionError:
        raise Unreadable("damaged tar", "headers of headers") from None


def _sample(contents: dict[str, bytes | None], source: SourceConfig) -> dict[str, Any]:
    read = [ending for ending in (_TEXT, _FIELDS) if ending in contents]
    if not read:
        raise Unreadable("no .txt or .json in the sample", f"it has {', '.join(contents)}")
    texts: dict[str, str] = {}
    for ending in read:
        content = contents[ending]
        if content is None:
            raise Unreadable(
                "member larger than max_document_bytes", f".{ending}: {source.max_document_bytes}"
            )
        texts[ending] = decoded(content, source.encoding, source.encoding_errors)
    try:
        fields = json.loads(texts.get(_FIELDS, "{}"))
    except (ValueError, RecursionError) as error:
        raise Unreadable("invalid JSON", str(error)) from None
    if not isinstance(fields, dict):
        raise Unreadable("not an object", f".{_FIELDS}: a JSON {type(fields).__name__}")
    return fields | ({source.text_field: texts[_TEXT]} if _TEXT in texts else {})


# number, text, metadata
Row = tuple[int, str, dict[str, Any]]
# (row, reason in a few words, what exactly)
Refuse = Callable[[int, str, str], None]
_JSON_CHUNK_CHARACTERS = 2**20
_ARROW_BATCH_ROWS = 64
# Rows that are decoded together may hold so many times `max_document_bytes`.
_BATCH_DOCUMENTS = 8
# Text is seldom compressed to a hundredth of its size.
_MAX_EXPANSION = 1_000


def read_rows(file: SourceFile, source: SourceConfig, refuse: Refuse) -> Iterator[Row]:
    """The rows of a file that hold a text.

    Args:
        refuse: told of each row that cannot be used.
    Raises:
        Unreadable: where the rest of the file cannot be read.
        OSError: if it cannot be opened.
    """
    match file.kind:
        case "json":
            return texts(_json_objects(file.path, source), source, refuse)
        case "jsonl":
            return texts(_json_lines(file.path, source, refuse), source, refuse)
        case "csv" | "tsv":
            delimiter = "\t" if file.kind == "tsv" else ","
            return texts(_csv_rows(file.path, source, delimiter, refuse), source, refuse)
        case "parquet":
            return texts(_parquet_rows(file.path, source, refuse), source, refuse)
        case "tar":
            return texts(tar_samples(file.path, source, refuse), source, refuse)
        case "arrow":
            return texts(_arrow_rows(file.path, source, refuse), source, refuse)
    raise AssertionError(f"no reader of rows for {file.kind}")


def texts(
    objects: Iterable[tuple[int, Any]], source: SourceConfig, refuse: Refuse
) -> Iterator[Row]:
    """Rows of numbered objects: those with texts in the fields that the source names."""
    for row, value in objects:
        if not isinstance(value, dict):
            refuse(row, "not an object", f"a JSON {type(value).__name__}")
            continue
        try:
            parts = [_text(value, name) for name in source.text_fields]
            text = parts[0] if source.chain_of_thought is None else _joined(parts)
        except Unreadable as error:
            refuse(row, error.reason, error.detail)
        else:
            yield row, text, _metadata(value, source)


def _text(value: dict[str, Any], name: str) -> str:
    text = _field(value, name)
    if text is None:
        known = ", ".join(map(str, list(value)[:20]))
        raise Unreadable(f"no text in field '{name}'", f"its fields: {known}")
    if not isinstance(text, str):
        raise Unreadable(f"field '{name}' holds no text", f"it holds a {type(text).__name__}")
    return text


def _joined(parts: list[str]) -> str:
    """The parts of a chain of thought as one text."""
    prompt, thought, answer = parts
    if not prompt.strip() or not answer.strip():
        raise Unreadable("empty prompt or answer")
    for part in parts:
        if reserved := reserved_in(part):
            raise Unreadable("name of a special token in the text", reserved)
    return joined(prompt, thought, answer)


def _field(value: dict[str, Any], name: str) -> Any:
    """What a field holds, None where it is not there; dots lead into objects."""
    inner: Any = value.get(name)  # a column of a table may have a dot in its name
    if inner is None:
        inner = value
        for key in name.split("."):
            inner = inner.get(key) if isinstance(inner, dict) else None
    return inner


def _metadata(value: dict[str, Any], source: SourceConfig) -> dict[str, Any]:
    """The fields kept beside the text, under the last part of their names."""
    kept = {name: _field(value, name) for name in source.metadata_fields}
    return {name.rpartition(".")[2]: held for name, held in kept.items() if held is not None}


def _json_lines(path: Path, source: SourceConfig, refuse: Refuse) -> Iterator[tuple[int, Any]]:
    with open_bytes(path) as file:
        for row, line in enumerate(bounded_lines(file, source.max_document_bytes)):
            if line is None:
                limit = source.max_document_bytes
                refuse(row, "line longer than max_document_bytes", f"more than {limit} bytes")
            elif not line.isspace():
                try:
                    yield row, _parsed(line, source)
                except Unreadable as error:
                    refuse(row, error.reason, error.detail)


def _parsed(line: bytes, source: SourceConfig) -> Any:
    try:
        return json.loads(decoded(line, source.encoding, source.encoding_errors))
    except ValueError as error:
        raise Unreadable("invalid JSON", str(error)) from None
    except RecursionError:
        raise Unreadable("invalid JSON", "nested too deeply") from None


def _json_objects(path: Path, source: SourceConfig) -> Iterator[tuple[int, Any]]:
    """The values of a .json file: the elements of its list, or values one after the other."""
    with open_bytes(path) as file:
        how = "strict" if source.encoding_errors == "set_aside" else "replace"
        reader = io.TextIOWrapper(file, source.encoding, errors=how)
        try:
            yield from enumerate(_json_values(reader.read, source.max_document_bytes))
        except UnicodeDecodeError as error:
            raise Unreadable(f"invalid {source.encoding}", error.reason) from None


def _json_values(read: Callable[[int], str], limit: int) -> Iterator[Any]:
    """Values of JSON text that is read piece by piece; at most one value is held.

    Raises:
        Unreadable: at what is not JSON, at a value longer than `limit` characters, and at an end
            inside a value or list.
    """
    decoder = json.JSONDecoder()
    text = read(_JSON_CHUNK_CHARACTERS).removeprefix("\ufeff")
    place = 0
    ended = False
    in_list = False
    started = False
    while True:
        place = _after_separators(text, place)
        if place < len(text) and not started and text[place] == "[":
            in_list = True
            place = place + 1
            started = True
            continue
        if place < len(text) and in_list and text[place] == "]":
            return
        try:
            value, end = decoder.raw_decode(text, place)
            # A number at the end of what was read may go on.
            complete = ended or end < len(text)
            problem = ""
        except RecursionError:
            raise Unreadable("invalid JSON", "nested too deeply") from None
        except ValueError as error:
            complete = False
            problem = str(error)
        if complete:
            started = True
            place = end
            yield value
        elif ended:
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
            ended = not more


def _after_separators(text: str, place: int) -> int:
    while place < len(text) and text[place] in " \t\r\n,":
        place += 1
    return place


def _csv_rows(
    path: Path, source: SourceConfig, delimiter: str, refuse: Refuse
) -> Iterator[tuple[int, Any]]:
    """Rows of a table with a header, as objects."""
    csv.field_size_limit(source.max_document_bytes)
    with open_bytes(path) as file:
        lines = _csv_lines(file, source)
        reader = csv.reader(lines, delimiter=delimiter, strict=True)
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


def _csv_lines(file: Any, source: SourceConfig) -> Iterator[str]:
    for number, line in enumerate(bounded_lines(file, source.max_document_bytes)):
        if line is None:
            limit = source.max_document_bytes
            raise Unreadable("line longer than max_document_bytes", f"more than {limit} bytes")
        if b"\0" in line:
            raise Unreadable("NUL characters", f"line {number + 1}")
        yield decoded(line, source.encoding, source.encoding_errors)


def _parquet_rows(path: Path, source: SourceConfig, refuse: Refuse) -> Iterator[tuple[int, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise missing_extra(str(path), "pyarrow") from None
    with ExitStack() as opened:
        try:
            file = opened.enter_context(pyarrow.parquet.ParquetFile(path))
            columns = _columns(file.schema_arrow.names, source)
            batches = file.iter_batches(
                _batch_rows(file.metadata, columns, source), columns=columns
            )
            yield from _numbered(batches, source, refuse)
        except pyarrow.ArrowException as error:
            raise Unreadable("damaged parquet", str(error)) from None


def _batch_rows(metadata: Any, columns: list[str], source: SourceConfig) -> int:
    """Rows of a parquet file to decode together.

    A value that stands once in a column's dictionary may be that of every row: a file of 750 bytes
    holds 64 rows of 10 MB. So rows are decoded together only as far as each could be as large as
    the largest column chunk.

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
    """Rows of an Arrow file in either of its two formats; `datasets` writes the streaming one."""
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError:
        raise missing_extra(str(path), "pyarrow") from None
    with ExitStack() as opened:
        try:
            file = opened.enter_context(pyarrow.memory_map(str(path)))
            try:
                batches: Any = opened.enter_context(pyarrow.ipc.open_stream(file))
            except pyarrow.ArrowInvalid:
                whole = opened.enter_context(pyarrow.ipc.open_file(file))
                batches = (whole.get_batch(i) for i in range(whole.num_record_batches))
                columns = _columns(whole.schema.names, source)
            else:
                columns = _columns(batches.schema.names, source)
            selected = (batch.select(columns) for batch in batches)
            yield from _numbered(selected, source, refuse)
        except pyarrow.ArrowException as error:
            raise Unreadable("damaged arrow", str(error)) from None


def _columns(names: list[str], source: SourceConfig) -> list[str]:
    """The columns that are read.

    Raises:
        Unreadable: if the one with the text is missing.
    """

    def column(field: str) -> str:
        return field if field in names else field.partition(".")[0]

    if missing := [field for field in source.text_fields if column(field) not in names]:
        columns = ", ".join(names[:20])
        raise Unreadable(f"no column '{missing[0]}'", f"its columns: {columns}")
    wanted = map(column, (*source.text_fields, *source.metadata_fields))
    return [name for name in dict.fromkeys(wanted) if name in names]


def _numbered(
    batches: Iterable[Any], source: SourceConfig, refuse: Refuse
) -> Iterator[tuple[int, Any]]:
    """Rows as Python objects, a few at a time: a batch of a file on disk may be large."""
    limit = source.max_document_bytes
    row = 0
    for batch in batches:
        # Where a few rows may be large, or the same bytes stand behind all of them (dictionaries,
        # views), one at a time: each may be as large as all that there is.
        together = _BATCH_DOCUMENTS * limit // max(1, batch.nbytes)
        rows = min(_ARROW_BATCH_ROWS, max(1, together))
        for start in range(0, batch.num_rows, rows):
            for value in batch.slice(start, rows).to_pylist():
                texts = [_field(value, name) for name in source.text_fields]
                if any(isinstance(text, str) and _num_bytes(text) > limit for text in texts):
                    refuse(row, "row longer than max_document_bytes", f"more than {limit} bytes")
                else:
                    yield row, value
                row += 1


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))
