"""Kernels and bytes a token of a block, counted without running it, forward and backward together.

As they are, on the meta device: each operator that is no view is one kernel, which reads its
tensors once and writes its results once, as PyTorch does on a GPU; norms and attention are one
kernel each. Compiled: what inductor has scheduled for its C++ backend, neither built nor run. The
recurrence is one kernel each way in both, and weights, which all tokens of a micro-batch share, are
in the count.
"""

# B batch, T time, D hidden

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cdrmix import runtime

runtime.import_deepspeed()

from cdrmix.config.load import load_config, shipped  # noqa: E402
from cdrmix.config.model import ModelConfig  # noqa: E402
from cdrmix.models import compiled, wkv7  # noqa: E402
from cdrmix.models.block import Block  # noqa: E402
from cdrmix.models.rwkv7 import TimeMix  # noqa: E402

_VIEWS = frozenset(
    {
        *("view", "_unsafe_view", "reshape", "_reshape_alias", "view_as", "as_strided", "alias"),
        *("transpose", "permute", "t", "unsqueeze", "squeeze", "expand", "unflatten", "detach"),
        *("select", "slice", "split", "split_with_sizes", "unbind", "chunk", "narrow"),
        *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh"),
    }
)

_PRODUCTS = frozenset(("mm", "addmm", "bmm", "baddbmm", "_grouped_mm"))


class Moved(NamedTuple):
    """Traffic of a block, forward and backward, but for matrix products."""

    kernels: int
    kilobytes: float  # a token, of 1,000 bytes


def as_it_is(config: ModelConfig, layer: int, tokens: tuple[int, int]) -> Moved:
    """Counts a block as it is, in bf16, with a micro-batch of `tokens`, (B, T)."""
    counter = _Counter()
    norm, attention = (_one_kernel(counter, inputs) for inputs in (1, 3))
    with (
        mock.patch.object(F, "rms_norm", lambda x, shape, weight, eps: norm.apply(x, weight)),
        mock.patch.object(
            F, "scaled_dot_product_attention", lambda q, k, v, **_: attention.apply(q, k, v)
        ),
        torch.device("meta"),
    ):
        block, inputs = _block(config, layer, tokens)
        with counter:
            x, _, statistics = compiled._whole(block, *inputs, None)
            outputs = [x] + ([] if statistics is None else [statistics])
            torch.autograd.backward(outputs, [torch.empty_like(each) for each in outputs])
    return Moved(counter.kernels, counter.bytes / tokens[0] / tokens[1] / 1e3)


def as_compiled(config: ModelConfig, layer: int, tokens: tuple[int, int]) -> Moved:
    """Counts a block as `as_it_is`, compiled."""
    kernels: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(graph, inputs, inner_compile=counting)  # type: ignore[return-value]

    def counting(graph: torch.fx.GraphModule, inputs: Sequence[Tensor], **_: Any) -> Any:
        from torch._functorch._aot_autograd.utils import make_boxed_func

        kernels.extend(_scheduled(graph, inputs))
        results = graph.graph.find_nodes(op="output")[0].args[0]
        return make_boxed_func(lambda *_: [_unwritten(each) for each in results])

    block, given = _block(config, layer, tokens)
    torch._dynamo.reset()
    run = torch.compile(compiled._whole, backend=backend, fullgraph=True, dynamic=False)
    x, _, statistics = run(block, *given, None)
    outputs = [x] + ([] if statistics is None else [statistics])
    torch.autograd.backward(outputs, [torch.empty_like(each) for each in outputs])
    return Moved(len(kernels), sum(kernels) / tokens[0] / tokens[1] / 1e3)


