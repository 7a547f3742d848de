"""Grouped experts on a CUDA device in bfloat16 against the CPU in float32.

On Blackwell, torch's grouped_mm has given experts without tokens a gradient (pytorch issue 172439).
"""

import pytest
import torch
from torch import Tensor

from cdrmix.models.moe import GroupedExperts, float_linear

pytestmark = pytest.mark.gpu

# bfloat16 rounds each operand by up to 2^-9, a few times in a row.
BFLOAT16_TOLERANCE = 0.02


def results(counts: list[int], device: str, dtype: torch.dtype) -> list[Tensor]:
    """Output, and gradients of rows, up and down projections, for `counts` rows per expert."""
    experts = GroupedExperts(len(counts), 72, 64, group_name="ep_size_1")
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    rows, weights = torch.randn(2, sum(counts), 64)
    experts.to(device, dtype)
    leaves = [rows.to(device, dtype).requires_grad_(), experts.up, experts.down]
    ends = torch.tensor(counts, device=device).cumsum(0).to(torch.int32)
    poison = [torch.full((2**20,), torch.nan, device=device) for _ in range(8)]
    del poison  # what the kernels leave unwritten is then not-a-number
    out = experts(leaves[0], ends)
    gradients = torch.autograd.grad(out, leaves, weights.to(device, dtype))
    return [x.detach().cpu().float() for x in (out, *gradients)]


@pytest.mark.parametrize("counts", [[5, 0, 17, 42], [0, 0, 64, 0], [0, 0, 0, 0]], ids=str)
def test_experts_equal_the_cpu_and_those_without_tokens_get_no_gradient(counts: list[int]) -> None:
    torch.manual_seed(0)
    wanted = results(counts, "cpu", torch.float32)
    torch.manual_seed(0)
    found = results(counts, "cuda", torch.bfloat16)
    for ours, exact in zip(found, wanted, strict=True):
        assert (ours - exact).norm() <= BFLOAT16_TOLERANCE * exact.norm()
    for gradient in found[2:]:
        assert not any(gradient[e].any() for e, count in enumerate(counts) if count == 0)


def test_a_routers_product_of_bfloat16_equals_that_of_float32_copies() -> None:
    torch.manual_seed(0)
    x, weight, worth = (
        torch.randn(*shape, device="cuda") for shape in ((99, 64), (8, 64), (99, 8))
    )
    leaves = [each.bfloat16().requires_grad_() for each in (x, weight)]
    copies = torch.nn.functional.linear(*(leaf.float() for leaf in leaves))
    expected = [copies, *torch.autograd.grad(copies, leaves, worth)]
    ours = float_linear(*leaves)
    for found, exact in zip(
        [ours, *torch.autograd.grad(ours, leaves, worth)], expected, strict=True
    ):
        tolerance = 1e-5 if found.dtype == torch.float32 else 2**-7
        assert (found - exact).abs().max() <= tolerance * exact.abs().max()
