"""Triton kernels of our own against the eager forms on a GPU, forward and backward.

At the size of cdrmix-core-1b, bfloat16: 2 x 4,096 tokens of width 2,048 as 16 heads of 128, 8
experts of width 4,608, top-2. Needs a CUDA device; elsewhere nothing is measured, and it says so.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cdrmix.models import (
    expert_rows,
    expert_rows_triton,
    feed_forward,
    rwkv7_pointwise,
    rwkv7_triton,
    triton_launch,
)

BATCH, TIME, HEADS, HEAD_DIM = 2, 4096, 16, 128
WIDTH = HEADS * HEAD_DIM
EXPERTS, TOP_K, INNER = 8, 2, 4608
COMPILED_FOR = {"recurrence_inputs": HEAD_DIM, "gated_output": HEAD_DIM}
COMPILED_FOR |= {"gather_rows": TOP_K, "weighted_sum": TOP_K}
Form = Callable[..., Tensor | Sequence[Tensor]]


def rwkv_forms(module: Any) -> dict[str, Form]:
    """Functions of an RWKV layer, from the module with kernels or from the eager one."""

    def shift_mix(x: Tensor, mu: Tensor) -> Tensor:
        return module.shift_mix(x, None, None, mu)

    def recurrence_inputs(k: Tensor, d: Tensor, i: Tensor, *vectors: Tensor) -> Any:
        names = ("decay_bias", "iclr_bias", "k_k", "k_a")
        return module.recurrence_inputs(k, d, i, **dict(zip(names, vectors, strict=True)))

    def gated_output(*tensors: Tensor) -> Tensor:
        names = ("r_k", "weight", "bias")
        vectors = dict(zip(names, tensors[5:], strict=True))
        return module.gated_output(*tensors[:5], **vectors, eps=1e-3)

    return {
        "shift_mix, 6 mixes": shift_mix,
        "shift_mix, 1 mix": shift_mix,
        "blend_values": module.blend_values,
        "recurrence_inputs": recurrence_inputs,
        "gated_output": gated_output,
    }


def rwkv_cases() -> dict[str, tuple[Form, Form, list[tuple[int, ...]]]]:
    """Kernel and eager form of each function, and the shapes of what has a gradient."""
    rows, heads, vector = (BATCH, TIME, WIDTH), (BATCH, TIME, HEADS, HEAD_DIM), (HEADS, HEAD_DIM)
    shapes = {
        "shift_mix, 6 mixes": [rows, (6, WIDTH)],
        "shift_mix, 1 mix": [rows, (1, WIDTH)],
        "blend_values": [*[rows] * 3, (WIDTH,)],
        "recurrence_inputs": [*[heads] * 3, *[vector] * 4],
        "gated_output": [*[heads] * 5, *[vector] * 3],
    }
    kernels, eager = rwkv_forms(rwkv7_triton), rwkv_forms(rwkv7_pointwise)
    return {name: (kernels[name], eager[name], shapes[name]) for name in shapes}


def expert_cases() -> dict[str, tuple[Form, Form, list[tuple[int, ...]]]]:
    """The same for the functions around the experts' products."""
    tokens = BATCH * TIME
    order = expert_rows.sort_by_expert(
        torch.rand(tokens, EXPERTS, device="cuda").topk(TOP_K).indices, EXPERTS, None
    )
    of_order = (order.token, order.choice, order.row)
    return {
        "squared_relu": (
            expert_rows_triton.squared_relu,
            feed_forward.squared_relu,
            [(TOP_K * tokens, INNER)],
        ),
        "gather_rows": (
            lambda x: expert_rows_triton.gather_rows(x, order.token, order.row),
            lambda x: expert_rows.gather_rows(x, order),
            [(tokens, WIDTH)],
        ),
        "weighted_sum": (
            lambda x, w: expert_rows_triton.weighted_sum(x, w, *of_order),
            lambda x, w: expert_rows.weighted_sum(x, w, order),
            [(TOP_K * tokens, WIDTH), (tokens, TOP_K)],
        ),
    }


def microseconds(form: Form, shapes: list[tuple[int, ...]], runs: int) -> float:
    """Median time on the device of a forward and a backward pass."""
    leaves = [
        torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for shape in shapes
    ]
    times = []
    for _ in range(runs + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        out = form(*leaves)
        outputs = [out] if isinstance(out, Tensor) else list(out)
        torch.autograd.grad(outputs, leaves, [torch.ones_like(x) for x in outputs])
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end))
    return statistics.median(times[3:])


def measure(runs: int) -> dict[str, Any] | None:
    """Times by function and form, and whether the kernel passes its check; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    device = torch.device("cuda", torch.cuda.current_device())
    found = []
    for title, (kernel, eager, shapes) in (rwkv_cases() | expert_cases()).items():
        name = title.partition(",")[0]
        size = COMPILED_FOR.get(name)
        row: dict[str, Any] = {
            "function": title,
            "passes": triton_launch.passes(name, device, torch.bfloat16, size),
        }
        with triton_launch.without_kernels():
            row["eager_us"] = microseconds(eager, shapes, runs)
        if row["passes"]:
            row["kernel_us"] = microseconds(kernel, shapes, runs)
        found.append(row)
    return {"device": torch.cuda.get_device_name(), "runs": runs, "rows": found}


def main() -> None:
    """Print a table, or JSON with --json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = measure(args.runs)
    if args.json:
        print(json.dumps(result))
    elif result is None:
        print("Triton kernels: not measured: no CUDA device")
    else:
        print(f"{result['device']}, microseconds, forward and backward")
        for row in result["rows"]:
            ours = f"{row['kernel_us']:9.1f}" if row["passes"] else "    wrong"
            print(f"{row['function']:20} eager {row['eager_us']:9.1f}  kernel {ours}")


if __name__ == "__main__":
    main()
