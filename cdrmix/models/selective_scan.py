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
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from cdrmix.errors import ConfigError
from cdrmix.models import selective_scan_cuda
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
    form = _choose(backend, inputs, s0, segment_ids)
    with torch.autocast(inputs.u.device.type, enabled=False):
        return form(inputs, s0, segment_ids)


Form = Callable[[ScanInputs, Tensor | None, Tensor | None], tuple[Tensor, Tensor]]


def _choose(
    backend: str, inputs: ScanInputs, s0: Tensor | None, segment_ids: Tensor | None
) -> Form:
    forms: dict[str, Form] = {
        "reference": scan_reference,
        "chunked": scan_chunked,
        "mamba_ssm": selective_scan_cuda.scan,
    }
    if backend not in ("auto", *forms):
        raise ValueError(f"backend is {backend!r}; allowed: auto, {', '.join(forms)}")
    if backend == "auto":
        if inputs.u.shape[1] == 1 and segment_ids is None:
            backend = "reference"
        else:
            fits = selective_scan_cuda.obstacle(inputs, s0, is_packed=segment_ids is not None)
            backend = "mamba_ssm" if fits is None else "chunked"
    elif backend == "mamba_ssm":
        why = selective_scan_cuda.obstacle(inputs, s0, is_packed=segment_ids is not None)
        if why is not None:
            raise ConfigError(
                f"selective scan: mamba_ssm cannot be used here: {why}. Try 'auto' or 'chunked'"
            )
    return forms[backend]


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
    y, s = _ChunkedScan.apply(chunk_tokens, segment_ids, saves, s0, *inputs)
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


class _ChunkedScan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        chunk_tokens: int,
        segment_ids: Tensor | None,
        saves: bool,
        s0: Tensor | None,
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor]:
        inputs = ScanInputs(*tensors)
        batch, time, inner = inputs.u.shape
        states = inputs.a.shape[1]
        dtype = _compute_dtype(inputs.u)
        s = inputs.u.new_zeros(batch, states, inner, dtype=dtype) if s0 is None else s0.to(dtype)
        spans = [slice(t, min(t + chunk_tokens, time)) for t in range(0, time, chunk_tokens)]
        out = torch.empty_like(inputs.u)
        entering = s.new_empty(batch, len(spans), states, inner) if saves else None
        continues = _continues(segment_ids)
        for number, span in enumerate(spans):
            if entering is not None:
                entering[:, number] = s
            chunk = _Chunk(inputs, continues, span)
            all_states = chunk.states(s)
            out[:, span] = chunk.read(all_states).mul_(F.silu(chunk.z))
            s = all_states[:, -1]
        if entering is not None:
            ctx.save_for_backward(segment_ids, entering, *tensors)
            ctx.spans = spans
            ctx.has_start = s0 is not None
        return out, s.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_state: Tensor) -> tuple[Tensor | None, ...]:
        segment_ids, entering, *tensors = ctx.saved_tensors
        continues = _continues(segment_ids)
        inputs = ScanInputs(*tensors)
        dtype = entering.dtype
        totals = {
            name: torch.zeros_like(getattr(inputs, name), dtype=dtype)
            for name in ("dt_bias", "a", "d")
        }
        along = {
            name: torch.empty_like(getattr(inputs, name)) for name in ("u", "dt", "b", "c", "z")
        }
        carried = grad_state.to(dtype)  # gradient of the states after a chunk
        for number in range(len(ctx.spans) - 1, -1, -1):
            span = ctx.spans[number]
            chunk = _Chunk(inputs, continues, span)
            states = chunk.states(entering[:, number])
            parts, carried = _chunk_gradients(chunk, states, grad[:, span].to(dtype), carried)
            for name, part in parts.items():
                if name in totals:
                    totals[name] += part
                else:
                    along[name][:, span] = part
        gradients = {
            name: total.to(getattr(inputs, name)) for name, total in totals.items()
        } | along
        return (None, None, None, carried if ctx.has_start else None) + tuple(
            gradients[name] for name in ScanInputs._fields
        )


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
