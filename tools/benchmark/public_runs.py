"""Predicts published training runs with the time model of `cdrmix plan`.

    python -m tools.benchmark.public_runs [--json] [--efficiency 0.5]

The runs are in public_runs.toml, each with its source. This is a composer of its own beside
`CostModel.estimate`, as their software is other: layouts of FSDP and Megatron, fused kernels,
collectives beside products. Their work becomes seconds by the functions of a plan
(planning/step_time.py), and bytes of attention, routing, activations and time mixing are those that
a plan counts of compiled or fused blocks. One number for each kind of device is fitted, the share
of the peak that products reach, on the runs that say so.
tests/unit/test_public_runs.py holds the errors of all others.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cdrmix.planning.blocks.attention import attention_moved
from cdrmix.planning.blocks.feed_forward import activation_moved_fused, routing_moved_compiled
from cdrmix.planning.blocks.rwkv import time_mix_moved_fused
from cdrmix.planning.cluster import PRESETS, Cluster, make_cluster
from cdrmix.planning.step_time import (
    Work,
    exchange_seconds,
    hidden_seconds,
    memory_seconds,
    pipeline_seconds,
    ring_bandwidth,
    seconds_of,
)

_DATA = Path(__file__).with_suffix(".toml")
_ELEMENT = 2  # bytes of an activation: all runs are in bf16, FP8 for matrices alone
# Bytes for each score of the loss: one kernel that reads and writes bf16 in each pass, or the
# float32 passes of PyTorch without a compiler.
_LOSS_FUSED, _LOSS = 12, 28
# Optimizer: AdamW, norm, clipping and cast on a rank's share (planning/state_traffic.py).
_OPTIMIZER_BYTES = 46
# Megatron adds the gradient to float32 inside the product: read and written once.
_FUSED_SUM_BYTES = 8
# Elements that are reduced behind a backward pass: a bucket of ZeRO-2, as Lightning sets it.
_BUCKET_ELEMENTS = 2e8
# Kernels of a block forward and backward, fused and not, and of one with experts.
_KERNELS = {(True, False): 45, (False, False): 140, (True, True): 200, (False, True): 260}


@dataclass(frozen=True)
class Model:
    """Sizes of a published model; the fields are explained in public_runs.toml."""

    name: str
    layers: int
    width: int
    heads: int
    ffn: str
    inner: int
    vocab: int
    kv_heads: int = 0
    head_dim: int = 0
    value_dim: int = 0
    mixer_params: int = 0
    experts: int = 0
    top_k: int = 1
    most_nodes: int = 0
    shared_inner: int = 0
    dense_layers: int = 0
    dense_inner: int = 0
    attention_layers: int | None = None
    ffn_layers: int | None = None
    full_attention: float = 1.0
    rotates: bool = True
    biases: bool = False
    tied: bool = False
    is_rwkv: bool = False
    mamba_layers: int = 0
    mamba_inner: int = 0
    mamba_states: int = 0
    mamba_groups: int = 0
    mamba_heads: int = 0

    @property
    def query_width(self) -> int:
        """Features of all query heads."""
        return self.heads * (self.head_dim or self.width // self.heads)

    @property
    def value_width(self) -> int:
        """Features of all heads' values."""
        return self.heads * self.value_dim if self.value_dim else self.query_width

    @property
    def kv_width(self) -> int:
        """Features of the keys of all heads."""
        return self.query_width * (self.kv_heads or self.heads) // self.heads

    @property
    def matrices(self) -> int:
        """Matrices of a feed-forward."""
        return 3 if self.ffn == "swiglu" else 2

    def mixers(self) -> int:
        """Number of layers with attention, or with RWKV-7's time mixing."""
        return self.layers if self.attention_layers is None else self.attention_layers

    def feed_forwards(self) -> int:
        """Number of layers with a feed-forward."""
        return self.layers if self.ffn_layers is None else self.ffn_layers

    def mixer_elements(self) -> int:
        """Matrix parameters of all mixers."""
        each = self.mixer_params
        if not each:
            each = 2 * self.width * (self.query_width + self.kv_width)
        entering = 2 * self.mamba_inner + 2 * self.mamba_groups * self.mamba_states
        mamba = self.width * (entering + self.mamba_heads + self.mamba_inner)
        return self.mixers() * each + self.mamba_layers * mamba

    def dense_elements(self) -> int:
        """Matrix parameters of dense and shared feed-forwards, and of routers."""
        of_inner = self.matrices * self.width
        if not self.experts:
            return self.feed_forwards() * of_inner * self.inner
        routed = self.feed_forwards() - self.dense_layers
        shared = routed * (of_inner * self.shared_inner + self.width * self.experts)
        return self.dense_layers * of_inner * self.dense_inner + shared

    def expert_elements(self) -> int:
        """Parameters of all experts."""
        routed = self.feed_forwards() - self.dense_layers
        return routed * self.experts * self.matrices * self.width * self.inner

    def mixing_flops(self, length: int) -> float:
        """Forward FLOPs per token of all mixers beside their matrices, causal attention halved."""
        if self.is_rwkv:
            return self.layers * 9 * self.width * (self.width // self.heads)
        attention = length * (self.query_width + self.value_width) * self.full_attention
        return self.mixers() * attention + self.mamba_layers * 5 * self.mamba_inner * (
            self.mamba_states
        )

    def matrix_flops(self) -> float:
        """Forward FLOPs per token of all matrices of the layers."""
        used = self.expert_elements() * self.top_k / max(1, self.experts)
        return 2 * (self.mixer_elements() + self.dense_elements() + used)

    def head_flops(self) -> float:
        """Forward FLOPs per token of the head."""
        return 2 * self.width * self.vocab

    def train_flops(self, length: int) -> float:
        """FLOPs per token without recomputation."""
        return 3 * (self.matrix_flops() + self.mixing_flops(length) + self.head_flops())

    def moved(self, *, fused: bool) -> tuple[float, float]:
        """Elements per token that kernels beside products move forward and backward, all layers."""
        halves = self.mixers() + self.mamba_layers + self.feed_forwards()
        around = (4, 4) if fused else (5, 6)  # of the stream: norm and residual sum
        forward, backward = (float(halves * each * self.width) for each in around)
        for number, (ahead, back) in self._parts(fused=fused):
            forward, backward = forward + number * ahead, backward + number * back
        return forward, backward

    def _parts(self, *, fused: bool) -> Iterable[tuple[int, tuple[float, float]]]:
        """Number of mixers and of feed-forwards, with what each moves forward and backward."""
        if self.is_rwkv:
            forward, backward = time_mix_moved_fused(self.width)
            yield self.layers, (forward + 2 * self.width, backward + 3 * self.width)
        else:
            yield self.mixers(), self._of_attention(fused=fused)
        if self.mamba_layers:
            convolved = self.mamba_inner + 2 * self.mamba_groups * self.mamba_states
            # convolution, scan, gated norm: each reads its inputs and writes its output
            each = 2 * convolved + convolved + self.mamba_inner + 3 * self.mamba_inner
            yield self.mamba_layers, (each, 2 * each)
        forward, backward = activation_moved_fused(is_gated=self.ffn == "swiglu")
        if not fused and self.ffn == "swiglu":  # silu and product apart
            forward, backward = 5, 9
        routed = self.feed_forwards() - self.dense_layers if self.experts else 0
        dense = self.feed_forwards() - routed
        inner = self.dense_inner or self.inner
        yield dense, (forward * inner, backward * inner)
        inner = self.top_k * self.inner + self.shared_inner
        to_rows, back = routing_moved_compiled(self.width, self.top_k)
        if self.biases:  # of experts, spread over their rows, weighted in float32, and added
            to_rows += self.top_k * (8 * self.inner + 10 * self.width)
            back += self.top_k * (2 * self.inner + 4 * self.width)
        yield routed, (forward * inner + to_rows, backward * inner + back)

    def _of_attention(self, *, fused: bool) -> tuple[float, float]:
        query, kv = self.query_width, self.kv_width
        if not self.rotates:  # the kernel alone, behind one product for all three inputs
            return 2 * (query + kv), 4 * (query + kv)
        return attention_moved(query, kv, compiled=fused)


@dataclass(frozen=True)
class Run:
    """A published run; the fields are explained in public_runs.toml."""

    name: str
    source: str
    model: str
    device: str
    gpus: int
    length: int
    micro_batch: int
    micro_steps: int
    shards: str
    tokens_per_second: float = 0.0
    mfu: float = 0.0
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    parts: int = 1
    rounds: int = 1
    again: float = 0.0
    fused: bool = False
    fp8: bool = False
    sends_once: bool = False
    overlaps: bool = False
    gathers_once: bool = False
    fitted: bool = False
    held: bool = True

    @property
    def ranks(self) -> int:
        """Data ranks, those of a context included."""
        return self.gpus // (self.tensor * self.pipeline)


@dataclass(frozen=True)
class Record:
    """Everything of public_runs.toml."""

    sources: Mapping[str, str]
    devices: Mapping[str, Mapping[str, Any]]
    models: Mapping[str, Model]
    runs: tuple[Run, ...]


def read_record() -> Record:
    """Reads models and runs."""
    given = tomllib.loads(_DATA.read_text(encoding="utf-8"))
    models = {name: Model(name, **sizes) for name, sizes in given["models"].items()}
    runs = tuple(Run(**each) for each in given["runs"])
    return Record(given["sources"], given["devices"], models, runs)


def cluster_of(run: Run, record: Record, efficiency: float | None = None) -> tuple[Cluster, float]:
    """Cluster of a run and the peak of its products in bf16; another efficiency if given."""
    device = record.devices[run.device]
    per_node = min(8, run.gpus)
    cluster = make_cluster(nodes=run.gpus // per_node, gpus_per_node=per_node, gpu=device["preset"])
    bandwidth = device.get("memory_bandwidth", cluster.memory_bandwidth)
    share = cluster.efficiency if efficiency is None else efficiency
    cluster = replace(cluster, memory_bandwidth=bandwidth, efficiency=share)
    return cluster, cluster.peak_flops["bf16"] * device.get("peak_share", 1.0)


def _work(run: Run, model: Model, tokens: float) -> Work:
    """Work of a rank in a micro-step, on a stage with an equal share of layers and head."""
    spread = run.tensor * run.pipeline
    passes = 3 + run.again
    # FP8 runs matrices at twice the peak; attention, recurrences and the head stay in bf16
    matrices = passes * model.matrix_flops() / (2 if run.fp8 else 1)
    others = passes * model.mixing_flops(run.length) + 3 * model.head_flops()
    forward, backward = model.moved(fused=run.fused)
    of_loss = model.vocab * (_LOSS_FUSED if run.fused else _LOSS)
    moved = _ELEMENT * ((1 + run.again) * forward + backward) + of_loss
    kernels = _KERNELS[run.fused, model.experts > 0] * (1 + run.again / 3)
    return Work(
        tokens * (matrices + others) / spread,
        tokens * moved / spread,
        model.layers / run.pipeline * kernels,
    )


def _exchange_seconds_of_byte(run: Run, model: Model, cluster: Cluster) -> float:
    """Time in which a byte of every token reaches its experts."""
    plain = exchange_seconds(model.top_k, cluster, run.expert)
    nodes = run.expert // cluster.gpus_per_node
    if not run.sends_once or nodes < 2:
        return plain
    # a token goes once to each node on which it has experts, and on from there by NVLink
    reached = nodes * (1 - (1 - 1 / nodes) ** model.top_k)
    reached = min(reached, model.most_nodes or nodes)
    between = reached * (1 - 1 / nodes) / cluster.inter_bandwidth
    return max(between, model.top_k / cluster.intra_bandwidth)


def _held(run: Run, model: Model) -> tuple[float, float]:
    """Parameters of a rank before sharding: all but experts, and experts."""
    ends = (1 if model.tied else 2) * model.width * model.vocab
    dense = (model.mixer_elements() + model.dense_elements() + ends) / (run.tensor * run.pipeline)
    return dense, model.expert_elements() / (run.pipeline * run.expert)


def predict(run: Run, record: Record, efficiency: float | None = None) -> float:
    """Tokens per second of one GPU; with another efficiency than the preset's if it is given."""
    cluster, peak = cluster_of(run, record, efficiency)
    model = record.models[run.model]
    tokens = run.micro_batch * run.length / run.context
    work = _work(run, model, tokens)
    dense, experts = _held(run, model)
    groups = max(1, run.ranks * run.tensor // run.expert)  # data ranks of an expert
    rings = [(dense, run.ranks, run.tensor), (experts, groups, run.expert)]
    shards = dense / run.ranks + experts / groups
    # bytes a parameter: weights gathered for both passes and float32 gradients, or bf16 ones
    beside = once = reducing = 0.0
    for elements, ranks, stride in rings:
        if ranks == 1 or not elements:
            continue
        ring = (1 - 1 / ranks) / ring_bandwidth(cluster, ranks, stride=stride)
        if run.shards == "parameters" and not run.gathers_once:
            beside += (2 * _ELEMENT + 4) * elements * ring
        elif run.shards == "gradients":
            reducing += 2 * _ELEMENT * elements * ring
        else:
            once += (_ELEMENT + 4) * elements * ring
    if run.shards == "optimizer":
        work = work + Work(0, _FUSED_SUM_BYTES * (dense + experts), 0)
    compute = seconds_of(work, cluster, peak)
    waits = 0.0
    stream = tokens * model.width * _ELEMENT
    if run.tensor > 1:  # gathered and scattered around both halves, in each pass
        rounds = model.layers / run.pipeline * (8 + 2 * run.again)
        passed = stream * rounds * (1 - 1 / run.tensor) / ring_bandwidth(cluster, run.tensor)
        if run.overlaps:
            beside += passed
        else:
            waits += passed
    if run.expert > 1:  # rows there and back, in each pass
        routed = (model.feed_forwards() - model.dense_layers) / run.pipeline
        payload = stream * routed * (4 + 2 * run.again) / run.tensor
        waits += payload * _exchange_seconds_of_byte(run, model, cluster)
    if run.overlaps:  # under the backward pass, as many products as its share
        backward = compute * (2 + run.again) / (3 + run.again)
        last = min(1.0, _BUCKET_ELEMENTS / (dense + experts))
        reducing -= hidden_seconds(reducing, backward, last=last)
    micro_step = max(compute, beside) + waits + reducing
    step = run.rounds * pipeline_seconds(
        micro_step, micro_steps=run.micro_steps, stages=run.pipeline, parts=run.parts
    )
    step += once + memory_seconds(_OPTIMIZER_BYTES * shards, cluster)
    samples = run.rounds * run.micro_steps * run.micro_batch * run.ranks / run.context
    return samples * run.length / step / run.gpus


def published(run: Run, record: Record) -> float:
    """Tokens per second of one GPU as published, or from its published MFU."""
    if run.tokens_per_second:
        return run.tokens_per_second
    peak = PRESETS[record.devices[run.device]["preset"]].peak_flops["bf16"]
    return run.mfu * peak / record.models[run.model].train_flops(run.length)


def errors(
    record: Record, runs: Iterable[Run], efficiency: float | None = None
) -> list[tuple[Run, float]]:
    """Relative error of each prediction."""
    return [(run, predict(run, record, efficiency) / published(run, record) - 1) for run in runs]


def fit(record: Record, kind: str) -> float:
    """Efficiency, to two digits, with the least squares of the fitted runs' logarithmic errors."""
    runs = [run for run in record.runs if run.fitted and kind_of(run) == kind]

    def off(efficiency: float) -> float:
        return sum(math.log1p(error) ** 2 for _, error in errors(record, runs, efficiency))

    return min((n / 100 for n in range(30, 90)), key=off)


def kind_of(run: Run) -> str:
    """Kind of a run's device: H100 and H200 are one."""
    return "a100" if run.device.startswith("a100") else "hopper"


def public_rows(result: dict[str, Any]) -> list[str]:
    """Lines of the page: each run, and the errors of those that nothing is fitted on."""
    rows = [
        "Tokens per second of a GPU as published, and as the time model of `cdrmix plan` predicts "
        "them (`planning/step_time.py`). The only number that is fitted is the share of the peak "
        "that products reach: "
        + ", ".join(f"{share:.2f} for {kind}" for kind, share in result["fits"].items())
        + ", each by least squares on the runs marked *. Assumed and not fitted are "
        "90 % of the data sheet's memory bandwidth and 5 us a launch. MFU counts causal attention "
        "half. Sizes, layouts and sources of all runs stand in `tools/benchmark/public_runs.toml`.",
        "",
        "| run | GPUs | published | predicted | error | MFU | source |",
        "|---|---|---|---|---|---|---|",
    ]

    def line(row: dict[str, Any]) -> str:
        mark = " *" if row["fitted"] else ""
        return (
            f"| {row['name']}{mark} | {row['gpus']:,} {row['device']} | {row['published']:,.0f} "
            f"| {row['predicted']:,.0f} | {row['error']:+.0%} | {row['mfu']:.0%} "
            f"| {row['source']} |"
        )

    rows += [line(row) for row in result["rows"] if row["held"]]
    kept_out = [abs(row["error"]) for row in result["rows"] if row["held"] and not row["fitted"]]
    rows += [
        "",
        f"Of the {len(kept_out)} runs that nothing is fitted on, the median is off by "
        f"{statistics.median(kept_out):.1%} (demanded: 15 %), the worst by {max(kept_out):.1%} "
        "(35 %). `h100_500w` are Meta's H100 of 2.4 TB/s at 500 W, whose peak is scaled by "
        "500 / 700.",
        "",
        "These are predictions of a composer of its own (`tools/benchmark/public_runs.py`), not "
        "of `CostModel.estimate`, which knows the layouts of DeepSpeed and the blocks of this "
        "project alone. Both share the presets, all of `planning/step_time.py` (products, "
        "memory, launches, rings, all-to-alls, what is hidden, the pipeline), and bytes of "
        "attention and routing as compiled, of activations, of norms and of RWKV-7's time "
        "mixing as fused kernels. The composer has its own sizes and FLOPs of the published "
        "models, bytes of the loss, of Megatron's sum of gradients and of the optimizer, "
        "kernels of a block, and layouts (FSDP, Megatron's tensor and interleaved pipeline "
        "ranks, DeepEP). So these runs hold the speed of products, memory and links, and no "
        "more: the plan's bytes of DeepSpeed's gradients, of our Triton kernels and of the loss "
        "are held by counts, its payloads by runs on CPU ranks, its bytes of the WKV-7 op by "
        "nothing yet.",
        "",
        "Which runs are fitted on was chosen after first trials of the model, and two facts of "
        "single runs (biases of GPT-OSS's experts, one copy of a token to each node) were put in "
        "after their errors were seen. Layouts of arXiv 2205.05198 are from memory of the paper, "
        "its MFU from a page about it; the micro-batch of RWKV-7 is assumed.",
        "",
        "Nothing is claimed of experts in FP8 on Hopper. The same model on the same GPUs is "
        "published at 5,113 and at 9,058 tokens per second in two releases a month apart, so that "
        "what bounds it is the host's software, which the model does not know:",
        "",
        "| run | GPUs | published | predicted | error | MFU | source |",
        "|---|---|---|---|---|---|---|",
        *(line(row) for row in result["rows"] if not row["held"]),
    ]
    return rows


def main() -> None:
    """Prints the runs with their errors, and what a fit gives."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--efficiency", type=float, help="in place of the presets'")
    parser.add_argument("--rounds", type=int, help=argparse.SUPPRESS)  # nothing is measured
    arguments = parser.parse_args()
    record = read_record()
    rows: list[dict[str, Any]] = []
    for run, error in errors(record, record.runs, arguments.efficiency):
        measured = published(run, record)
        peak = PRESETS[record.devices[run.device]["preset"]].peak_flops["bf16"]
        rows.append(
            {
                "name": run.name,
                "device": run.device,
                "gpus": run.gpus,
                "source": record.sources[run.source],
                "published": measured,
                "predicted": measured * (1 + error),
                "error": error,
                "mfu": measured * record.models[run.model].train_flops(run.length) / peak,
                "fitted": run.fitted,
                "held": run.held,
            }
        )
    fits = {kind: fit(record, kind) for kind in ("a100", "hopper")}
    if arguments.json:
        print(json.dumps({"rounds": 1, "rows": rows, "fits": fits}))
        return
    for row in rows:
        marks = "fitted" if row["fitted"] else "" if row["held"] else "not held"
        print(
            f"{row['name']:34} {row['gpus']:5} {row['device']:10} {row['published']:8,.0f} "
            f"{row['predicted']:8,.0f} {row['error']:+6.0%} MFU {row['mfu']:.0%} {marks}"
        )
    for title, chosen in (("all", rows), ("not fitted", [r for r in rows if not r["fitted"]])):
        sizes = [abs(row["error"]) for row in chosen if row["held"]]
        print(f"{title}: {len(sizes)} runs, median {statistics.median(sizes):.1%}, "
              f"worst {max(sizes):.1%}")  # fmt: skip
    print("fitted efficiency:", fits)


if __name__ == "__main__":
    main()
