"""Memory traffic that planning tells of each block type and of the loss, against what runs.

Blocks are counted in three forms: operators one by one and our Triton kernels on the meta device
(`tools.benchmark.count_bytes`), and what inductor has scheduled (`tools.benchmark.block_bytes`).
The figures are those of the count but for indices and parameters, which are small: 2 % of the bytes
and 25 % of the kernels are allowed.
"""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cdrmix.config.load import load_config, shipped
from cdrmix.config.model import BLOCK_TYPES, HEAD_DIMS, ModelConfig
from cdrmix.models import triton_launch
from cdrmix.parallel.gradient_sums import add_without_copies
from cdrmix.planning.activations import SavedActivations
from cdrmix.planning.blocks.block_type import (
    BlockKernels,
    Moved,
    Setting,
    block_type,
)
from cdrmix.planning.blocks.feed_forward import saved_by_feed_forward
from cdrmix.planning.blocks.rwkv import moved_by_op
from cdrmix.planning.layout import Degrees, Group, Layout
from cdrmix.planning.moved import block_moved, loss_bytes
from cdrmix.planning.state_traffic import accumulation_bytes
from tools.benchmark.block_bytes import Compiled, count_compiled
from tools.benchmark.count_bytes import Kernels, count_block, count_loss, counting

BATCH, LENGTH = 4, 4096
TOKENS = BATCH * LENGTH
TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
FORMS: tuple[BlockKernels, ...] = ("operators", "own", "compiled")


def setting_of(
    kind: str, precision: str, *overrides: str, kernels: BlockKernels = "operators"
) -> Setting:
    config = load_config(
        shipped("model_configs") / "cdrmix-core-1b.yaml",
        [f"model.mixers=[{kind}*24]", f"training.precision={precision}", *overrides],
    )
    return replace(SavedActivations(config, "cuda", "fla").setting, kernels=kernels)


def without_op(kernels: Kernels) -> tuple[float, int]:
    """Bytes per token and number of kernels, the recurrence and the products' bytes left out."""
    number, moved = kernels.total(products=False)
    for name in ("wkv7", "wkv7_backward"):
        moved -= kernels.moved[name]
        number -= kernels.number[name]
    return moved / TOKENS, number + kernels.total(products=True)[0]


def planned(moved: Moved, setting: Setting, kind: str) -> list[tuple[float, int]]:
    passes = [
        (moved.forward.on(Degrees()), moved.forward_kernels),
        (moved.backward.on(Degrees()), moved.backward_kernels),
    ]
    if kind == "rwkv":
        op = moved_by_op(setting)
        passes[0] = passes[0][0] - op.forward.split, passes[0][1] - op.forward_kernels
        passes[1] = passes[1][0] - op.backward.split, passes[1][1] - op.backward_kernels
    return passes


@cache
def compiled_block(model: str, layer: int) -> Compiled:
    """Counts of a block of a model, as JSON, which several tests look at."""
    return count_compiled(ModelConfig.model_validate_json(model), layer, (BATCH, LENGTH))


def counted_passes(setting: Setting, layer: int, precision: str) -> tuple[Kernels, Kernels]:
    if setting.is_compiled:
        block = compiled_block(setting.model.model_dump_json(), layer)
        return block.forward, block.backward
    return count_block(
        setting.model,
        layer,
        batch=BATCH,
        length=LENGTH,
        dtype=TYPES[precision],
        is_fused=setting.runs_triton,
    )


def check(
    kind: str, layer: int, precision: str, *overrides: str, kernels: BlockKernels = "operators"
) -> None:
    setting = setting_of(kind, precision, *overrides, kernels=kernels)
    moved = block_moved(setting, layer, "whole", block_type(kind, setting.model))
    counted = counted_passes(setting, layer, precision)
    for guess, found in zip(planned(moved, setting, kind), counted, strict=True):
        bytes_per_token, number = without_op(found)
        assert guess[0] == pytest.approx(bytes_per_token, rel=0.02)
        assert guess[1] == pytest.approx(number, rel=0.25)


@pytest.mark.parametrize("kernels", ["operators", "own"])
@pytest.mark.parametrize("activation", ["squared_relu", "swiglu"])
@pytest.mark.parametrize("precision", TYPES)
@pytest.mark.parametrize(("kind", "layer"), [("rwkv", 0), ("rwkv", 1), ("transformer", 0),
                                             ("mamba", 0)])  # fmt: skip
def test_a_block_moves_what_its_type_tells(
    kind: str, layer: int, precision: str, activation: str, kernels: BlockKernels
) -> None:
    activated = f"model.ffn_activation={activation}"
    check(kind, layer, precision, "model.moe=null", activated, kernels=kernels)


@pytest.mark.parametrize("kernels", FORMS)
def test_few_keys_and_small_heads_are_counted(kernels: BlockKernels) -> None:
    sizes = ("model.num_kv_heads=4", "model.num_heads=32", "model.head_dim=64")
    check("transformer", 0, "bf16", "model.moe=null", *sizes, kernels=kernels)


