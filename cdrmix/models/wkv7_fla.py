"""WKV-7 on CUDA through chunk_rwkv7 of fla-core, the optional extra `gpu`.

Some versions of Triton compile kernels of this family wrongly on some GPUs (Triton 3.4 to 3.7.0 on
Hopper: fla issues #640 and #984, gradients off by half their size, forward right). So output, state
and all gradients are compared with the reference loop for each kind of device, dtype and head size,
in chunks of 64, 32 and 16 tokens. Those that pass are timed at the size of the run, and the fastest
is used; see checked_kernels.py for how long that is remembered.

fla saves the op's inputs and computes its forward pass again for the backward pass. Where a block
is recomputed, that would be a third time: there it keeps what the backward pass reads. So it does
in a compiled block, whose operator runs it again in the backward pass (wkv7_op.py).
"""

# B batch, T time, H heads, K key dim, V value dim, N sequences packed into a batch

from __future__ import annotations

import contextlib
import contextvars
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cdrmix.log import get_logger
from cdrmix.models import checked_kernels
from cdrmix.models.packing import packing_of
from cdrmix.models.wkv7_reference import DECAY_BOUND, wkv7_reference

log = get_logger(__name__)

_DTYPES = (torch.bfloat16, torch.float16)  # fla itself warns of float32
_CHUNK_TOKENS = (64, 32, 16)  # in order of preference where none is timed
# Calls with fewer tokens, such as those of generation, do not tell what is fastest in training.
_TIMED_TOKENS = 1_024
_TIMED_RUNS = 5  # after two that compile and choose
# Relative, Frobenius. bfloat16 rounds each operand by up to 2^-9 = 0.2 %, a few times in a row:
# right kernels stay below 1 %, the known miscompilations are off by 50 %.
_TOLERANCE = 0.02
Shape = tuple[int, ...]  # B, T and H

# tests/unit/planning/test_step_time.py holds the figure to the plan.
_COST = (
    "The WKV-7 op runs in its chunked form in PyTorch: same results, slower; by the plan a step of "
    "cdrmix-core-1b on an H200 takes 2.5 times as long."
)


