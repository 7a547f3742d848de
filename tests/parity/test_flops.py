"""FLOPs of the plan against torch's counter, and against every operation of the recurrences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from cdrmix.config.load import load_config, shipped
from cdrmix.config.model import ModelConfig
from cdrmix.hf.model import HuggingFaceModel
from cdrmix.models.backbone import Backbone
from cdrmix.models.selective_scan import ScanInputs, scan_reference
from cdrmix.models.wkv7_reference import wkv7_reference
from cdrmix.planning.blocks.block_type import block_type
from cdrmix.planning.blocks.mamba import mamba_sizes
from cdrmix.planning.counts import count, forward_flops_by_layer, head_flops
from tests.hf_models import VOCAB_SIZE, make_folder
from tests.hf_runs import Case, loaded, make_config

LENGTH, BATCH = 24, 2
TOKENS = LENGTH * BATCH
# Two blocks of gated feed-forwards, with fewer heads of keys than of queries: Llama's.
LLAMA = {
    "num_layers": 2,
    "transformer_fraction": 1.0,
    "moe": None,
    "num_kv_heads": 2,
    "ffn_activation": "swiglu",
    "ffn_hidden_size": 192,
}
TINY = load_config(shipped("model_configs") / "cdrmix-core-tiny.yaml").model


class Scores(nn.Module):
    """Sum of all scores of a model."""

    def __init__(self, backbone: Any, score: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.backbone, self.score = backbone, score

    def forward(self, ids: Tensor) -> Tensor:
        """Runs ids [B, T]."""
        return self.score(self.backbone(ids).hidden).sum()


def counted(model: nn.Module, vocab_size: int, backend: SDPBackend) -> tuple[int, int]:
    """FLOPs of a forward and of a backward pass by torch's counter."""
    ids = torch.randint(0, vocab_size, (BATCH, LENGTH))
    with sdpa_kernel(backend):
        with FlopCounterMode(display=False) as forward:
            total = model(ids)
        with FlopCounterMode(display=False) as backward:
            total.backward()
    return forward.get_total_flops(), backward.get_total_flops()


def beyond_causal(model: ModelConfig, width: int) -> int:
    """FLOPs per token of scores, and of mixing, above the diagonal: attention as matrix products
    computes them, and the plan does not count them."""
    return model.num_layers * 2 * LENGTH * width


def test_the_plan_counts_blocks_like_llamas_as_torch_does() -> None:
    model = ModelConfig.model_validate(TINY.model_dump() | LLAMA)
    backbone = Backbone(model)
    forward, backward = counted(
        Scores(backbone, backbone.embedding.logits), model.vocab_size, SDPBackend.MATH
    )
    planned = sum(forward_flops_by_layer(model, LENGTH)) + head_flops(model)
    extra = beyond_causal(model, model.hidden_size)
    assert forward == TOKENS * (planned + extra)
    assert backward == 2 * forward
    assert TOKENS * count(model, LENGTH).train_flops_per_token == 3 * (forward - TOKENS * extra)
    # A control, and why attention runs as matrix products here: the fused one is not counted.
    fused, _ = counted(
        Scores(backbone, backbone.embedding.logits), model.vocab_size, SDPBackend.FLASH_ATTENTION
    )
    assert fused == TOKENS * (planned - extra)


def test_the_plan_counts_a_llama_of_transformers_as_torch_does(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "llama", "llama")
    model = make_config(Case(""), folder).model
    causal = loaded(folder)
    wrapped = HuggingFaceModel(causal, model)
    forward, backward = counted(
        Scores(wrapped, wrapped.embedding.logits), VOCAB_SIZE, SDPBackend.MATH
    )
    planned = sum(forward_flops_by_layer(model, LENGTH)) + head_flops(model)
    width = causal.config.num_attention_heads * causal.config.head_dim
    extra = beyond_causal(model, width)
    assert forward == TOKENS * (planned + extra)
    assert backward == 2 * forward


class Operations(TorchDispatchMode):
    """Counts the additions and multiplications of all operations, one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Runs an operation."""
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if name in ("mm", "bmm"):
            inner = args[0].shape[-1]
            self.total += result.numel() * (2 * inner if inner > 1 else 1)
        elif name in ("add", "sub", "mul"):
            self.total += result.numel()
        return result


def of_recurrence(run: Callable[[int], Any]) -> float:
    """Additions and multiplications that one more token takes."""
    totals = []
    for length in (3, 7):
        with Operations() as operations:
            run(length)
        totals.append(operations.total)
    return (totals[1] - totals[0]) / 4


def test_the_plan_counts_wkv7_as_the_loop_computes_it() -> None:
    heads, size = TINY.num_heads, TINY.head_dim

    def run(length: int) -> None:
        inputs = torch.zeros(6, 1, length, heads, size).unbind()
        wkv7_reference(inputs)

    planned = block_type("rwkv").mixing_flops(TINY, LENGTH)
    assert of_recurrence(run) == planned == 9 * TINY.hidden_size * size


def test_the_plan_counts_the_selective_scan_as_the_loop_computes_it() -> None:
    model = ModelConfig.model_validate(TINY.model_dump() | {"mixers": ["mamba"] * TINY.num_layers})
    sizes = mamba_sizes(model)
    inner, states = sizes.expand * model.hidden_size, sizes.state_size

    def run(length: int) -> None:
        wide = torch.zeros(1, length, inner)
        vector = torch.zeros(inner)
        shared = torch.zeros(1, length, states)
        rates = torch.zeros(inner, states)
        scan_reference(ScanInputs(wide, wide, vector, rates, shared, shared, vector, wide))

    convolution = 2 * sizes.conv_size * inner
    planned = block_type("mamba").mixing_flops(model, LENGTH) - convolution
    # Beside the states: bias, what enters, the way past the states (2) and the gate, of each
    # feature once a token.
    assert of_recurrence(run) == planned + 5 * inner
    assert planned == 6 * inner * states
