"""Tar files in WebDataset's way: consecutive members with one name and several endings are one
sample, such as `a/0001.txt` with the text and `a/0001.json` with what belongs to it."""

from __future__ import annotations

import itertools
import json
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cdrmix.data.source import SourceConfig
from cdrmix.data.steps.read_bytes import Unreadable, open_bytes
from cdrmix.data.steps.read_text import decoded

_TEXT, _FIELDS = "txt", "json"
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
