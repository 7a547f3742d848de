"""The stages of a GPU day; each is a process that tools/gpu_day/run.py starts and may kill."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from cdrmix import runtime
from cdrmix.config.load import load_config
from tools.benchmark.run import ROOT

Row = dict[str, Any]
# Sizes of cdrmix-core-1b, and of the smoke form.
_LARGE = {"tokens": 8192, "length": 4096, "width": 2048, "expert": 4608, "vocabulary": 50272}
_SMALL = {"tokens": 64, "length": 32, "width": 64, "expert": 48, "vocabulary": 128}
_EXPERTS = 8
_HEADS = 16
_SECONDS_A_FIGURE = 0.25


class Bench:
    """Sizes and device of this process, and its clock."""

    def __init__(self, *, smoke: bool) -> None:
        self.smoke = smoke
        self.device = torch.device("cpu" if smoke else "cuda")
        self.sizes = _SMALL if smoke else _LARGE

    def randn(self, *shape: int) -> torch.Tensor:
        """Random bfloat16 values."""
        return torch.randn(*shape, device=self.device, dtype=torch.bfloat16)

    def milliseconds(self, action: Callable[[], object]) -> float:
        """Median time of an action on the device, after two calls to warm up; cold caches."""
        for _ in range(1 if self.smoke else 2):
            action()
        if self.smoke:
            began = time.perf_counter()
            action()
            return 1e3 * (time.perf_counter() - began)
        torch.cuda.synchronize()
        flush = torch.empty(2**28, dtype=torch.int8, device=self.device)  # four times the L2
        times: list[float] = []
        began = time.perf_counter()
        while len(times) < 3 or time.perf_counter() - began < _SECONDS_A_FIGURE:
            flush.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            action()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return statistics.median(times)


def attempt(name: str, figures: Callable[[], Row]) -> Row:
    """A row, or its failure: a form that cannot run here is a result too."""
    try:
        return {"name": name, **figures()}
    except Exception as error:
        return {"name": name, "failed": f"{type(error).__name__}: {str(error)[:200]}"}


def environment(bench: Bench) -> Iterator[Row]:
    """Versions, and the two ceilings: copies and matrix products."""
    facts = runtime.describe_environment()
    device = facts["device"].get("name", facts["device"]["kind"])
    versions = {name: str(facts["packages"][name]) for name in ("torch", "deepspeed")}
    yield {"name": "machine", "device": device, "python": facts["python"], **versions}
    size = 2**16 if bench.smoke else 2**32
    source = torch.empty(size, dtype=torch.int8, device=bench.device)
    target = torch.empty_like(source)
    took = bench.milliseconds(lambda: target.copy_(source))
    yield {"name": "copy", "tb_per_second": 2 * size / took / 1e9}
    width = 64 if bench.smoke else 8192
    a, b = bench.randn(2, width, width)
    took = bench.milliseconds(lambda: a @ b)
    yield {"name": f"matmul of {width}", "tflops": 2 * width**3 / took / 1e9}


def check(bench: Bench) -> Iterator[Row]:
    """Check fla's kernels here, by head size, packing and chunk."""
    from cdrmix.models import wkv7_fla

    for head, packed in ((128, False), (128, True), (64, False)):
        for tokens in (64, 32, 16):
            name = f"fla, head {head}, {'packed, ' if packed else ''}chunk {tokens}"
            kernel = wkv7_fla._kernel()
            if bench.smoke or isinstance(kernel, str):
                yield {"name": name, "not_run": kernel if isinstance(kernel, str) else "no GPU"}
                continue
            case = wkv7_fla._Case(torch.device("cuda", 0), torch.bfloat16, head, head, packed)
            problem = wkv7_fla._problem(case, tokens)
            yield {"name": name, "problem": problem or "none"}