def wkv7_fla(
    inputs: Sequence[Tensor], s0: Tensor | None = None, segment_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Runs WKV-7 through fla's kernels: products in v's dtype, sums and state in float32.

    Arguments and results as of `wkv7_reference`; `obstacle` has returned None.
    """
    r, _, _, v, _, _ = inputs
    case = _Case(v.device, v.dtype, r.shape[3], v.shape[3], is_packed=segment_ids is not None)
    chunk = _checked_chunk_tokens(case, tuple(v.shape[:3]))
    assert isinstance(chunk, int), f"fla's chunk_rwkv7 cannot be used: {chunk}"
    return _call(inputs, s0, segment_ids, chunk_tokens=chunk)


_is_recomputed = contextvars.ContextVar("_is_recomputed", default=False)


@contextlib.contextmanager
def inside_recomputation() -> Iterator[None]:
    """Has the op keep what its backward pass reads, within a block that is recomputed for it.

    Both times that the block runs: what is saved must be the same, and checkpointing drops what the
    first one saves.
    """
    token = _is_recomputed.set(True)
    try:
        yield
    finally:
        _is_recomputed.reset(token)


def obstacle(
    device: torch.device,
    dtype: torch.dtype,
    key: int,
    value: int,
    *,
    is_packed: bool,
    shape: Shape | None = None,
) -> str | None:
    """Returns the reason why fla's kernels cannot compute here, or None.

    Device and type are those of v, `key` and `value` the sizes of a head; `shape` is B, T
    and H where they are known. The first call for a device, dtype and head size runs the check,
    unless an earlier process has kept its outcome: a few seconds of compilation.
    """
    if device.type != "cuda":
        return f"fla computes on CUDA, and the inputs are on {device}"
    if dtype not in _DTYPES:
        return f"fla computes in 16 bits, and v is {dtype}"
    chunk = _checked_chunk_tokens(_Case(device, dtype, key, value, is_packed), shape)
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
        packing = packing_of(segment_ids)
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
        disable_recompute=_is_recomputed.get(),
    )
    if packing is not None:
        s = s[packing.last]
    return y.to(v.dtype).view(v.shape), s.mT


_timed: dict[_Case, int | str] = {}  # by the first call of this process that is large enough


def _checked_chunk_tokens(case: _Case, shape: Shape | None) -> int | str:
    """Returns tokens per chunk with which fla's kernels are right here, or why there are none.

    The fastest at the shape of the first call of _TIMED_TOKENS or more, which all later calls
    follow; before it, and while a model is traced, the first in order of preference.
    """
    if case not in _timed:
        if shape is None or shape[0] * shape[1] < _TIMED_TOKENS:
            return _settled(case, None)
        _timed[case] = _settled(case, shape)
    return _timed[case]


@functools.cache
def _settled(case: _Case, shape: Shape | None) -> int | str:
    """Settles tokens per chunk with the other ranks; `shape` is that of the timed run, or None."""
    kernel = _kernel()
    if isinstance(kernel, str):
        return kernel

    def find() -> dict[str, Any] | None:
        right = _right_chunk_tokens(case)
        if isinstance(right, str):
            return None
        return {"chunk_tokens": right[0] if shape is None else _fastest(case, shape, right)}

    named = {**case._asdict(), "device": case.device.type, "shape": shape}  # whatever its number
    key = checked_kernels.key_of("fla", [Path(__file__)], case.device, named)
    outcome = checked_kernels.settle(key, find)
    if outcome is None:
        right = _right_chunk_tokens(case)
        assert isinstance(right, str)
        return right
    chunk_tokens: int = outcome["chunk_tokens"]
    return chunk_tokens


@functools.cache
def _right_chunk_tokens(case: _Case) -> tuple[int, ...] | str:
    """Returns all tokens per chunk with which the kernels are right, or why there are none."""
    found = {
        tokens: checked_kernels.in_clean_thread(
            case.device, functools.partial(_problem, case, tokens)
        )
        for tokens in _CHUNK_TOKENS
    }
    problems = [problem for problem in found.values() if problem is not None]
    right = tuple(tokens for tokens, problem in found.items() if problem is None)
    if not right:
        log.warning("%s. %s", "; ".join(problems), _COST)
        return "; ".join(problems)
    if problems:
        log.warning("%s. Chunks of %s tokens pass.", "; ".join(problems), right)
    return right


def _fastest(case: _Case, shape: Shape, right: tuple[int, ...]) -> int:
    """Times forward and backward pass of a run's shape; the first one where none can be timed."""
    if len(right) == 1:
        return right[0]
    seconds: dict[int, float] = {}
    for tokens in right:
        timing = functools.partial(_seconds, case, shape, tokens)
        try:
            seconds[tokens] = checked_kernels.in_clean_thread(case.device, timing)
        except Exception as error:  # out of memory, or whatever a compiler of kernels raises
            log.info("fla's chunk_rwkv7 with chunks of %d cannot be timed: %s", tokens, error)
    told = ", ".join(f"{tokens}: {1e3 * taken:.2f} ms" for tokens, taken in seconds.items())
    log.info("fla's chunk_rwkv7 at %s by tokens of a chunk, forward and backward: %s", shape, told)
    return min(seconds, key=lambda tokens: seconds[tokens], default=right[0])


def _seconds(case: _Case, shape: Shape, chunk_tokens: int) -> float:
    """Median of the device's time for a forward and a backward pass."""
    inputs, segment_ids = _random_input(case, shape, case.device)
    leaves = [x.requires_grad_() for x in inputs[:-1]]
    grad = torch.ones_like(inputs[3])

    def run() -> None:
        y, _ = _call(leaves, None, segment_ids, chunk_tokens=chunk_tokens)
        torch.autograd.grad(y, leaves, grad)

    for _ in range(2):
        run()
    return statistics.median(_seconds_of(run, case.device) for _ in range(_TIMED_RUNS))


def _seconds_of(run: Callable[[], None], device: torch.device) -> float:
    if device.type != "cuda":
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin
    begins, ends = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begins.record()
    run()
    ends.record()
    ends.synchronize()
    return begins.elapsed_time(ends) / 1e3


def _problem(case: _Case, chunk_tokens: int) -> str | None:
    """Compares fla's kernels with the reference on a small input; returns the problem, or None."""
    about = f"fla's chunk_rwkv7 with chunks of {chunk_tokens} on {case.device}, {tuple(case)[1:]}"
    inputs, segment_ids, weights = _small_input(case)
    references = _results(wkv7_reference, [x.float() for x in inputs], segment_ids, weights)
    form = functools.partial(_call, chunk_tokens=chunk_tokens)
    errors: list[tuple[float, str]] = []
    for keeps in (False, True):  # what the backward pass reads
        try:
            with inside_recomputation() if keeps else contextlib.nullcontext():
                results = _results(
                    form,
                    [x.to(case.device) for x in inputs],
                    None if segment_ids is None else segment_ids.to(case.device),
                    [x.to(case.device) for x in weights],
                )
        except Exception as error:  # whatever a compiler of kernels raises: not usable here
            return f"{about} fails: {error}"
        for name, exact in references.items():
            off = (results[name].cpu().float() - exact).norm() / exact.norm()
            errors.append((off.item(), name))
    if all(off <= _TOLERANCE for off, _ in errors):  # not so for not-a-number
        return None
    worst, name = max(errors)
    return f"{about} is wrong: {name} is off by {worst:.2g}, allowed {_TOLERANCE}"


def _small_input(case: _Case) -> tuple[list[Tensor], Tensor | None, list[Tensor]]:
    """Makes inputs over two chunks and a part, segment ids, and weights of y and s, on the CPU."""
    inputs, segment_ids = _random_input(case, (2, 150, 2), torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(inputs[i].shape, generator=generator) for i in (3, 6)]
    return inputs, segment_ids, weights


def _random_input(
    case: _Case, shape: Shape, device: torch.device
) -> tuple[list[Tensor], Tensor | None]:
    """Makes r, lw, k, v, a, b and s0 as RWKV-7 does, and segment ids if the case is packed."""
    generator = torch.Generator(device).manual_seed(0)
    normal = functools.partial(torch.randn, generator=generator, device=device)
    batch, length, heads = shape
    kk = torch.nn.functional.normalize(normal(*shape, case.key), dim=-1)
    r = normal(*shape, case.key)
    lw = -DECAY_BOUND * normal(*shape, case.key).sigmoid()
    k = normal(*shape, case.key)
    v = normal(*shape, case.value)
    iclr = normal(*shape, case.key).sigmoid()
    r, k, v, a, b = (x.to(case.dtype) for x in (r, k, v, -kk, kk * iclr))
    inputs = [r, lw, k, v, a, b, normal(batch, heads, case.value, case.key)]
    segment_ids = None
    if case.is_packed:  # one at the border of a chunk, one within, one early
        steps = torch.zeros(batch, length, dtype=torch.int64, device=device)
        steps[0, 64 * (length // 150)] = steps[0, length // 2 + 2] = steps[-1, length // 8 + 2] = 1
        segment_ids = steps.cumsum(1)
    return inputs, segment_ids


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
