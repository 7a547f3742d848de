"""Forms of the WKV-7 op against the reference loop, forward and backward.

Batch 4, 512 tokens, width 256 as 4 heads of 64 or 2 of 128, float32 on one thread.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cdrmix.models import wkv7_cpu
from cdrmix.models.wkv7 import wkv7
from cdrmix.models.wkv7_reference import DECAY_BOUND
from tools.benchmark.timing import median_ratio, paired_cpu_seconds

BATCH = 4
TIME = 512
WIDTH = 256
HEAD_DIMS = (64, 128)
UNBOUND = "loop over unbound inputs"


def unbound_loop(*inputs: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence over inputs that are unbound along time first: the quickest plain loop."""
    v = inputs[3]
    state = v.new_zeros(v.shape[0], v.shape[2], v.shape[3], v.shape[3])  # [B, H, V, K]
    rows = []
    for r, lw, k, value, a, b in zip(*(x.unbind(1) for x in inputs), strict=True):
        removed = (state @ a.unsqueeze(-1)) @ b.unsqueeze(-2)
        state = state * lw.exp().unsqueeze(-2) + removed + value.unsqueeze(-1) @ k.unsqueeze(-2)
        rows.append((state @ r.unsqueeze(-1)).squeeze(-1))
    return torch.stack(rows, 1), state


def forward_and_backward(backend: str, head_dim: int) -> Callable[[], None]:
    """A closure over inputs as RWKV-7 makes them, all of which need a gradient."""
    generator = torch.Generator().manual_seed(0)
    shape = (5, BATCH, TIME, WIDTH // head_dim, head_dim)
    r, k, v, raw, kk = torch.randn(shape, generator=generator)
    kk = torch.nn.functional.normalize(kk, dim=-1)
    lw = -DECAY_BOUND * raw.sigmoid()
    iclr = raw.sigmoid()
    inputs = [x.requires_grad_() for x in (r, lw, k, v, -kk, kk * iclr)]
    weights = torch.randn_like(r)

    def run() -> None:
        if backend == UNBOUND:
            y, _ = unbound_loop(*inputs)
        else:
            y, _ = wkv7(*inputs, backend=backend)
        y.backward(weights)
        for x in inputs:
            x.grad = None

    return run


def measure(head_dim: int, rounds: int) -> dict[str, Any]:
    """Median CPU milliseconds of each form, and how many times faster than the loop it is."""
    forms = ["reference", UNBOUND, "chunked"]
    if not isinstance(wkv7_cpu.load_kernel(), str):
        forms.append("cpp")
    steps = {form: forward_and_backward(form, head_dim) for form in forms}
    seconds = paired_cpu_seconds(steps, rounds=rounds)
    return {
        "head_dim": head_dim,
        "milliseconds": {form: 1e3 * statistics.median(seconds[form]) for form in forms},
        "times_the_reference": {
            form: median_ratio(seconds["reference"], seconds[form]) for form in forms
        },
    }


def quality(head_dim: int) -> dict[str, Any]:
    """Worst error against the loop in float64, and bytes kept for the backward pass.

    With the inputs, references and lengths of tests/parity/test_wkv7.py: T = 200 with all decay at
    its bound, and T of 1 to 200; outputs, final state and all gradients.
    """
    from tests.parity import test_wkv7 as parity

    forms = [form for form in parity.BACKENDS if form in ("chunked", "cpp")]
    if isinstance(wkv7_cpu.load_kernel(), str):
        forms.remove("cpp")
    worst = dict.fromkeys(forms, 0.0)
    for time, fastest in [*((time, False) for time in parity.LENGTHS), (200, True)]:
        inputs = parity.random_inputs(time, head_dim, fastest=fastest)
        exact = parity.oracle(time, head_dim, fastest=fastest)
        for form in forms:
            found = parity.results(parity.run(form), inputs)
            errors = [float((found[n].double() - exact[n]).norm() / exact[n].norm()) for n in exact]
            worst[form] = max(worst[form], *errors)
    inputs = parity.random_inputs(512, head_dim, batch=1)
    autograd = functools.partial(parity.chunk_form_by_autograd, c=16)
    kept = {form: parity.saved_bytes(parity.run(form), inputs) for form in forms}
    kept["chunk form left to autograd"] = parity.saved_bytes(autograd, inputs)
    return {"head_dim": head_dim, "worst_relative_error": worst, "saved_bytes": kept}


def main() -> None:
    """Print a table, or JSON with --json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    cases = [measure(head_dim, args.rounds) for head_dim in HEAD_DIMS]
    checks = [quality(head_dim) for head_dim in HEAD_DIMS]
    if args.json:
        print(json.dumps({"rounds": args.rounds, "cases": cases, "quality": checks}))
        return
    print("head size  form                      ms CPU  tokens/s  times the reference")
    for case in cases:
        milliseconds = case["milliseconds"]
        speed = case["times_the_reference"]
        for form, time in milliseconds.items():
            rate = BATCH * TIME / time * 1e3
            print(f"{case['head_dim']:9}  {form:24} {time:7.1f} {rate:9.0f} {speed[form]:20.1f}")
    for check in checks:
        for form, error in check["worst_relative_error"].items():
            print(f"head size {check['head_dim']}: {form}: worst relative error {error:.1e}")
        for form, size in check["saved_bytes"].items():
            print(f"head size {check['head_dim']}: {form}: keeps {size / 1e6:.3f} MB")


if __name__ == "__main__":
    main()