def gemm(bench: Bench) -> Iterator[Row]:
    """Matrix products of the model: dense, low-rank, head, and grouped by expert."""
    n, d, f, v = (bench.sizes[k] for k in ("tokens", "width", "expert", "vocabulary"))
    low = 16 if bench.smoke else 128
    products = {
        "projection": (n, d, d),
        "weight of a projection": (d, n, d),
        "low rank, down": (n, d, low),
        "low rank, up": (n, low, d),
        "head": (n, d, v),
        "weight of the head": (v, n, d),
    }
    for name, (outer, inner, columns) in products.items():

        def dense(outer: int = outer, inner: int = inner, columns: int = columns) -> Row:
            a, b = bench.randn(outer, inner), bench.randn(inner, columns)
            took = bench.milliseconds(lambda: a @ b)
            return {"tflops": 2 * outer * inner * columns / took / 1e9}

        yield attempt(name, dense)
    rows = 2 * n
    balances = {"even": [1.0] * _EXPERTS, "skewed": [2.0, 1.5, 1.2, 1.0, 0.9, 0.7, 0.4, 0.3]}
    for balance, shares in balances.items():
        sizes = [int(rows * share / sum(shares)) for share in shares]
        sizes[0] += rows - sum(sizes)
        ends = torch.tensor(sizes, device=bench.device).cumsum(0).to(torch.int32)
        x, g, w = bench.randn(rows, d), bench.randn(rows, f), bench.randn(_EXPERTS, f, d)
        forms = {
            "experts up": partial(F.grouped_mm, x, w.mT, offs=ends),
            "gradient of their rows": partial(F.grouped_mm, g, w, offs=ends),
            "gradient of their weights": partial(F.grouped_mm, g.t(), x, offs=ends),
        }
        for name, action in forms.items():

            def grouped(action: Callable[[], object] = action) -> Row:
                return {"tflops": 2 * rows * d * f / bench.milliseconds(action) / 1e9}

            yield attempt(f"{name}, {rows} rows, {balance}", grouped)


