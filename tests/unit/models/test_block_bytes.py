"""Bytes that a block at the size of cdrmix-core-1b reads and writes on a GPU, forward and backward.

Counted on the meta device, in bfloat16: each operator that is no view reads its tensors once and
writes its results once. RMSNorm and the WKV-7 op are one kernel each way, as they are on GPUs; ours
are launched nowhere and count what they are given. Matrix products are left out.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cdrmix.config.load import load_config
from cdrmix.models import rwkv7, triton_launch
from cdrmix.models.block import Block
from tests.harness import ROOT

TOKENS = (2, 4096)
_VIEWS = (
    "view _unsafe_view reshape transpose permute t unsqueeze squeeze expand select slice split "
    "unbind detach alias as_strided unflatten chunk split_with_sizes _reshape_alias empty_like "
    "empty new_empty empty_strided new_empty_strided narrow view_as lift_fresh"
)
VIEWS = frozenset(_VIEWS.split())
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm"}


class Moved(TorchDispatchMode):
    """Bytes by kernel, and how many kernels there are."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.kernels = 0

    def add(self, name: str, *tensors: Any) -> None:
        self.kernels += 1
        leaves = [x for x in tree_leaves(tensors) if isinstance(x, Tensor)]
        self.bytes[name] += sum(x.numel() * x.element_size() for x in leaves)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name not in VIEWS | PRODUCTS:
            self.add(name, args, kwargs, out)
        return out


def as_one_kernel(moved: Moved, name: str, like: int) -> Any:
    """A function of the shape of input `like` that is one kernel each way."""

    class One(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> Tensor:
            ctx.save_for_backward(*inputs)
            out = torch.empty_like(inputs[like])
            moved.add(name, inputs, out)
            return out

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
            grads = tuple(torch.empty_like(x) for x in ctx.saved_tensors)
            moved.add(f"{name}_backward", ctx.saved_tensors, grad, grads)
            return grads

    return One.apply


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> Moved:
    """Counts what is done within it."""
    count = Moved()
    norm, wkv = as_one_kernel(count, "rms_norm", 0), as_one_kernel(count, "wkv7", 3)
    monkeypatch.setattr(F, "rms_norm", lambda x, shape, weight, eps: norm(x, weight))

    def recurrence(*inputs: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        return wkv(*inputs[:6]), inputs[0].new_empty(0)

    monkeypatch.setattr(rwkv7, "wkv7", recurrence)
    monkeypatch.setattr(
        triton_launch,
        "launch",
        lambda module, kernel, grid, *arguments, **sizes: count.add(kernel, arguments),
    )
    return count


def kilobytes_a_token(moved: Moved) -> float:
    """Forward and backward of an RWKV block with experts."""
    config = load_config(ROOT / "model_configs" / "cdrmix-core-1b.yaml").model
    with torch.device("meta"):
        block = Block(config, 1).to(torch.bfloat16)
        x, v_first = torch.empty(2, *TOKENS, config.hidden_size, dtype=torch.bfloat16)
    with moved:
        y, _, statistics, _ = block(x.requires_grad_(), v_first.requires_grad_())
        outputs = [y, statistics]
        torch.autograd.backward(outputs, [torch.empty_like(each) for each in outputs])
    return sum(moved.bytes.values()) / (TOKENS[0] * TOKENS[1]) / 1e3


def test_fused_kernels_move_at_most_900_kb_a_token(
    moved: Moved, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_launch, "can_run", lambda *_, **__: True)
    size = kilobytes_a_token(moved)
    assert 400 < size < 900, moved.bytes.most_common()
    assert moved.kernels < 150


def test_eager_forms_move_twice_as_much(moved: Moved) -> None:
    assert kilobytes_a_token(moved) > 1800, "the account of docs/benchmarks.md is another one"