# torch's fake grouped product takes bf16 alone
@pytest.mark.parametrize("kernels", FORMS)
@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("model.moe.drop_tokens=false",),
        ("model.moe.top_k=1", "model.ffn_activation=swiglu"),
        ("model.moe.top_k=8", "model.moe.num_experts=64", "model.moe.expert_hidden_size=768"),
    ],
)
def test_experts_move_what_the_feed_forward_tells(
    overrides: tuple[str, ...], kernels: BlockKernels
) -> None:
    check("transformer", 0, "bf16", *overrides, kernels=kernels)


@pytest.mark.parametrize("kernels", FORMS)
@pytest.mark.parametrize("choices", [1, 2])
def test_routing_mamba_moves_what_its_type_tells(choices: int, kernels: BlockKernels) -> None:
    routing = f"model.routing_mamba={{num_experts: 8, top_k: {choices}}}"
    check("routing_mamba", 0, "bf16", "model.moe=null", routing, kernels=kernels)


@pytest.mark.parametrize("activation", ["squared_relu", "swiglu"])
@pytest.mark.parametrize(("kind", "layer"), [("rwkv", 0), ("rwkv", 1), ("transformer", 0),
                                             ("mamba", 0)])  # fmt: skip
def test_a_compiled_block_moves_what_its_type_tells(kind: str, layer: int, activation: str) -> None:
    """Counted from what inductor has scheduled, bf16 alone."""
    activated = f"model.ffn_activation={activation}"
    check(kind, layer, "bf16", "model.moe=null", activated, kernels="compiled")


def test_recurrent_blocks_with_experts_are_the_sum_of_their_parts() -> None:
    check("rwkv", 1, "bf16", kernels="own")
    check("rwkv", 1, "bf16", kernels="compiled")


def test_the_triton_kernels_take_every_head_that_a_configuration_may_have() -> None:
    assert all(map(triton_launch.is_whole_head, HEAD_DIMS))


@pytest.mark.parametrize(
    ("kind", "layer", "overrides"),
    [
        ("rwkv", 0, ("model.moe=null",)),
        ("rwkv", 1, ("model.moe=null",)),
        ("rwkv", 1, ()),
        ("transformer", 0, ("model.moe=null", "model.ffn_activation=swiglu")),
        ("transformer", 0, ()),
        ("mamba", 0, ("model.moe=null",)),
    ],
)
def test_a_compiled_block_saves_what_is_told(
    kind: str, layer: int, overrides: tuple[str, ...]
) -> None:
    """The graph's values that its backward pass reads, those of parameters and v_first left out."""
    setting = setting_of(kind, "bf16", *overrides, kernels="compiled")
    saved = compiled_block(setting.model.model_dump_json(), layer).saved / TOKENS
    of_type = block_type(kind, setting.model)
    told = of_type.saved(setting, layer, "whole") + saved_by_feed_forward(setting, layer)
    stream = setting.element_bytes * setting.model.hidden_size
    # inputs of two norms, and the shift
    around = (3 if of_type.shifts_channels else 2) * stream
    assert told.on(Degrees()) + around == pytest.approx(saved, rel=0.01)


def test_every_type_is_held_to_a_count() -> None:
    assert set(BLOCK_TYPES) == {"rwkv", "transformer", "mamba", "routing_mamba"}


@pytest.mark.parametrize("precision", TYPES)
@pytest.mark.parametrize("vocab", [4_096, 50_272])
def test_the_loss_moves_what_is_told(precision: str, vocab: int) -> None:
    model: ModelConfig = setting_of("rwkv", precision, f"model.vocab_size={vocab}").model
    dtype = TYPES[precision]
    counted = count_loss(model, batch=BATCH, length=LENGTH, dtype=dtype)
    bytes_moved = counted.total(products=False)[1]
    assert loss_bytes(model, TOKENS, dtype.itemsize) == pytest.approx(bytes_moved, rel=0.01)


def test_gradients_are_summed_with_the_bytes_that_are_told() -> None:
    weight = torch.nn.Parameter(torch.zeros(64, 32, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    optimizer: Any = SimpleNamespace(
        immediate_grad_update=True,
        fp32_groups_gradients=[[torch.zeros(64, 32)]],
        fp32_groups_has_gradients=[[False]],
    )
    assert add_without_copies(SimpleNamespace(optimizer=optimizer))
    with counting() as kernels:
        optimizer.accumulate_hp_grads_and_remove_lp(weight, 0, 0)
    layout = Layout(Degrees(), 1, 1, 1, "none")
    held: dict[Group, int] = {"matrices": weight.numel()}
    told = accumulation_bytes(layout, held, element_bytes=2)
    assert told == kernels.total(products=False)[1] == 10 * weight.numel()
