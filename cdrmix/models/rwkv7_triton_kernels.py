"""Triton kernels of RWKV-7's pointwise maths; rwkv7_triton.py launches them.

Each reads and writes every tensor once, in its own type, and computes in float32. A program has a
tile of rows and columns. Gradients of vectors are sums over all rows: a program writes that of its
tile, and PyTorch adds the tiles up, in an order that no timing changes.

Tensors are contiguous. Those of heads are rows of [N, H, K], a head for each program.
"""

# N rows (B T), T time, D hidden, M mixes, H heads, K key dim per head

import triton
import triton.language as tl


@triton.jit
def shift_mix_forward(
    x,  # [N, D]
    last,  # [B, D], read if HAS_LAST
    segment_ids,  # [N], read if HAS_SEGMENTS
    mu,  # [M, D]
    mixed,  # M tensors of [N, D], written
    N,
    T,
    D,
    M: tl.constexpr,
    HAS_LAST: tl.constexpr,
    HAS_SEGMENTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    here = (row < N)[:, None] & (column < D)[None, :]
    at = row.to(tl.int64)[:, None] * D + column[None, :]
    current = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
    previous = _previous(x, last, segment_ids, row, column, here, N, T, D, HAS_LAST, HAS_SEGMENTS)
    for m in tl.static_range(M):
        share = tl.load(mu + m * D + column, mask=column < D, other=0.0).to(tl.float32)
        tl.store(mixed[m] + at, current + (previous - current) * share[None, :], mask=here)


@triton.jit
def shift_mix_backward(
    x,
    last,
    segment_ids,
    mu,
    grads,  # M tensors of [N, D]
    dx,  # [N, D], written
    dlast,  # [B, D], written if HAS_LAST
    dmu,  # [tiles, M, D], float32, written
    N,
    T,
    D,
    M: tl.constexpr,
    HAS_LAST: tl.constexpr,
    HAS_SEGMENTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_width = column < D
    here = (row < N)[:, None] & in_width[None, :]
    at = row.to(tl.int64)[:, None] * D + column[None, :]
    current = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
    previous = _previous(x, last, segment_ids, row, column, here, N, T, D, HAS_LAST, HAS_SEGMENTS)
    delta = previous - current
    # whose predecessor this row is: the next one, if it continues the document
    next_row = row + 1
    is_followed = (next_row < N) & (next_row % T != 0)
    if HAS_SEGMENTS:
        this = tl.load(segment_ids + row, mask=row < N, other=0)
        is_followed &= tl.load(segment_ids + next_row, mask=is_followed, other=0) == this
    is_first = (row < N) & (row % T == 0)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    entering = tl.zeros([ROWS, COLUMNS], tl.float32)
    for m in tl.static_range(M):
        share = tl.load(mu + m * D + column, mask=in_width, other=0.0).to(tl.float32)[None, :]
        grad = tl.load(grads[m] + at, mask=here, other=0.0).to(tl.float32)
        of_next = tl.load(
            grads[m] + at + D, mask=is_followed[:, None] & in_width[None, :], other=0.0
        ).to(tl.float32)
        total += grad * (1 - share) + of_next * share
        if HAS_LAST:
            entering += grad * share
        place = (tl.program_id(0).to(tl.int64) * M + m) * D + column
        tl.store(dmu + place, tl.sum(grad * delta, axis=0), mask=in_width)
    tl.store(dx + at, total, mask=here)
    if HAS_LAST:
        of_sample = (row // T).to(tl.int64)[:, None] * D + column[None, :]
        tl.store(dlast + of_sample, entering, mask=is_first[:, None] & in_width[None, :])


@triton.jit
def _previous(
    x,
    last,
    segment_ids,
    row,
    column,
    here,
    N,
    T,
    D,
    HAS_LAST: tl.constexpr,
    HAS_SEGMENTS: tl.constexpr,
):
    """The token before each row's, float32: zero where a document begins."""
    follows = (row < N) & (row % T != 0)
    if HAS_SEGMENTS:
        this = tl.load(segment_ids + row, mask=row < N, other=0)
        follows &= tl.load(segment_ids + row - 1, mask=follows, other=0) == this
    at = row.to(tl.int64)[:, None] * D + column[None, :]
    previous = tl.load(x + at - D, mask=here & follows[:, None], other=0.0).to(tl.float32)
    if HAS_LAST:
        is_first = (row % T == 0)[:, None]
        of_sample = (row // T).to(tl.int64)[:, None] * D + column[None, :]
        previous += tl.load(last + of_sample, mask=here & is_first, other=0.0).to(tl.float32)
    return previous


@triton.jit
def blend_values_forward(
    v,  # [N, D], as are v_first, amount and out
    v_first,
    amount,
    bias,  # [D]
    out,  # written
    N,
    D,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    here = (row < N)[:, None] & (column < D)[None, :]
    at = row.to(tl.int64)[:, None] * D + column[None, :]
    offset = tl.load(bias + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
    share = tl.sigmoid(tl.load(amount + at, mask=here, other=0.0).to(tl.float32) + offset)
    value = tl.load(v + at, mask=here, other=0.0).to(tl.float32)
    first = tl.load(v_first + at, mask=here, other=0.0).to(tl.float32)
    tl.store(out + at, value + (first - value) * share, mask=here)


@triton.jit
def blend_values_backward(
    v,
    v_first,
    amount,
    bias,
    grad,  # [N, D]
    dv,  # [N, D], written, as are the next two
    dfirst,
    damount,
    dbias,  # [tiles, D], float32, written
    N,
    D,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    here = (row < N)[:, None] & (column < D)[None, :]
    at = row.to(tl.int64)[:, None] * D + column[None, :]
    offset = tl.load(bias + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
    share = tl.sigmoid(tl.load(amount + at, mask=here, other=0.0).to(tl.float32) + offset)
    value = tl.load(v + at, mask=here, other=0.0).to(tl.float32)
    first = tl.load(v_first + at, mask=here, other=0.0).to(tl.float32)
    of_out = tl.load(grad + at, mask=here, other=0.0).to(tl.float32)
    of_first = of_out * share
    of_amount = of_first * (1 - share) * (first - value)
    tl.store(dv + at, of_out - of_first, mask=here)
    tl.store(dfirst + at, of_first, mask=here)
    tl.store(damount + at, of_amount, mask=here)
    place = tl.program_id(0).to(tl.int64) * D + column
    tl.store(dbias + place, tl.sum(of_amount, axis=0), mask=column < D)


@triton.jit
def recurrence_inputs_forward(
    k,  # [N, H, K], as are decay and iclr
    decay,
    iclr,
    decay_bias,  # [H, K], as are the next three
    iclr_bias,
    k_k,
    k_a,
    lw,  # [N, H, K], float32, written
    key,  # [N, H, K], written, as are a and b
    a,
    b,
    N,
    fastest,  # log decay
    smallest,  # norm that a key is divided by
    K: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    lane = head * K + tl.arange(0, K)
    here = (row < N)[:, None] & (lane >= 0)[None, :]
    at = row.to(tl.int64)[:, None] * (tl.num_programs(1) * K) + lane[None, :]
    rate, raw, direction, _ = _direction(k, iclr, iclr_bias, k_k, at, lane, here, smallest)
    offset = tl.load(decay_bias + lane).to(tl.float32)[None, :]
    share = tl.sigmoid(tl.load(decay + at, mask=here, other=0.0).to(tl.float32) + offset)
    amount = tl.load(k_a + lane).to(tl.float32)[None, :]
    tl.store(lw + at, share * fastest, mask=here)
    tl.store(key + at, raw + raw * amount * (rate - 1), mask=here)
    tl.store(a + at, -direction, mask=here)
    tl.store(b + at, direction * rate, mask=here)


@triton.jit
def recurrence_inputs_backward(
    k,
    decay,
    iclr,
    decay_bias,
    iclr_bias,
    k_k,
    k_a,
    of_lw,  # [N, H, K], float32
    of_key,  # [N, H, K], as are the next two
    of_a,
    of_b,
    dk,  # [N, H, K], written, as are the next two
    ddecay,
    diclr,
    dvectors,  # [tiles, 4, H, K], float32, written: decay_bias, iclr_bias, k_k, k_a
    N,
    fastest,
    smallest,
    K: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    width = tl.num_programs(1) * K
    lane = head * K + tl.arange(0, K)
    here = (row < N)[:, None] & (lane >= 0)[None, :]
    at = row.to(tl.int64)[:, None] * width + lane[None, :]
    place = dvectors + tl.program_id(0).to(tl.int64) * 4 * width + lane

    offset = tl.load(decay_bias + lane).to(tl.float32)[None, :]
    share = tl.sigmoid(tl.load(decay + at, mask=here, other=0.0).to(tl.float32) + offset)
    grad_lw = tl.load(of_lw + at, mask=here, other=0.0).to(tl.float32)
    grad_decay = grad_lw * fastest * share * (1 - share)
    tl.store(ddecay + at, grad_decay, mask=here)
    tl.store(place, tl.sum(grad_decay, axis=0))

    rate, raw, direction, norm = _direction(k, iclr, iclr_bias, k_k, at, lane, here, smallest)
    grad_key = tl.load(of_key + at, mask=here, other=0.0).to(tl.float32)
    grad_b = tl.load(of_b + at, mask=here, other=0.0).to(tl.float32)
    grad_direction = grad_b * rate - tl.load(of_a + at, mask=here, other=0.0).to(tl.float32)
    amount = tl.load(k_a + lane).to(tl.float32)[None, :]
    grad_rate = grad_b * direction + grad_key * raw * amount
    grad_iclr = grad_rate * rate * (1 - rate)
    tl.store(diclr + at, grad_iclr, mask=here)
    tl.store(place + width, tl.sum(grad_iclr, axis=0))

    along = tl.sum(grad_direction * direction, axis=1)[:, None]
    # a norm that was raised to the smallest one has no gradient
    along = tl.where(norm < smallest, 0.0, along)
    grad_scaled = (grad_direction - direction * along) / tl.maximum(norm, smallest)
    scale = tl.load(k_k + lane).to(tl.float32)[None, :]
    grad_raw = grad_scaled * scale + grad_key * (1 + amount * (rate - 1))
    tl.store(dk + at, grad_raw, mask=here)
    tl.store(place + 2 * width, tl.sum(grad_scaled * raw, axis=0))
    tl.store(place + 3 * width, tl.sum(grad_key * raw * (rate - 1), axis=0))


@triton.jit
def _direction(k, iclr, iclr_bias, k_k, at, lane, here, smallest):
    """Learning rate, key, normalised k * k_k, and the norm that it was divided by or below it."""
    raw = tl.load(k + at, mask=here, other=0.0).to(tl.float32)
    scaled = raw * tl.load(k_k + lane).to(tl.float32)[None, :]
    norm = tl.sqrt(tl.sum(scaled * scaled, axis=1))[:, None]
    offset = tl.load(iclr_bias + lane).to(tl.float32)[None, :]
    rate = tl.sigmoid(tl.load(iclr + at, mask=here, other=0.0).to(tl.float32) + offset)
    return rate, raw, scaled / tl.maximum(norm, smallest), norm


@triton.jit
def gated_output_forward(
    y,  # [N, H, K], as are the next four
    r,
    k,
    v,
    gate,
    r_k,  # [H, K], as are the next two
    weight,
    bias,
    out,  # [N, H, K], written
    N,
    eps,
    K: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lane = tl.program_id(1) * K + tl.arange(0, K)
    here = (row < N)[:, None] & (lane >= 0)[None, :]
    at = row.to(tl.int64)[:, None] * (tl.num_programs(1) * K) + lane[None, :]
    hat, _ = _normed(y, at, here, eps, K)
    value = hat * tl.load(weight + lane).to(tl.float32)[None, :]
    value += tl.load(bias + lane).to(tl.float32)[None, :]
    share = tl.load(r_k + lane).to(tl.float32)[None, :]
    read = tl.load(r + at, mask=here, other=0.0).to(tl.float32)
    key = tl.load(k + at, mask=here, other=0.0).to(tl.float32)
    bonus = tl.sum(read * key * share, axis=1)[:, None]
    value += bonus * tl.load(v + at, mask=here, other=0.0).to(tl.float32)
    tl.store(out + at, value * tl.load(gate + at, mask=here, other=0.0).to(tl.float32), mask=here)


@triton.jit
def gated_output_backward(
    y,
    r,
    k,
    v,
    gate,
    r_k,
    weight,
    bias,
    grad,  # [N, H, K]
    dy,  # [N, H, K], written, as are the next four
    dr,
    dk,
    dv,
    dgate,
    dvectors,  # [tiles, 3, H, K], float32, written: r_k, weight, bias
    N,
    eps,
    K: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    width = tl.num_programs(1) * K
    lane = tl.program_id(1) * K + tl.arange(0, K)
    here = (row < N)[:, None] & (lane >= 0)[None, :]
    at = row.to(tl.int64)[:, None] * width + lane[None, :]
    place = dvectors + tl.program_id(0).to(tl.int64) * 3 * width + lane

    hat, deviation = _normed(y, at, here, eps, K)
    scale = tl.load(weight + lane).to(tl.float32)[None, :]
    share = tl.load(r_k + lane).to(tl.float32)[None, :]
    read = tl.load(r + at, mask=here, other=0.0).to(tl.float32)
    key = tl.load(k + at, mask=here, other=0.0).to(tl.float32)
    value = tl.load(v + at, mask=here, other=0.0).to(tl.float32)
    bonus = tl.sum(read * key * share, axis=1)[:, None]
    of_out = tl.load(grad + at, mask=here, other=0.0).to(tl.float32)
    ungated = hat * scale + tl.load(bias + lane).to(tl.float32)[None, :] + bonus * value
    tl.store(dgate + at, of_out * ungated, mask=here)

    of_sum = of_out * tl.load(gate + at, mask=here, other=0.0).to(tl.float32)
    tl.store(dv + at, of_sum * bonus, mask=here)
    of_bonus = tl.sum(of_sum * value, axis=1)[:, None]
    tl.store(dr + at, of_bonus * key * share, mask=here)
    tl.store(dk + at, of_bonus * read * share, mask=here)
    tl.store(place, tl.sum(of_bonus * read * key, axis=0))
    tl.store(place + width, tl.sum(of_sum * hat, axis=0))
    tl.store(place + 2 * width, tl.sum(of_sum, axis=0))

    of_hat = of_sum * scale
    mean = tl.sum(of_hat, axis=1)[:, None] / K
    along = tl.sum(of_hat * hat, axis=1)[:, None] / K
    tl.store(dy + at, (of_hat - mean - hat * along) / deviation, mask=here)


@triton.jit
def _normed(y, at, here, eps, K: tl.constexpr):
    """y of a head with mean 0 and variance 1, and the deviation that it was divided by."""
    value = tl.load(y + at, mask=here, other=0.0).to(tl.float32)
    centred = value - tl.sum(value, axis=1)[:, None] / K
    deviation = tl.sqrt(tl.sum(centred * centred, axis=1)[:, None] / K + eps)
    return centred / deviation, deviation
