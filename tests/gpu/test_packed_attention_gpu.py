"""Attention of packed documents on a CUDA device in bfloat16 against the CPU in float32."""

import pytest
import torch
from torch import Tensor

from cdrmix.models.packed_attention import attend_documents, obstacle
from tests.parity.test_packed_attention import ROWS, ids_of

pytestmark = pytest.mark.gpu

# bfloat16 rounds each operand by up to 2^-9, a few times in a row.
BFLOAT16_TOLERANCE = 0.02


def results(inputs: list[Tensor], rows: list[list[int]]) -> list[Tensor]:
    """Output, and gradients of query, keys and values."""
    *leaves, weights = (x.detach().requires_grad_() for x in inputs)
    out = attend_documents(*leaves, ids_of(rows).to(weights.device))
    return [out, *torch.autograd.grad(out, leaves, weights)]


@pytest.mark.parametrize("num_kv_heads", [2, 4])
@pytest.mark.parametrize("rows", ROWS, ids=["one", "single", "edges", "mixed", "ends"])
def test_documents_are_those_of_the_cpu(rows: list[list[int]], num_kv_heads: int) -> None:
    shape = (len(rows), sum(rows[0]))
    inputs = [torch.randn(*shape, n, 64).bfloat16() for n in (4, num_kv_heads, num_kv_heads, 4)]
    on_device = [x.cuda() for x in inputs]
    assert obstacle(on_device[0]) is None
    wanted = results([x.float() for x in inputs], rows)
    for found, exact in zip(results(on_device, rows), wanted, strict=True):
        error = (found.cpu().float() - exact).norm() / exact.norm()
        assert error < BFLOAT16_TOLERANCE


def test_a_step_with_known_documents_waits_for_nothing() -> None:
    from cdrmix.models.packing import remember

    ids = ids_of(ROWS[3])
    there = ids.cuda()
    remember(there, ids)
    shape = (*ids.shape, 4, 64)
    query, keys, values = (torch.randn(shape, device="cuda").bfloat16() for _ in range(3))
    torch.cuda.set_sync_debug_mode("error")
    try:
        attend_documents(query.requires_grad_(), keys, values, there).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
