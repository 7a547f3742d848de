"""The C++ passes of RWKV-7's pointwise maths against the eager forms in float64.

Errors are held against the largest value of a tensor: sums are of values of either sign.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cdrmix.models import cpu_library, rwkv7_cpu
from cdrmix.models.rwkv7_pointwise import (
    blend_values,
    gated_output,
    recurrence_inputs,
    shift_mix,
)

pytestmark = pytest.mark.compiler

# of the largest value; a float32 has 6e-8, and gradients of vectors are sums over 99 rows
TOLERANCE = 1e-6
Maths = Callable[[dict[str, Tensor]], Sequence[Tensor]]


def _shifted(mixes: int, *, carried: bool, packed: bool) -> tuple[Maths, dict[str, tuple]]:
    shapes: dict[str, tuple] = {"x": (2, 65, 24), "mu": (mixes, 24)}
    if carried:
        shapes["last"] = (2, 24)
    segment_ids = None
    if packed:  # a document of one token, and one that begins where a run of rows does
        starts = torch.zeros(2, 65, dtype=torch.int64)
        starts[0, [1, 2, 40]] = 1
        starts[1, [17, 64]] = 1
        segment_ids = starts.cumsum(1)
    return lambda x: shift_mix(x["x"], x.get("last"), segment_ids, x["mu"]), shapes


def _heads(width: int) -> dict[str, tuple]:
    return dict.fromkeys(("k", "decay", "iclr", "y", "r", "v", "gate"), (2, 33, 3, width))


def _inputs(x: dict[str, Tensor]) -> Sequence[Tensor]:
    vectors = {name: x[name] for name in ("decay_bias", "iclr_bias", "k_k", "k_a")}
    return recurrence_inputs(x["k"], x["decay"], x["iclr"], **vectors)


def _output(x: dict[str, Tensor]) -> Sequence[Tensor]:
    vectors = {name: x[name] for name in ("r_k", "weight", "bias")}
    return [gated_output(x["y"], x["r"], x["k"], x["v"], x["gate"], **vectors, eps=1e-3)]


def _cases() -> dict[str, tuple[Maths, dict[str, tuple]]]:
    cases = {
        "six mixes": _shifted(6, carried=False, packed=False),
        "one mix, carried": _shifted(1, carried=True, packed=False),
        "six mixes, carried, packed": _shifted(6, carried=True, packed=True),
        "values": (
            lambda x: [blend_values(x["v"], x["v_first"], x["amount"], x["bias"])],
            {**dict.fromkeys(("v", "v_first", "amount"), (3, 5, 21)), "bias": (21,)},
        ),
    }
    for width in (4, 32, 41):  # less than a vector, whole vectors, and a rest
        heads = _heads(width)
        keys = {name: heads[name] for name in ("k", "decay", "iclr")}
        vectors = dict.fromkeys(("decay_bias", "iclr_bias", "k_k", "k_a"), (3, width))
        cases[f"inputs of the recurrence, heads of {width}"] = (_inputs, keys | vectors)
        rows = {name: heads[name] for name in ("y", "r", "k", "v", "gate")}
        vectors = dict.fromkeys(("r_k", "weight", "bias"), (3, width))
        cases[f"output, heads of {width}"] = (_output, rows | vectors)
    return cases


CASES = _cases()


def _random(shapes: dict[str, tuple]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}


def _results(maths: Maths, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Outputs, and gradients of their product with random tensors, by name."""
    leaves = {name: x.clone().requires_grad_() for name, x in values.items()}
    outputs = maths(leaves)
    generator = torch.Generator().manual_seed(6)
    probes = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in outputs]
    gradients = torch.autograd.grad(list(outputs), list(leaves.values()), probes)
    found = {f"output {i}": x.detach() for i, x in enumerate(outputs)}
    return found | dict(zip(leaves, gradients, strict=True))


def _assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        assert found[name].shape == value.shape, name
        error = (found[name].double() - value.double()).abs().max() / value.abs().max()
        assert error <= TOLERANCE, f"{name}: off by {error:.1e} of the largest value"


