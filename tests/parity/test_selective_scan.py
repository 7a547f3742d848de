"""Forms of the selective scan against the loop over tokens, mamba-ssm's kernel among them."""

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cdrmix.models import selective_scan_cuda
from cdrmix.models.selective_scan import (
    ScanInputs,
    scan_chunked,
    scan_reference,
    selective_scan,
)
from tests.parity.test_mamba import STATES, assert_all_close, gradients, ids_of, random_inputs


@pytest.mark.parametrize("chunk_tokens", [1, 5, 16, 64])
@pytest.mark.parametrize("is_packed", [False, True])
def test_chunks_equal_the_loop_over_tokens(chunk_tokens: int, is_packed: bool) -> None:
    ids = ids_of([9, 1, 27], [16, 16, 5]) if is_packed else None
    start = torch.randn(2, STATES, 24, generator=torch.Generator().manual_seed(5)).double()
    results = []
    for form in (scan_reference, partial(scan_chunked, chunk_tokens=chunk_tokens)):
        leaves = [x.requires_grad_() for x in random_inputs(2, 37, dtype=torch.float64)]
        s0 = start.clone().requires_grad_()
        outputs = form(ScanInputs(*leaves), s0, ids)
        results.append([*outputs, *gradients(outputs, [*leaves, s0])])
    assert_all_close(results[1], results[0], 1e-12)


def test_chunks_carry_nothing_over_a_border_of_documents() -> None:
    inputs = random_inputs(1, 20)
    ids = ids_of([12, 8])
    kept, _ = scan_chunked(inputs, None, ids)
    changed = inputs._replace(u=inputs.u.clone())
    changed.u[:, :12] += 1
    after, _ = scan_chunked(changed, None, ids)
    assert torch.equal(after[:, 12:], kept[:, 12:])
    leaked, _ = scan_chunked(changed, None, None)
    assert not torch.allclose(leaked[:, 12:], kept[:, 12:]), "without ids it must"


def test_half_precision_is_computed_in_float32() -> None:
    inputs = random_inputs(2, 37)
    rounded = ScanInputs(*(x.bfloat16() for x in inputs))
    y, s = scan_chunked(rounded)
    exact, s_exact = scan_reference(ScanInputs(*(x.float() for x in rounded)))
    assert y.dtype == torch.bfloat16
    assert_all_close([y.float(), s], [exact, s_exact], 2**-8)
    assert_all_close([s], [s_exact], 1e-5)


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="allowed: auto, reference, chunked, mamba_ssm"):
        selective_scan(random_inputs(1, 2), backend="fast")


def stand_in(
    u: Tensor,
    delta: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    D: Tensor | None = None,  # noqa: N803 - mamba-ssm's name
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
) -> tuple[Tensor, Tensor]:
    """Computes as mamba-ssm's selective_scan_fn documents: [B, I, T], no gradient of the state."""
    assert return_last_state
    assert len({x.dtype for x in (u, delta, b, c)}) == 1, "mamba-ssm takes one type"
    step = delta if delta_bias is None else delta + delta_bias[:, None]
    step = nn.functional.softplus(step) if delta_softplus else step
    s, out = u.new_zeros(u.shape[0], *a.shape), []
    for t in range(u.shape[2]):
        s = torch.exp(step[..., t, None] * a) * s
        s = s + (step * u)[..., t, None] * b[:, None, :, t]
        out.append((s * c[:, None, :, t]).sum(-1))
    y = torch.stack(out, -1)
    y = y if D is None else y + D[:, None] * u
    return y if z is None else y * nn.functional.silu(z), s.detach()


@pytest.fixture
def use_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[object], None]]:
    """Puts a stand-in where mamba-ssm's kernel is imported."""
    selective_scan_cuda._checked.cache_clear()
    monkeypatch.setattr(logging.getLogger("cdrmix"), "propagate", True)
    yield lambda kernel: monkeypatch.setattr(selective_scan_cuda, "_kernel", lambda: kernel)
    selective_scan_cuda._checked.cache_clear()


@pytest.mark.parametrize("is_packed", [True, False])
def test_mamba_ssms_conventions_are_translated(
    use_kernel: Callable[[object], None], is_packed: bool
) -> None:
    use_kernel(stand_in)
    ids = ids_of([9, 15], [1, 23]) if is_packed else None
    results = []
    for form in (scan_reference, selective_scan_cuda.scan):
        leaves = [x.requires_grad_() for x in random_inputs(2, 24)]
        outputs = form(ScanInputs(*leaves), None, ids)
        results.append([*outputs, *gradients(outputs, leaves)])
    assert_all_close(results[1], results[0], 2e-5)


def test_kernels_are_used_where_their_gradients_are_right(
    use_kernel: Callable[[object], None], caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(u: Tensor, delta: Tensor, a: Tensor, b: Tensor, *rest: Tensor, **options: Any) -> Any:
        return stand_in(u, delta, a, 0.5 * b + 0.5 * b.detach(), *rest, **options)

    case = selective_scan_cuda._Case(torch.device("cpu"), torch.float32, 8, is_packed=False)
    use_kernel(stand_in)
    assert selective_scan_cuda._checked(case) is None
    assert selective_scan_cuda._checked(case._replace(is_packed=True)) is None
    selective_scan_cuda._checked.cache_clear()
    use_kernel(wrong)
    problem = selective_scan_cuda._checked(case)
    assert problem is not None
    assert "db is off by 0." in problem
    (record,) = caplog.records
    assert "chunked form" in record.message
    assert "slower than the plan says" in record.message
    assert "computes on CUDA" in str(
        selective_scan_cuda.obstacle(*case[:3], is_packed=False, has_start=False)
    )
