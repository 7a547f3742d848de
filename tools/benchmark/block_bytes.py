"""Kernels and bytes a token of a block under torch.compile, counted without running it.

What inductor has scheduled for its C++ backend, neither built nor run, forward and backward
together; the recurrence is one kernel each way. `tools.benchmark.count_bytes` counts blocks as they
are, which `measure` puts beside it.
"""

# B batch, T time, D hidden

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cdrmix import runtime

runtime.import_deepspeed()

from cdrmix.config.load import load_config, shipped  # noqa: E402
from cdrmix.config.model import ModelConfig  # noqa: E402
from cdrmix.models import compiled, wkv7  # noqa: E402
from cdrmix.models.block import Block  # noqa: E402
from cdrmix.models.rwkv7 import TimeMix  # noqa: E402
from tools.benchmark.count_bytes import count_block, count_loss  # noqa: E402

_PRODUCTS = frozenset(("mm", "addmm", "bmm", "baddbmm", "_grouped_mm"))


class Moved(NamedTuple):
    """Traffic of a block, forward and backward, but for matrix products."""

    kernels: int
    kilobytes: float  # a token, of 1,000 bytes


def as_it_is(
    config: ModelConfig, layer: int, tokens: tuple[int, int], *, is_fused: bool = False
) -> Moved:
    """Counts a block as `as_compiled`, without a compiler; with our own kernels if `is_fused`."""
    shape = {"batch": tokens[0], "length": tokens[1], "dtype": torch.bfloat16}
    passes = count_block(config, layer, **shape, is_fused=is_fused)  # type: ignore[arg-type]
    numbers, sizes = zip(*(each.total(products=False) for each in passes), strict=True)
    return Moved(sum(numbers), sum(sizes) / tokens[0] / tokens[1] / 1e3)


def as_compiled(config: ModelConfig, layer: int, tokens: tuple[int, int]) -> Moved:
    """Counts a compiled block in bf16, with a micro-batch of `tokens`, (B, T)."""
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
    """Counts one block of each kind of a shipped variant, dropless, and its loss.

    Rows for docs/benchmarks.md; the loss is not compiled.
    """
    path = shipped("model_configs") / f"{name}.yaml"
    config = load_config(path, ["model.moe.drop_tokens=false"]).model
    kinds = config.layer_kinds()
    rows = []
    for kind in dict.fromkeys(kinds):
        layer = max(place for place, each in enumerate(kinds) if each == kind)
        row: dict[str, Any] = {"block": kind}
        for form, is_fused in (("eager", False), ("our kernels", True)):
            row[form] = as_it_is(config, layer, tokens, is_fused=is_fused)._asdict()
        rows.append(row | {"compiled": as_compiled(config, layer, tokens)._asdict()})
    loss = count_loss(config, batch=tokens[0], length=tokens[1], dtype=torch.bfloat16)
    kernels, moved = loss.total(products=False)
    number = tokens[0] * tokens[1]
    of_loss = Moved(kernels, moved / number / 1e3)._asdict()
    return {"model": name, "tokens": number, "rows": rows, "loss": of_loss}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="cdrmix-core-1b")
    print(json.dumps(measure(parser.parse_args().model), indent=1))
