"""Weights carried from chunk to chunk: the C++ form against PyTorch's in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cdrmix.models import clamped_recurrence
from cdrmix.models.clamped_recurrence import in_kernel, in_turn, run_cpp

LARGEST = 2.0


def given(along: tuple[int, int], elements: tuple[int, ...]) -> list[Tensor]:
    """Weights, additions of five chunks to three sequences, and decays; many exceed the clamp."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(3, *elements, generator=generator),
        torch.randn(3, 5, *elements, generator=generator),
        torch.rand(*along, generator=generator),
    ]


def outputs_and_gradients(form, values: list[Tensor]) -> list[Tensor]:
    values = [x.clone().requires_grad_() for x in values]
    outputs = form(*values, largest=LARGEST)
    generator = torch.Generator().manual_seed(1)
    probes = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in outputs]
    return [*(x.detach() for x in outputs), *torch.autograd.grad(outputs, values, probes)]


@pytest.mark.compiler
@pytest.mark.parametrize("along", [(1, 1), (3, 1), (1, 5), (3, 5)])
@pytest.mark.parametrize("elements", [(8, 8), (3,)])
def test_the_kernel_equals_pytorchs_operations_in_float64(
    along: tuple[int, int], elements: tuple[int, ...]
) -> None:
    values = given(along, elements)
    found = outputs_and_gradients(clamped_recurrence.clamped_recurrence, values)
    with_kernel = outputs_and_gradients(lambda *x, **k: in_kernel(*x, **k, run=run_cpp), values)
    exact = outputs_and_gradients(in_turn, [x.double() for x in values])
    assert exact[0].abs().max() > LARGEST / 2
    for ours, chosen, expected in zip(with_kernel, found, exact, strict=True):
        assert torch.equal(ours, chosen)  # what a float32 tensor on a CPU takes
        torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=2e-6)


@pytest.mark.compiler
def test_what_is_no_number_stays_so_and_spoils_nothing_else() -> None:
    weights, added, decay = given((1, 1), (4,))
    whole = in_kernel(weights, added, decay, largest=LARGEST, run=run_cpp)
    added[1, 2, 3] = torch.nan
    befores, after = in_kernel(weights, added, decay, largest=LARGEST, run=run_cpp)
    assert befores[1, 3:, 3].isnan().all() and after[1, 3].isnan()
    assert befores.isnan().sum() == 2 and after.isnan().sum() == 1
    kept = ~befores.isnan()
    assert torch.equal(befores[kept], whole[0][kept])


def test_what_kernels_do_not_take_is_computed_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    values = given((1, 5), (4,))
    exact = outputs_and_gradients(in_turn, [x.double() for x in values])
    double = [x.double() for x in values]
    found = outputs_and_gradients(clamped_recurrence.clamped_recurrence, double)
    assert all(map(torch.equal, found, exact))
    monkeypatch.setattr(clamped_recurrence, "load_kernels", lambda: "no compiler")
    found = outputs_and_gradients(clamped_recurrence.clamped_recurrence, values)
    for ours, expected in zip(found, exact, strict=True):
        torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=2e-6)
