"""Triton kernels around the grouped products of experts; expert_rows_triton.py launches them.

Each reads and writes every row once, in its own type, and computes in float32. Sums over a token's
choices are in the order of the choices.
"""

# N tokens, D hidden, k choices per token, M rows of experts, F inner width

import triton
import triton.language as tl


@triton.jit
def squared_relu_forward(x, out, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < size
    value = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
    # a comparison, not a maximum, so that not-a-number stays what it is
    positive = tl.where(value < 0, 0.0, value)
    tl.store(out + at, positive * positive, mask=here)


@triton.jit
def squared_relu_backward(x, grad, dx, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < size
    value = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
    positive = tl.where(value < 0, 0.0, value)
    of_out = tl.load(grad + at, mask=here, other=0.0).to(tl.float32)
    tl.store(dx + at, 2 * of_out * positive, mask=here)


@triton.jit
def sum_choices(
    rows,  # [M, D]
    row,  # [N, CHOICES], int64: those of M or more count as zero
    weights,  # [N, CHOICES], read if HAS_WEIGHTS
    out,  # [N, D], written
    N,
    M,
    D,
    CHOICES: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_token = token < N
    in_width = (column < D)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for choice in tl.static_range(CHOICES):
        index = tl.load(row + token.to(tl.int64) * CHOICES + choice, mask=is_token, other=M)
        is_kept = (index < M)[:, None] & in_width
        at = index.to(tl.int64)[:, None] * D + column[None, :]
        each = tl.load(rows + at, mask=is_kept, other=0.0).to(tl.float32)
        if HAS_WEIGHTS:
            place = weights + token.to(tl.int64) * CHOICES + choice
            each *= tl.load(place, mask=is_token, other=0.0).to(tl.float32)[:, None]
        total += each
    at = token.to(tl.int64)[:, None] * D + column[None, :]
    tl.store(out + at, total, mask=is_token[:, None] & in_width)


@triton.jit
def weighted_sum_backward(
    rows,  # [M, D]
    weights,  # [N, CHOICES]
    token,  # [M], int64
    choice,  # [M], int64
    grad,  # [N, D]
    drows,  # [M, D], written
    dots,  # [M], float32, written: each row with the gradient of its token
    M,
    D,
    CHOICES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < M
    of = tl.load(token + row, mask=is_row, other=0).to(tl.int64)
    which = tl.load(choice + row, mask=is_row, other=0).to(tl.int64)
    weight = tl.load(weights + of * CHOICES + which, mask=is_row, other=0.0).to(tl.float32)
    dot = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, D, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        here = is_row[:, None] & (column < D)[None, :]
        of_token = tl.load(grad + of[:, None] * D + column[None, :], mask=here, other=0.0)
        of_token = of_token.to(tl.float32)
        at = row.to(tl.int64)[:, None] * D + column[None, :]
        dot += of_token * tl.load(rows + at, mask=here, other=0.0).to(tl.float32)
        tl.store(drows + at, of_token * weight[:, None], mask=here)
    tl.store(dots + row, tl.sum(dot, axis=1), mask=is_row)
