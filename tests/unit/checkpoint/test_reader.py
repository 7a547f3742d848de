"""Reading any part of a checkpoint, whatever layout wrote it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cdrmix.checkpoint.checkpoint_file import CheckpointFile
from cdrmix.checkpoint.fragments import Box, Fragment, Span
from cdrmix.checkpoint.saver import Saved
from cdrmix.errors import StateError
from tests.checkpoints import on_ranks, save_checkpoint, whole


def cut(
    generator: random.Random, tensor: torch.Tensor, splits: tuple[int, ...]
) -> Iterator[Fragment]:
    """`tensor` as a grid of blocks, `splits` per dimension, each block as several flat spans."""
    shape = tuple(tensor.shape)
    edges = [
        sorted({0, size, *generator.sample(range(1, size), parts - 1)})
        for size, parts in zip(shape, splits, strict=True)
    ]
    for corner in itertools.product(*(list(itertools.pairwise(edge)) for edge in edges)):
        offset = tuple(low for low, _ in corner)
        block = Box(offset, tuple(high - low for low, high in corner))
        flat = tensor[tuple(slice(low, high) for low, high in corner)].reshape(-1)
        middle = generator.randrange(block.numel)
        for start, end in ((0, middle), (middle, block.numel)):
            if end > start:
                span = Span(block, start, end - start)
                yield Fragment("w", "param", shape, span, flat[start:end])


@pytest.mark.parametrize(
    ("shape", "splits"),
    [
        ((24,), (3,)),
        ((8, 6), (4, 1)),
        ((8, 6), (1, 3)),
        ((4, 5, 6), (2, 1, 1)),
        ((4, 5, 6), (1, 2, 3)),
        ((3, 4, 5, 6), (2, 2, 2, 2)),
    ],
)
def test_any_block_and_range_is_read_from_fragments_of_any_layout(
    tmp_path: Path, shape: tuple[int, ...], splits: tuple[int, ...]
) -> None:
    generator = random.Random(0)
    logical = torch.randn(shape)
    pieces = list(cut(generator, logical, splits))
    # One file per key, so that a block's two spans do not collide in one.
    outcomes = on_ranks(
        len(pieces),
        lambda rank: save_checkpoint(tmp_path, 1, [pieces[rank]], state={}, rank_state={}, keep=1),
    )
    assert {type(outcome) for outcome in outcomes} == {Saved}
    with CheckpointFile(tmp_path / "1") as reader:
        assert torch.equal(reader.full("w"), logical)
        for _ in range(30):
            low = [generator.randrange(size) for size in shape]
            high = [generator.randrange(a, size) + 1 for a, size in zip(low, shape, strict=True)]
            box = tuple(slice(a, b) for a, b in zip(low, high, strict=True))
            expected = logical[box].reshape(-1)
            block = Box(tuple(low), tuple(logical[box].shape))
            start = generator.randrange(block.numel)
            numel = generator.randrange(block.numel - start) + 1
            assert torch.equal(reader.read("w", span=Span.whole(block)), expected)
            part = reader.read("w", span=Span(block, start, numel))
            assert torch.equal(part, expected[start : start + numel])


def test_reading_outside_the_tensor_is_an_error(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, [whole("w", torch.ones(64))], state={}, rank_state={}, keep=1)
    with CheckpointFile(tmp_path / "1") as reader:
        with pytest.raises(StateError, match=r"6 of the 10 elements asked for lie outside"):
            reader.read("w", span=Span.whole(Box((60,), (10,))))
        with pytest.raises(StateError, match="holds no exp_avg of 'w'"):
            reader.read("w", "exp_avg")
