"""Triton kernels compiled for a GPU that is not here: Triton's compiler brings NVIDIA's assembler.

A process of its own, as this one has Triton's interpreter in place of its compiler.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cdrmix.models import clamped_recurrence, expert_rows_triton, rwkv7_triton, triton_launch
from tests.harness import ROOT

H100 = 90  # compute capability 9.0
TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int64: "*i64"}


def signature(value: Any) -> Any:
    """Type of an argument as Triton writes it; None is a constant."""
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    if isinstance(value, tuple):
        return tuple(signature(each) for each in value)
    return {int: "i32", float: "fp32", type(None): "constexpr"}[type(value)]


def alignments(arguments: tuple[Any, ...]) -> dict[tuple[int, ...], Any]:
    """What Triton finds in the tensors and sizes of a model: addresses and numbers in sixteens."""
    places: list[tuple[int, ...]] = []
    for i, value in enumerate(arguments):
        if isinstance(value, tuple):
            places += [(i, j) for j in range(len(value))]
        elif isinstance(value, torch.Tensor | int):
            places.append((i,))
    return {place: [["tt.divisibility", 16]] for place in places}


def compiled(module: str, kernel: str, arguments: tuple[Any, ...], sizes: dict[str, int]) -> str:
    """Resources of a kernel as cuobjdump tells them: registers, stack, local memory."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(triton_launch._load(module), kernel)
    types = dict(zip(function.arg_names, map(signature, arguments), strict=False))
    constants: dict[tuple[int, ...], Any] = {
        (i,): None for i, value in enumerate(arguments) if value is None
    }
    for name, size in sizes.items():
        types[name] = "constexpr"
        constants[(function.arg_names.index(name),)] = size
    aligned = alignments(arguments)
    source = ASTSource(fn=function, signature=types, constexprs=constants, attrs=aligned)
    cubin = Path(f"{kernel}.cubin")
    cubin.write_bytes(triton.compile(source, target=GPUTarget("cuda", H100, 32)).asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    told = subprocess.run(
        [tool, "-res-usage", cubin], capture_output=True, text=True, check=True
    ).stdout
    return next(line for line in told.splitlines() if "REG:" in line)


def main() -> None:
    """Compiles each kernel in bfloat16 that a step of tiny tensors would launch; prints JSON."""
    found: dict[str, str] = {}

    def launch(module: str, kernel: str, _: Any, *arguments: Any, **sizes: int) -> None:
        if kernel not in found:
            found[kernel] = compiled(module, kernel, arguments, sizes)

    triton_launch.launch = launch

    def some(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True)

    x, heads, vector = some(1, 8, 128), some(1, 8, 1, 128), some(1, 128)
    ids = torch.zeros(1, 8, dtype=torch.int64)
    keys, norms = ("decay_bias", "iclr_bias", "k_k", "k_a"), ("r_k", "weight", "bias")
    index = torch.zeros(16, dtype=torch.int64)
    weights = torch.zeros(8, 2, requires_grad=True)
    outputs = [
        *rwkv7_triton.shift_mix(x, some(1, 128), ids, some(2, 128)),
        rwkv7_triton.blend_values(x, x, x, some(128)),
        *rwkv7_triton.recurrence_inputs(heads, heads, heads, **dict.fromkeys(keys, vector)),
        rwkv7_triton.gated_output(*[heads] * 5, **dict.fromkeys(norms, vector), eps=1e-3),
        expert_rows_triton.squared_relu(x),
        expert_rows_triton.weighted_sum(some(16, 128), weights, index, index, index.view(8, 2)),
        *clamped_recurrence.in_kernel(
            *(some(2, 256), some(2, 4, 256), some(1, 4)),
            largest=2.0,
            run=clamped_recurrence.run_triton,
        ),
    ]
    torch.autograd.backward(outputs, [torch.zeros_like(each) for each in outputs])
    print(json.dumps(found))


@pytest.mark.slow
def test_every_kernel_compiles_for_an_h100_and_stays_in_registers(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed (it comes with torch for GPUs)")
    environment = {name: value for name, value in os.environ.items() if "TRITON" not in name}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-m", "tests.parity.test_triton_compiles"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found) == 14, "there and back, but for gathering, which sums choices back"
    for kernel, resources in found.items():
        assert "STACK:0 " in resources, kernel
        assert "LOCAL:0 " in resources, kernel


if __name__ == "__main__":
    main()
