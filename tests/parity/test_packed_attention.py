"""Attention of packed documents against a mask of all pairs, forward and every gradient."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from cdrmix.models import packed_attention
from cdrmix.models.attention import attend, shared_angles
from cdrmix.models.packed_attention import GROUP_TOKENS, attend_documents, groups_of
from cdrmix.models.packing import packing_of, remember

HEAD_DIM, THETA = 16, 10_000.0
# lengths of the documents of each row: one, one of each token, on and beside the size of a group,
# short ones before and behind a long one, rows that begin as others end
ROWS = (
    [[67]],
    [[1] * 67],
    [[GROUP_TOKENS, GROUP_TOKENS, 3], [GROUP_TOKENS + 1, 34], [1, 66]],
    [[7, 1, 1, 30, 28], [2, 31, 34]],
    [[66, 1], [1, 66]],
)


def ids_of(rows: list[list[int]]) -> Tensor:
    """Segment ids, [B, T], of rows of documents of these lengths."""
    return torch.tensor(
        [[n for n, length in enumerate(row) for _ in range(length)] for row in rows]
    )


def heads(rows: list[list[int]], num_kv_heads: int, dtype: torch.dtype) -> list[Tensor]:
    """Query, keys, values, and weights of the result, [B, T, H or G, K]."""
    shape = (len(rows), sum(rows[0]))
    numbers = (4, num_kv_heads, num_kv_heads, 4)
    return [torch.randn(*shape, number, HEAD_DIM, dtype=dtype) for number in numbers]


def by_mask(query: Tensor, keys: Tensor, values: Tensor, ids: Tensor) -> Tensor:
    """The definition: scores of all pairs, behind a mask."""
    query, keys, values = (x.transpose(1, 2) for x in (query, keys, values))
    mask = (ids.unsqueeze(2) == ids.unsqueeze(1)).tril().unsqueeze(1)
    mixed = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
    return mixed.transpose(1, 2)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("rows", ROWS, ids=["one", "single", "edges", "mixed", "ends"])
def test_documents_and_their_gradients_are_those_of_a_mask(
    rows: list[list[int]], num_kv_heads: int
) -> None:
    *inputs, weights = heads(rows, num_kv_heads, torch.float64)
    results = []
    for form in (attend_documents, by_mask):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = form(*leaves, ids_of(rows))
        results.append([out, *torch.autograd.grad(out, leaves, weights)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


def test_torch_finds_no_fault_with_the_operator() -> None:
    query, keys, values, _ = heads(ROWS[3], 2, torch.float32)
    leaves = [x.requires_grad_() for x in (query, keys, values)]
    torch.library.opcheck(packed_attention._attention, (*leaves, ids_of(ROWS[3])))


def test_groups_hold_one_document_or_few_tokens() -> None:
    ends = [0, 3, 5, 40, 41, 42, 73, 74]
    groups = list(groups_of(ends, 32))
    assert groups == [(0, 1), (2, 2), (3, 4), (5, 6)]
    # so that work is bounded by squared lengths and by the size of a group
    assert all(first == last or ends[last + 1] - ends[first] <= 32 for first, last in groups)


def test_no_tensor_of_all_pairs_is_made() -> None:
    rows = [[64] * 64]  # 4,096 tokens: all pairs of a head would be 64 MiB
    query, keys, values, weights = heads(rows, 4, torch.float32)
    ids = ids_of(rows)
    with torch.profiler.profile(profile_memory=True) as profiled:
        out = attend(query.requires_grad_(), keys, values, None, ids, THETA)[0]
        out.backward(weights)
    largest = max(event.cpu_memory_usage for event in profiled.events())
    assert 0 < largest <= 4 * query.numel() * 4


def test_rows_are_packed_once_and_anew_when_they_change() -> None:
    ids = torch.tensor([[0, 0, 1], [3, 4, 4]])
    packing = packing_of(ids)
    assert packing.ends.tolist() == packing.ends_list == [0, 2, 3, 4, 6]
    assert (packing.first.tolist(), packing.last.tolist()) == ([0, 2], [1, 3])
    assert packing.longest == 2
    assert packing_of(ids) is packing
    ids[0, 1] = 1
    assert packing_of(ids).ends.tolist() == [0, 1, 3, 4, 6]


def test_ids_that_the_host_has_seen_are_not_read_on_a_device() -> None:
    ids = torch.tensor([[0, 0, 1], [3, 4, 4]])
    there = ids.to("meta")  # which has no values that could be read
    remember(there, ids)
    packing = packing_of(there)
    assert packing.ends.is_meta
    assert packing.ends_list == [0, 2, 3, 4, 6]
    del packing, there
    gc.collect()
    with pytest.raises(NotImplementedError):
        packing_of(ids.to("meta"))


def test_layers_share_the_angles_of_a_forward_pass() -> None:
    shared_angles.cache_clear()
    query, keys, values, _ = heads([[9]], 2, torch.float32)
    for _ in range(3):
        attend(query, keys, values, None, None, THETA)
    assert (shared_angles.cache_info().misses, shared_angles.cache_info().hits) == (1, 2)