def _block(
    config: ModelConfig, layer: int, tokens: tuple[int, int]
) -> tuple[Block, tuple[Tensor, Tensor]]:
    """Makes a block, and its residual stream and v_first, [B, T, D], on the default device."""
    with torch.device("meta"):
        block = Block(config, layer).to(torch.bfloat16)
    block.to_empty(device=torch.get_default_device())
    if isinstance(block.mixer, TimeMix):
        block.mixer.recurrence = _one_recurrence
    sizes = (*tokens, config.hidden_size)
    x, v_first = (torch.empty(sizes, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    return block, (x, v_first)


def _one_recurrence(*inputs: Any, segment_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The recurrence as a GPU has it: through the operator of fla, which runs nowhere here."""
    y, s, *_ = wkv7._TRACED["fla"](*inputs, segment_ids, 0, False)
    return y, s


class _Counter(TorchDispatchMode):
    """Kernels and bytes of what runs."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = 0
        self.bytes = 0

    def add(self, tensors: Sequence[Any]) -> None:
        self.kernels += 1
        self.bytes += sum(x.numel() * x.element_size() for x in tensors if isinstance(x, Tensor))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ not in _VIEWS | _PRODUCTS:
            self.add([*tree_leaves((args, kwargs or {})), *tree_leaves(out)])
        return out


def _one_kernel(counter: _Counter, gradients: int) -> Any:
    """Makes a Function of one kernel each way, with the gradients of its first inputs."""

    class One(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> Tensor:
            ctx.save_for_backward(*inputs)
            out = torch.empty_like(inputs[0])
            counter.add([*inputs, out])
            return out

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
            found = [torch.empty_like(x) for x in ctx.saved_tensors]
            counter.add([*ctx.saved_tensors, grad, *found[:gradients]])
            return tuple(found)

    return One


def _scheduled(module: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> list[int]:
    """Bytes that each kernel of a graph reads and writes, by inductor's scheduler."""
    from torch._inductor import compile_fx
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    # as compile_fx.py does before it generates code
    compile_fx.view_to_reshape(module)
    with torch.no_grad():
        fake_mode = compile_fx.fake_tensor_prop(module, list(inputs))
    compile_fx._recursive_record_original_output_strides(module)
    with V.set_fake_mode(fake_mode):
        compile_fx._recursive_post_grad_passes(module, is_inference=False)
    graph = GraphLowering(module, shape_env=fake_mode.shape_env)
    with (
        V.set_fake_mode(fake_mode),
        V.set_graph_handler(graph),
        V.set_debug_handler(DebugContext()),
    ):
        graph.run(*inputs)
        graph._update_scheduler()
        sizes = [
            (int(node.get_read_write_buffers_sizes()), _is_product(node))
            for node in graph.scheduler.nodes
        ]
    return [size for size, is_product in sizes if size > 0 and not is_product]


def _is_product(node: Any) -> bool:
    """True for a matrix product of inductor's scheduler, which is a kernel of a library."""
    kernel = getattr(node.node, "python_kernel_name", None) or ""
    return kernel.rpartition(".")[2] in _PRODUCTS or any(
        f".{name}." in f".{kernel}." for name in _PRODUCTS
    )


def _unwritten(node: Any) -> Any:
    """A result of a graph as its node says, without values."""
    value = node.meta["val"] if isinstance(node, torch.fx.Node) else node
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype)


def measure(name: str = "cdrmix-core-1b", tokens: tuple[int, int] = (2, 4096)) -> dict[str, Any]:
    """Counts one block of each kind of a shipped variant, dropless: rows for docs/benchmarks.md."""
    path = shipped("model_configs") / f"{name}.yaml"
    config = load_config(path, ["model.moe.drop_tokens=false"]).model
    kinds = config.layer_kinds()
    rows = []
    for kind in dict.fromkeys(kinds):
        layer = max(place for place, each in enumerate(kinds) if each == kind)
        eager, joined = (count(config, layer, tokens) for count in (as_it_is, as_compiled))
        rows.append({"block": kind, "eager": eager._asdict(), "compiled": joined._asdict()})
    return {"model": name, "tokens": tokens[0] * tokens[1], "rows": rows}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="cdrmix-core-1b")
    print(json.dumps(measure(parser.parse_args().model), indent=1))
