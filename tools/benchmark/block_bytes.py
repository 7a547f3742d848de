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
from cdrmix.planning.blocks.block_type import is_v_first_made  # noqa: E402
from tools.benchmark.count_bytes import PRODUCTS, Kernels, count_block, count_loss  # noqa: E402


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
    block = count_compiled(config, layer, tokens)
    passes = (block.forward, block.backward)
    numbers, sizes = zip(*(each.total(products=False) for each in passes), strict=True)
    return Moved(sum(numbers), sum(sizes) / tokens[0] / tokens[1] / 1e3)


class Compiled(NamedTuple):
    """Counts of the graphs of a compiled block.

    Kernels of inductor are named "fused"; the recurrence is "wkv7" and "wkv7_backward", as in
    `count_block`.
    """

    forward: Kernels
    backward: Kernels
    saved: int  # bytes for the backward pass, but for parameters and v_first, which others hold


def count_compiled(config: ModelConfig, layer: int, tokens: tuple[int, int]) -> Compiled:
    """Counts a compiled block in bf16 over a forward and a backward pass."""
    passes: list[Kernels] = []
    saved: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(graph, inputs, inner_compile=reading)  # type: ignore[return-value]

    def reading(graph: torch.fx.GraphModule, inputs: Sequence[Tensor], **_: Any) -> Any:
        from torch._functorch._aot_autograd.utils import make_boxed_func

        saved.append(_saved(graph))  # before the scheduler rewrites the graph
        passes.append(_scheduled(graph, inputs))
        results = graph.graph.find_nodes(op="output")[0].args[0]
        return make_boxed_func(lambda *_: [_unwritten(each) for each in results])

    block, given = _block(config, layer, tokens)
    torch._dynamo.reset()
    run = torch.compile(compiled._whole, backend=backend, fullgraph=True, dynamic=False)
    x, made, statistics = run(block, *given, None)
    outputs = [each for each in (x, made, statistics) if each is not None and each.requires_grad]
    torch.autograd.backward(outputs, [torch.empty_like(each) for each in outputs])
    forward, backward = passes
    return Compiled(forward, backward, saved[0])


def _saved(module: torch.fx.GraphModule) -> int:
    """Bytes of a forward graph's results, with its residual stream in place of the block's output.

    Both are as large; what other results repeat, or the caller holds already, is not counted.
    """
    results = dict.fromkeys(module.graph.find_nodes(op="output")[0].args[0])
    values = [each.meta["val"] for each in results if _is_made(each)]
    return sum(each.numel() * each.element_size() for each in values if isinstance(each, Tensor))


def _is_made(result: Any) -> bool:
    return isinstance(result, torch.fx.Node) and result.op != "placeholder"


def _block(
    config: ModelConfig, layer: int, tokens: tuple[int, int]
) -> tuple[Block, tuple[Tensor, Tensor | None]]:
    """Makes a block, and its residual stream and v_first, [B, T, D], on the default device.

    There is no v_first where the block is the one that makes it.
    """
    with torch.device("meta"):
        block = Block(config, layer).to(torch.bfloat16)
    block.to_empty(device=torch.get_default_device())
    if isinstance(block.mixer, TimeMix):
        block.mixer.recurrence = _one_recurrence
    sizes = (*tokens, config.hidden_size)
    x, v_first = (torch.empty(sizes, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    return block, (x, v_first if is_v_first_made(config, layer) else None)


def _one_recurrence(*inputs: Any, segment_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The recurrence as a GPU has it: through the operator of fla, which runs nowhere here."""
    y, s, *_ = wkv7._TRACED["fla"](*inputs, segment_ids, 0, False)
    return y, s


def _scheduled(module: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Kernels:
    """Kernels of a graph and the bytes that each reads and writes, by inductor's scheduler."""
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
    kernels = Kernels()
    with (
        V.set_fake_mode(fake_mode),
        V.set_graph_handler(graph),
        V.set_debug_handler(DebugContext()),
    ):
        graph.run(*inputs)
        graph._update_scheduler()
        for node in graph.scheduler.nodes:
            size = int(node.get_read_write_buffers_sizes())
            if size > 0:
                name = _name(node)
                kernels.number[name] += 1
                kernels.moved[name] += size
    return kernels


def _name(node: Any) -> str:
    """Name of a kernel of inductor's scheduler, as `count_bytes` has it where a library runs it."""
    parts = (getattr(node.node, "python_kernel_name", None) or "fused").split(".")
    product = next((part for part in parts if part in PRODUCTS), None)
    if product is not None:
        return product
    found = next((part for part in parts if part.startswith("wkv7")), parts[-1])
    return found.replace("wkv7_fla", "wkv7")


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
