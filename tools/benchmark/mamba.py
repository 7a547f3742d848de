"""Forms of the selective scan in a Mamba mixer, and transformers' mixer, forward and backward.

On one thread in float32, 16 states: batch 4 of 256 tokens at width 128, batch 1 of 128 at width
1,024. The chunk of the chunked form was chosen by this.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cdrmix.config.model import ModelConfig
from cdrmix.models import mamba
from cdrmix.models.selective_scan import ScanInputs, scan_chunked, scan_reference
from tools.benchmark.timing import median_ratio, paired_cpu_seconds, report

SIZES = ((4, 256, 128), (1, 128, 1024))  # batch, tokens, width
CHUNKS = (4, 8, 16, 32, 64)
THEIRS = "transformers"


def make_mixer(width: int) -> mamba.Mamba:
    """Makes a mixer with initial values."""
    sizes = {"hidden_size": width, "num_layers": 1, "num_heads": width // 64, "vocab_size": 256}
    mixer = mamba.Mamba(ModelConfig.model_validate({**sizes, "mixers": ["mamba"]}))
    mixer.initialize(seed=0, name="mixer", std=0.02)
    return mixer


def make_theirs(width: int) -> nn.Module:
    """Makes transformers' mixer, which without its kernels runs in plain PyTorch."""
    from transformers import MambaConfig
    from transformers.models.mamba.modeling_mamba import MambaMixer

    return MambaMixer(MambaConfig(hidden_size=width, num_hidden_layers=1), layer_idx=0)


def steps(batch: int, tokens: int, width: int) -> dict[str, Callable[[], None]]:
    """Makes a forward and backward pass of each form."""
    x = torch.randn(batch, tokens, width, requires_grad=True)
    mixer, theirs = make_mixer(width), make_theirs(width)

    def with_form(form: Callable[..., tuple[Tensor, Tensor]]) -> None:
        def scan(
            inputs: ScanInputs, s0: Tensor | None, *, segment_ids: Tensor | None
        ) -> tuple[Tensor, Tensor]:
            return form(inputs, s0, segment_ids)

        mamba.selective_scan = scan  # type: ignore[assignment]
        mixer(x)[0].sum().backward()

    forms: dict[str, Callable[[], None]] = {
        "loop over tokens": functools.partial(with_form, scan_reference),
        THEIRS: lambda: theirs(x).sum().backward(),
    }
    for chunk in CHUNKS:
        form = functools.partial(scan_chunked, chunk_tokens=chunk)
        forms[f"chunks of {chunk}"] = functools.partial(with_form, form)
    return forms


def measure(rounds: int) -> dict[str, Any]:
    """Measures CPU milliseconds of each form, and how many times faster than theirs it is."""
    torch.set_num_threads(1)
    cases = []
    for batch, tokens, width in SIZES:
        seconds = paired_cpu_seconds(steps(batch, tokens, width), rounds=rounds)
        cases.append(
            {
                "batch": batch,
                "tokens": tokens,
                "width": width,
                "milliseconds": {k: 1e3 * statistics.median(v) for k, v in seconds.items()},
                "times_theirs": {k: median_ratio(seconds[THEIRS], v) for k, v in seconds.items()},
            }
        )
    return {"rounds": rounds, "cases": cases}


def show(result: dict[str, Any]) -> None:
    """Prints a table."""
    for case in result["cases"]:
        print(f"batch {case['batch']} of {case['tokens']} tokens, width {case['width']}")
        for form, time in case["milliseconds"].items():
            print(f"  {form:18} {time:8.1f} ms CPU {case['times_theirs'][form]:6.2f} times theirs")


if __name__ == "__main__":
    report(measure, show, rounds=5, description=__doc__)
