"""Deduplication: which documents stay, whoever signed them, in bounded memory."""

from __future__ import annotations

import json
import random
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from cdrmix.corpus.steps.dedup import (
    Deduplicate,
    Duplicates,
    Method,
    MinHash,
    Sign,
    SimHash,
    drops_path,
    find_duplicates,
)
from cdrmix.corpus.steps.signatures import record_type
from cdrmix.data.document import Document
from cdrmix.errors import DataError
from tests.unit.corpus.test_minhash import random_text, replaced, shingle_set


def documents_of(texts: Sequence[str]) -> list[Document]:
    return [
        Document(text, f"tests/texts#{row}", "tests", "prose") for row, text in enumerate(texts)
    ]


def ignore(document: Document, reason: str) -> None:
    """Where nothing is dropped."""


def sign(task: Sequence[Document], path: Path, method: Method) -> None:
    assert list(Sign(path, method)(task, ignore)) == list(task)


def deduplicate(
    tasks: Sequence[Sequence[Document]],
    folder: Path,
    *,
    method: Method | None = None,
    memory_bytes: int = 2**24,
) -> tuple[list[str], dict[str, str], Duplicates]:
    """Ids that stay, reasons of the others by id, and what the report is told."""
    method = method or MinHash()
    files = [folder / f"{number:03d}.signatures" for number in range(len(tasks))]
    for task, file in reversed(list(zip(tasks, files, strict=True))):
        sign(task, file, method)
    found = find_duplicates(files, folder / "drops", method=method, memory_bytes=memory_bytes)
    kept, reasons = [], {}
    for task, file in zip(tasks, files, strict=True):

        def drop(document: Document, reason: str) -> None:
            reasons[document.id] = reason

        step = Deduplicate(drops_path(folder / "drops", file))
        kept += [document.id for document in step(task, drop)]
    return kept, reasons, found


@pytest.fixture(scope="module")
def planted() -> tuple[list[Document], dict[str, tuple[str, float]]]:
    """800 documents, 400 of them copies with some words replaced, shuffled; for each copy the
    id of its original and their Jaccard similarity."""
    generator = random.Random(11)
    texts = [random_text(generator, generator.randint(150, 400)) for _ in range(400)]
    copies = [
        replaced(generator, text, max(1, int(share * len(text.split()))))
        for text, share in zip(texts, [0.01, 0.02, 0.05, 0.10] * 100, strict=True)
    ]
    documents = documents_of([*texts, *copies])
    pairs = {}
    for original, copy in zip(documents[:400], documents[400:], strict=True):
        first, second = shingle_set(original.text), shingle_set(copy.text)
        pairs[copy.id] = (original.id, len(first & second) / len(first | second))
    generator.shuffle(documents)
    return documents, pairs


def test_planted_near_duplicates_are_found_and_others_stay(
    planted: tuple[list[Document], dict[str, tuple[str, float]]], tmp_path: Path
) -> None:
    documents, pairs = planted
    _, reasons, found = deduplicate([documents[:300], documents[300:]], tmp_path)
    similar = [{copy, first} for copy, (first, jaccard) in pairs.items() if jaccard >= 0.8]
    assert len(similar) > 100
    assert sum(bool(pair & reasons.keys()) for pair in similar) >= 0.98 * len(similar)
    right = {i for copy, (first, jaccard) in pairs.items() if jaccard >= 0.5 for i in (copy, first)}
    assert len(right & reasons.keys()) >= 0.98 * len(reasons)
    assert found.near.dropped == len(reasons) == found.near.sizes["2"]
    assert set(reasons.values()) == {"near duplicate"}


