"""Deduplication by address: which documents stay, however the corpus is cut, in bounded memory."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from cdrmix.corpus.dedup_steps import UrlDedup
from cdrmix.corpus.steps.url import canonical_url, host_of, url_key
from cdrmix.data.document import Document
from cdrmix.errors import DataError

pytest.importorskip("w3lib", reason="the [data] extra is not installed")


def page(url: object, number: int) -> Document:
    metadata = {} if url is None else {"url": url}
    return Document(f"text {number}", f"s/f#{number}", "s", "web", metadata)


def pages(*urls: object) -> list[Document]:
    return [page(url, number) for number, url in enumerate(urls)]


def ignore(document: Document, reason: str) -> None:
    """Where nothing is dropped."""


def after(
    tasks: Sequence[Sequence[Document]], folder: Path, **options: int
) -> tuple[list[str], dict[str, str], dict[str, int]]:
    """Ids that stay, reasons of the others by id, and what the report is told."""
    step = UrlDedup(**options)
    notes = [folder / f"{number:03d}.notes" for number in range(len(tasks))]
    for task, path in zip(tasks, notes, strict=True):
        assert list(step.before(path)(task, ignore)) == list(task)
    out = folder / "out"
    out.mkdir(exist_ok=True)
    found = step.decide(notes, out)
    kept: list[str] = []
    reasons: dict[str, str] = {}
    for task, path in zip(tasks, notes, strict=True):

        def drop(document: Document, reason: str) -> None:
            reasons[document.id] = reason

        kept += [d.id for d in step.after(step.decision(path, out))(task, drop)]
    assert not [path for path in out.iterdir() if path.is_dir()], "temporary files are left"
    return kept, reasons, found


def test_the_first_document_of_a_page_stays(tmp_path: Path) -> None:
    first = pages("https://a.org/x?utm_source=m", None, "https://b.org/", "no address")
    second = [
        page(url, number)
        for number, url in ((10, "http://www.a.org/x/"), (11, "https://b.org/y"), (12, None))
    ]
    kept, reasons, found = after([first, [], second], tmp_path)
    assert kept == ["s/f#0", "s/f#1", "s/f#2", "s/f#3", "s/f#11", "s/f#12"]
    assert reasons == {"s/f#10": "same url"}
    assert found == {"documents": 4, "pages": 3, "hosts": 2, "same_url": 1, "full_host": 0}


def test_a_host_keeps_so_many_pages_wherever_they_stand(tmp_path: Path) -> None:
    urls = [f"https://big.org/{n}" for n in range(50)] + ["https://small.org/", "https://big.org/7"]
    kept, reasons, found = after([pages(*urls)], tmp_path, max_per_host=5)
    assert len(kept) == 6 and "s/f#50" in kept
    assert set(reasons.values()) <= {"host has enough", "same url"}
    assert found["full_host"] + found["same_url"] == len(reasons) == 46
    chosen = {urls[int(i.partition("#")[2])] for i in kept}
    shuffled = list(urls)
    random.Random(0).shuffle(shuffled)
    kept, _, _ = after([pages(*shuffled)], tmp_path, max_per_host=5)
    assert {shuffled[int(i.partition("#")[2])] for i in kept} == chosen


@pytest.mark.parametrize("max_per_host", [None, 1, 7])
def test_tasks_and_memory_change_nothing_and_it_equals_plain_sets(
    tmp_path: Path, max_per_host: int | None
) -> None:
    generator = random.Random(3)
    urls = [
        f"https://h{int(generator.paretovariate(0.7)) % 40}.org/{generator.randrange(60)}"
        for _ in range(4000)
    ]
    documents = pages(*urls)
    options = {} if max_per_host is None else {"max_per_host": max_per_host}
    whole = after([documents], tmp_path, **options)
    (tmp_path / "parts").mkdir()
    parts = [documents[start : start + 600] for start in range(0, 4000, 600)]
    assert after(parts, tmp_path / "parts", memory_bytes=2**14, **options) == whole
    keys: dict[str, set[str]] = {}
    for url in urls:
        canonical = canonical_url(url)
        keys.setdefault(host_of(canonical), set()).add(url_key(canonical))
    wanted = {key for host in keys.values() for key in sorted(host)[:max_per_host]}
    seen: Counter[str] = Counter()
    for document in documents:
        key = url_key(canonical_url(document.metadata["url"]))
        seen[key] += key in wanted
        assert (document.id in whole[0]) == (key in wanted and seen[key] == 1)
    assert whole[2]["pages"] == len(set.union(*keys.values()))
    assert whole[2]["hosts"] == len(keys)


def test_damaged_notes_are_named(tmp_path: Path) -> None:
    step = UrlDedup()
    list(step.before(tmp_path / "a")(pages("https://a.org/"), ignore))
    (tmp_path / "a").write_bytes((tmp_path / "a").read_bytes()[:-1])
    with pytest.raises(DataError, match="truncated"):
        step.decide([tmp_path / "a"], tmp_path)
    with pytest.raises(DataError, match="cannot be read"):
        step.decide([tmp_path / "none"], tmp_path)


def test_a_limit_that_keeps_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="max_per_host = 0"):
        UrlDedup(max_per_host=0)
