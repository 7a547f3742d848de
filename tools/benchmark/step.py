"""One training step of the hybrid against Hugging Face models of equal active size.

Forward, backward and AdamW in float32 on one thread: D=256, 8 layers, vocabulary 8,192 tied,
2 sequences of 512 tokens. Prints medians of CPU time and paired ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from cdrmix import runtime
from cdrmix.config.model import ModelConfig
from cdrmix.models import wkv7 as wkv7_module
from cdrmix.planning.counts import count
from tools.benchmark.timing import matmul_peak_flops, median_ratio, paired_cpu_seconds

HIDDEN = 256
LAYERS = 8
VOCABULARY = 8192
BATCH = 2
LENGTH = 512
TOKENS = BATCH * LENGTH


def trainer(model: nn.Module, loss_of: Callable[[torch.Tensor], torch.Tensor]) -> Callable:
    """A closure that takes one optimizer step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1))

    def step() -> None:
        loss_of(ids).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def hugging_face(model: nn.Module) -> Callable:
    """A step of a Hugging Face causal language model."""
    return trainer(model, lambda ids: model(input_ids=ids[:, :-1], labels=ids[:, :-1]).loss)


def ours(config: ModelConfig, *, is_compiled: bool = False) -> Callable:
    """A step of the hybrid as the training loop takes it, with its router losses."""
    runtime.import_deepspeed()
    from cdrmix.engines.training_step import micro_step
    from cdrmix.models.backbone import Backbone
    from cdrmix.parallel.topology import ALONE

    model = Backbone(config, is_compiled=is_compiled)
    model.initialize(seed=0)
    run: Any = SimpleNamespace(model=config)  # all that a micro-step reads of a Config

    class Plain:
        """The backbone where the loop expects DeepSpeed's engine."""

        module = model

        def __call__(self, ids: torch.Tensor, **inputs: Any) -> object:
            return model(ids, **inputs)

    return trainer(
        model,
        lambda ids: (
            micro_step(Plain(), run, ALONE, ids[:, :-1], ids[:, 1:], nats_scale=1 / TOKENS).loss
        ),
    )


def models() -> tuple[dict[str, ModelConfig], dict[str, Callable]]:
    """Our configurations and the steps of all models.

    Llama and the dense hybrid have equally many parameters; Mixtral and the MoE hybrid have equally
    many active ones and in all, for which Mixtral's heads are 80 wide: all within 1 %.
    """
    shared: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "num_layers": LAYERS,
        "num_heads": 2,
        "vocab_size": VOCABULARY,
    }
    dense = ModelConfig.model_validate({**shared, "ffn_hidden_size": 912})
    mixture = ModelConfig.model_validate(
        {**shared, "moe": {"num_experts": 8, "top_k": 2, "expert_hidden_size": 520}}
    )
    common: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": True,
        "use_cache": False,
    }
    llama = LlamaForCausalLM(LlamaConfig(**common, intermediate_size=688))
    mixtral = MixtralForCausalLM(
        MixtralConfig(
            **common,
            head_dim=80,
            intermediate_size=344,
            num_local_experts=8,
            num_experts_per_tok=2,
        )
    )
    steps = {
        "Hugging Face Llama": hugging_face(llama),
        "Hugging Face Mixtral": hugging_face(mixtral),
    }
    return {"hybrid dense": dense, "hybrid MoE": mixture}, steps


def with_backend(step: Callable, backend: str) -> Callable:
    """The step with one backend of the WKV op."""
    import cdrmix.models.rwkv7 as rwkv7

    def run() -> None:
        original = rwkv7.wkv7
        rwkv7.wkv7 = lambda *args, **kwargs: wkv7_module.wkv7(*args, **kwargs, backend=backend)
        try:
            step()
        finally:
            rwkv7.wkv7 = original

    return run


def measure(rounds: int, backends: list[str]) -> dict[str, Any]:
    """Medians, paired ratios and MFU."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    configs, steps = models()
    for name, config in configs.items():
        step = ours(config)
        for backend in backends:
            steps[f"{name}, {backend}"] = with_backend(step, backend)
    peak = matmul_peak_flops()
    seconds = paired_cpu_seconds(steps, rounds=rounds, warmup=2)
    rows = []
    for name, times in seconds.items():
        row: dict[str, Any] = {
            "model": name,
            "tokens_per_cpu_second": TOKENS / statistics.median(times),
        }
        for kind, config in configs.items():
            if name.startswith(kind):
                peer = "Hugging Face Mixtral" if config.moe else "Hugging Face Llama"
                flops = count(config, LENGTH).train_flops_per_token * TOKENS
                row["peer"] = peer
                row["ratio"] = median_ratio(seconds[peer], times)
                row["mfu"] = flops / statistics.median(times) / peak
        rows.append(row)
    return {"peak_gflops": peak / 1e9, "rounds": rounds, "rows": rows}


def main() -> None:
    """Print a table, or JSON with --json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--backends", nargs="+", default=["chunked", "cpp"])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = measure(args.rounds, args.backends)
    if args.json:
        print(json.dumps(result))
        return
    print(f"float32 matmul peak of this thread: {result['peak_gflops']:.1f} GFLOP/s")
    print(f"{'model':28} {'tok/CPU-s':>10} {'to its peer':>12} {'MFU':>7}")
    for row in result["rows"]:
        ratio = f"{row['ratio']:.2f}" if "ratio" in row else ""
        mfu = f"{row['mfu']:.1%}" if "mfu" in row else ""
        print(f"{row['model']:28} {row['tokens_per_cpu_second']:10.0f} {ratio:>12} {mfu:>7}")


if __name__ == "__main__":
    main()