def wkv(bench: Bench) -> Iterator[Row]:
    """The recurrence, forward and with backward, by form, head size and batch."""
    from cdrmix.models.wkv7 import wkv7
    from cdrmix.models.wkv7_reference import DECAY_BOUND

    length, width = bench.sizes["length"], bench.sizes["width"]
    cases = ((32, 1),) if bench.smoke else ((128, 2), (128, 4), (128, 8), (64, 2), (64, 8))
    for head, batch in cases:
        shape = (batch, length, width // head, head)
        r, k, v, kk = bench.randn(4, *shape)
        kk = F.normalize(kk.float(), dim=-1).bfloat16()
        rate = torch.rand_like(r)
        lw = -DECAY_BOUND * torch.rand(shape, device=bench.device)
        inputs = [x.detach().requires_grad_() for x in (r, lw, k, v, -kk, kk * rate)]
        weights = torch.randn_like(r)
        for form in ("fla", "chunked"):

            def figures(form: str = form, inputs: Any = inputs, weights: Any = weights) -> Row:
                def both() -> None:
                    y = wkv7(*inputs, backend=form)[0]
                    torch.autograd.grad(y, inputs, weights)

                forward = bench.milliseconds(lambda: wkv7(*inputs, backend=form))
                took = bench.milliseconds(both)
                a_token = 1e3 * took / (inputs[0].shape[0] * length)
                return {
                    "forward_ms": forward,
                    "both_ms": took,
                    "us_a_token_of_18_layers": 18 * a_token,
                }

            yield attempt(f"{form}, head {head}, batch {batch}", figures)


def step(bench: Bench) -> Iterator[Row]:
    """The whole model in the real trainer, variant by variant."""
    from tools.gpu_day.step import VARIANTS, step_rows

    # in small two: one that keeps activations, and one that computes them again
    variants = (*VARIANTS[:1], VARIANTS[3]) if bench.smoke else VARIANTS
    yield from step_rows(variants, steps=3 if bench.smoke else 6, smoke=bench.smoke)


def block(bench: Bench) -> Iterator[Row]:
    """One block of each kind, forward and with backward: time, and device time by kernel."""
    runtime.import_deepspeed()
    from cdrmix.models.block import Block

    file = ROOT / f"model_configs/cdrmix-core-{'tiny' if bench.smoke else '1b'}.yaml"
    config = load_config(file, ["model.moe.drop_tokens=false"]).model
    batch, length = 2, bench.sizes["length"]
    for layer, kind in ((1, "rwkv"), (3, "attention")):

        def figures(layer: int = layer) -> Row:
            torch.manual_seed(0)
            with bench.device:
                made = Block(config, layer)
                made.initialize(seed=0, std=config.init_std)
            made = made.to(torch.float32 if bench.smoke else torch.bfloat16)
            dtype = next(made.parameters()).dtype
            shape = (batch, length, config.hidden_size)
            x, first, grad = torch.randn(3, *shape, device=bench.device, dtype=dtype)
            x, first = x.requires_grad_(), first.requires_grad_()

            def both() -> None:
                y, _, statistics, *_ = made(x, first)
                ends = [y, statistics] if statistics.requires_grad else [y]
                torch.autograd.backward(ends, [grad, *map(torch.zeros_like, ends[1:])])
                made.zero_grad(set_to_none=True)

            took = bench.milliseconds(both)
            return {
                "forward_ms": bench.milliseconds(lambda: made(x, first)),
                "both_ms": took,
                "us_a_token": 1e3 * took / (batch * length),
                **({} if bench.smoke else _kernels(both)),
            }

        yield attempt(f"{kind} block", figures)


def _kernels(action: Callable[[], object]) -> Row:
    """Kernels of one call, their time on the device, and the ten that take longest."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        action()
        torch.cuda.synchronize()
    events = [e for e in profiled.key_averages() if e.self_device_time_total > 0]
    events.sort(key=lambda event: -event.self_device_time_total)
    return {
        "kernels": sum(event.count for event in events),
        "busy_ms": sum(event.self_device_time_total for event in events) / 1e3,
        "largest": [
            [event.key[:120], event.count, event.self_device_time_total / 1e3]
            for event in events[:10]
        ],
    }


def triton(bench: Bench) -> Iterator[Row]:
    """Our Triton kernels beside the eager forms, where their gradients pass."""
    from cdrmix.models.triton_checks import CASES
    from tools.benchmark.triton_kernels import measure

    if bench.smoke:  # its kernels need a GPU: their names alone
        yield from ({"name": name, "not_run": "no GPU"} for name in CASES)
        return
    for row in (measure(20) or {}).get("rows", []):
        yield {"name": row.pop("function"), **row}


def loss(bench: Bench) -> Iterator[Row]:
    """The head and cross-entropy, forward and backward."""
    from cdrmix.objectives.language_model import linear_cross_entropy

    n, d, v = (bench.sizes[k] for k in ("tokens", "width", "vocabulary"))
    hidden = bench.randn(n, d).requires_grad_()
    weight = (0.02 * bench.randn(v, d)).requires_grad_()
    labels = torch.randint(0, v, (n,), device=bench.device)

    def figures() -> Row:
        took = bench.milliseconds(
            lambda: torch.autograd.grad(
                linear_cross_entropy(hidden, weight, labels), (hidden, weight)
            )
        )
        return {"ms": took, "us_a_token": 1e3 * took / n, "tflops": 6 * n * d * v / took / 1e9}

    yield attempt("loss", figures)


def attention(bench: Bench) -> Iterator[Row]:
    """Causal attention, forward and backward, by kernel and determinism."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    length = bench.sizes["length"]
    for batch in (2, 4):
        qkv = [bench.randn(batch, _HEADS, length, 128).requires_grad_() for _ in range(3)]
        for backend in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION"):
            for is_deterministic in (True, False):

                def figures(
                    qkv: Any = qkv,
                    batch: int = batch,
                    backend: str = backend,
                    is_deterministic: bool = is_deterministic,
                ) -> Row:
                    torch.use_deterministic_algorithms(is_deterministic, warn_only=True)

                    def both() -> None:
                        with sdpa_kernel(getattr(SDPBackend, backend)):
                            q, k, v = qkv
                            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
                        torch.autograd.grad(y.sum(), qkv)

                    took = bench.milliseconds(both)
                    a_token = 1e3 * took / (batch * length)
                    return {"ms": took, "us_a_token_of_6_layers": 6 * a_token}

                told = "deterministic" if is_deterministic else "any order"
                yield attempt(f"{backend}, batch {batch}, {told}", figures)


def tests(bench: Bench) -> Iterator[Row]:
    """The tests of tests/gpu; in small they are collected only."""
    words = [sys.executable, "-m", "pytest", "tests/gpu", "-q", "-p", "no:cacheprovider"]
    words += ["--collect-only"] if bench.smoke else []
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    last = (done.stdout.strip().splitlines() or ["no output"])[-1]
    yield {"name": "tests/gpu", "exit_code": done.returncode, "summary": last}


_STAGES: dict[str, Callable[[Bench], Iterator[Row]]] = {
    each.__name__: each
    for each in (environment, check, gemm, wkv, step, block, triton, loss, attention, tests)
}


def main() -> None:
    """Run one stage; each row is written as it comes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=list(_STAGES))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    if not args.smoke and not torch.cuda.is_available():
        sys.exit("no GPU that torch can use here: `make gpu-day ARGS=--smoke` runs on CPUs")
    with (args.out / f"{args.name}.rows.jsonl").open("w", encoding="utf-8") as file:
        for row in _STAGES[args.name](Bench(smoke=args.smoke)):
            print(json.dumps(row), flush=True)
            file.write(json.dumps(row) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