def test_what_is_dropped_does_not_depend_on_tasks_or_memory(
    planted: tuple[list[Document], dict[str, tuple[str, float]]], tmp_path: Path
) -> None:
    documents, _ = planted
    outcomes = []
    for num_tasks, memory_bytes in [(1, 2**24), (7, 2**18), (40, 2**20)]:
        cuts = [len(documents) * task // num_tasks for task in range(num_tasks + 1)]
        tasks = [documents[a:b] for a, b in zip(cuts[:-1], cuts[1:], strict=True)]
        folder = tmp_path / str(num_tasks)
        folder.mkdir()
        kept, reasons, found = deduplicate(tasks, folder, memory_bytes=memory_bytes)
        outcomes.append((kept, reasons, found.candidates, found.verified, found.near.sizes))
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert len(outcomes[0][1]) > 100


def test_the_first_document_of_a_cluster_stays_whatever_links_it(tmp_path: Path) -> None:
    generator = random.Random(12)
    text = random_text(generator, 300)
    chain = [text]
    for _ in range(5):  # neighbours are similar, the ends are not
        chain.append(replaced(generator, chain[-1], 9))
    other = random_text(generator, 300)
    kept, reasons, found = deduplicate(
        [documents_of([chain[3], other, chain[0], chain[5], chain[1], chain[4], chain[2]])],
        tmp_path,
        method=MinHash(min_jaccard=0.3),
    )
    assert kept == ["tests/texts#0", "tests/texts#1"]
    assert found.near.largest == [(6, 0, 0)]
    assert found.near.sizes == {"5-8": 1}
    assert set(reasons.values()) == {"near duplicate"}


def test_equal_texts_are_exact_duplicates_but_for_case_and_space(tmp_path: Path) -> None:
    generator = random.Random(13)
    text, other = random_text(generator, 100), random_text(generator, 100)
    texts = [text, other, text, text.upper(), text.replace(" ", "\n  "), text + " more", "", "\n"]
    kept, reasons, found = deduplicate([documents_of(texts)], tmp_path)
    assert kept == ["tests/texts#0", "tests/texts#1", "tests/texts#6"]
    assert reasons.pop("tests/texts#5") == "near duplicate"
    assert set(reasons.values()) == {"exact duplicate"}
    assert found.exact.sizes == {"2": 1, "3-4": 1}
    assert found.exact.largest == [(4, 0, 0), (2, 0, 6)]
    written = json.loads((tmp_path / "drops" / "duplicates.json").read_text())
    assert written["near"]["dropped"] == 1
    assert written["documents"] == 8


def test_candidates_whose_sketches_disagree_are_not_duplicates(tmp_path: Path) -> None:
    generator = random.Random(14)
    texts = [random_text(generator, 200) for _ in range(60)]
    documents = documents_of([*texts, *(replaced(generator, text, 10) for text in texts)])
    strict, loose = MinHash(min_jaccard=0.9), MinHash(min_jaccard=0)
    dropped = []
    for name, method in (("strict", strict), ("loose", loose)):
        (tmp_path / name).mkdir()
        dropped.append(deduplicate([documents], tmp_path / name, method=method)[1])
    assert dropped[0] == {}
    assert len(dropped[1]) > 0


def test_simhash_finds_light_edits(tmp_path: Path) -> None:
    generator = random.Random(15)
    texts = [random_text(generator, 1500) for _ in range(20)]
    documents = documents_of([*texts, *(f"{text} last" for text in texts)])
    kept, _, _ = deduplicate([documents], tmp_path, method=SimHash())
    assert {document.id for document in documents[:20]} <= set(kept)
    assert len(kept) <= 22


def test_tasks_without_documents_are_no_obstacle(tmp_path: Path) -> None:
    documents = documents_of(["a b c d e f", "a b c d e f"])
    kept, _, found = deduplicate([[], documents[:1], [], documents[1:], []], tmp_path)
    assert kept == [documents[0].id]
    assert found.documents == 2


def test_no_tasks_and_what_a_killed_run_left_are_no_obstacle(tmp_path: Path) -> None:
    left = tmp_path / "drops" / "clusters.partial" / "sort-1"
    left.mkdir(parents=True)
    assert find_duplicates([], tmp_path / "drops", method=MinHash()).documents == 0
    assert [path.name for path in (tmp_path / "drops").iterdir()] == ["duplicates.json"]


def test_signatures_appear_only_when_all_documents_have_passed(tmp_path: Path) -> None:
    def failing() -> Iterator[Document]:
        yield from documents_of(["one"])
        raise OSError("the source went away")

    path = tmp_path / "task.signatures"
    with pytest.raises(OSError, match="the source went away"):
        list(Sign(path, MinHash())(failing(), ignore))
    stopped = Sign(path, MinHash())(iter(documents_of(["one"] * 600)), ignore)
    next(stopped)
    stopped.close()
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "task.signatures"
    with pytest.raises(DataError, match=r"task\.signatures: signatures cannot be written: No such"):
        list(Sign(path, MinHash())(documents_of(["one"]), ignore))


def test_signatures_of_another_method_or_cut_short_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "task.signatures"
    sign(documents_of(["one two"]), path, MinHash(shingle_words=3))
    with pytest.raises(DataError, match='"shingle_words": 3.* wanted are .*"shingle_words": 5'):
        find_duplicates([path], tmp_path / "drops", method=MinHash())
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match="truncated"):
        find_duplicates([path], tmp_path / "drops", method=MinHash(shingle_words=3))
    with pytest.raises(DataError, match="cannot be read: No such file"):
        find_duplicates([tmp_path / "none"], tmp_path / "drops", method=MinHash())


