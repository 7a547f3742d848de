"""The MoE feed-forward against a dense one of equal active FLOPs, forward and backward.

2,048 tokens of width 384, 8 experts of width 1,024, top-2; the dense one has width 2,048. Both
float32 on one thread; the MoE side includes router, statistics, dispatch and combination, through
DeepSpeed's MoE layer on one rank.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from cdrmix import runtime
from cdrmix.config.model import ModelConfig
from tools.benchmark.timing import median_ratio, paired_cpu_seconds, report

TOKENS = 2048
HIDDEN = 384
INNER = 1024


def forward_and_backward(layer: nn.Module) -> Callable[[], None]:
    """A closure over one input that needs a gradient, as inside a model."""
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.02)
    x = torch.randn(1, TOKENS, HIDDEN, requires_grad=True)
    weights = torch.randn(1, TOKENS, HIDDEN)

    def run() -> None:
        out = layer(x)
        out = out[0] if isinstance(out, tuple) else out
        out.backward(weights)
        layer.zero_grad(set_to_none=True)
        x.grad = None

    return run


def measure(rounds: int) -> dict[str, Any]:
    """Median milliseconds of both and the paired ratio."""
    runtime.import_deepspeed()
    from cdrmix.models.feed_forward import FeedForward
    from cdrmix.models.moe import MoEFeedForward

    torch.set_num_threads(1)
    torch.manual_seed(0)
    shared: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "num_layers": 4,
        "num_heads": 3,
        "vocab_size": 256,
    }
    dense = FeedForward(ModelConfig.model_validate({**shared, "ffn_hidden_size": 2 * INNER}))
    mixture = MoEFeedForward(
        ModelConfig.model_validate(
            {**shared, "moe": {"num_experts": 8, "expert_hidden_size": INNER}}
        )
    )
    steps = {"dense": forward_and_backward(dense), "moe": forward_and_backward(mixture)}
    seconds = paired_cpu_seconds(steps, rounds=rounds, warmup=2)
    milliseconds = {name: 1e3 * statistics.median(times) for name, times in seconds.items()}
    ratio = median_ratio(seconds["moe"], seconds["dense"])
    return {"rounds": rounds, "milliseconds": milliseconds, "moe_over_dense": ratio}


def show(result: dict[str, Any]) -> None:
    """Print a line per layer."""
    for name, milliseconds in result["milliseconds"].items():
        print(f"{name:6} {milliseconds:8.1f} ms CPU")
    print(f"MoE takes {result['moe_over_dense']:.2f} of the dense time")


if __name__ == "__main__":
    report(measure, show, rounds=15, description=__doc__)
