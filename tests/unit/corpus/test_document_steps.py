"""What every step promises: each document goes on or is dropped, once and in order."""

from __future__ import annotations

import pickle
import pydoc_data.topics
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cdrmix.corpus.steps.filter import Filter
from cdrmix.corpus.steps.language import Language
from cdrmix.corpus.steps.normalise import Boilerplate, Normalise
from cdrmix.corpus.steps.scrub import Scrub
from cdrmix.corpus.steps.url import Blocklist, Url
from cdrmix.data.document import Document, Step
from tests.unit.corpus.planted_pii import planted


def blocklist(folder: Path) -> Blocklist:
    (folder / "words").write_text("the\nof the\n")
    return Blocklist(words=folder / "words", min_distinct_words=2)


STEPS: dict[str, Callable[[Path], Step]] = {
    "normalise": lambda _: Normalise(),
    "language": lambda _: Language(),
    "filter": lambda _: Filter(),
    "scrub": lambda _: Scrub(),
    "url": lambda _: Url(drop_invalid=True),
    "boilerplate": lambda _: Boilerplate(),
    "blocklist": blocklist,
}
URLS = (None, "https://example.org/a?utm_source=b", "nowhere", 5)


def documents(seed: int) -> list[Document]:
    rng = random.Random(seed)
    topics = list(pydoc_data.topics.topics.values())
    texts = [
        "",
        " ",
        "\x00\x01",
        "\ud800",
        "x" * 5000,
        "a b " * 500,
        "Sign in\nMenu",
        "Das ist es.",
    ]
    texts += [planted(seed).text, *rng.sample(topics, 6)]
    texts += ["".join(rng.choices(" \n\r\x00a1@:.é’\ud83d\udce9", k=rng.randint(0, 300)))] * 6
    rng.shuffle(texts)
    return [
        Document(
            text=text,
            id=f"a#{i}",
            source="a",
            domain=rng.choice(["web", "prose", "code", "reference"]),
            metadata={} if (url := rng.choice(URLS)) is None else {"url": url},
        )
        for i, text in enumerate(texts)
    ]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", STEPS)
def test_each_document_goes_on_or_is_dropped_once_in_order(
    name: str, seed: int, tmp_path: Path
) -> None:
    step = STEPS[name](tmp_path)
    given = documents(seed)
    ids = [document.id for document in given]
    dropped: list[tuple[str, str]] = []
    passed = [d.id for d in step(given, lambda d, why: dropped.append((d.id, why)))]
    assert sorted([*passed, *(i for i, _ in dropped)]) == sorted(ids)
    assert passed == [i for i in ids if i in set(passed)]
    assert [i for i, _ in dropped] == [i for i in ids if i not in set(passed)]
    assert all(0 < len(reason.split()) <= 4 for _, reason in dropped)


@pytest.mark.parametrize("name", STEPS)
def test_step_takes_one_document_at_a_time(name: str, tmp_path: Path) -> None:
    taken: list[int] = []

    def source() -> Iterator[Document]:
        for i, document in enumerate(documents(0)):
            taken.append(i)
            yield document

    gone: list[str] = []
    for passed in STEPS[name](tmp_path)(source(), lambda d, _: gone.append(d.id)):
        gone.append(passed.id)
        assert len(gone) == len(taken)


@pytest.mark.parametrize("name", STEPS)
def test_step_works_alike_in_another_process(name: str, tmp_path: Path) -> None:
    step = STEPS[name](tmp_path)
    assert step.name == name
    twin = pickle.loads(pickle.dumps(step))
    results = []
    for each in (step, twin):
        reasons: list[tuple[str, str]] = []
        passed = list(each(documents(1), lambda d, why, to=reasons: to.append((d.id, why))))
        results.append((passed, reasons))
    assert results[0] == results[1]