@pytest.mark.parametrize("case", CASES)
def test_passes_and_all_gradients_equal_the_eager_forms_in_float64(case: str) -> None:
    maths, shapes = CASES[case]
    values = _random(shapes)
    assert rwkv7_cpu.can_run(*values.values())
    found = _results(maths, values)
    assert all(x.dtype == torch.float32 for x in found.values())
    _assert_close(found, _results(maths, {name: x.double() for name, x in values.items()}))


def test_bits_do_not_depend_on_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: dict[str, tuple] = {"x": (2, 300, 40), "last": (2, 40), "mu": (6, 40)}
    maths: Maths = lambda x: shift_mix(x["x"], x["last"], None, x["mu"])  # noqa: E731
    values = _random(shapes)
    found = _results(maths, values)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for name, value in _results(maths, values).items():
        assert torch.equal(found[name], value), name


def test_recomputed_passes_give_the_same_gradients() -> None:
    maths, shapes = CASES["output, heads of 41"]
    values = _random(shapes)
    recomputed: Maths = lambda x: checkpoint(maths, x, use_reentrant=False)  # noqa: E731
    found = _results(recomputed, values)
    for name, value in _results(maths, values).items():
        assert torch.equal(found[name], value), name


def test_the_sigmoid_is_right_to_three_units_in_the_last_place() -> None:
    x = torch.cat([torch.linspace(-87, 87, 100_001), torch.linspace(-1, 1, 100_001)])
    zeros, ones = torch.zeros_like(x), torch.ones_like(x)
    found = blend_values(zeros, ones, x, zeros)
    expected = torch.sigmoid(x.double())
    assert ((found - expected) / expected).abs().max() < 3 * torch.finfo(torch.float32).eps


def test_bounds_and_not_a_number_come_out_as_in_the_eager_forms() -> None:
    amount = torch.tensor([-1e30, -100.0, 0.0, 100.0, 1e30, float("inf"), float("nan")])
    zeros, ones = torch.zeros_like(amount), torch.ones_like(amount)
    found = blend_values(zeros, ones, amount, zeros)
    assert found[1:6].tolist() == [pytest.approx(0, abs=1e-38), 0.5, 1, 1, 1]
    assert found[6].isnan()


def test_a_key_of_zeros_gives_no_direction_and_no_number_is_lost() -> None:
    maths, shapes = CASES["inputs of the recurrence, heads of 32"]
    values = _random(shapes)
    values["k"][:, ::2] = 0
    found = _results(maths, values)
    _assert_close(found, _results(maths, {name: x.double() for name, x in values.items()}))
    assert not found["output 2"][:, ::2].any()


def test_the_eager_forms_run_where_the_passes_cannot() -> None:
    values = _random({"v": (2, 3, 8), "bias": (8,)})
    v, bias = values["v"], values["bias"]
    assert rwkv7_cpu.can_run(v, bias, None)
    assert not rwkv7_cpu.can_run(v.bfloat16(), bias)
    assert not rwkv7_cpu.can_run(v.double(), bias.double())
    assert not rwkv7_cpu.can_run(v.to("meta"), bias)

    def blended(v: Tensor) -> Tensor:
        assert not rwkv7_cpu.can_run(v, bias)
        return blend_values(v, v, v, bias)

    compiled = torch.compile(blended, backend="eager", fullgraph=True)
    for found in (torch.func.vmap(blended)(v), compiled(v)):
        torch.testing.assert_close(found, v)


def test_a_changed_header_makes_another_library(tmp_path: Path) -> None:
    folder = Path(cpu_library.__file__).parent
    source, header = tmp_path / "rwkv7_cpu.cpp", tmp_path / "cpu_vectors.h"
    source.write_bytes((folder / source.name).read_bytes())
    header.write_bytes((folder / header.name).read_bytes())
    compiler = shutil.which("c++")
    assert compiler
    before = cpu_library.library_path(compiler, source)
    header.write_text("// changed")
    assert cpu_library.library_path(compiler, source) != before
