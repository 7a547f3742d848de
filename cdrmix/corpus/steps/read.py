"""Documents of files, and of data sets of the Hugging Face hub read as streams.

A row or file that cannot be read is set aside with its reason, and reading goes on with the next
one; memory is bounded by the largest document allowed. A stream is cut into the shards that
`datasets` sees in it (its files), which are read independently.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import yaml

from cdrmix.corpus.source import SetAside, SourceConfig, SourceFile
from cdrmix.corpus.steps.read_bytes import Unreadable, from_extra
from cdrmix.corpus.steps.read_rows import Rows, read_rows, text_and_metadata
from cdrmix.corpus.steps.read_text import read_text
from cdrmix.data.document import Document
from cdrmix.data.shards import read_regular
from cdrmix.errors import DataError
from cdrmix.log import get_logger

# Metadata must stay small beside its text: it is held for every document in flight.
_MAX_METADATA_CHARACTERS = 2_000


def read_file(file: SourceFile, source: SourceConfig, set_aside: SetAside) -> Iterator[Document]:
    """Reads the documents of one file in order, ids `<source>/<file>#<row>`.

    Documents before a damage are given; the rest of the file is set aside.
    """
    try:
        is_whole = file.kind in ("text", "code", "html", "docx")
        if is_whole and source.chain_of_thought is not None:
            raise Unreadable("no fields for a chain of thought", f"a file of kind {file.kind}")
        rows = iter([(0, read_text(file, source))]) if is_whole else read_rows(file, source)
        yield from documents_of(rows, file.name, source, set_aside)
    except Unreadable as error:
        set_aside(file.name, None, error.reason, error.detail)
    except OSError as error:
        reason = "damaged file" if _is_damage(error) else f"cannot be read: {error.strerror}"
        set_aside(file.name, None, reason, str(error))


def documents_of(
    rows: Rows, file: str, source: SourceConfig, set_aside: SetAside
) -> Iterator[Document]:
    """Makes documents of rows; sets aside those without a text of plain characters."""
    for row, value in rows:
        try:
            text, fields = text_and_metadata(value, source)
            if has_surrogates(text):
                if source.encoding_errors == "set_aside":
                    raise Unreadable("invalid unicode", "a lone surrogate")
                text = text.encode(errors="surrogatepass").decode(errors="replace")
            if not text or text.isspace():
                raise Unreadable("empty text")
        except Unreadable as error:
            set_aside(file, row, error.reason, error.detail)
            continue
        metadata: dict[str, Any] = {"path": file}
        for name, field in fields.items():
            is_short = isinstance(field, str) and len(field) <= _MAX_METADATA_CHARACTERS
            is_number = isinstance(field, bool | int | float)
            if is_number or (is_short and not has_surrogates(field)):
                metadata[name] = field
        yield Document(text, f"{source.name}/{file}#{row}", source.name, source.domain, metadata)


def has_surrogates(text: str) -> bool:
    """Returns True if a text has half of a surrogate pair, which UTF-8 cannot hold."""
    if text.isascii():  # costs nothing, where encoding copies the text
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


SHARD_NAME = "shard-{:05d}"  # of a stream, in ids and reports
_LONGEST_PAUSE_SECONDS = 60.0
_MAX_DESCRIPTION_BYTES = 2**22
_NETWORK_PACKAGES = frozenset(
    ("aiohttp", "fsspec", "httpcore", "httpx", "httpx2", "huggingface_hub", "requests", "urllib3")
)
_logger = get_logger(__name__)


def count_shards(source: SourceConfig) -> int:
    """Number of parts of the stream that can be read independently."""
    try:
        return int(_open(source).num_shards)
    except (OSError, ValueError) as error:
        advice = "See path, subset, split and revision of this source"
        if isinstance(error, ConnectionError):
            advice = "A data set on the hub needs a network; without one, give the path of a folder"
        raise DataError(f"source '{source.name}': {source.path}: {error}. {advice}.") from error


def read_shard(
    source: SourceConfig, shard: int, num_shards: int, set_aside: SetAside
) -> Iterator[Document]:
    """Reads the documents of one shard of the stream, ids `<source>/shard-<number>#<row>`."""
    name = SHARD_NAME.format(shard)

    def rows_from(row: int) -> Iterator[Any]:
        part = _open(source).shard(num_shards=num_shards, index=shard)
        return iter(part.skip(row) if row else part)

    values = retry_rows(rows_from, retries=source.retries, what=f"{source.name}/{name}")
    if source.max_documents_per_second:
        values = paced(values, source.max_documents_per_second)
    try:
        yield from documents_of(enumerate(values), name, source, set_aside)
    except Exception as error:
        if not _is_damage(error):
            raise
        set_aside(name, None, "damaged shard", f"{type(error).__name__}: {error}")


def retry_rows(
    rows_from: Callable[[int], Iterator[Any]], *, retries: int, what: str
) -> Iterator[Any]:
    """Reads all rows of a stream; where the connection breaks, reopens it at the next row.

    Args:
        rows_from: opens the stream at a row.
        retries: consecutive failures allowed, with pauses of 1, 2, 4 ... 60 seconds between.
        what: name of the stream in messages.
    """
    row = 0
    failures = 0
    while True:
        try:
            for value in rows_from(row):
                yield value
                row += 1
                failures = 0
            return
        except Exception as error:
            # A broken connection, rather than broken data: the clients raise classes of their own.
            is_system = isinstance(error, OSError) and not _is_damage(error)
            if not is_system and type(error).__module__.partition(".")[0] not in _NETWORK_PACKAGES:
                raise
            failures += 1
            if failures > retries:
                raise DataError(
                    f"{what}: reading failed {failures} times at row {row}: {error}. "
                    "Finished work is kept; start again when the connection is back."
                ) from error
            pause = min(_LONGEST_PAUSE_SECONDS, 2.0 ** (failures - 1))
            _logger.warning("%s: row %d: %s; trying again in %.0f s", what, row, error, pause)
            sleep(pause)


def paced(rows: Iterator[Any], per_second: float) -> Iterator[Any]:
    """Gives the same rows, no faster than `per_second` on average since the first."""
    begin = monotonic()
    for number, row in zip(count(), rows, strict=False):
        ahead = number / per_second - (monotonic() - begin)
        if ahead > 0:
            sleep(ahead)
        yield row


def _open(source: SourceConfig) -> Any:
    """Opens the stream, limited to the columns in use if their names are known."""
    datasets = from_extra("datasets", f"source '{source.name}': type huggingface")
    _check_description(Path(source.path))
    stream = datasets.load_dataset(
        source.path, source.subset, split=source.split, revision=source.revision, streaming=True
    )
    # Decoding a column that claims to hold images or sounds would fetch the URLs in its rows.
    stream = stream.decode(False)
    names = stream.column_names or []
    fields = (*source.text_fields, *source.metadata_fields)
    columns = {*fields, *(field.partition(".")[0] for field in fields)}
    return stream.select_columns([name for name in names if name in columns]) if names else stream


def _check_description(folder: Path) -> None:
    """Refuses a folder whose own description names files elsewhere: `datasets` would fetch them."""
    from huggingface_hub import DatasetCard

    for path in (folder / "README.md", folder / ".huggingface.yaml"):
        if not path.is_file():
            continue
        try:
            text = read_regular(path, _MAX_DESCRIPTION_BYTES).decode()
            if path.suffix == ".md":
                card = DatasetCard(text, ignore_metadata_errors=True).data.to_dict()
            else:
                card = yaml.safe_load(text) or {}
        except (ValueError, TypeError, AttributeError, RecursionError, yaml.YAMLError) as error:
            raise DataError(f"{path}: cannot be read: {error}") from None
        pending = [card.get("configs") if isinstance(card, dict) else None]
        seen = set()  # an anchor of YAML may stand in any number of places, itself included
        while pending:
            value = pending.pop()
            if isinstance(value, dict | list) and id(value) not in seen:
                seen.add(id(value))
                pending += value.values() if isinstance(value, dict) else value
            elif isinstance(value, str) and (
                ":" in value or value.startswith(("/", "~")) or ".." in value.split("/")
            ):
                raise DataError(
                    f"{path}: its configs name {value!r}; allowed are files below this folder, by "
                    "relative names without ':'. Change the file or remove it."
                )


def _is_damage(error: Exception) -> bool:
    """Tells data that violates its format from other faults."""
    # pyarrow's errors are ValueErrors, and an OSError without a number if decompression fails.
    if type(error) is OSError:
        return error.errno is None
    return isinstance(error, ValueError | EOFError | zlib.error | gzip.BadGzipFile)
