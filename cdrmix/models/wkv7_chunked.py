"""WKV-7 in chunks: batched matrix products in plain PyTorch, gradient derived by hand.

Within a chunk of C tokens let g be the running sum of lw and g' = g - lw. With Z = S^T [K,V] the
state that enters the chunk, C steps of the recurrence are

    X = [a e^g'; r e^g]   Q = [b; k] e^-g   A = X Q^T, kept below the diagonal (r rows: and on it)
    [R; O] = X Z + A [0; V]      U = (I - A_ab)^-1 R      O += A_rb U
    Z' = e^(g_C) Z + Y^T [U; V]    Y = Q e^(g_C)

and, with A kept, the gradient of what leaves (O and Z') passes back as

    d[U; V] = A_r^T dO + Y dZ'    dR = (I - A_ab)^-T dU    dV += A_ak^T dR
    dZ = e^(g_C) dZ' + X^T [dR; dO]
    dA = [dR; dO] [U; V]^T, masked as A
    dX = dA Q + [dR; dO] Z^T      dQ = dA^T X + e^(g_C) [U; V] dZ'^T
    [da; dr] = dX [e^g'; e^g]     [db; dk] = dQ e^-g
    dg_t = r_t dr_t - b_t db_t - k_t dk_t + a_(t+1) da_(t+1),    dg_C += rowsum(Z' dZ')
    dlw_t = sum of dg_u over u >= t

Only the scan over Z (backwards: over dZ) is sequential. e^-g stays below e^39 within 64 tokens
because lw >= -exp(-0.5), and every product that A keeps has a true exponent <= 0, so float32 holds
all of it to full relative precision: this is what the op's bound on lw is for.

Source: the WY form of the delta rule; parity in tests/parity/test_wkv7.py.
"""

# B batch, T time, H heads, K key dim, V value dim, C tokens of a chunk
# n chunks of a block, N = n B H matrices of a block

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cdrmix.models.wkv7_op import Computation, Gradients, Results, recurrence_op
from cdrmix.models.wkv7_reference import compute_dtype, is_differentiated

# Against 32 tokens: 10 % faster at K = 64, level at K = 128, and half the rounding error at both.
_CHUNK_TOKENS = 16
# Floats of one [N,2C,K] buffer per thread. A block's dozen buffers then stay near the L2 cache:
# 16 times as much made forward and backward 1.5 to 2 times slower on an EPYC with 1 MiB of L2.
_BLOCK_FLOATS = 65_536
_GPU_WORKERS = 64  # threads that a GPU counts for: its launches, not its caches, want blocks


def wkv7_chunked(
    inputs: Sequence[Tensor],
    s0: Tensor | None = None,
    segment_ids: Tensor | None = None,
    *,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Runs WKV-7 in chunks; arguments and results as of `wkv7_reference`.

    Saves its inputs and the states around blocks of chunks, about 2 B T H V floats at most; the
    backward recomputes the rest.

    Args:
        chunk_tokens: C, a power of two up to 64; by default 16, or less where T is.
    """
    length = inputs[0].shape[1]
    if chunk_tokens is None:
        chunk_tokens = min(_CHUNK_TOKENS, 1 << (length - 1).bit_length())
    missing = -length % chunk_tokens
    if missing:  # lw = k = b = a = 0 leaves the state as it is
        inputs = [F.pad(x, (0, 0, 0, 0, 0, missing)) for x in inputs]
        if segment_ids is not None:
            segment_ids = torch.cat([segment_ids, segment_ids[:, -1:].expand(-1, missing)], 1)
    saves = is_differentiated(inputs, s0)
    y, s, *_ = _recurrence(*inputs, s0, segment_ids, chunk_tokens, saves)
    return y[:, :length], s


def _run_forward(
    inputs: Sequence[Tensor],
    s0: Tensor | None,
    segment_ids: Tensor | None,
    chunk_tokens: int,
    saves: bool,
) -> Results:
    r, _, _, v, _, _ = inputs
    y = torch.empty_like(v, memory_format=torch.contiguous_format)
    s = v.new_empty(v.shape[0], *v.shape[2:], r.shape[3], dtype=compute_dtype(inputs))
    layout = _layout(r, chunk_tokens)
    states, nothing = (s.new_empty(x if saves else 0) for x in _kept_shapes(inputs, chunk_tokens))
    for rows in layout.rows:
        part = [x[rows] for x in inputs]
        saved = states[:, rows].flatten(1, 2) if saves else None
        start = _rows_of(s0, rows)
        _forward(part, start, _rows_of(segment_ids, rows), y[rows], s[rows], layout, saved)
    return y, s, states, nothing


def _kept_shapes(
    inputs: Sequence[Tensor], chunk_tokens: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the states around blocks of chunks, [blocks + 1, B, H, K, V], and of nothing."""
    r, _, _, v, _, _ = inputs
    batch, _, heads, key = r.shape
    blocks = len(_layout(r, chunk_tokens).blocks)
    return (blocks + 1, batch, heads, key, v.shape[3]), (0,)


def _run_backward(
    inputs: Sequence[Tensor],
    s0: Tensor | None,
    segment_ids: Tensor | None,
    chunk_tokens: int,
    kept: tuple[Tensor, Tensor],
    dy: Tensor,
    ds: Tensor,
) -> Gradients:
    layout = _layout(inputs[0], chunk_tokens)
    gradients = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]
    ds0 = torch.empty_like(ds, memory_format=torch.contiguous_format)
    for rows in layout.rows:
        part, out = ([x[rows] for x in tensors] for tensors in (inputs, gradients))
        ids = _rows_of(segment_ids, rows)
        states = kept[0][:, rows].flatten(1, 2)
        ds0[rows] = _backward(part, ids, states, dy[rows], ds[rows], out, layout)
    return *gradients, ds.new_empty(0) if s0 is None else ds0  # type: ignore[return-value]


