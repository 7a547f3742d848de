"""Where spans of a tensor meet, and that together they are all of it."""

import pytest

from cdrmix.checkpoint.fragments import Box, Span, check_cover, shared_runs


def test_blocks_that_differ_in_the_first_dimension_only_share_one_run() -> None:
    experts_of_rank_1 = Span(Box((2, 0, 0), (2, 300, 50)), 7, 20_000)
    all_experts = Span.whole(Box.whole((8, 300, 50)))
    source, target, lengths = shared_runs(experts_of_rank_1, all_experts)
    assert (source.tolist(), target.tolist()) == ([0], [2 * 300 * 50 + 7])
    assert lengths.tolist() == [20_000]


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([(0, 5)], "5 of 8 elements"),
        ([(0, 5), (4, 4)], "held twice"),
        ([(0, 4), (4, 4), (0, 8)], "held twice"),
    ],
)
def test_fragments_must_hold_each_element_exactly_once(
    spans: list[tuple[int, int]], message: str
) -> None:
    block = Box.whole((8,))
    with pytest.raises(AssertionError, match=message):
        check_cover("w", (8,), [Span(block, start, numel) for start, numel in spans])


def test_overlapping_blocks_are_refused() -> None:
    blocks = [Box((0, 0), (2, 3)), Box((1, 2), (1, 2))]
    with pytest.raises(AssertionError, match="overlap"):
        check_cover("w", (2, 4), [Span.whole(block) for block in blocks])
