"""Sorting and components on disk, against the same in memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cdrmix.corpus.steps.components import Chunks, Disk, components, grouped, unique

TINY = 2**14  # bytes; room for some hundred records, so that runs and levels of merging are many


def sorted_chunks(records: np.ndarray, folder: Path, *, piece: int = 700) -> Chunks:
    pieces = (records[start : start + piece] for start in range(0, len(records), piece))
    return Disk(folder, TINY).sort(pieces)


@pytest.mark.parametrize("num_columns", [1, 2, 3])
@pytest.mark.parametrize("largest", [1, 5, 2**64 - 1])
@pytest.mark.parametrize("num_records", [0, 1, 300, 30_000])
def test_chunks_are_the_records_in_order(
    tmp_path: Path, num_columns: int, largest: int, num_records: int
) -> None:
    records = np.random.default_rng(0).integers(
        largest, size=(num_records, num_columns), dtype=np.uint64, endpoint=True
    )
    found = [np.empty((0, num_columns), np.uint64), *sorted_chunks(records, tmp_path)]
    assert np.concatenate(found).tolist() == sorted(records.tolist())
    assert list(tmp_path.iterdir()) == []


def test_no_chunk_is_larger_than_the_memory_given(tmp_path: Path) -> None:
    records = np.random.default_rng(1).integers(3, size=(60_000, 2), dtype=np.uint64)
    sizes = [len(chunk) for chunk in sorted_chunks(records, tmp_path)]
    assert sum(sizes) == 60_000
    assert max(sizes) <= 1024


def test_groups_go_on_across_chunks() -> None:
    records = np.array([[1, 4], [1, 6], [2, 1], [2, 3], [2, 3], [2, 9], [5, 0]], np.uint64)
    for size in (1, 2, 3, 7):
        chunks = [records[i : i + size] for i in range(0, len(records), size)]
        groups = list(grouped(iter(chunks)))
        assert np.concatenate([g.leaders for g in groups]).tolist() == [4, 4, 1, 1, 1, 1, 0]
        assert np.concatenate([g.previous for g in groups]).tolist() == [4, 4, 1, 1, 3, 3, 0]
        assert (
            np.concatenate(list(unique(iter(chunks)))).tolist()
            == np.unique(records, axis=0).tolist()
        )
        # A chunk that only repeats the one before leaves nothing, which has no groups.
        assert sum(len(g.keys) for g in grouped(unique(iter(chunks)))) == 6


def components_in_memory(edges: np.ndarray, num_nodes: int) -> dict[int, int]:
    """Smallest node of each node's component, for nodes that are not it: repeated relabelling."""
    labels = np.arange(num_nodes)
    while True:
        before = labels.copy()
        for a, b in edges.astype(int).tolist():
            labels[a] = labels[b] = min(labels[a], labels[b])
        if np.array_equal(labels, before):
            return {node: int(root) for node, root in enumerate(labels) if node != root}


@pytest.mark.parametrize("shape", ["random", "path", "shuffled path", "star", "none"])
def test_components_are_stars_around_their_smallest_node(tmp_path: Path, shape: str) -> None:
    generator = np.random.default_rng(2)
    names = generator.permutation(300)
    pairs = {
        "random": generator.integers(300, size=(200, 2)),
        "path": np.stack([np.arange(299), np.arange(1, 300)], 1),
        "shuffled path": np.stack([names[:-1], names[1:]], 1),
        "star": np.stack([np.full(299, 150), np.delete(np.arange(300), 150)], 1),
        "none": np.empty((0, 2), np.int64),
    }[shape]
    pairs = pairs[pairs[:, 0] != pairs[:, 1]]
    edges = np.sort(pairs, axis=1)[:, ::-1].astype(np.uint64)
    stars = components(iter([edges[:100], edges[50:]]), Disk(tmp_path, TINY))
    found = np.concatenate([np.empty((0, 2), np.uint64), *stars.chunks()]).tolist()
    assert dict(map(tuple, found)) == components_in_memory(edges, 300)
    assert len(found) == stars.num_records
    assert found == sorted(found)
