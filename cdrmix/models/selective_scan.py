"""The selective scan of Mamba, gated: one entry over several ways to compute it.

    d_t = softplus(dt_t + bias)
    S_t = exp(d_t A) S_{t-1} + d_t u_t B_t
    y_t = (C_t . S_t + D u_t) silu(z_t)

reference  a loop over tokens, autograd: the yardstick
chunked    a loop over tokens, what can be done for a chunk at once done so, with a gradient derived
           by hand: saves the inputs and one state for each chunk; runs anywhere
mamba_ssm  selective_scan_fn of mamba-ssm on CUDA, where its gradients pass a check

The decay is one number for each feature and state, so that tokens cannot be put together in matrix
products, as those of RWKV-7 and Mamba-2 are, without dividing by decays that vanish.
"""

# B batch, T time, I inner features, N states of a feature, c tokens of a chunk

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cdrmix.errors import ConfigError
from cdrmix.models import selective_scan_cuda
from cdrmix.models.wkv7_op import with_autograd
from cdrmix.models.wkv7_reference import is_differentiated

# Tokens between the states that the chunked form saves, and that it works on at once. On one thread
# of an AVX2 CPU (tools/benchmark/mamba.py) 4 to 16 are alike; at large widths more fall out of its
# cache and take half as long again. planning/blocks/mamba.py counts what is saved.
CHUNK_TOKENS = 16


class ScanInputs(NamedTuple):
    """Inputs of a scan, each of any float type."""

    u: Tensor  # what enters the states, [B, T, I]
    dt: Tensor  # time step before bias and softplus, [B, T, I]
    dt_bias: Tensor  # [I]
    a: Tensor  # rates, below 0, [I, N]
    b: Tensor  # share of each state in what enters, [B, T, N]
    c: Tensor  # share of each state in what is read, [B, T, N]
    d: Tensor  # share of u that is read past the states, [I]
    z: Tensor  # gate before silu, [B, T, I]