_recurrence = recurrence_op("wkv7_chunked", Computation(_run_forward, _run_backward, _kept_shapes))


class _Layout(NamedTuple):
    """Division of the work, equal in forward and backward."""

    chunk_tokens: int  # C
    rows: list[slice]  # batch rows that are worked on together
    blocks: list[slice]  # chunks worked on together; the states around a block are saved


def _layout(r: Tensor, chunk_tokens: int) -> _Layout:
    batch, time, heads, key = r.shape
    workers = torch.get_num_threads() if r.device.type == "cpu" else _GPU_WORKERS
    matrices = workers * _BLOCK_FLOATS // (2 * chunk_tokens * key)
    rows = min(batch, max(1, matrices // heads))
    # A block saves one state [K,V]: with at least K / 2 tokens in it, that is 2 V floats a token.
    few = max(1, key // (2 * chunk_tokens))
    chunks = max(few, matrices // (rows * heads))
    return _Layout(
        chunk_tokens,
        rows=[slice(first, first + rows) for first in range(0, batch, rows)],
        blocks=[slice(first, first + chunks) for first in range(0, time // chunk_tokens, chunks)],
    )


def _rows_of(x: Tensor | None, rows: slice) -> Tensor | None:
    return None if x is None else x[rows]


def _by_chunk(x: Tensor, chunk_tokens: int) -> Tensor:
    """Views [B,T,H,K] as [T/C,B,H,C,K]."""
    return x.unflatten(1, (-1, chunk_tokens)).permute(1, 0, 3, 2, 4)


class _Masks(NamedTuple):
    """Masks of rows that hold several segments; 1 or 0 in the dtype of the work."""

    pairs: Tensor  # token pairs of one segment, [n,B,1,2C,2C]
    enters: Tensor  # rows of X that see the entering state, [n,B,1,2C,1]
    leaves: Tensor  # rows of Q that reach the leaving state, [n,B,1,2C,1]
    carries: Tensor  # 1 where the entering state leaves too, [n,B,1,1]


def _masks(segment_ids: Tensor | None, chunk_tokens: int, dtype: torch.dtype) -> _Masks | None:
    """Makes the masks of all chunks; `segment_ids` is [B,T]."""
    if segment_ids is None:
        return None
    ids = segment_ids.unflatten(1, (-1, chunk_tokens)).transpose(0, 1)  # [n,B,C]
    entering = torch.cat([ids[:1, :, :1], ids[:-1, :, -1:]])  # of the token before, [n,B,1]
    pairs = (ids[..., :, None] == ids[..., None, :]).repeat(1, 1, 2, 2)
    rows = [(ids == other).repeat(1, 1, 2) for other in (entering, ids[..., -1:])]
    enters, leaves = (x[:, :, None, :, None].to(dtype) for x in rows)
    carries = (ids[..., -1:] == entering)[..., None].to(dtype)
    return _Masks(pairs[:, :, None].to(dtype), enters, leaves, carries)


class _Block:
    """Work space for some chunks of all heads of some rows, filled anew for each such block.

    `like` is any tensor of the device and dtype of the work, `size` is (n, B, H, C, K, V), and
    `backward` allocates the buffers of gradients too.
    """

    def __init__(self, like: Tensor, size: tuple[int, ...], *, backward: bool) -> None:
        self.size = size
        n, rows, heads, c, key, value = size
        self.c = c
        self.batch = n * rows * heads
        buffer = partial(like.new_empty, self.batch)  # of so many rows and columns
        self.lw, self.e = buffer(c, key), buffer(c + 1, key)  # e^0, e^g_1, ..., e^g_C
        self.x, self.q, self.y = (buffer(2 * c, key) for _ in range(3))
        self.uv, self.u, self.r = buffer(2 * c, value), buffer(c, value), buffer(c, value)
        self.a = buffer(2 * c, 2 * c)
        self.states = like.new_empty(n + 1, rows * heads, key, value)  # around the chunks
        if backward:
            self.dro, self.duv = buffer(2 * c, value), buffer(2 * c, value)
            self.da, self.dz = buffer(2 * c, 2 * c), torch.empty_like(self.states)
            self.dx, self.dq, self.dg = buffer(2 * c, key), buffer(2 * c, key), buffer(c + 1, key)
        else:
            self.ro = buffer(2 * c, value)
        low = like.new_ones(c, c).tril()
        strict = low.tril(-1)
        self.sums = F.pad(low, (0, 0, 1, 0)).expand(self.batch, -1, -1)  # [C+1,C]
        # Rows of a see the tokens before theirs; rows of r see their own too.
        self.causal = torch.cat([strict.repeat(1, 2), low.repeat(1, 2)])
        self.eye = torch.eye(c, dtype=like.dtype, device=like.device)

    def heads(self, x: Tensor) -> Tensor:
        """Views [N,...] as [n,B,H,...]."""
        return x.unflatten(0, self.size[:3])

    def chunks(self, x: Tensor) -> tuple[Tensor, ...]:
        """Views of x [N,...], one per chunk, [B H,...]."""
        return x.unflatten(0, (self.size[0], -1)).unbind(0)

    def fill(self, inputs: Sequence[Tensor], masks: _Masks | None) -> None:
        """Computes all that needs no state; `inputs` are r, lw, k, v, a, b as [n,B,H,C,*]."""
        r, lw, k, v, a, b = inputs
        c = self.c
        heads = self.heads
        heads(self.lw).copy_(lw)  # contiguous, and in the dtype of the work
        torch.bmm(self.sums, self.lw, out=self.e).exp_()
        before = heads(self.e)[..., :c, :]
        after = heads(self.e)[..., 1:, :]
        x = heads(self.x)
        q = heads(self.q)
        torch.mul(a, before, out=x[..., :c, :])
        torch.mul(r, after, out=x[..., c:, :])
        torch.div(b, after, out=q[..., :c, :])
        torch.div(k, after, out=q[..., c:, :])
        heads(self.uv)[..., c:, :].copy_(v)
        torch.bmm(self.x, self.q.mT, out=self.a).mul_(self.causal)
        self.carry = self.e[:, c:]  # [N,1,K]
        torch.mul(self.q, self.carry, out=self.y)
        self.x_state = self.x  # X as the state sees it
        if masks is not None:
            # Masking products, instead of cutting chunks where segments do, keeps all shapes equal.
            heads(self.a).mul_(masks.pairs)
            heads(self.y).mul_(masks.leaves)
            self.x_state = (x * masks.enters).flatten(0, 2)
            self.carry = (heads(self.carry) * masks.carries[..., None]).flatten(0, 2)
        # (I - A_ab)^-1 = (I + A_ab)(I + A_ab^2)(I + A_ab^4)...: A_ab^C is zero, as it is strictly
        # lower triangular, so that log2 C squarings give the whole series.
        power = self.a[:, :c, :c]
        self.inverse = power + self.eye
        reached = 2
        while reached < c:
            power = torch.bmm(power, power)
            self.inverse = torch.baddbmm(self.inverse, self.inverse, power)
            reached *= 2


def _filled_blocks(
    inputs: Sequence[Tensor],
    segment_ids: Tensor | None,
    like: Tensor,
    layout: _Layout,
    *,
    backward: bool,
) -> Iterator[tuple[slice, _Block, _Masks | None]]:
    """Gives the chunks of each block, the work space filled from them and their masks.

    Backward begins with the last block. Blocks in sequence share one work space; the last one may
    be shorter and need its own.
    """
    views = [_by_chunk(x, layout.chunk_tokens) for x in inputs]
    masks = _masks(segment_ids, layout.chunk_tokens, like.dtype)
    block = None
    for here in reversed(layout.blocks) if backward else layout.blocks:
        parts = [x[here] for x in views]
        size = (*parts[0].shape, parts[3].shape[-1])
        if block is None or block.size != size:
            block = _Block(like, size, backward=backward)
        block_masks = None if masks is None else _Masks(*(x[here] for x in masks))
        block.fill(parts, block_masks)
        yield here, block, block_masks


def _forward(
    inputs: Sequence[Tensor],
    s0: Tensor | None,
    segment_ids: Tensor | None,
    y: Tensor,
    s: Tensor,
    layout: _Layout,
    saved: Tensor | None,
) -> None:
    """Fills y, s and, if they are saved, the states around blocks, [blocks + 1,B H,K,V]."""
    c = layout.chunk_tokens
    y_view = _by_chunk(y, c)
    z = s.new_zeros(s.shape).mT.flatten(0, 1) if s0 is None else s0.to(s.dtype).mT.flatten(0, 1)
    filled = _filled_blocks(inputs, segment_ids, s, layout, backward=False)
    for i, (here, block, _) in enumerate(filled):
        if saved is not None:
            saved[i] = z
        torch.bmm(block.a[:, :, c:], block.uv[:, c:], out=block.ro)
        z = _scan(block, z, block.ro, block.x_state)
        # U is known now, for all chunks: O += A_rb U in one product
        block.r.copy_(block.ro[:, c:]).baddbmm_(block.a[:, c:, :c], block.uv[:, :c])
        y_view[here] = block.heads(block.r)
    if saved is not None:
        saved[-1] = z
    s.copy_(z.unflatten(0, s.shape[:2]).mT)


def _scan(block: _Block, z: Tensor, ro: Tensor, x: Tensor, leaving: Tensor | None = None) -> Tensor:
    """Passes the state z [B H,K,V] through a block's chunks; returns that after the last one.

    Adds X Z to `ro`, which holds A [0; V], for as many rows as `x` has of X: at least those of R.
    Puts U into block.uv and the states around chunks into block.states. `leaving` is the last of
    these if it is known.
    """
    c = block.c
    states = block.states.unbind(0)
    states[0].copy_(z)
    parts = (ro, x, block.inverse, block.u, block.uv, block.carry.mT, block.y)
    for i, (ro_i, x_i, inverse, u, uv, carry, y) in enumerate(
        zip(*map(block.chunks, parts), strict=True)
    ):
        ro_i.baddbmm_(x_i, states[i])
        # The product goes by way of u: bmm falls back to a loop where its output has gaps.
        uv[:, :c] = torch.bmm(inverse, ro_i[:, :c], out=u)
        if leaving is not None and i + 2 == len(states):
            states[i + 1].copy_(leaving)
        else:
            torch.mul(states[i], carry, out=states[i + 1]).baddbmm_(y.mT, uv)
    return states[-1]


def _backward(
    inputs: Sequence[Tensor],
    segment_ids: Tensor | None,
    saved: Tensor,
    dy: Tensor,
    ds: Tensor,
    gradients: Sequence[Tensor],
    layout: _Layout,
) -> Tensor:
    """Fills the gradients of r, lw, k, v, a, b; returns that of s0, [B,H,V,K]."""
    c = layout.chunk_tokens
    out = [_by_chunk(x, c) for x in gradients]
    dy_view = _by_chunk(dy, c)
    dz = ds.mT.flatten(0, 1)
    # Chunks are recomputed block by block from the saved states, the last block first: at any time
    # only one block's intermediate values exist.
    filled = _filled_blocks(inputs, segment_ids, ds, layout, backward=True)
    around = reversed(list(pairwise(saved)))  # states before and after each block
    for (entering, leaving), (here, block, masks) in zip(around, filled, strict=True):
        # backward needs U but not O: the rows of R suffice
        torch.bmm(block.a[:, :c, c:], block.uv[:, c:], out=block.r)
        _scan(block, entering, block.r, block.x_state[:, :c], leaving)
        block.heads(block.dro)[..., c:, :].copy_(dy_view[here])
        dz = _scan_back(block, dz)
        _block_gradients(block, masks, [x[here] for x in out])
    return dz.unflatten(0, ds.shape[:2]).mT


def _scan_back(block: _Block, dz: Tensor) -> Tensor:
    """Passes dz [B H,K,V] back through a block's chunks; returns that before the first one.

    Completes d[U; V] and [dR; dO], puts dg_C into the last row of dg and dz around the chunks into
    block.dz.
    """
    c = block.c
    torch.bmm(block.a[:, c:].mT, block.dro[:, c:], out=block.duv)
    dr = block.chunks(block.u)[0]
    states = block.states.unbind(0)
    around = block.dz.unbind(0)
    around[-1].copy_(dz)
    parts = (block.duv, block.dro, block.inverse, block.y, block.x_state, block.carry.mT, block.dg)
    chunks = list(zip(*map(block.chunks, parts), strict=True))
    for i in reversed(range(len(chunks))):
        duv, dro, inverse, y, x, carry, dg = chunks[i]
        dz = around[i + 1]
        dz_before = around[i]
        # d[U; V] is complete only with dZ' of this chunk, and gives dR, which dZ before it needs
        duv.baddbmm_(y, dz)
        dro[:, :c] = torch.bmm(inverse.mT, duv[:, :c], out=dr)
        # dg_C += rowsum(Z' dZ'); dz_before only lends its memory to the product
        torch.sum(torch.mul(dz, states[i + 1], out=dz_before), -1, out=dg[:, c])
        torch.mul(dz, carry, out=dz_before).baddbmm_(x.mT, dro)
    return around[0]


def _block_gradients(block: _Block, masks: _Masks | None, out: Sequence[Tensor]) -> None:
    """Fills the gradients of a block's inputs, in the order r, lw, k, v, a, b, [n,B,H,C,*]."""
    dr, dlw, dk, dv, da, db = out
    c = block.c
    heads = block.heads
    x = block.x
    q = block.q
    dx = block.dx
    dq = block.dq
    dg = block.dg
    block.u.copy_(block.duv[:, c:]).baddbmm_(block.a[:, :c, c:].mT, block.dro[:, :c])
    dv.copy_(heads(block.u))

    torch.bmm(block.dro, block.uv.mT, out=block.da).mul_(block.causal)
    torch.bmm(block.dro, block.states[:-1].flatten(0, 1).mT, out=dx)
    torch.bmm(block.uv, block.dz[1:].flatten(0, 1).mT, out=dq).mul_(block.e[:, c:])
    if masks is not None:
        heads(block.da).mul_(masks.pairs)
        heads(dx).mul_(masks.enters)
        heads(dq).mul_(masks.leaves)
    dx.baddbmm_(block.da, q)
    dq.baddbmm_(block.da.mT, x)

    before = heads(block.e)[..., :c, :]
    after = heads(block.e)[..., 1:, :]
    torch.mul(heads(dx)[..., :c, :], before, out=da)
    torch.mul(heads(dx)[..., c:, :], after, out=dr)
    torch.div(heads(dq)[..., :c, :], after, out=db)
    torch.div(heads(dq)[..., c:, :], after, out=dk)

    # Row i of dg belongs to e^(g_i): a looks at the row before its token, the others at their own.
    torch.mul(x[:, :c], dx[:, :c], out=dg[:, :c])
    at_token = dg[:, 1:].addcmul_(x[:, c:], dx[:, c:])
    at_token.addcmul_(q[:, :c], dq[:, :c], value=-1).addcmul_(q[:, c:], dq[:, c:], value=-1)
    # g is a running sum of lw, so that dlw is the sum of dg from its token on
    torch.bmm(block.sums.mT, dg, out=block.lw)
    dlw.copy_(heads(block.lw))
