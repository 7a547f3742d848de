"""Triton kernels of H' = clamp(decay H + added); clamped_recurrence.py launches them.

A program carries some elements of one sequence through all chunks, in float32.
"""

# B sequences, n chunks, M elements of H

import triton
import triton.language as tl


@triton.jit
def clamped_forward(
    weights,  # [B, M]
    added,  # [B, n, M]
    decay,
    befores,  # [B, n, M], written
    after,  # [B, M], written
    n,
    M,
    along_b,  # steps of the decay along sequences and chunks; 0 where it is the same for all
    along_n,
    half,
    BLOCK: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = element < M
    here = tl.load(weights + b * M + element, mask=inside, other=0.0).to(tl.float32)
    for k in range(n):
        at = (b * n + k) * M + element
        tl.store(befores + at, here, mask=inside)
        fades = tl.load(decay + b * along_b + k * along_n).to(tl.float32)
        new = tl.load(added + at, mask=inside, other=0.0).to(tl.float32)
        here = fades * here + new
        size = tl.abs(here)
        # tanh of a positive number, without overflow
        small = tl.exp(2.0 - 2.0 * size / half)
        bent = half + half * (1.0 - small) / (1.0 + small)
        # a comparison, so that not-a-number stays what it is
        here = tl.where(size > half, tl.where(here < 0, -bent, bent), here)
    tl.store(after + b * M + element, here, mask=inside)


@triton.jit
def clamped_backward(
    befores,  # [B, n, M]
    after,  # [B, M]
    decay,
    of_befores,  # [B, n, M]
    of_after,  # [B, M]
    of_added,  # [B, n, M], written
    of_weights,  # [B, M], written
    n,
    M,
    along_b,
    along_n,
    half,
    BLOCK: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = element < M
    grad = tl.load(of_after + b * M + element, mask=inside, other=0.0).to(tl.float32)
    next = tl.load(after + b * M + element, mask=inside, other=0.0).to(tl.float32)
    for back in range(n):
        k = n - 1 - back
        at = (b * n + k) * M + element
        # the slope of the clamp is 1 - tanh^2, which follows from the clamped value
        size = tl.abs(next)
        bent = size / half - 1.0
        here = tl.where(size > half, grad * (1.0 - bent * bent), grad)
        tl.store(of_added + at, here, mask=inside)
        fades = tl.load(decay + b * along_b + k * along_n).to(tl.float32)
        grad = fades * here + tl.load(of_befores + at, mask=inside, other=0.0).to(tl.float32)
        next = tl.load(befores + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(of_weights + b * M + element, grad, mask=inside)