def test_a_list_for_other_documents_is_refused(tmp_path: Path) -> None:
    documents = documents_of(["a b c d e", "a b c d e", "other words are these ones"])
    deduplicate([documents], tmp_path)
    step = Deduplicate(drops_path(tmp_path / "drops", tmp_path / "000.signatures"))
    with pytest.raises(DataError, match="lists 1 documents, of which 0 were met"):
        list(step(documents[2:], ignore))
    step.drops.write_bytes(b"not a list")
    with pytest.raises(DataError, match="damaged"):
        list(step(documents, ignore))


def write_random_signatures(path: Path, *, documents: int) -> None:
    """A signature file of documents in a few hundred clusters, 30 % of equal text: far more
    duplicates than any corpus has."""
    generator = np.random.default_rng(int(path.stem))
    method = MinHash()
    sign([], path, method)
    records = np.zeros(documents, dtype=record_type(method))
    records["id"] = generator.integers(2**63, size=documents)
    records["text"] = generator.integers(2**63, size=(documents, 2))
    records["text"][: documents * 3 // 10] = 7
    clusters = generator.integers(1, 500, size=(documents, 1))
    records["keys"] = clusters * 1000 + np.arange(method.num_keys)
    with path.open("ab") as file:
        file.write(records.tobytes())


def test_memory_is_bounded_whatever_the_corpus(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.signatures" for number in range(10)]
    for path in paths:
        write_random_signatures(path, documents=1000)
    memory_bytes = 2**20
    tracemalloc.start()
    found = find_duplicates(paths, tmp_path / "drops", method=MinHash(), memory_bytes=memory_bytes)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # The signatures are 2.5 MB; keys, candidates with sketches and links a multiple of that.
    assert sum(path.stat().st_size for path in paths) > 2 * memory_bytes
    assert peak < memory_bytes
    assert found.exact.dropped == 300 * len(paths) - 1
    assert found.near.clusters < 500 < found.near.dropped
    lists = [np.load(drops_path(tmp_path / "drops", path)) for path in paths]
    assert sum(map(len, lists)) == found.exact.dropped + found.near.dropped


def write_chain(path: Path, order: Sequence[int], *, changed: int, strangers: int = 0) -> None:
    """Signatures of `strangers`, then of a chain in some order; all have one key in common.

    Sketches of neighbours in the chain differ in `changed` bytes of 112, those of others in more.
    """
    method = MinHash()
    generator = np.random.default_rng(5)
    sign([], path, method)
    records = np.zeros(strangers + len(order), dtype=record_type(method))
    records["id"] = np.arange(1, len(records) + 1)
    records["text"] = generator.integers(2**63, size=(len(records), 2))
    records["keys"] = generator.integers(2**62, size=(len(records), method.num_keys)) + 10
    records["keys"][:, 0] = 3
    sketches = [generator.integers(256, size=method.sketch_bytes)]
    for number in range(len(order) - 1):
        following = sketches[-1].copy()
        places = (number * changed + np.arange(changed)) % method.sketch_bytes
        following[places] = (following[places] + 1 + generator.integers(255, size=changed)) % 256
        sketches.append(following)
    for row in range(strangers):
        records["sketch"][row] = generator.integers(256, size=method.sketch_bytes)
    records["sketch"][strangers:] = np.stack(sketches)[list(order)]
    with path.open("ab") as file:
        file.write(records.tobytes())


def test_a_long_chain_behind_documents_that_share_its_key_is_one_cluster(tmp_path: Path) -> None:
    # neighbours agree in 102 of 112 bytes; of two that are ten apart hardly any byte is equal
    path = tmp_path / "0.signatures"
    write_chain(path, range(2000), changed=10, strangers=2)
    found = find_duplicates([path], tmp_path / "drops", method=MinHash(), memory_bytes=2**18)
    # each is compared with the first that has the key, a stranger, and with the one before it
    assert found.candidates == 2 * 2001 - 1
    assert found.verified == 1999
    assert (found.near.clusters, found.near.dropped) == (1, 1999)
    assert found.near.largest == [(2000, 0, 2)], "the chain's first document, not a stranger"
    dropped = np.load(drops_path(tmp_path / "drops", path))
    assert sorted(dropped["id"].tolist()) == list(range(4, 2003))


def test_a_chain_whose_order_hides_its_links_gives_many_clusters_not_a_wrong_one(
    tmp_path: Path,
) -> None:
    order = [*range(0, 60, 2), *range(1, 60, 2)]  # the one before is two links away
    path = tmp_path / "0.signatures"
    write_chain(path, order, changed=30)
    found = find_duplicates([path], tmp_path / "drops", method=MinHash())
    # two links apart 60 of 112 bytes differ: no duplicates. What meets its link is the first only.
    assert found.verified == 1
    assert found.near.largest == [(2, 0, 0)]
