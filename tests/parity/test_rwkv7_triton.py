"""Triton kernels, of RWKV-7's pointwise maths and around experts, in Triton's interpreter.

Against the eager forms in float64: the cases of triton_checks.py, which a GPU has to pass before it
uses the kernels, and what they leave out. Compiled kernels are tested in tests/gpu.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cdrmix.config.model import ModelConfig
from cdrmix.models import (
    expert_rows,
    expert_rows_triton,
    rwkv7_cpu,
    rwkv7_pointwise,
    rwkv7_triton,
    triton_checks,
    triton_launch,
)
from cdrmix.models.block import Block

pytest.importorskip("triton", reason="triton is not installed (it comes with torch for GPUs)")
if torch.cuda.is_available():
    pytest.skip("kernels are compiled here: tests/gpu has them", allow_module_level=True)

CPU = torch.device("cpu")
# Relative, Frobenius, float32: sums are over 66 rows.
TOLERANCE = 1e-6
# Features of heads, choices of a token.
SIZES = {"recurrence_inputs": 64, "gated_output": 64, "gather_rows": 2, "weighted_sum": 2}
CASES = [(name, SIZES.get(name)) for name in triton_checks.CASES]


@pytest.mark.parametrize(
    ("kernel", "size"),
    [*CASES, ("recurrence_inputs", 128), ("gated_output", 128), ("weighted_sum", 3)],
)
def test_outputs_and_all_gradients_equal_the_eager_forms_in_float64(
    kernel: str, size: int | None
) -> None:
    for name, error in triton_checks.errors(kernel, CPU, torch.float32, size).items():
        assert error < TOLERANCE, name


@pytest.mark.parametrize(
    ("kernel", "size", "dtype"),
    [*((*case, torch.bfloat16) for case in CASES), ("blend_values", None, torch.float16)],
)
def test_sixteen_bits_are_rounded_once(kernel: str, size: int | None, dtype: torch.dtype) -> None:
    assert triton_checks.problem(kernel, CPU, dtype, size) is None


def test_a_single_token_meets_the_carried_one_alone() -> None:
    x, last, mu = torch.randn(3, 1, 8), torch.randn(3, 8), torch.rand(2, 8)
    found = rwkv7_triton.shift_mix(x, last, torch.zeros(3, 1, dtype=torch.int64), mu)
    for mixed, share in zip(found, mu, strict=True):
        torch.testing.assert_close(mixed[:, 0], torch.lerp(x[:, 0], last, share))


def test_a_key_of_zeros_gives_no_direction_and_no_number_is_lost() -> None:
    values = {name: torch.randn(1, 9, 2, 16) for name in ("k", "decay", "iclr")}
    values["k"][:, ::2] = 0
    values["k"][:, 1] *= 1e-14  # below the norm from which a key has a direction of its own
    vectors = {name: torch.randn(2, 16) for name in ("decay_bias", "iclr_bias", "k_k", "k_a")}
    gradients = []
    for module, dtype in ((rwkv7_triton, torch.float32), (rwkv7_pointwise, torch.float64)):
        leaves = {name: x.to(dtype).requires_grad_() for name, x in {**values, **vectors}.items()}
        outputs = module.recurrence_inputs(**leaves)
        assert not outputs[2][:, ::2].any()
        gradients.append(torch.autograd.grad(sum(x.sum() for x in outputs), list(leaves.values())))
    for found, expected in zip(*gradients, strict=True):
        assert (found - expected).norm() <= TOLERANCE * expected.norm()


def test_rows_of_dropped_choices_may_hold_anything() -> None:
    order = expert_rows.sort_by_expert(torch.rand(40, 4).topk(2).indices, 4, capacity=12)
    places = (order.token, order.choice, order.row)
    kept = int(order.counts.sum())
    assert kept < 80
    rows = torch.randn(80, 6)
    clean = rows.clone()
    rows[kept:] = torch.nan
    clean[kept:] = 0
    weights = torch.rand(40, 2)
    results = []
    for values in (rows, clean):
        leaves = [values.requires_grad_(), weights.clone().requires_grad_()]
        total = expert_rows_triton.weighted_sum(*leaves, *places)
        of_rows, of_weights = torch.autograd.grad(total.square().sum(), leaves)
        results.append((total, of_rows[:kept], of_weights))
        x = torch.randn(40, 6, requires_grad=True)
        gathered = expert_rows_triton.gather_rows(x, order.token, order.row)
        (of_x,) = torch.autograd.grad(gathered, x, values)
        assert not of_x.isnan().any()
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_not_a_number_stays_what_it_is() -> None:
    x = torch.tensor([-1.0, torch.nan, 2.0, torch.inf], requires_grad=True)
    out = expert_rows_triton.squared_relu(x)
    out.backward(torch.ones(4))
    assert x.grad is not None
    for found, expected in ((out, [0, 4, torch.inf]), (x.grad, [0, 4, torch.inf])):
        assert found[1].isnan()
        assert found[[0, 2, 3]].tolist() == expected


def test_recomputed_kernels_give_the_same_gradients() -> None:
    leaves = [torch.randn(1, 7, 2, 16, requires_grad=True) for _ in range(5)]
    vectors = {name: torch.randn(2, 16) for name in ("r_k", "weight", "bias")}

    def run(*tensors: Tensor) -> Tensor:
        return rwkv7_triton.gated_output(*tensors, **vectors, eps=1e-3)

    outputs = (run(*leaves), checkpoint(run, *leaves, use_reentrant=False))
    gradients = [torch.autograd.grad(out.square().sum(), leaves) for out in outputs]
    for kept, again in zip(*gradients, strict=True):
        assert torch.equal(kept, again)


# --- choice of the form --------------------------------------------------------------------------


@pytest.fixture
def on_cpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> Iterator[pytest.LogCaptureFixture]:
    """As on a GPU that has checked nothing yet; yields the log."""
    monkeypatch.setattr(triton_launch, "_DEVICE_TYPES", ("cpu",))
    monkeypatch.setattr(rwkv7_cpu, "can_run", lambda *_: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(logging.getLogger("cdrmix"), "propagate", True)
    checked = triton_launch.passes
    checked.cache_clear()
    yield caplog
    checked.cache_clear()


def blend(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    v = torch.randn(2, 3, 8, dtype=dtype, requires_grad=True)
    return rwkv7_pointwise.blend_values(v, v, v, v[0, 0])


def is_fused(x: Tensor) -> bool:
    """True if x comes out of a kernel."""
    return "BlendValues" in type(x.grad_fn).__name__


def test_kernels_are_used_where_they_passed_and_a_second_start_knows_it(
    on_cpus: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_fused(blend())
    assert len(list(tmp_path.glob("cdrmix/kernel_checks/blend_values-*.json"))) == 1
    monkeypatch.setattr(triton_checks, "problem", None)  # a check would call it
    triton_launch.passes.cache_clear()
    assert is_fused(blend())
    assert not is_fused(blend(torch.float64))
    assert not on_cpus.records


def test_a_kernel_that_is_wrong_is_not_used_and_told_of_once(
    on_cpus: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = triton_launch.launch

    def halve_a_gradient(module: str, kernel: str, grid: object, *args: object, **sizes: object):
        launch(module, kernel, grid, *args, **sizes)  # type: ignore[arg-type]
        if kernel == "blend_values_backward":
            args[6].mul_(0.5)  # type: ignore[attr-defined]

    monkeypatch.setattr(triton_launch, "launch", halve_a_gradient)
    assert not any(is_fused(blend()) for _ in range(2))
    (record,) = on_cpus.records
    assert "blend_values on cpu in torch.bfloat16 is wrong: values: dv_first is off by 0.5" in (
        record.message
    )
    assert "PyTorch computes instead" in record.message
    assert "moves 2.9 times as many bytes" in record.message
    assert not list(tmp_path.glob("cdrmix/kernel_checks/*"))


def test_a_kernel_that_does_not_compile_is_not_used(
    on_cpus: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("PassManager::run failed")

    monkeypatch.setattr(triton_launch, "launch", broken)
    assert not is_fused(blend())
    assert "blend_values on cpu in torch.bfloat16 fails: PassManager::run failed" in on_cpus.text
    assert "moves 2.9 times as many bytes" in on_cpus.text


def test_without_triton_the_eager_forms_run_and_the_log_says_so_once(
    on_cpus: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # its import fails
    triton_launch._has_triton.cache_clear()
    assert not any(is_fused(blend(dtype)) for dtype in (torch.bfloat16, torch.float16))
    triton_launch._has_triton.cache_clear()
    (record,) = on_cpus.records
    assert "Triton cannot be imported" in record.message
    assert "PyTorch computes instead" in record.message


def test_compiled_and_transformed_code_takes_the_eager_forms(
    on_cpus: pytest.LogCaptureFixture,
) -> None:
    v = torch.randn(2, 3, 8)

    def blended(v: Tensor) -> Tensor:
        assert not triton_launch.can_run("blend_values", v)
        return rwkv7_pointwise.blend_values(v, v, v, v[0, 0])

    compiled = torch.compile(blended, backend="eager", fullgraph=True)
    for found in (torch.func.vmap(blended)(v.unsqueeze(0))[0], compiled(v)):
        torch.testing.assert_close(found, v)


@pytest.mark.parametrize(
    ("head_dim", "is_whole"), [(64, True), (128, True), (256, True), (96, False), (512, False)]
)
def test_heads_are_powers_of_two_to_256(head_dim: int, is_whole: bool) -> None:
    assert triton_launch.is_whole_head(head_dim) == is_whole


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid")  # rows of dropped choices
def test_a_block_with_experts_gives_what_the_eager_one_gives(
    on_cpus: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelConfig.model_validate(
        {
            "hidden_size": 64,
            "num_layers": 4,
            "num_heads": 2,
            "head_dim": 32,
            "vocab_size": 256,
            "moe": {"num_experts": 4, "top_k": 2, "expert_hidden_size": 24, "drop_tokens": True},
        }
    )
    block = Block(config, 1).train()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    x, v_first = torch.randn(2, 2, 21, 64)
    ids = torch.tensor([[0] * 5 + [1] * 16, [2] * 20 + [3]])
    leaves = [x.requires_grad_(), v_first.requires_grad_(), *block.parameters()]

    def results() -> tuple[Tensor, ...]:
        y, _, statistics, _ = block(x, v_first, None, ids)
        return y, *torch.autograd.grad(y.square().sum() + statistics.sum(), leaves)

    monkeypatch.setattr(triton_launch, "passes", lambda *_: True)
    calls = []
    launch = triton_launch.launch

    def noting(module: str, kernel: str, *rest: object, **sizes: object) -> None:
        calls.append(kernel)
        launch(module, kernel, *rest, **sizes)  # type: ignore[arg-type]

    monkeypatch.setattr(triton_launch, "launch", noting)
    fused = results()
    assert len(set(calls)) == 12, "each kernel there and back, but for gathering there"
    monkeypatch.setattr(triton_launch, "passes", lambda *_: False)
    for found, expected in zip(fused, results(), strict=True):
        assert (found - expected).norm() <= 1e-5 * expected.norm()
