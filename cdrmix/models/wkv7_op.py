"""Forms of WKV-7 as operators of PyTorch, each opaque to whatever traces a model.

torch.compile sees one node forward and one backward, whose shapes follow from those of the inputs.
What looks at values, the checks of the log decay and of the segment ids, is inside of it, so that
no graph depends on them.
"""

# B batch, T time, H heads, K key dim, V value dim

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cdrmix.models.wkv7_reference import check_values, compute_dtype

# y, s, and two tensors for the backward pass
Results = tuple[Tensor, Tensor, Tensor, Tensor]
# of r, lw, k, v, a, b, and of s0: any tensor where there is none
Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


class Computation(NamedTuple):
    """One form of the recurrence, in two functions without autograd.

    Attributes:
        forward: takes r, lw, k, v, a, b, then s0, segment ids, tokens of a chunk and whether the
            backward pass will come.
        backward: takes the inputs, s0, segment ids, tokens of a chunk, the two tensors that were
            kept, and the gradients of y and s.
        kept_shapes: shapes of these two tensors, from the inputs and the tokens of a chunk; they
            are of the type that is computed in.
    """

    forward: Callable[..., Results]
    backward: Callable[..., Gradients]
    kept_shapes: Callable[[Sequence[Tensor], int], tuple[tuple[int, ...], tuple[int, ...]]]


def recurrence_op(name: str, form: Computation) -> Callable[..., Results]:
    """Registers a form as the operator `cdrmix::name`, with its gradient; vmap is refused.

    The operator takes r, lw, k, v, a, b, s0, segment_ids, chunk_tokens, saves; `saves` is whether
    its backward pass will come. It gives y, s and what it keeps, which has no gradient.
    """

    def forward(
        r: Tensor,
        lw: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor,
        s0: Tensor | None,
        segment_ids: Tensor | None,
        chunk_tokens: int,
        saves: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        check_values(lw, segment_ids)
        with torch.autocast(v.device.type, enabled=False):
            return form.forward((r, lw, k, v, a, b), s0, segment_ids, chunk_tokens, saves)

    def backward(
        r: Tensor,
        lw: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor,
        s0: Tensor | None,
        segment_ids: Tensor | None,
        first_kept: Tensor,
        second_kept: Tensor,
        dy: Tensor,
        ds: Tensor,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        kept = (first_kept, second_kept)
        with torch.autocast(v.device.type, enabled=False):
            return form.backward((r, lw, k, v, a, b), s0, segment_ids, chunk_tokens, kept, dy, ds)

    op = torch.library.custom_op(f"cdrmix::{name}", forward, mutates_args=())
    gradient = torch.library.custom_op(f"cdrmix::{name}_backward", backward, mutates_args=())

    _describe_results(form, op, gradient)

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
        *tensors, ctx.chunk_tokens, _ = inputs
        ctx.save_for_backward(*tensors, *output[2:])
        ctx.mark_non_differentiable(*output[2:])

    def differentiate(ctx: Any, dy: Tensor, ds: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once: activation checkpointing allows no more
        *gradients, ds0 = gradient(*saved, dy, ds, ctx.chunk_tokens)
        return (*gradients, None if saved[6] is None else ds0, None, None, None)

    op.register_autograd(differentiate, setup_context=keep)
    for each in (op, gradient):
        each.register_vmap(_refuse_vmap)
    return op


def _describe_results(form: Computation, op: Any, gradient: Any) -> None:
    """Tells tracers the shapes and types of what the operator and its gradient give."""

    @op.register_fake
    def _(*arguments: Any) -> Results:
        *inputs, s0, _, chunk_tokens, saves = arguments
        shapes = form.kept_shapes(inputs, chunk_tokens) if saves else ((0,), (0,))
        r, _, _, v, _, _ = inputs
        like = v.new_empty(0, dtype=compute_dtype(inputs))
        s = like.new_empty(v.shape[0], *v.shape[2:], r.shape[3])
        return _dense_like(v), s, like.new_empty(shapes[0]), like.new_empty(shapes[1])

    @gradient.register_fake
    def _(*arguments: Any) -> Any:
        s0, ds = arguments[6], arguments[11]
        return (*map(_dense_like, arguments[:6]), ds.new_empty(0 if s0 is None else ds.shape))


@contextlib.contextmanager
def with_autograd() -> Iterator[None]:
    """Has autograd record inside of an operator, where PyTorch's dispatcher goes past it."""
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set()
    autograd = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradFunctionality)
    guard = torch._C._ForceDispatchKeyGuard(included, excluded - autograd)
    with guard, torch.enable_grad():
        yield


def by_autograd(
    form: Callable[..., tuple[Tensor, Tensor]],
    again: Callable[..., tuple[Tensor, Tensor]] | None = None,
) -> Computation:
    """Makes a computation of a form that autograd differentiates: its backward runs it again.

    Args:
        form: computes y and s from the inputs, s0 and segment ids.
        again: what the backward pass runs and differentiates at once; None: `form`.
    """

    def forward(
        inputs: Sequence[Tensor],
        s0: Tensor | None,
        segment_ids: Tensor | None,
        chunk_tokens: int,
        saves: bool,
    ) -> Results:
        with torch.no_grad():
            y, s = form(inputs, s0, segment_ids)
        # views and inputs that came through are copied: an operator gives tensors of its own
        return y.clone(), s.clone(), s.new_empty(0), s.new_empty(0)

    def backward(
        inputs: Sequence[Tensor],
        s0: Tensor | None,
        segment_ids: Tensor | None,
        chunk_tokens: int,
        kept: tuple[Tensor, Tensor],
        dy: Tensor,
        ds: Tensor,
    ) -> Gradients:
        leaves = [x.detach().requires_grad_() for x in (*inputs, *([] if s0 is None else [s0]))]
        with with_autograd():
            outputs = (again or form)(leaves[:6], None if s0 is None else leaves[6], segment_ids)
            gradients = list(torch.autograd.grad(outputs, leaves, [dy, ds]))
        if s0 is None:
            gradients.append(ds.new_empty(0))
        return tuple(x.contiguous() for x in gradients)  # type: ignore[return-value]

    return Computation(forward, backward, lambda inputs, chunk_tokens: ((0,), (0,)))


def _dense_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _refuse_vmap(*_: Any) -> Any:
    raise NotImplementedError(
        "WKV-7 cannot be run under torch.vmap: it has a batch dimension of its own. Put the "
        "samples into [B, T, H, K]"
    )