def selective_scan(
    inputs: ScanInputs,
    s0: Tensor | None = None,
    *,
    segment_ids: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Runs the scan over T tokens; differentiable in all inputs and s0.

    Computes in float32 whatever comes in, or in float64 if u is; autocast does not reach inside.
    Equal calls on CPU give equal bits.

    Args:
        s0: states before the first token, [B, N, I], or None for zero.
        segment_ids: integers [B, T] that never fall along T. The states are zero at the start of
            each new segment; s0 belongs to the first segment of its row.
        backend: auto, reference, chunked or mamba_ssm. "auto" takes mamba_ssm where it can be used,
            else the chunked form, or the loop for a single token.
    Returns:
        y, [B, T, I] in u's type, and the states after token T, [B, N, I], float32 or float64.
    Raises:
        ValueError: if the backend's name is wrong.
        ConfigError: if mamba_ssm is asked for by name and cannot be used for these inputs here.
    Source: Gu and Dao, arXiv 2312.00752, algorithm 2. Parity in
    tests/parity/test_selective_scan.py.
    """
    u = inputs.u
    case = (u.device, u.dtype, inputs.a.shape[1])
    is_single = u.shape[1] == 1 and segment_ids is None
    form = _choose(backend, *case, is_single, segment_ids is not None, s0 is not None)
    with torch.autocast(u.device.type, enabled=False):
        if form == "mamba_ssm" and torch.compiler.is_compiling():
            y, s = _traced_kernel(*inputs, segment_ids)
            return y, s
        return _FORMS[form](inputs, s0, segment_ids)


Form = Callable[[ScanInputs, Tensor | None, Tensor | None], tuple[Tensor, Tensor]]


@torch.compiler.assume_constant_result
def _choose(
    backend: str,
    device: torch.device,
    dtype: torch.dtype,
    num_states: int,
    is_single: bool,
    is_packed: bool,
    has_start: bool,
) -> str:
    """Chooses the form to compute with; traced, its answer is a constant.

    `device` and `dtype` are those of u; `is_single` is whether there is one token, without ids.
    """
    if backend not in ("auto", *_FORMS):
        raise ValueError(f"backend is {backend!r}; allowed: auto, {', '.join(_FORMS)}")
    case = (device, dtype, num_states)
    if backend == "auto":
        if is_single:
            return "reference"
        fits = selective_scan_cuda.obstacle(*case, is_packed=is_packed, has_start=has_start)
        return "mamba_ssm" if fits is None else "chunked"
    if backend == "mamba_ssm":
        why = selective_scan_cuda.obstacle(*case, is_packed=is_packed, has_start=has_start)
        if why is not None:
            raise ConfigError(
                f"selective scan: mamba_ssm cannot be used here: {why}. Try 'auto' or 'chunked'"
            )
    return backend


def _compute_dtype(u: Tensor) -> torch.dtype:
    return torch.float64 if u.dtype == torch.float64 else torch.float32


def scan_reference(
    inputs: ScanInputs, s0: Tensor | None = None, segment_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Runs the scan token by token, differentiated by autograd: slow, and it saves every state."""
    dtype = _compute_dtype(inputs.u)
    u, dt, dt_bias, a, b, c, d, z = (x.to(dtype) for x in inputs)
    step = F.softplus(dt + dt_bias)  # [B, T, I]
    rates = a.t()  # [N, I]
    s = u.new_zeros(u.shape[0], *rates.shape) if s0 is None else s0.to(dtype)
    y = []
    for t in range(u.shape[1]):
        if segment_ids is not None and t > 0:
            is_new = segment_ids[:, t] != segment_ids[:, t - 1]  # [B]
            s = s.masked_fill(is_new[:, None, None], 0)
        entering = (step[:, t] * u[:, t]).unsqueeze(1) * b[:, t].unsqueeze(2)  # [B, N, I]
        s = torch.exp(step[:, t].unsqueeze(1) * rates) * s + entering
        y.append((c[:, t].unsqueeze(1) @ s).squeeze(1))
    out = (torch.stack(y, 1) + d * u) * F.silu(z)
    return out.to(inputs.u.dtype), s


def scan_chunked(
    inputs: ScanInputs,
    s0: Tensor | None = None,
    segment_ids: Tensor | None = None,
    *,
    chunk_tokens: int = CHUNK_TOKENS,
) -> tuple[Tensor, Tensor]:
    """Runs the scan chunk by chunk; arguments and results as of `scan_reference`."""
    saves = is_differentiated(inputs, s0)
    y, s, _ = _chunked_scan(*inputs, s0, segment_ids, chunk_tokens, saves)
    return y, s


def _continues(segment_ids: Tensor | None) -> Tensor | None:
    """Tells which tokens are of the document of the one before, or the first of all, [B, T]."""
    if segment_ids is None:
        return None
    return F.pad(segment_ids[:, 1:] == segment_ids[:, :-1], (1, 0), value=True)


class _Chunk:
    """Tokens of a chunk in the type that is computed in, and what follows from them at once."""

    def __init__(self, inputs: ScanInputs, continues: Tensor | None, span: slice) -> None:
        dtype = _compute_dtype(inputs.u)
        self.rates = inputs.a.to(dtype).t().contiguous()  # [N, I]
        self.u, self.dt, self.b, self.c, self.z = (
            x[:, span].to(dtype) for x in (inputs.u, inputs.dt, inputs.b, inputs.c, inputs.z)
        )
        self.d = inputs.d.to(dtype)
        self.dt = self.dt + inputs.dt_bias.to(dtype)
        self.step = F.softplus(self.dt)  # [B, c, I]
        self.decay = (self.step.unsqueeze(2) * self.rates).exp_()  # [B, c, N, I]
        if continues is not None:  # nothing of the document before enters a new one
            self.decay *= continues[:, span, None, None]
        self.entering = self.step * self.u  # [B, c, I]

    def states(self, s: Tensor) -> Tensor:
        """Returns the states before the first token and after each one, [B, c + 1, N, I]."""
        batch, tokens, states, inner = self.decay.shape
        all_states = s.new_empty(batch, tokens + 1, states, inner)
        all_states[:, 0] = s
        after = all_states[:, 1:]
        torch.mul(self.entering.unsqueeze(2), self.b.unsqueeze(3), out=after)
        for decay, before, now in zip(
            self.decay.unbind(1), all_states.unbind(1)[:-1], after.unbind(1), strict=True
        ):
            now.addcmul_(decay, before)
        return all_states

    def read(self, states: Tensor) -> Tensor:
        """Returns what is read of the states after each token, [B, c, I], before the gate."""
        return (self.c.unsqueeze(2) @ states[:, 1:]).squeeze(2).addcmul_(self.d, self.u)


# Operators, so that a graph has one node for a scan; vmap is refused below.
@torch.library.custom_op("cdrmix::selective_scan", mutates_args=())
def _chunked_scan(
    u: Tensor,
    dt: Tensor,
    dt_bias: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    z: Tensor,
    s0: Tensor | None,
    segment_ids: Tensor | None,
    chunk_tokens: int,
    saves: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gives y, the state after the last token, and the states that enter chunks, if it saves."""
    inputs = ScanInputs(u, dt, dt_bias, a, b, c, d, z)
    batch, time, inner = u.shape
    dtype = _compute_dtype(u)
    s = u.new_zeros(batch, a.shape[1], inner, dtype=dtype) if s0 is None else s0.to(dtype)
    spans = _chunk_spans(time, chunk_tokens)
    out = _dense_like(u)
    entering = s.new_empty(_entering_shape(u, a, chunk_tokens) if saves else 0)
    continues = _continues(segment_ids)
    for number, span in enumerate(spans):
        if saves:
            entering[:, number] = s
        chunk = _Chunk(inputs, continues, span)
        all_states = chunk.states(s)
        out[:, span] = chunk.read(all_states).mul_(F.silu(chunk.z))
        s = all_states[:, -1]
    return out, s.clone(memory_format=torch.contiguous_format), entering


@torch.library.custom_op("cdrmix::selective_scan_backward", mutates_args=())
def _chunked_scan_backward(
    u: Tensor,
    dt: Tensor,
    dt_bias: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    z: Tensor,
    segment_ids: Tensor | None,
    entering: Tensor,
    grad: Tensor,
    grad_state: Tensor,
    chunk_tokens: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gives the gradients of the inputs, in their order, and of the state that they began with."""
    inputs = ScanInputs(u, dt, dt_bias, a, b, c, d, z)
    continues = _continues(segment_ids)
    dtype = entering.dtype
    totals = {
        name: torch.zeros_like(getattr(inputs, name), dtype=dtype) for name in ("dt_bias", "a", "d")
    }
    along = {name: _dense_like(getattr(inputs, name)) for name in ("u", "dt", "b", "c", "z")}
    carried = grad_state.to(dtype)  # gradient of the states after a chunk
    spans = _chunk_spans(u.shape[1], chunk_tokens)
    for number in range(len(spans) - 1, -1, -1):
        span = spans[number]
        chunk = _Chunk(inputs, continues, span)
        states = chunk.states(entering[:, number])
        parts, carried = _chunk_gradients(chunk, states, grad[:, span].to(dtype), carried)
        for name, part in parts.items():
            if name in totals:
                totals[name] += part
            else:
                along[name][:, span] = part
    gradients = {name: _own(total, getattr(inputs, name)) for name, total in totals.items()} | along
    return *(gradients[name] for name in ScanInputs._fields), carried  # type: ignore[return-value]


def _chunk_spans(time: int, chunk_tokens: int) -> list[slice]:
    return [slice(t, min(t + chunk_tokens, time)) for t in range(0, time, chunk_tokens)]


def _entering_shape(u: Tensor, a: Tensor, chunk_tokens: int) -> tuple[int, ...]:
    """Shape of the states that enter chunks, [B, chunks, N, I]."""
    batch, time, inner = u.shape
    return batch, -(-time // chunk_tokens), a.shape[1], inner


def _dense_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _own(total: Tensor, like: Tensor) -> Tensor:
    return total.to(like.dtype).contiguous()


@_chunked_scan.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    *tensors, _, _, chunk_tokens, saves = arguments
    u, a = tensors[0], tensors[3]
    s = u.new_empty(u.shape[0], a.shape[1], u.shape[2], dtype=_compute_dtype(u))
    kept = s.new_empty(_entering_shape(u, a, chunk_tokens) if saves else (0,))
    return _dense_like(u), s, kept


@_chunked_scan_backward.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    return *map(_dense_like, arguments[:8]), _dense_like(arguments[11])


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, s0, segment_ids, ctx.chunk_tokens, _ = inputs
    ctx.has_start = s0 is not None
    ctx.save_for_backward(*tensors, segment_ids, output[2])
    ctx.mark_non_differentiable(output[2])


def _differentiate(ctx: Any, grad: Tensor, grad_state: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    *gradients, ds0 = _chunked_scan_backward(*saved, grad, grad_state, ctx.chunk_tokens)
    return *gradients, ds0 if ctx.has_start else None, None, None, None


_chunked_scan.register_autograd(_differentiate, setup_context=_keep_for_backward)


# The kernels of mamba-ssm where a model is traced, and only there: their own gradient is made by
# autograd, so that the backward pass runs them once more.
@torch.library.custom_op("cdrmix::mamba_ssm", mutates_args=())
def _traced_kernel(
    u: Tensor,
    dt: Tensor,
    dt_bias: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    z: Tensor,
    segment_ids: Tensor | None,
) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        inputs = ScanInputs(u, dt, dt_bias, a, b, c, d, z)
        y, s = selective_scan_cuda.scan(inputs, None, segment_ids)
        return y.contiguous(), s.contiguous()


@torch.library.custom_op("cdrmix::mamba_ssm_backward", mutates_args=())
def _traced_kernel_backward(
    u: Tensor,
    dt: Tensor,
    dt_bias: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    z: Tensor,
    segment_ids: Tensor | None,
    grad: Tensor,
    grad_state: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    leaves = [x.detach().requires_grad_() for x in (u, dt, dt_bias, a, b, c, d, z)]
    with with_autograd():
        outputs = selective_scan_cuda.scan(ScanInputs(*leaves), None, segment_ids)
        gradients = torch.autograd.grad(outputs, leaves, [grad, grad_state])
    return tuple(x.contiguous() for x in gradients)  # type: ignore[return-value]


@_traced_kernel.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    u, a = arguments[0], arguments[3]
    return _dense_like(u), u.new_empty(u.shape[0], a.shape[1], u.shape[2], dtype=torch.float32)


@_traced_kernel_backward.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    return tuple(map(_dense_like, arguments[:8]))


def _differentiate_kernel(ctx: Any, grad: Tensor, grad_state: Tensor) -> tuple[Tensor | None, ...]:
    return *_traced_kernel_backward(*ctx.saved_tensors, grad, grad_state), None


_traced_kernel.register_autograd(
    _differentiate_kernel, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


def _refuse_vmap(*_: Any) -> Any:
    raise NotImplementedError(
        "the selective scan cannot be run under torch.vmap: it has a batch dimension of its own. "
        "Put the samples into [B, T, I]"
    )


for _op in (_chunked_scan, _chunked_scan_backward, _traced_kernel, _traced_kernel_backward):
    _op.register_vmap(_refuse_vmap)


def _chunk_gradients(
    chunk: _Chunk, states: Tensor, grad: Tensor, carried: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    """Computes the gradients of a chunk's inputs, by name, and of the states before it.

    `states` are those of `_Chunk.states`, `grad` the gradient of the output, [B, c, I], `carried`
    that of the states after the last token, [B, N, I].
    """
    gate = torch.sigmoid(chunk.z)
    dy = grad * chunk.z * gate
    dz = grad * chunk.read(states) * gate * (1 + chunk.z * (1 - gate))
    dc = (states[:, 1:] @ dy.unsqueeze(3)).squeeze(3)  # [B, c, N]
    ds = chunk.c.unsqueeze(3) * dy.unsqueeze(2)  # of the states after each token, [B, c, N, I]
    each, decays = ds.unbind(1), chunk.decay.unbind(1)
    each[-1].add_(carried)
    for t in range(len(each) - 2, -1, -1):
        each[t].addcmul_(decays[t + 1], each[t + 1])
    carried = decays[0] * each[0]
    db = (ds @ chunk.entering.unsqueeze(3)).squeeze(3)
    entering = (chunk.b.unsqueeze(2) @ ds).squeeze(2)  # of step * u, [B, c, I]
    exponent = ds.mul_(chunk.decay).mul_(states[:, :-1])  # of step * rates, [B, c, N, I]
    da = torch.einsum("bcni,bci->in", exponent, chunk.step)
    dstep = torch.einsum("bcni,ni->bci", exponent, chunk.rates).addcmul_(entering, chunk.u)
    ddt = dstep * torch.sigmoid(chunk.dt)  # softplus
    parts = {
        "u": entering * chunk.step + dy * chunk.d,
        "dt": ddt,
        "dt_bias": ddt.sum((0, 1)),
        "a": da,
        "b": db,
        "c": dc,
        "d": (dy * chunk.u).sum((0, 1)),
        "z": dz,
    }
    return parts, carried


_FORMS: dict[str, Form] = {
    "reference": scan_reference,
    "chunked": scan_chunked,
    "mamba_ssm": selective_scan_cuda.scan,
}
