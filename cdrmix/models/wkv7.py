"""The WKV-7 op: the recurrence of RWKV-7's time mix, one entry over several ways to compute it.

    S_t = S_{t-1} diag(exp lw_t) + (S_{t-1} a_t) b_t^T + v_t k_t^T
    y_t = S_t r_t

reference  a loop over tokens, autograd: the yardstick
chunked    batched matrix products with a gradient derived by hand; runs anywhere
cpp        the recurrence in C++ for CPUs, where a compiler is found
fla        chunk_rwkv7 of fla-core for 16-bit inputs on CUDA, where its gradients pass a check
"""

# B batch, T time, H heads, K key dim, V value dim

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cdrmix.errors import ConfigError
from cdrmix.models import wkv7_cpu, wkv7_fla
from cdrmix.models.wkv7_chunked import wkv7_chunked
from cdrmix.models.wkv7_op import by_autograd, recurrence_op
from cdrmix.models.wkv7_reference import check_values, wkv7_reference

_FORMS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "reference": wkv7_reference,
    "chunked": wkv7_chunked,
    "cpp": wkv7_cpu.wkv7_cpu,
    "fla": wkv7_fla.wkv7_fla,
}
BACKENDS = ("auto", *_FORMS)
# Those of which autograd makes the gradient are operators where a model is traced, and only there:
# an operator saves its inputs alone, and runs the form once more in the backward pass. That of fla
# keeps there what its own backward pass reads, which follows at once: it would run a third time.
_TRACED = {
    "reference": recurrence_op("wkv7_reference", by_autograd(wkv7_reference)),
    "fla": recurrence_op(
        "wkv7_fla",
        by_autograd(wkv7_fla.wkv7_fla, wkv7_fla.inside_recomputation()(wkv7_fla.wkv7_fla)),
    ),
}


def wkv7(
    r: Tensor,
    lw: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    s0: Tensor | None = None,
    *,
    segment_ids: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Runs the WKV-7 recurrence over T tokens; differentiable in r, lw, k, v, a, b and s0.

    Whatever float type comes in, this computes in float32 (fla: 16-bit products, float32 sums), or
    in float64 if any input is float64; autocast does not reach inside. Equal calls on CPU give
    equal bits.

    Args:
        r: receptance, [B, T, H, K].
        lw: log decay, [B, T, H, K], from -exp(-0.5), but for one rounding of its dtype, to 0: the
            chunked forms rely on it (wkv7_chunked.py). On CUDA the check is an assertion on the
            device, so that the host need not wait. Not-a-number passes and comes out as such.
        k: key, [B, T, H, K].
        v: value, [B, T, H, V].
        a: direction in which the state is read to be replaced (RWKV-7: -kk), [B, T, H, K].
        b: direction in which that is written back (RWKV-7: kk * iclr), [B, T, H, K].
        s0: state before the first token, [B, H, V, K], or None for zero.
        segment_ids: integers [B, T] that never fall along T. The state is zero at the start of each
            new segment; s0 belongs to the first segment of its row.
        backend: one of BACKENDS. "auto" takes fla or cpp where they can be used, else the chunked
            form, or the loop for a single token.
    Returns:
        y, [B, T, H, V] in v's dtype, and the state after token T, [B, H, V, K], float32 or float64.
    Raises:
        ValueError: if a shape, a dtype or the backend's name is wrong, if lw is out of range or if
            segment_ids fall (the last two on CPU only).
        ConfigError: if the backend asked for by name cannot be used for these inputs here.
    Source: RWKV-7 paper, state-update equation; parity in tests/parity/test_wkv7.py.
    """
    inputs = (r, lw, k, v, a, b)
    _check(inputs, s0, segment_ids)
    is_double = torch.float64 in {x.dtype for x in inputs}
    case = (v.device, v.dtype, r.shape[3], v.shape[3], segment_ids is not None)
    shape = None if torch.compiler.is_compiling() else tuple(v.shape[:3])
    form = _choose(backend, r.shape[1] == 1, is_double, *case, shape)
    with torch.autocast(v.device.type, enabled=False):
        if form in _TRACED and torch.compiler.is_compiling():
            y, s, *_ = _TRACED[form](*inputs, s0, segment_ids, 0, False)
            return y, s
        if form in _TRACED:
            check_values(lw, segment_ids)
        return _FORMS[form](inputs, s0, segment_ids)


@torch.compiler.assume_constant_result
def _choose(
    backend: str,
    is_single: bool,
    is_double: bool,
    device: torch.device,
    dtype: torch.dtype,
    key: int,
    value: int,
    is_packed: bool,
    shape: tuple[int, ...] | None,
) -> str:
    """Chooses the form to compute with; "auto" takes the first that can be used here.

    It asks what is installed and built, which no graph can hold: traced, its answer is a constant.

    Args:
        is_single: there is one token.
        is_double: an input is float64.
        device, dtype, key, value: of v, but for `key`, the last dimension of r.
        is_packed: there are segment ids.
        shape: B, T and H; None while it is traced, as shapes may be symbols.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; allowed: {', '.join(BACKENDS)}")
    names: tuple[str, ...] = (backend,)
    if backend == "auto":
        # One token: the loop is ten operations, the chunked form fifty.
        names = ("cpp", "reference") if is_single else ("fla", "cpp", "chunked")
    for name in names:
        obstacle = None  # the other forms compute anything, anywhere
        if name == "fla":
            obstacle = wkv7_fla.obstacle(
                device, dtype, key, value, is_packed=is_packed, shape=shape
            )
        elif name == "cpp" and device.type != "cpu":
            obstacle = f"it computes on CPUs, and the inputs are on {device}"
        elif name == "cpp" and is_double:
            obstacle = "it computes in float32, and an input is float64"
        elif name == "cpp":
            kernel = wkv7_cpu.load_kernel()
            obstacle = kernel if isinstance(kernel, str) else None
        if obstacle is None:
            return name
    raise ConfigError(
        f"wkv7: backend {backend!r} cannot be used here: {obstacle}. Try 'auto' or 'chunked'."
    )


def _check(inputs: tuple[Tensor, ...], s0: Tensor | None, segment_ids: Tensor | None) -> None:
    r, lw, _, v, _, _ = inputs
    if r.ndim != 4 or v.ndim != 4 or 0 in r.shape:
        raise ValueError(
            f"r and v must be [B, T, H, K] and [B, T, H, V], T at least 1; "
            f"given {tuple(r.shape)} and {tuple(v.shape)}"
        )
    batch, time, heads, key = r.shape
    values = v.shape[3]
    keys: tuple[int, ...] = (batch, time, heads, key)
    shapes = dict.fromkeys(("r", "lw", "k", "v", "a", "b"), keys)
    shapes |= {"v": (batch, time, heads, values), "s0": (batch, heads, values, key)}
    given = {name: x for name, x in zip(shapes, (*inputs, s0), strict=True) if x is not None}
    for name, tensor in given.items():
        if not tensor.is_floating_point():
            raise ValueError(f"{name} must be of a float type; given {tensor.dtype}")
    if segment_ids is not None:
        if segment_ids.is_floating_point() or segment_ids.is_complex():
            raise ValueError(f"segment_ids must be integers; given {segment_ids.dtype}")
        given["segment_ids"] = segment_ids
        shapes["segment_ids"] = (batch, time)
    for name, tensor in given.items():
        if tensor.shape != shapes[name]:
            raise ValueError(f"{name} must be {shapes[name]}; given {tuple(tensor.shape)}")
