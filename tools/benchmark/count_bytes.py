"""Counts what kernels of a block and of the loss read and write, on the meta device.

    python -m tools.benchmark.count_bytes [--config model_configs/cdrmix-core-1b.yaml]

Each operator that is no view counts as one kernel that reads its tensors once and writes its
results once, as PyTorch without a compiler runs them on a GPU. RMSNorm, attention, the WKV-7 op and
the selective scan are one kernel each, as they are there; their insides are counted nowhere. No GPU
is needed, and no memory. tests/parity/test_moved_bytes.py holds planning's numbers to these.
"""

from __future__ import annotations

import argparse
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cdrmix.config.load import load_config
from cdrmix.config.model import ModelConfig

# Operators that move nothing: views, and memory without values.
_FREE = frozenset(
    (
        *("view", "_unsafe_view", "reshape", "_reshape_alias", "view_as", "as_strided", "alias"),
        *("transpose", "permute", "t", "unsqueeze", "squeeze", "expand", "detach", "lift_fresh"),
        *("select", "slice", "narrow", "split", "split_with_sizes", "chunk", "unbind", "unflatten"),
        *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
    )
)
PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "grouped_product"})
# Operators that read no more of their first argument than they write.
_SELECTING = frozenset({"index_select", "embedding", "gather"})
# Operators in place that touch no more of their first argument than the values that they put there.
_PLACING = frozenset({"scatter_"})
# Operators that read nothing of what they are given, but its shape.
_FILLING = frozenset({"zeros_like", "ones_like", "full_like", "zero_", "fill_"})
_SMALL_BYTES = 8 * 2**20  # of a kernel that takes no longer than its launch


@dataclass
class Kernels:
    """Kernels of a pass by operator: how many, and the bytes that they move."""

    number: Counter[str] = field(default_factory=Counter)
    moved: Counter[str] = field(default_factory=Counter)
    small: int = 0  # kernels that move less than `_SMALL_BYTES`

    def add(self, name: str, tensors: list[Any]) -> None:
        """Adds a kernel that reads or writes each of the tensors once."""
        size = sum(x.numel() * x.element_size() for x in tensors if isinstance(x, Tensor))
        self.number[name] += 1
        self.moved[name] += size
        self.small += size < _SMALL_BYTES

    def total(self, *, products: bool) -> tuple[int, int]:
        """Number and bytes of matrix products, or of all other kernels."""
        names = [name for name in self.number if (name in PRODUCTS) == products]
        return sum(self.number[name] for name in names), sum(self.moved[name] for name in names)


