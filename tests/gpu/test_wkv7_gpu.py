"""The WKV-7 op on a CUDA device against the plain loop in float64 on the CPU."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cdrmix.models import wkv7_fla
from cdrmix.models.wkv7 import wkv7
from cdrmix.models.wkv7_fla import obstacle
from tests.parity.test_wkv7 import LOOP, Form, assert_equal, ids_of, random_inputs, results

pytestmark = pytest.mark.gpu

# bfloat16 rounds each operand by up to 2^-9, a few times in a row.
BFLOAT16_TOLERANCE = 0.02
LENGTHS = ([20, 100, 80], [64, 64, 72])


def on_device(backend: str, device: str = "cuda") -> Form:
    def form(*leaves: Tensor, segment_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        ids = None if segment_ids is None else segment_ids.to(device)
        y, s = wkv7(*(x.to(device) for x in leaves), segment_ids=ids, backend=backend)
        return y.cpu(), s.cpu()

    return form


@pytest.mark.parametrize("key", [64, 128])
@pytest.mark.parametrize("is_packed", [False, True])
def test_chunked_equals_the_loop(key: int, is_packed: bool) -> None:
    ids = ids_of(LENGTHS) if is_packed else None
    inputs = random_inputs(200, key)
    wanted = results(LOOP, inputs, torch.float64, ids)
    assert_equal(results(on_device("chunked"), inputs, segment_ids=ids), wanted)


@pytest.mark.parametrize("backend", ["auto", "fla"])
@pytest.mark.parametrize("key", [64, 128])
@pytest.mark.parametrize("is_packed", [False, True])
def test_sixteen_bit_forms_equal_the_loop(backend: str, key: int, is_packed: bool) -> None:
    inputs = [x.bfloat16() for x in random_inputs(200, key)]
    device = torch.device("cuda", torch.cuda.current_device())
    reason = obstacle(device, torch.bfloat16, key, key, is_packed=is_packed)
    if backend == "fla" and reason:
        pytest.skip(reason)
    ids = ids_of(LENGTHS) if is_packed else None
    wanted = results(LOOP, inputs, torch.float64, ids)
    found = results(on_device(backend), inputs, torch.bfloat16, ids)
    assert_equal(found, wanted, BFLOAT16_TOLERANCE)


def test_the_fastest_right_chunk_is_used_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    case = wkv7_fla._Case(torch.device("cuda", 0), torch.bfloat16, 128, 128, is_packed=False)
    monkeypatch.setattr(wkv7_fla, "_timed", {})
    wkv7_fla._settled.cache_clear()
    found = wkv7_fla._checked_chunk_tokens(case, (2, 4096, 16))
    if isinstance(found, str):
        pytest.skip(found)
    assert found in wkv7_fla._right_chunk_tokens(case)
    wkv7_fla._settled.cache_clear()
    monkeypatch.setattr(wkv7_fla, "_timed", {})
    monkeypatch.setattr(wkv7_fla, "_right_chunk_tokens", None)  # a check would call it
    assert wkv7_fla._checked_chunk_tokens(case, (2, 4096, 16)) == found
    wkv7_fla._settled.cache_clear()


def test_kept_and_recomputed_gradients_are_the_same() -> None:
    inputs = [x.bfloat16().cuda() for x in random_inputs(200, 64)[:6]]
    if reason := obstacle(torch.device("cuda"), torch.bfloat16, 64, 64, is_packed=False):
        pytest.skip(reason)

    def gradients(form: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        y = form(*leaves)
        return torch.autograd.grad(y, leaves, torch.ones_like(y))

    def plain(*leaves: Tensor) -> Tensor:
        return wkv7(*leaves, backend="fla")[0]

    def kept(*leaves: Tensor) -> Tensor:
        with wkv7_fla.inside_recomputation():
            return plain(*leaves)

    def recomputed(*leaves: Tensor) -> Tensor:
        return checkpoint(kept, *leaves, use_reentrant=False)

    for one, other in zip(gradients(plain), gradients(recomputed), strict=True):
        torch.testing.assert_close(one, other)


def test_decay_out_of_bounds_stops_the_process() -> None:
    program = """
import torch
from cdrmix.models.wkv7 import wkv7
x = torch.zeros(1, 4, 1, 64, device="cuda")
wkv7(x, x - 1, x, x, x, x)
torch.cuda.synchronize()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "assert" in done.stderr
