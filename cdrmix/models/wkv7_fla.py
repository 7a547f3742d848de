"""WKV-7 on CUDA through chunk_rwkv7 of fla-core, the optional extra `gpu`.

Some versions of Triton compile kernels of this family wrongly on some GPUs (Triton 3.4 to 3.7.0 on
Hopper: fla issues #640 and #984, gradients off by half their size, forward right). So each process
compares output, state and all gradients with the reference loop once per device, dtype and head
size, and uses what passes: chunks of 64 tokens, else of 16, else nothing.
"""

# B batch, T time, H heads, K key dim, V value dim, N sequences packed into a batch

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from cdrmix.log import get_logger
from cdrmix.models.wkv7_reference import DECAY_BOUND, wkv7_reference

log = get_logger(__name__)

_DTYPES = (torch.bfloat16, torch.float16)  # fla itself warns of float32
_CHUNK_TOKENS = (64, 16)  # in order of preference
# Relative, Frobenius. bfloat16 rounds each operand by up to 2^-9 = 0.2 %, a few times in a row:
# right kernels stay below 1 %, the known miscompilations are off by 50 %.
_TOLERANCE = 0.02
_COST = "The WKV-7 op runs in its chunked form in PyTorch: same results, slower."


def wkv7_fla(
    inputs: Sequence[Tensor], s0: Tensor | None = None, segment_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Runs WKV-7 through fla's kernels: products in v's dtype, sums and state in float32.

    Arguments and results as of `wkv7_reference`; `obstacle` has returned None.
    """
    r, _, _, v, _, _ = inputs
    case = _Case(v.device, v.dtype, r.shape[3], v.shape[3], is_packed=segment_ids is not None)
    chunk = _checked_chunk_tokens(case)
    assert isinstance(chunk, int), f"fla's chunk_rwkv7 cannot be used: {chunk}"
    return _call(inputs, s0, segment_ids, chunk_tokens=chunk)


def obstacle(
    device: torch.device, dtype: torch.dtype, key: int, value: int, *, is_packed: bool
) -> str | None:
    """Returns the reason why fla's kernels cannot compute here, or None.

    Device and type are those of v, `key` and `value` the sizes of a head. The first call for a
    device, dtype and head size runs the check: a few seconds of compilation.
    """
    if device.type != "cuda":
        return f"fla computes on CUDA, and the inputs are on {device}"
    if dtype not in _DTYPES:
        return f"fla computes in 16 bits, and v is {dtype}"
    chunk = _checked_chunk_tokens(_Case(device, dtype, key, value, is_packed))
    return chunk if isinstance(chunk, str) else None


class _Case(NamedTuple):
    """Properties of inputs that select a compiled kernel."""

    device: torch.device
    dtype: torch.dtype
    key: int
    value: int
    is_packed: bool


@functools.cache
def _kernel() -> Callable[..., tuple[Tensor, Tensor]] | str:
    """Returns fla's chunk_rwkv7, or the reason why it cannot be imported (logged once)."""
    try:
        from fla.ops.rwkv7 import chunk_rwkv7
    except ImportError as error:
        log.warning("fla-core is not usable (%s); pip install 'cdrmix[gpu]'. %s", error, _COST)
        return f"fla-core is not usable ({error}); pip install 'cdrmix[gpu]'"
    return chunk_rwkv7


def _call(
    inputs: Sequence[Tensor], s0: Tensor | None, segment_ids: Tensor | None, *, chunk_tokens: int
) -> tuple[Tensor, Tensor]:
    """Translates to fla's conventions and back: states are [N,H,K,V], segments one flat batch."""
    kernel = _kernel()
    assert not isinstance(kernel, str), kernel
    r, lw, k, v, a, b = inputs
    tokens = [r.to(v), lw.float(), k.to(v), v, a.to(v), b.to(v)]
    initial = None if s0 is None else s0.float().mT.contiguous()
    packing = None
    if segment_ids is not None:
        packing = _packing(segment_ids)
        tokens = [x.flatten(0, 1)[None] for x in tokens]
        if initial is not None:
            empty = initial.new_zeros(packing.ends_cpu.numel() - 1, *initial.shape[1:])
            initial = empty.index_copy(0, packing.first, initial)
    y, s = kernel(
        *tokens,
        scale=1.0,
        initial_state=initial,
        output_final_state=True,
        cu_seqlens=packing and packing.ends,
        cu_seqlens_cpu=packing and packing.ends_cpu,
        safe_gate=True,
        lower_bound=-DECAY_BOUND,
        chunk_size=chunk_tokens,
    )
    if packing is not None:
        s = s[packing.last]
    return y.to(v.dtype).view(v.shape), s.mT


class _Packing(NamedTuple):
    """Segments as sequences of one flat batch."""

    ends: Tensor  # 0 and the end of each sequence, [N + 1], int64, on the device
    ends_cpu: Tensor  # the same on the CPU, so that fla does not wait for the device
    first: Tensor  # index of the first sequence of each row, [B]
    last: Tensor  # index of the last sequence of each row, [B]


_packings: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _packing(segment_ids: Tensor) -> _Packing:
    """Packs [B,T] ids; one synchronisation serves all layers with the same tensor."""
    version, packing = _packings.get(segment_ids, (None, None))
    if packing is None or version != segment_ids._version:
        starts = torch.ones_like(segment_ids, dtype=torch.bool)
        starts[:, 1:] = segment_ids.diff(dim=1) != 0
        sequence = starts.flatten().cumsum(0).view_as(segment_ids) - 1
        begins = starts.flatten().nonzero()[:, 0]
        ends = torch.cat([begins, begins.new_tensor([segment_ids.numel()])])
        packing = _Packing(ends, ends.cpu(), sequence[:, 0], sequence[:, -1])
        _packings[segment_ids] = (segment_ids._version, packing)
    return packing


@functools.cache
def _checked_chunk_tokens(case: _Case) -> int | str:
    """Returns tokens per chunk with which fla's kernels are right here, or why there are none.

    Runs in a thread of its own, where gradients are on and no autocast and no hooks on saved
    tensors of the caller, such as those of activation checkpointing, are in force.
    """
    kernel = _kernel()
    if isinstance(kernel, str):
        return kernel
    problems: list[str] = []
    for chunk_tokens in _CHUNK_TOKENS:
        with ThreadPoolExecutor(1) as thread:
            problem = thread.submit(_problem, case, chunk_tokens).result()
        if problem is None:
            if problems:
                log.warning("%s. Chunks of %d tokens pass: slower.", problems[0], chunk_tokens)
            return chunk_tokens
        problems.append(problem)
    log.warning("%s. %s", "; ".join(problems), _COST)
    return "; ".join(problems)


def _problem(case: _Case, chunk_tokens: int) -> str | None:
    """Compares fla's kernels with the reference on a small input; returns the problem, or None."""
    about = f"fla's chunk_rwkv7 with chunks of {chunk_tokens} on {case.device}, {tuple(case)[1:]}"
    inputs, segment_ids, weights = _small_input(case)
    try:
        results = _results(
            functools.partial(_call, chunk_tokens=chunk_tokens),
            [x.to(case.device) for x in inputs],
            None if segment_ids is None else segment_ids.to(case.device),
            [x.to(case.device) for x in weights],
        )
    except Exception as error:  # whatever a compiler of kernels raises: not usable here
        return f"{about} fails: {error}"
    references = _results(wkv7_reference, [x.float() for x in inputs], segment_ids, weights)
    errors = {
        name: ((results[name].cpu().float() - exact).norm() / exact.norm()).item()
        for name, exact in references.items()
    }
    worst = max(errors, key=lambda name: errors[name])
    if all(error <= _TOLERANCE for error in errors.values()):  # not so for not-a-number
        return None
    return f"{about} is wrong: {worst} is off by {errors[worst]:.2g}, allowed {_TOLERANCE}"


def _small_input(case: _Case) -> tuple[list[Tensor], Tensor | None, list[Tensor]]:
    """Makes inputs over two chunks and a part, segment ids, and weights of y and s, on the CPU."""
    shape = (2, 150, 2)
    batch, time, heads = shape
    normal = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))
    kk = torch.nn.functional.normalize(normal(*shape, case.key), dim=-1)
    r = normal(*shape, case.key)
    lw = -DECAY_BOUND * normal(*shape, case.key).sigmoid()
    k = normal(*shape, case.key)
    v = normal(*shape, case.value)
    iclr = normal(*shape, case.key).sigmoid()
    r, k, v, a, b = (x.to(case.dtype) for x in (r, k, v, -kk, kk * iclr))
    inputs = [r, lw, k, v, a, b, normal(batch, heads, case.value, case.key)]
    segment_ids = None
    if case.is_packed:
        steps = torch.zeros(batch, time, dtype=torch.int64)
        steps[0, 64] = steps[0, 77] = steps[1, 20] = 1
        segment_ids = steps.cumsum(1)
    weights = [normal(*v.shape), normal(*inputs[-1].shape)]
    return inputs, segment_ids, weights


def _results(
    form: Callable[..., tuple[Tensor, Tensor]],
    inputs: list[Tensor],
    segment_ids: Tensor | None,
    weights: list[Tensor],
) -> dict[str, Tensor]:
    """Computes output, state and the gradients of a weighted sum of both."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    outputs = form(leaves[:-1], leaves[-1], segment_ids)
    gradients = torch.autograd.grad([x.float() for x in outputs], leaves, weights)
    names = ("y", "s", "dr", "dlw", "dk", "dv", "da", "db", "ds0")
    return dict(zip(names, (*(x.detach() for x in outputs), *gradients), strict=True))
