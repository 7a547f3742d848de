"""Files and streams to documents. What cannot be read is set aside with its reason, and the
reading goes on with the next row or file; memory is bounded by the largest document allowed.

Data sets of the Hugging Face hub, or folders laid out like one, read as a stream.

A stream is cut into the shards that `datasets` finds in it (its files), which are read apart from
each other. A read that fails is taken up again at the row where it broke off.
"""

from __future__ import annotations

import gzip
import time
import zlib
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from cdrmix.corpus.source import SetAside, SourceConfig, SourceFile
from cdrmix.corpus.steps.read_bytes import Unreadable, missing_extra
from cdrmix.corpus.steps.read_rows import Row, read_rows, texts
from cdrmix.corpus.steps.read_text import read_text
from cdrmix.data.document import Document
from cdrmix.data.shards import read_regular
from cdrmix.errors import DataError
from cdrmix.log import get_logger

_WHOLE_FILES = ("text", "code", "html", "docx")
# What is kept beside a text must stay small beside it.
_MAX_METADATA_CHARACTERS = 2_000


def read_file(file: SourceFile, source: SourceConfig, set_aside: SetAside) -> Iterator[Document]:
    """The documents of one file, in its order, ids `<source>/<file>#<row>`.

    What comes before a damage is given; the rest of the file is set aside.

    Args:
        set_aside: told of each row, or the rest of the file, that cannot be read.
    """

    def refuse(row: int, reason: str, detail: str) -> None:
        set_aside(file.name, row, reason, detail)

    try:
        if file.kind in _WHOLE_FILES and source.chain_of_thought is not None:
            raise Unreadable("no fields for a chain of thought", f"a file of kind {file.kind}")
        if file.kind in _WHOLE_FILES:
            text, metadata = read_text(file, source)
            rows: Iterator[Row] = iter([(0, text, metadata)])
        else:
            rows = read_rows(file, source, refuse)
        yield from documents(rows, file.name, source, set_aside)
    except Unreadable as error:
        set_aside(file.name, None, error.reason, error.detail)
    except OSError as error:
        damaged = error.errno is None  # pyarrow's own
        reason = "damaged file" if damaged else f"cannot be read: {error.strerror}"
        set_aside(file.name, None, reason, str(error))


def documents(
    rows: Iterator[Row], file: str, source: SourceConfig, set_aside: SetAside
) -> Iterator[Document]:
    """Documents of rows (number, text, metadata); those without a text of plain characters are
    set aside."""
    for row, given, metadata in rows:
        text = given
        if not text.isascii() and _has_surrogates(text):
            if source.encoding_errors == "set_aside":
                set_aside(file, row, "invalid unicode", "a lone surrogate")
                continue
            text = text.encode(errors="surrogatepass").decode(errors="replace")
        if not text or text.isspace():
            set_aside(file, row, "empty text", "")
            continue
        yield Document(
            text=text,
            id=f"{source.name}/{file}#{row}",
            source=source.name,
            domain=source.domain,
            metadata={"path": file} | _plain(metadata),
        )


