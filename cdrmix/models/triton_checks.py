"""Checks of our Triton kernels: outputs and all gradients against the eager forms in float64.

The kernel computes on the device, the eager form on the CPU, from the same rounded inputs: at odd
lengths and widths, with a carried token, documents of one token, and dropped rows of experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cdrmix.models import (
    clamped_recurrence,
    expert_rows,
    expert_rows_triton,
    feed_forward,
    rwkv7_pointwise,
    rwkv7_triton,
)

# Relative, Frobenius. Kernels round outputs and gradients once, by up to 2^-9 in bfloat16 and 2^-12
# in float16 (the interpreter truncates bfloat16, up to 2^-8); float32 adds up 66 rows.
TOLERANCES = {torch.bfloat16: 0.01, torch.float16: 0.002, torch.float32: 1e-5}


class Sizes(NamedTuple):
    """Sizes of inputs; `compiled_for` is features of a head or choices of a token, where a kernel
    is compiled for a number of them."""

    batch: int
    time: int
    heads: int
    width: int
    compiled_for: int

    @property
    def rows(self) -> tuple[int, ...]:
        """Shape of all tokens, [B, T, D]."""
        return self.batch, self.time, self.width

    @property
    def in_heads(self) -> tuple[int, ...]:
        """Shape of all tokens, [B, T, H, K]."""
        return self.batch, self.time, self.heads, self.compiled_for


_ODD = (2, 33, 3, 72)
# For numbers that 16 divides, as those of models, another kernel is compiled.
_EVEN = (2, 64, 2, 128)

Values = dict[str, Tensor]
Form = Callable[[Values], Sequence[Tensor]]


class Case(NamedTuple):
    """A kernel and an eager form of the same maths, and what both take."""

    kernel: Form
    eager: Form
    shapes: Mapping[str, tuple[int, ...]]  # of tensors that have a gradient
    integers: Values  # the others


def problem(
    kernel: str, device: torch.device, dtype: torch.dtype, compiled_for: int | None
) -> str | None:
    """Returns what is wrong with a kernel on a device, or None."""
    about = f"Triton's {kernel} on {device} in {dtype}"
    if compiled_for is not None:
        about += f" for {compiled_for}"
    try:
        found = errors(kernel, device, dtype, compiled_for)
    except Exception as error:  # whatever a compiler of kernels raises: not usable here
        return f"{about} fails: {error}"
    allowed = TOLERANCES[dtype]
    if all(off <= allowed for off in found.values()):  # not so for not-a-number
        return None
    worst = max(found, key=lambda name: found[name])
    return f"{about} is wrong: {worst} is off by {found[worst]:.2g}, allowed {allowed}"


def errors(
    kernel: str, device: torch.device, dtype: torch.dtype, compiled_for: int | None
) -> dict[str, float]:
    """Returns the relative error of each output and gradient, by case and name."""
    errors = {}
    cases = CASES[kernel](Sizes(*_ODD, compiled_for or 0))
    if device.type == "cuda":
        even = CASES[kernel](Sizes(*_EVEN, compiled_for or 0))
        cases |= {f"{title}, even sizes": case for title, case in even.items()}
    for title, case in cases.items():
        generator = torch.Generator().manual_seed(5)
        values = {
            name: torch.randn(shape, generator=generator).to(dtype)
            for name, shape in case.shapes.items()
        }
        found = _results(case.kernel, values, case.integers, device)
        exact = {name: x.double() for name, x in values.items()}
        for name, expected in _results(
            case.eager, exact, case.integers, torch.device("cpu")
        ).items():
            off = (found[name].cpu().double() - expected).norm() / expected.norm()
            errors[f"{title}: {name}"] = off.item()
    return errors


def _results(form: Form, values: Values, integers: Values, device: torch.device) -> Values:
    """Computes outputs, and the gradients of their product with random tensors."""
    leaves = {name: x.detach().to(device).requires_grad_() for name, x in values.items()}
    outputs = form(leaves | {name: x.to(device) for name, x in integers.items()})
    generator = torch.Generator().manual_seed(6)
    probes = [torch.randn(x.shape, generator=generator).to(x) for x in outputs]
    gradients = torch.autograd.grad(list(outputs), list(leaves.values()), probes)
    named = {f"output {i}": x.detach() for i, x in enumerate(outputs)}
    return named | {f"d{name}": x for name, x in zip(leaves, gradients, strict=True)}


def _shift_mix(sizes: Sizes) -> dict[str, Case]:
    starts = torch.zeros(sizes.batch, sizes.time, dtype=torch.int64)
    starts[0, [1, 2, 32]] = 1  # one document of one token, and one where a tile of rows begins
    starts[1, [17, 31]] = 1
    documents = {"segment_ids": starts.cumsum(1)}

    def form(module: object) -> Form:
        mix = module.shift_mix  # type: ignore[attr-defined]
        return lambda x: mix(x["x"], x.get("last"), x.get("segment_ids"), x["mu"])

    forms = (form(rwkv7_triton), form(rwkv7_pointwise))
    six = {"x": sizes.rows, "mu": (6, sizes.width)}
    carried = {"x": sizes.rows, "last": (sizes.batch, sizes.width)}
    return {
        "six mixes": Case(*forms, six, {}),
        "six mixes, carried, documents": Case(*forms, six | carried, documents),
        "one mix, carried": Case(*forms, {**carried, "mu": (1, sizes.width)}, {}),
        "one mix, documents": Case(*forms, {**six, "mu": (1, sizes.width)}, documents),
    }


def _blend_values(sizes: Sizes) -> dict[str, Case]:
    def form(module: object) -> Form:
        blend = module.blend_values  # type: ignore[attr-defined]
        return lambda x: [blend(x["v"], x["v_first"], x["amount"], x["bias"])]

    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("v", "v_first", "amount"), sizes.rows)
    shapes["bias"] = (sizes.width,)
    return {"values": Case(form(rwkv7_triton), form(rwkv7_pointwise), shapes, {})}


def _recurrence_inputs(sizes: Sizes) -> dict[str, Case]:
    vectors = ("decay_bias", "iclr_bias", "k_k", "k_a")

    def form(module: object) -> Form:
        make = module.recurrence_inputs  # type: ignore[attr-defined]
        return lambda x: make(x["k"], x["decay"], x["iclr"], **{name: x[name] for name in vectors})

    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("k", "decay", "iclr"), sizes.in_heads)
    shapes |= dict.fromkeys(vectors, sizes.in_heads[2:])
    return {"heads": Case(form(rwkv7_triton), form(rwkv7_pointwise), shapes, {})}


def _gated_output(sizes: Sizes) -> dict[str, Case]:
    tensors, vectors = ("y", "r", "k", "v", "gate"), ("r_k", "weight", "bias")

    def form(module: object) -> Form:
        make = module.gated_output  # type: ignore[attr-defined]
        return lambda x: [
            make(
                *(x[name] for name in tensors),
                **{name: x[name] for name in vectors},
                eps=sizes.compiled_for * 1e-5,
            )
        ]

    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(tensors, sizes.in_heads)
    shapes |= dict.fromkeys(vectors, sizes.in_heads[2:])
    return {"heads": Case(form(rwkv7_triton), form(rwkv7_pointwise), shapes, {})}


def _orders(sizes: Sizes) -> dict[str, expert_rows.ExpertOrder]:
    """Orders of all rows of the first sample's tokens, and of those within a capacity."""
    generator = torch.Generator().manual_seed(4)
    number = 2 * sizes.compiled_for + 1
    scores = torch.rand(sizes.time, number, generator=generator)
    experts = scores.topk(sizes.compiled_for).indices
    return {
        "all rows": expert_rows.sort_by_expert(experts, number, None),
        "dropped rows": expert_rows.sort_by_expert(experts, number, sizes.time // 3),
    }


def _gather_rows(sizes: Sizes) -> dict[str, Case]:
    cases = {}
    for title, order in _orders(sizes).items():
        kept = int(order.counts.sum())

        def kernel(x: Values, kept: int = kept) -> Sequence[Tensor]:
            return [expert_rows_triton.gather_rows(x["x"], x["token"], x["row"])[:kept]]

        def eager(
            x: Values, kept: int = kept, order: expert_rows.ExpertOrder = order
        ) -> Sequence[Tensor]:
            return [expert_rows.gather_rows(x["x"], order)[:kept]]

        integers = {"token": order.token, "row": order.row}
        cases[title] = Case(kernel, eager, {"x": (sizes.time, sizes.width)}, integers)
    return cases


def _weighted_sum(sizes: Sizes) -> dict[str, Case]:
    cases = {}
    for title, order in _orders(sizes).items():
        kept = order.first(int(order.counts.sum()))

        def kernel(x: Values) -> Sequence[Tensor]:
            places = (x["token"], x["choice"], x["row"])
            return [expert_rows_triton.weighted_sum(x["rows"], x["weights"].float(), *places)]

        def eager(x: Values, kept: expert_rows.ExpertOrder = kept) -> Sequence[Tensor]:
            return [expert_rows.weighted_sum(x["rows"], x["weights"].float(), kept)]

        integers = {"token": kept.token, "choice": kept.choice, "row": kept.row}
        weights = (sizes.time, sizes.compiled_for)
        shapes = {"rows": (len(kept.token), sizes.width), "weights": weights}
        cases[title] = Case(kernel, eager, shapes, integers)
    return cases


def _squared_relu(sizes: Sizes) -> dict[str, Case]:
    return {
        "rows": Case(
            lambda x: [expert_rows_triton.squared_relu(x["x"])],
            lambda x: [feed_forward.squared_relu(x["x"])],
            {"x": (sizes.time, sizes.width)},
            {},
        )
    }


def _clamped_recurrence(sizes: Sizes) -> dict[str, Case]:
    # A decay for each chunk of a sequence, and one for all; some weights exceed the clamp.
    cases = {}
    for title, along in {"each": (sizes.batch, sizes.time), "one": (1, 1)}.items():

        def kernel(x: Values) -> Sequence[Tensor]:
            run = clamped_recurrence.run_triton
            return clamped_recurrence.in_kernel(*x.values(), largest=4.0, run=run)

        def eager(x: Values) -> Sequence[Tensor]:
            return clamped_recurrence.in_turn(*x.values(), largest=4.0)

        shapes = {"weights": (sizes.batch, sizes.width), "added": sizes.rows, "decay": along}
        cases[title] = Case(kernel, eager, shapes, {})
    return cases


# by the name of the function that asks
CASES: dict[str, Callable[[Sizes], dict[str, Case]]] = {
    "shift_mix": _shift_mix,
    "blend_values": _blend_values,
    "recurrence_inputs": _recurrence_inputs,
    "gated_output": _gated_output,
    "gather_rows": _gather_rows,
    "weighted_sum": _weighted_sum,
    "squared_relu": _squared_relu,
    "clamped_recurrence": _clamped_recurrence,
}