class _Counting(TorchDispatchMode):
    """Adds each operator that runs to `kernels`."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = Kernels()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        made = func(*args, **given)
        name = func.overloadpacket.__name__
        if name not in _FREE:
            # what it is given to write its result into, it does not read
            read = [args, {key: value for key, value in given.items() if key != "out"}]
            written = made
            if name in _SELECTING:
                read = [made, *args[1:]]
            elif name in _FILLING:
                read = []
            elif name in _PLACING:
                read, written = args[2:], args[3]
            self.kernels.add(name, [*tree_leaves(read), *tree_leaves(written)])
        return made


@contextlib.contextmanager
def counting() -> Iterator[Kernels]:
    """Counts the kernels of everything that runs inside."""
    with _Counting() as counted:
        yield counted.kernels


def _opaque(name: str, like: int, counter: Callable[[], Kernels]) -> Any:
    """Makes a Function of one kernel in each pass, whose output is like one of its inputs.

    The backward pass writes the gradients of all inputs; what the kernel does inside is left out.
    """

    class Opaque(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> Tensor:
            ctx.save_for_backward(*inputs)
            made = torch.empty_like(inputs[like])
            counter().add(name, [*inputs, made])
            return made

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
            inputs = ctx.saved_tensors
            grads = tuple(torch.empty_like(x) for x in inputs)
            counter().add(f"{name}_backward", [*inputs, grad, *grads])
            return grads

    return Opaque


@contextlib.contextmanager
def _kernels_of_a_gpu(counter: Callable[[], Kernels], *, is_fused: bool) -> Iterator[None]:
    """Makes norms, attention, recurrence and scan one kernel each, and runs none of ours.

    Ours take the place of the eager forms if `is_fused`, as on GPUs where their gradients pass.
    """
    from cdrmix.models import mamba, rwkv7, triton_launch

    norm, flash, recurrence, scan = (
        _opaque(name, like, counter)
        for name, like in (("rms_norm", 0), ("attention", 0), ("wkv7", 3), ("scan", 0))
    )

    def wkv7(r: Tensor, *inputs: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        return recurrence.apply(r, *inputs[:5]), r.new_empty(0)

    def selective_scan(inputs: Any, past: Any, **_: Any) -> tuple[Tensor, Tensor]:
        return scan.apply(*inputs), inputs[0].new_empty(0)

    def launch(module: str, kernel: str, grid: Any, *arguments: Any, **_: Any) -> None:
        counter().add(kernel, tree_leaves(arguments))

    replaced: list[tuple[Any, str, Any]] = [
        (triton_launch, "launch", launch),
        (triton_launch, "can_run", lambda *_, **__: is_fused),
        (F, "rms_norm", lambda x, shape, weight, eps: norm.apply(x, weight)),
        (F, "scaled_dot_product_attention", lambda q, k, v, **_: flash.apply(q, k, v)),
        (rwkv7, "wkv7", wkv7),
        (mamba, "selective_scan", selective_scan),
    ]
    before = [getattr(module, name) for module, name, _ in replaced]
    try:
        for module, name, function in replaced:
            setattr(module, name, function)
        yield
    finally:
        for (module, name, _), function in zip(replaced, before, strict=True):
            setattr(module, name, function)


def count_block(
    model: ModelConfig,
    layer: int,
    *,
    batch: int,
    length: int,
    dtype: torch.dtype,
    is_fused: bool = False,
) -> tuple[Kernels, Kernels]:
    """Counts the kernels of a block in a forward and a backward pass of [batch, length] tokens.

    With our own Triton kernels if `is_fused`.
    """
    from cdrmix.models.block import Block
    from cdrmix.planning.blocks.block_type import is_v_first_made

    counted = _Counting()
    with _kernels_of_a_gpu(lambda: counted.kernels, is_fused=is_fused):
        with torch.device("meta"):
            block = Block(model, layer).to(dtype)
            x = torch.empty(batch, length, model.hidden_size, dtype=dtype, requires_grad=True)
            v_first = torch.empty_like(x, requires_grad=True)
        with counted:
            y, _, statistics, _ = block(x, v_first if is_v_first_made(model, layer) else None)
        forward, counted.kernels = counted.kernels, Kernels()
        outputs = [each for each in (y, statistics) if each is not None]
        with counted:
            torch.autograd.backward(outputs, [torch.empty_like(each) for each in outputs])
    return forward, counted.kernels


def count_loss(model: ModelConfig, *, batch: int, length: int, dtype: torch.dtype) -> Kernels:
    """Counts the kernels of the loss, whose gradient is formed in its forward pass."""
    from cdrmix.objectives.language_model import linear_cross_entropy

    with torch.device("meta"):
        hidden = torch.empty(batch, length, model.hidden_size, dtype=dtype, requires_grad=True)
        weight = torch.empty(model.vocab_size, model.hidden_size, dtype=dtype, requires_grad=True)
        labels = torch.zeros((batch, length), dtype=torch.int64)
    with _Counting() as counted:
        linear_cross_entropy(hidden, weight, labels).backward()
    return counted.kernels


def main() -> None:
    """Prints kernels and bytes of each kind of block of a configuration, and of its loss."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path("model_configs/cdrmix-core-1b.yaml")
    parser.add_argument("--config", type=Path, default=default)
    parser.add_argument("--micro-batch", type=int, default=2)
    arguments = parser.parse_args()
    config = load_config(arguments.config)
    model, length = config.model, config.training.sequence_length
    shape = {"batch": arguments.micro_batch, "length": length, "dtype": torch.bfloat16}
    kinds = model.layer_kinds()
    parts: dict[str, Any] = {}
    for kind in dict.fromkeys(kinds):
        layer = max(n for n, each in enumerate(kinds) if each == kind)
        forward, backward = count_block(model, layer, **shape)
        parts |= {f"{kind}, forward": forward, f"{kind}, backward": backward}
    parts["loss"] = count_loss(model, **shape)
    tokens = arguments.micro_batch * length
    for name, kernels in parts.items():
        products, of_products = kernels.total(products=True)
        others, of_others = kernels.total(products=False)
        print(
            f"{name:22} {products:3} products {of_products / tokens / 1e3:6.0f} KB a token, "
            f"{others:3} other kernels {of_others / tokens / 1e3:6.0f} KB a token, "
            f"{kernels.small} small"
        )


if __name__ == "__main__":
    main()
