"""The path through fla's kernels but for the kernels: conventions, and the check before their use.

A stand-in follows fla's documented conventions (states [N,H,K,V], packed sequences in one flat
batch) and computes with the reference loop, so that all of this runs without a GPU. The kernels
themselves are tested in tests/gpu.
"""

# B batch, T time, H heads, K key dim, V value dim, N sequences packed into a batch

import inspect
import logging
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from cdrmix.models import wkv7_fla
from cdrmix.models.wkv7_reference import DECAY_BOUND
from tests.parity.test_wkv7 import LOOP, assert_equal, ids_of, random_inputs, results

CASE = wkv7_fla._Case(torch.device("cpu"), torch.bfloat16, 16, 16, is_packed=False)


def stand_in(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    scale: float,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    safe_gate: bool,
    chunk_size: int,
    lower_bound: float,
) -> tuple[Tensor, Tensor]:
    assert (scale, output_final_state, safe_gate, lower_bound) == (1.0, True, True, -DECAY_BOUND)
    assert chunk_size in (16, 64)
    tokens = (r, w, k, v, a, b)
    if cu_seqlens is None:
        assert cu_seqlens_cpu is None
        s0 = None if initial_state is None else initial_state.mT
        y, s = LOOP(*tokens, s0=s0)
        return y, s.mT.contiguous()
    assert cu_seqlens_cpu is not None
    assert torch.equal(cu_seqlens, cu_seqlens_cpu)
    assert r.shape[0] == 1
    rows, states = [], []
    lengths = cu_seqlens.diff().tolist()
    for n, part in enumerate(zip(*(x.split(lengths, 1) for x in tokens), strict=True)):
        s0 = None if initial_state is None else initial_state[n : n + 1].mT
        y, s = LOOP(*part, s0=s0)
        rows.append(y)
        states.append(s.mT)
    return torch.cat(rows, 1), torch.cat(states)


def with_wrong_gradient(*chunk_sizes: int) -> Callable[..., tuple[Tensor, Tensor]]:
    """A kernel whose forward is right and whose dk is halved at some chunk sizes."""

    def kernel(*inputs: Tensor, chunk_size: int, **options: object) -> tuple[Tensor, Tensor]:
        r, w, k, v, a, b = inputs
        if chunk_size in chunk_sizes:
            k = 0.5 * k + 0.5 * k.detach()
        return stand_in(r, w, k, v, a, b, chunk_size=chunk_size, **options)  # type: ignore[arg-type]

    return kernel


@pytest.fixture
def use_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[object], None]]:
    """Puts a stand-in where fla's kernel is imported."""
    monkeypatch.setattr(logging.getLogger("cdrmix"), "propagate", True)
    wkv7_fla._checked_chunk_tokens.cache_clear()
    yield lambda kernel: monkeypatch.setattr(wkv7_fla, "_kernel", lambda: kernel)
    wkv7_fla._checked_chunk_tokens.cache_clear()


@pytest.mark.parametrize("has_state", [True, False])
@pytest.mark.parametrize("is_packed", [True, False])
def test_conventions_are_translated(
    use_kernel: Callable[[object], None], has_state: bool, is_packed: bool
) -> None:
    use_kernel(stand_in)
    inputs = random_inputs(24, 16, 8)[: 7 if has_state else 6]
    ids = ids_of(([9, 15], [1, 1, 22])) if is_packed else None

    def call(*leaves: Tensor, segment_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        s0 = leaves[6] if has_state else None
        return wkv7_fla._call(leaves[:6], s0, segment_ids, chunk_tokens=64)

    wanted = results(LOOP, inputs, torch.float64, ids)
    assert_equal(results(call, inputs, segment_ids=ids), wanted)


@pytest.mark.parametrize("is_packed", [True, False])
def test_kernels_that_are_right_are_used_in_chunks_of_64(
    use_kernel: Callable[[object], None], caplog: pytest.LogCaptureFixture, is_packed: bool
) -> None:
    use_kernel(stand_in)
    assert wkv7_fla._checked_chunk_tokens(CASE._replace(is_packed=is_packed)) == 64
    assert not caplog.records


def test_a_wrong_gradient_at_64_leaves_16_and_is_named(
    use_kernel: Callable[[object], None], caplog: pytest.LogCaptureFixture
) -> None:
    use_kernel(with_wrong_gradient(64))
    assert wkv7_fla._checked_chunk_tokens(CASE) == 16
    (record,) = caplog.records
    assert "chunks of 64" in record.message
    assert "dk is off by 0.5, allowed 0.02" in record.message


@pytest.mark.parametrize("fault", ["wrong", "raises"])
def test_kernels_that_fail_everywhere_are_not_used(
    use_kernel: Callable[[object], None], caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    def broken(*inputs: Tensor, **options: object) -> None:
        raise RuntimeError("PassManager::run failed")

    use_kernel(broken if fault == "raises" else with_wrong_gradient(64, 16))
    found = [wkv7_fla._checked_chunk_tokens(CASE) for _ in range(2)]
    assert "PassManager::run failed" in str(found[0]) or "dk is off by 0.5" in str(found[0])
    assert found[1] == found[0]
    (record,) = caplog.records
    assert "chunks of 64" in record.message
    assert "chunks of 16" in record.message
    assert "chunked form" in record.message


def test_the_check_leaves_the_callers_random_numbers_and_gradients_alone(
    use_kernel: Callable[[object], None],
) -> None:
    use_kernel(stand_in)
    before = torch.get_rng_state()
    with torch.no_grad():
        assert wkv7_fla._checked_chunk_tokens(CASE) == 64
    assert torch.equal(torch.get_rng_state(), before)


def test_the_real_kernel_takes_what_the_stand_in_takes() -> None:
    module = pytest.importorskip(
        "fla.ops.rwkv7", reason="fla-core is not installed", exc_type=ImportError
    )
    assert set(inspect.signature(stand_in).parameters) <= set(
        inspect.signature(module.chunk_rwkv7).parameters
    )