def _has_surrogates(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _plain(metadata: dict[str, Any]) -> dict[str, Any]:
    """Values that JSON holds as they are: numbers and short texts."""
    return {
        key: value
        for key, value in metadata.items()
        if isinstance(value, bool | int | float)
        or (
            isinstance(value, str)
            and len(value) <= _MAX_METADATA_CHARACTERS
            and not _has_surrogates(value)
        )
    }


_LONGEST_PAUSE_SECONDS = 60.0
_MAX_DESCRIPTION_BYTES = 2**22
_NETWORK_PACKAGES = {
    *("aiohttp", "fsspec", "httpcore", "httpx", "httpx2", "huggingface_hub", "requests", "urllib3"),
}
_logger = get_logger(__name__)


def count_shards(source: SourceConfig) -> int:
    """How many parts the stream has that can be read apart.

    Raises:
        DataError: if `datasets` is not installed, or the data set cannot be reached or found.
    """
    try:
        return int(_open(source).num_shards)
    except (OSError, ValueError) as error:
        advice = (
            "A data set on the hub needs a network; without one, give the path of a folder."
            if isinstance(error, ConnectionError)
            else "See path, subset, split and revision of this source."
        )
        raise DataError(f"source '{source.name}': {source.path}: {error}. {advice}") from error


def shard_name(shard: int) -> str:
    """Name of a part of a stream in ids and reports."""
    return f"shard-{shard:05d}"


def read_shard(
    source: SourceConfig, shard: int, num_shards: int, set_aside: SetAside
) -> Iterator[Document]:
    """The documents of one of the stream's shards, ids `<source>/shard-<number>#<row>`.

    Args:
        set_aside: told of each row, or the rest of the shard, that cannot be read.
    Raises:
        DataError: if the connection stays broken after `source.retries` attempts.
    """
    name = shard_name(shard)

    def rows_from(row: int) -> Iterator[Any]:
        part = _open(source).shard(num_shards=num_shards, index=shard)
        return iter(part.skip(row) if row else part)

    def refuse(row: int, reason: str, detail: str) -> None:
        set_aside(name, row, reason, detail)

    rows = taken_up_again(rows_from, retries=source.retries, what=f"{source.name}/{name}")
    if source.max_documents_per_second:
        rows = paced(rows, source.max_documents_per_second)
    try:
        yield from documents(texts(enumerate(rows), source, refuse), name, source, set_aside)
    except Exception as error:
        if not _is_damage(error):
            raise
        set_aside(name, None, "damaged shard", f"{type(error).__name__}: {error}")


def taken_up_again(
    rows_from: Callable[[int], Iterator[Any]],
    *,
    retries: int,
    what: str,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Any]:
    """All rows of a stream, opened anew at the next row where the connection breaks.

    Args:
        rows_from: opens the stream at a row.
        retries: failures in a row that are forgiven, 1, 2, 4 ... 60 seconds apart.
        what: name of the stream in messages.
    Raises:
        DataError: at one failure more than that.
    """
    row = failures = 0
    while True:
        try:
            for value in rows_from(row):
                yield value
                row = row + 1
                failures = 0
            return
        except Exception as error:
            if not _is_transient(error):
                raise
            failures += 1
            if failures > retries:
                raise DataError(
                    f"{what}: reading failed {failures} times at row {row}: {error}. "
                    "What is done stays; start again when the connection is back."
                ) from error
            pause = min(_LONGEST_PAUSE_SECONDS, 2.0 ** (failures - 1))
            _logger.warning("%s: row %d: %s; trying again in %.0f s", what, row, error, pause)
            sleep(pause)


def paced(rows: Iterator[Any], per_second: float) -> Iterator[Any]:
    """The same rows, no faster than `per_second` on average since the first."""
    begin = time.monotonic()
    for number, row in zip(count(), rows, strict=False):
        ahead = number / per_second - (time.monotonic() - begin)
        if ahead > 0:
            time.sleep(ahead)
        yield row


def _open(source: SourceConfig) -> Any:
    """The stream, of the columns that are used where their names are known."""
    try:
        import datasets
    except ImportError:
        raise missing_extra(f"source '{source.name}': type huggingface", "datasets") from None
    _check_metadata(Path(source.path))
    stream = datasets.load_dataset(
        source.path, source.subset, split=source.split, revision=source.revision, streaming=True
    )
    # Decoding a column that says to hold images or sounds would fetch what its rows name.
    stream = stream.decode(False)
    known = stream.column_names or []
    fields = (*source.text_fields, *source.metadata_fields)
    wanted = {*fields, *(field.partition(".")[0] for field in fields)}
    return stream.select_columns([name for name in known if name in wanted]) if known else stream


def _check_metadata(folder: Path) -> None:
    """Refuse a folder whose own description names files elsewhere: `datasets` would fetch them.

    Raises:
        DataError: naming the file and what stands in it.
    """
    from huggingface_hub import DatasetCard

    for path in (folder / "README.md", folder / ".huggingface.yaml"):
        if not path.is_file():
            continue
        try:
            text = read_regular(path, _MAX_DESCRIPTION_BYTES).decode()
            if path.suffix == ".md":
                described = DatasetCard(text, ignore_metadata_errors=True).data.to_dict()
            else:
                described = yaml.safe_load(text) or {}
        except (ValueError, TypeError, AttributeError, RecursionError, yaml.YAMLError) as error:
            raise DataError(f"{path}: cannot be read: {error}") from None
        for name in _strings(described.get("configs") if isinstance(described, dict) else None):
            if ":" in name or name.startswith(("/", "~")) or ".." in name.split("/"):
                raise DataError(
                    f"{path}: its configs name {name!r}; allowed are files below this folder, by "
                    "relative names without ':'. Change the file or remove it."
                )


def _strings(value: Any) -> Iterator[str]:
    """Every string in plain values; an anchor of YAML may stand in any number of places."""
    waiting = [value]
    seen = set()
    while waiting:
        inner = waiting.pop()
        if isinstance(inner, str):
            yield inner
        elif isinstance(inner, dict | list) and id(inner) not in seen:
            seen.add(id(inner))
            waiting += inner.values() if isinstance(inner, dict) else inner


def _is_transient(error: Exception) -> bool:
    """Whether a connection broke, rather than the data."""
    network = type(error).__module__.split(".")[0] in _NETWORK_PACKAGES
    return network or (isinstance(error, OSError) and not _is_damage(error))


def _is_damage(error: Exception) -> bool:
    """Whether data is not what its format demands. pyarrow's errors are ValueErrors, and an
    OSError without a number where decompression fails."""
    if type(error) is OSError:
        return error.errno is None
    return isinstance(error, ValueError | EOFError | zlib.error | gzip.BadGzipFile)
