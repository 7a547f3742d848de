"""The selective scan on CUDA through selective_scan_fn of mamba-ssm, where it is installed.

Kernels of this family were miscompiled on some GPUs before (see wkv7_fla.py). So each process
compares output, state and all gradients with the reference loop once per device, dtype and number
of states, and uses them where they are right.

mamba-ssm starts from no state and knows no documents. A state that enters is left to the chunked
form. Documents are kept apart by the time step: with one of RESTART_STEP the decay is zero, and u
is divided by it, so that what enters stays as it is.
"""

# B batch, T time, I inner features, N states of a feature

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cdrmix.log import get_logger
from cdrmix.models import checked_kernels

if TYPE_CHECKING:
    from cdrmix.models.selective_scan import ScanInputs

log = get_logger(__name__)

# Time step of the first token of a document: exp(-1e6 |a|) is zero for any rate that is learned, as
# Mamba's start at 1; of fp16 the largest number is 65,504.
RESTART_STEP = 1e6
_DTYPES = (torch.float32, torch.bfloat16)
# Relative, Frobenius. bfloat16 rounds inputs and outputs by up to 2^-9 = 0.2 % each.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.02}
_COST = (
    "The selective scan runs in its chunked form in PyTorch: same results, slower than the plan "
    "says, which counts the kernel."
)

# The arguments and results of a form of the scan.
Scan = Callable[["ScanInputs", Tensor | None, Tensor | None], tuple[Tensor, Tensor]]


