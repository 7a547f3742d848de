"""Placing of documents: all of them, once, and none for infilling in two samples."""

from __future__ import annotations

import random

import pytest

from cdrmix.corpus.placing import NO_ROOM, REARRANGED, TOO_LONG, place


def lengths(count: int, window: int, *, drawn: float, seed: int = 0) -> tuple[list[int], list[int]]:
    """Tokens of documents in their own order, and rearranged, with three more."""
    chance = random.Random(seed)
    plain = [chance.randint(1, int(1.2 * window)) for _ in range(count)]
    return plain, [length + 3 if chance.random() < drawn else 0 for length in plain]


def num_cut(plain: list[int], rearranged: list[int], window: int, order) -> int:
    """Rearranged documents that are not within one sample of `window` tokens and a last label."""
    position = cut = 0
    for document, is_rearranged in order:
        length = rearranged[document] if is_rearranged else plain[document]
        cut += is_rearranged and position % window + length > window + 1
        position += length
    return cut


@pytest.mark.parametrize("drawn", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("window", [16, 256])
def test_every_document_is_placed_once_and_none_for_infilling_is_cut(
    window: int, drawn: float
) -> None:
    plain, rearranged = lengths(2_000, window, drawn=drawn)
    order, counts = place(plain, rearranged, window)
    assert sorted(document for document, _ in order) == list(range(2_000))
    assert num_cut(plain, rearranged, window, order) == 0
    # control: in corpus order most of them are
    given = [(n, bool(rearranged[n])) for n in range(2_000)]
    assert num_cut(plain, rearranged, window, given) > 0.2 * 2_000 * drawn - 1
    assert counts.total() == sum(length > 0 for length in rearranged)
    assert counts[REARRANGED] == sum(is_rearranged for _, is_rearranged in order)
    assert counts[TOO_LONG] == sum(length > window + 1 for length in rearranged)
    # Where other text fills the samples up, next to none has to give up its order.
    assert counts[NO_ROOM] < {0.0: 1, 0.5: 20, 1.0: 800}[drawn]
    assert place(plain, rearranged, window) == (order, counts)


def test_a_document_as_long_as_a_sample_and_its_last_label_fits() -> None:
    assert place([6, 3], [9, 0], 8)[0] == [(0, True), (1, False)]
    order, counts = place([7, 3], [10, 0], 8)
    assert (order, counts) == ([(0, False), (1, False)], {TOO_LONG: 1})


def test_without_any_for_infilling_the_order_stays() -> None:
    assert place([5, 50, 1], [0, 0, 0], 8) == ([(0, False), (1, False), (2, False)], {})
    assert place([], [], 8) == ([], {})
