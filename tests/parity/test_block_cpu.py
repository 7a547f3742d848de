"""The C++ norm and activation against PyTorch's in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from cdrmix.models import block_cpu
from cdrmix.models.block_cpu import RMSNorm
from cdrmix.models.feed_forward import squared_relu

pytestmark = pytest.mark.compiler

# of the largest value; the weight's gradient is a sum over 198 rows
TOLERANCE = 1e-6


def _probe(shape: torch.Size) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(6))


def _worst_error(found: list[Tensor], expected: list[Tensor]) -> float:
    errors = [
        (x.double() - y).abs().max() / y.abs().max() for x, y in zip(found, expected, strict=True)
    ]
    return float(max(errors))


@pytest.mark.parametrize("width", [1, 3, 32, 41, 300])
def test_norm_and_gradients_equal_those_in_float64(width: int) -> None:
    torch.manual_seed(5)
    x = 3 * torch.randn(2, 99, width)
    x[0, :3] *= 1e-4  # where eps counts
    norm = RMSNorm(width, eps=1e-6)
    nn.init.normal_(norm.weight)
    exact = nn.RMSNorm(width, eps=1e-6, dtype=torch.float64)
    exact.load_state_dict(norm.state_dict())

    def results(module: nn.RMSNorm, x: Tensor) -> list[Tensor]:
        x = x.clone().requires_grad_()
        out = module(x)
        leaves = [x, module.weight]
        return [out.detach(), *torch.autograd.grad(out, leaves, _probe(out.shape).to(out.dtype))]

    assert block_cpu.can_run(x, norm.weight)
    assert _worst_error(results(norm, x), results(exact, x.double())) <= TOLERANCE


@pytest.mark.parametrize("width", [1, 32, 41])
def test_squared_relu_and_its_gradient_are_pytorchs(width: int) -> None:
    torch.manual_seed(5)
    x = torch.randn(7, 5, width).transpose(0, 1).requires_grad_()  # not contiguous
    out = squared_relu(x)
    grad = _probe(out.shape)
    (dx,) = torch.autograd.grad(out, x, grad)
    positive = torch.relu(x.detach())
    assert torch.equal(out, positive * positive)
    assert torch.equal(dx, grad * positive * 2)


def test_not_a_number_and_infinity_stay() -> None:
    values = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0])
    assert squared_relu(values).tolist()[1:] == [float("inf"), 0.0, 0.0]
    assert squared_relu(values)[0].isnan()
    assert RMSNorm(4, eps=1e-6)(values).isnan().all()


def test_bits_do_not_depend_on_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def gradients() -> tuple[Tensor, ...]:
        torch.manual_seed(5)
        norm = RMSNorm(64, eps=1e-6)
        x = torch.randn(300, 64, requires_grad=True)
        return torch.autograd.grad(norm(x), [x, norm.weight], _probe(x.shape))

    expected = gradients()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for found, value in zip(gradients(), expected, strict=True):
        assert torch.equal(found, value)


def test_other_types_and_graphs_take_pytorchs_forms() -> None:
    norm = RMSNorm(8, eps=1e-6)
    x = torch.randn(3, 8)
    assert not block_cpu.can_run(x.bfloat16(), norm.weight)
    double = x.double().requires_grad_()
    assert torch.autograd.gradcheck(squared_relu, double)
    compiled = torch.compile(lambda x: squared_relu(norm(x)), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), squared_relu(norm(x)))
    torch.testing.assert_close(torch.func.vmap(norm)(x), norm(x))
