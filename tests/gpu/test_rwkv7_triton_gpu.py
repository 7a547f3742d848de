"""Compiled Triton kernels on a CUDA device against the eager forms in float64 on the CPU."""

from pathlib import Path

import pytest
import torch

from cdrmix.models import rwkv7_pointwise, rwkv7_triton, triton_checks, triton_launch

pytestmark = pytest.mark.gpu
pytest.importorskip("triton", reason="triton is not installed (it comes with torch for GPUs)")

# Features of heads, choices of a token.
SIZES = {
    "recurrence_inputs": (64, 128),
    "gated_output": (64, 128),
    "gather_rows": (1, 2),
    "weighted_sum": (1, 2),
}
CASES = [(name, size) for name in triton_checks.CASES for size in SIZES.get(name, (None,))]


@pytest.mark.parametrize("dtype", triton_launch.DTYPES, ids=str)
@pytest.mark.parametrize(("kernel", "size"), CASES)
def test_kernels_equal_the_eager_forms(kernel: str, size: int | None, dtype: torch.dtype) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    assert triton_checks.problem(kernel, device, dtype, size) is None


def test_equal_calls_give_equal_bits() -> None:
    torch.manual_seed(0)
    leaves = [
        torch.randn(2, 1000, 8, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(5)
    ]
    vectors = [torch.randn(8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    names = ("r_k", "weight", "bias")
    results = []
    for _ in range(2):
        given = [x.clone().requires_grad_() for x in vectors]
        out = rwkv7_triton.gated_output(*leaves, **dict(zip(names, given, strict=True)), eps=1e-3)
        gradients = torch.autograd.grad(out, [*leaves, *given], torch.ones_like(out))
        results.append((out, *gradients))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_the_model_takes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    triton_launch.passes.cache_clear()
    v = torch.randn(2, 9, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    out = rwkv7_pointwise.blend_values(v, v, v, v[0, 0])
    assert "BlendValues" in type(out.grad_fn).__name__
    triton_launch.passes.cache_clear()