def scan(
    inputs: ScanInputs, s0: Tensor | None = None, segment_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Runs the scan as `scan_reference` through mamba-ssm; `obstacle` has returned None."""
    kernel = _kernel()
    assert not isinstance(kernel, str), kernel
    assert s0 is None, "mamba-ssm starts from no state"
    y, s = _call(kernel, inputs, segment_ids)
    return y, _StateAfter.apply(s, segment_ids, *inputs)


def obstacle(
    device: torch.device, dtype: torch.dtype, num_states: int, *, is_packed: bool, has_start: bool
) -> str | None:
    """Returns the reason why mamba-ssm cannot compute here, or None.

    Device and type are those of u. The first call for a device, dtype and number of states runs the
    check.
    """
    if device.type != "cuda":
        return f"mamba-ssm computes on CUDA, and the inputs are on {device}"
    if dtype not in _DTYPES:
        return f"it is used in float32 and bfloat16, and u is {dtype}"
    if has_start:
        return "it goes on from no state"
    return _checked(_Case(device, dtype, num_states, is_packed))


class _Case(NamedTuple):
    """Properties of inputs that select a compiled kernel."""

    device: torch.device
    dtype: torch.dtype
    states: int
    is_packed: bool


@functools.cache
def _kernel() -> Callable[..., tuple[Tensor, Tensor]] | str:
    """Returns selective_scan_fn, or the reason why it cannot be imported (logged once)."""
    try:
        from mamba_ssm.ops.selective_scan_interface import selective_scan_fn
    except ImportError as error:
        log.warning("mamba-ssm is not usable (%s). %s", error, _COST)
        return f"mamba-ssm is not usable ({error})"
    function: Callable[..., tuple[Tensor, Tensor]] = selective_scan_fn
    return function


def _call(
    kernel: Callable[..., tuple[Tensor, Tensor]], inputs: ScanInputs, segment_ids: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Translates to mamba-ssm's conventions, [B, I, T] in one type, and back."""
    u, dt, dt_bias, a, b, c, d, z = inputs
    dtype = u.dtype
    along = [x.to(dtype).mT.contiguous() for x in (b, c)]
    settings: dict[str, Any] = {"return_last_state": True}
    if segment_ids is None:
        settings |= {"D": d.float(), "z": z.to(dtype).mT, "delta_bias": dt_bias.float()}
        settings["delta_softplus"] = True
        tokens = (u.mT, dt.to(dtype).mT)
        y, s = kernel(*tokens, a.float(), *along, **settings)
        return y.mT, s.mT
    starts = F.pad(segment_ids[:, 1:] != segment_ids[:, :-1], (1, 0)).unsqueeze(-1)
    step = F.softplus(dt.float() + dt_bias.float())
    entering = torch.where(starts, u.float() * step / RESTART_STEP, u.float()).to(dtype)
    step = step.masked_fill(starts, RESTART_STEP).to(dtype)
    y, s = kernel(entering.mT, step.mT, a.float(), *along, **settings)
    y = (y.mT.float() + d.float() * u.float()) * F.silu(z.float())
    return y.to(dtype), s.mT


class _StateAfter(torch.autograd.Function):
    """The state after the last token, of which mamba-ssm has no gradient: the chunked form has."""

    @staticmethod
    def forward(ctx: Any, s: Tensor, segment_ids: Tensor | None, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(segment_ids, *inputs)
        return s.detach().float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from cdrmix.models.selective_scan import ScanInputs, scan_chunked

        segment_ids, *inputs = ctx.saved_tensors
        leaves = [x.detach().requires_grad_() for x in inputs]
        with torch.enable_grad():
            _, s = scan_chunked(ScanInputs(*leaves), None, segment_ids)
        return (None, None, *torch.autograd.grad(s, leaves, grad, allow_unused=True))


@functools.cache
def _checked(case: _Case) -> str | None:
    """Returns None where mamba-ssm's kernels are right here, or what is wrong."""
    kernel = _kernel()
    if isinstance(kernel, str):
        return kernel
    problem = checked_kernels.in_clean_thread(case.device, lambda: _problem(case))
    if problem is not None:
        log.warning("%s. %s", problem, _COST)
    return problem


def _problem(case: _Case) -> str | None:
    """Compares mamba-ssm's kernel with the reference on a small input; returns the problem."""
    from cdrmix.models.selective_scan import scan_reference

    about = f"mamba-ssm's selective scan on {case.device}, {tuple(case)[1:]}"
    inputs, segment_ids, weights = _small_input(case)
    ids = None if segment_ids is None else segment_ids.to(case.device)
    try:
        results = _results(
            scan,
            [x.to(case.device) for x in inputs],
            ids,
            [x.to(case.device) for x in weights],
        )
    except Exception as error:  # whatever a kernel raises: not usable here
        return f"{about} fails: {error}"
    references = _results(scan_reference, [x.float() for x in inputs], segment_ids, weights)
    errors = {
        name: ((results[name].cpu().float() - exact).norm() / exact.norm()).item()
        for name, exact in references.items()
    }
    worst = max(errors, key=lambda name: errors[name])
    allowed = _TOLERANCE[case.dtype]
    if all(error <= allowed for error in errors.values()):  # not so for not-a-number
        return None
    return f"{about} is wrong: {worst} is off by {errors[worst]:.2g}, allowed {allowed}"


def _small_input(case: _Case) -> tuple[list[Tensor], Tensor | None, list[Tensor]]:
    """Makes inputs, ids of documents, and weights of y and s, on the CPU."""
    batch, time, inner = 2, 150, 32
    normal = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))
    wide, narrow = (batch, time, inner), (batch, time, case.states)
    rates = -normal(inner, case.states).exp()
    u, dt, b, c, z = (normal(*shape) for shape in (wide, wide, narrow, narrow, wide))
    u, dt, b, c, z = (x.to(case.dtype) for x in (u, dt, b, c, z))
    inputs = [u, dt, normal(inner) - 2, rates, b, c, normal(inner), z]
    segment_ids = None
    if case.is_packed:
        steps = torch.zeros(batch, time, dtype=torch.int64)
        steps[0, 64] = steps[0, 77] = steps[1, 20] = 1
        segment_ids = steps.cumsum(1)
    return inputs, segment_ids, [normal(*wide), normal(batch, case.states, inner)]


def _results(
    form: Scan, inputs: list[Tensor], segment_ids: Tensor | None, weights: list[Tensor]
) -> dict[str, Tensor]:
    """Computes output, state and the gradients of a weighted sum of both."""
    from cdrmix.models.selective_scan import ScanInputs

    leaves = [x.detach().requires_grad_() for x in inputs]
    outputs = form(ScanInputs(*leaves), None, segment_ids)
    gradients = torch.autograd.grad([x.float() for x in outputs], leaves, weights)
    names = ("y", "s", *(f"d{name}" for name in ScanInputs._fields))
    return dict(zip(names, (*(x.detach() for x in outputs), *gradients), strict=True))
