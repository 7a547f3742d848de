"""Tells where the planned time of a step goes, for each shipped variant: nothing is measured.

    python -m tools.benchmark.planned_time [--json]

The plan of `cdrmix plan` on one cluster for each scale, split into what its time is made of, and
the step of cdrmix-core-1b on one H200 by what computes between its products. Takes seconds of CPU.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

from cdrmix.config.load import load_config, shipped
from cdrmix.planning.activations import SavedActivations
from cdrmix.planning.blocks.block_type import BlockKernels
from cdrmix.planning.blocks.rwkv import moved_by_op
from cdrmix.planning.cluster import GIB, Cluster, make_cluster
from cdrmix.planning.cost import Cost, CostModel, time_text
from cdrmix.planning.layout import Degrees, Layout
from cdrmix.planning.memory import MemoryModel
from cdrmix.planning.profile import choose
from cdrmix.planning.step_time import memory_seconds

# nodes, devices of a node, and device that each scale is planned on
CLUSTERS = {
    "1b": (1, 1, "h200-141"),
    "4b": (2, 8, "h100-80"),
    "40b": (8, 8, "h100-80"),
    "200b": (32, 8, "h100-80"),
}
FAMILIES = ("core", "reason")
# what a step of one H200 is told of, with what computes between the products
FORMS: dict[BlockKernels, str] = {
    "operators": "operators one by one",
    "own": "our Triton kernels: as it is",
    "compiled": "`training.compile: blocks`",
}
# Reasons of a plan that say why this layout; the others tell sizes.
_WHY = (
    *("profile", "tensor", "pipeline", "sequence 2", "sequence 4", "sequence 8", "expert"),
    *("micro batch", "activation checkpointing", "speed"),
)


def parts_of(cost: Cost) -> dict[str, float]:
    """Seconds of a step by what they go into; their sum is the step.

    Launches count as far as they take longer than what they start, and the exchange as far as it
    does not pass under computation. A pipeline's bubble is of computation and of what its stages
    exchange in each micro-step.
    """
    running = cost.product_seconds + cost.memory_seconds + cost.accumulation_seconds
    parts = {
        "products": cost.product_seconds,
        "bytes of blocks and loss": cost.memory_seconds,
        "sum of gradients": cost.accumulation_seconds,
        "launches": max(0.0, cost.compute_seconds - running),  # rounding leaves less than none
        "optimizer": cost.optimizer_seconds,
        "exchange": sum(cost.communication_seconds.values()) - cost.hidden_seconds,
    }
    return parts | {"bubble": cost.step_seconds - sum(parts.values())}


def variant_row(family: str, scale: str) -> dict[str, Any]:
    """The plan of a shipped variant, its time by part, and why its layout was picked."""
    nodes, devices, gpu = CLUSTERS[scale]
    config = load_config(shipped("model_configs") / f"cdrmix-{family}-{scale}.yaml")
    cluster = make_cluster(nodes=nodes, gpus_per_node=devices, gpu=gpu)
    plan = choose(config, cluster)
    memory, cost = plan.estimates()
    return {
        "name": config.name,
        "cluster": f"{nodes} x {devices} {gpu}",
        "layout": plan.describe(),
        "fits": plan.fits,
        "gib": memory.of_device(cluster) / GIB,
        "tokens_per_second": cost.tokens_per_second,
        "mfu": cost.mfu,
        "step_seconds": cost.step_seconds,
        "parts": parts_of(cost),
        "launching_seconds": cost.launch_seconds,
        "why": [reason for reason in plan.reasons if reason.startswith(_WHY)],
    }


def form_row(kernels: BlockKernels) -> dict[str, Any]:
    """The step of cdrmix-core-1b on one H200 with such kernels between its products.

    The layout is the one that the plan picks: ZeRO-1, two samples, nothing recomputed.
    """
    overrides = ["training.compile=blocks"] if kernels == "compiled" else []
    config = load_config(shipped("model_configs") / "cdrmix-core-1b.yaml", overrides)
    cluster = make_cluster(nodes=1, gpus_per_node=1, gpu="h200-141")
    memory = MemoryModel(config, cluster.device)
    activations = memory.activations
    assert isinstance(activations, SavedActivations), "the model is RWKX-V's"
    # that of GPUs where Triton's kernels fail their check cannot be configured
    activations.setting = replace(activations.setting, kernels=kernels)
    layout = Layout(Degrees(), 1, 2, config.training.global_batch_size // 2, "none")
    cost = CostModel(memory, cluster).estimate(layout)
    tokens = config.training.tokens_per_step
    return {
        "form": kernels,
        "gib": memory.estimate(layout).total / GIB,
        "tokens_per_second": cost.tokens_per_second,
        "mfu": cost.mfu,
        "us_a_token": 1e6 * cost.step_seconds / tokens,
        "of_recurrence": 1e6 * _seconds_of_recurrence(activations, cluster),
        "launching_us_a_token": 1e6 * cost.launch_seconds / tokens,
        "parts": {name: 1e6 * each / tokens for name, each in parts_of(cost).items()},
    }


def _seconds_of_recurrence(activations: SavedActivations, cluster: Cluster) -> float:
    """Seconds a token in which the WKV-7 ops of all layers read and write."""
    moved = moved_by_op(activations.setting)
    each = moved.forward.on(Degrees()) + moved.backward.on(Degrees())
    layers = activations.model.layer_kinds().count("rwkv")
    return memory_seconds(layers * each, cluster)


def measure() -> dict[str, Any]:
    """Rows of docs/benchmarks.md."""
    rows = [variant_row(family, scale) for scale in CLUSTERS for family in FAMILIES]
    return {"rounds": 1, "rows": rows, "forms": [form_row(kernels) for kernels in FORMS]}


def planned_time_rows(result: dict[str, Any]) -> list[str]:
    """Lines of the page: an H200 by part, all variants, and why their layouts were picked."""
    forms = {form["form"]: form for form in result["forms"]}
    names = list(next(iter(forms.values()))["parts"])
    rows = [
        "Planned, not measured: what `cdrmix plan` makes of FLOPs, bytes, launches and links. "
        "Bytes and launches of blocks are counted (`python -m tools.benchmark.block_bytes`), but "
        "for the WKV-7 op's, which are assumed. Microseconds a token of `cdrmix-core-1b` on one "
        "H200, ZeRO-1, micro batch 2, nothing recomputed:",
        "",
        f"| | {' | '.join(FORMS[form] for form in forms)} |",
        f"|---|{'---|' * len(forms)}",
    ]

    def line(name: str, key: str, form: str) -> str:
        return f"| {name} | {' | '.join(format(each[key], form) for each in forms.values())} |"

    for name in names:
        figures = (f"{each['parts'][name]:.2f}" for each in forms.values())
        rows.append(f"| {name} | {' | '.join(figures)} |")
        if name == "bytes of blocks and loss":
            rows.append(line("of these, the WKV-7 op", "of_recurrence", ".2f"))
    rows += [
        line("sum", "us_a_token", ".2f"),
        line("tokens per second", "tokens_per_second", ",.0f"),
        line("MFU", "mfu", ".1%"),
        line("GiB of 139.7", "gib", ".1f"),
        line("the host launches in", "launching_us_a_token", ".2f"),
    ]
    rows += [
        "",
        "Launches count where they take longer than what they start; here they are hidden. All "
        "shipped variants, each on one cluster; parts in per cent of the step:",
        "",
        f"| variant | cluster | step | tokens/s | MFU | GiB | {' | '.join(names)} |",
        f"|---|---|---|---|---|---|{'---|' * len(names)}",
    ]
    for row in result["rows"]:
        shares = (f"{each / row['step_seconds']:.0%}" for each in row["parts"].values())
        rows.append(
            f"| {row['name']} | {row['cluster']} | {time_text(row['step_seconds'])} "
            f"| {row['tokens_per_second']:,.0f} | {row['mfu']:.1%} | {row['gib']:.1f} "
            f"| {' | '.join(shares)} |"
        )
    rows += ["", "The layouts, and why:", ""]
    told: dict[str, list[str]] = {}  # variants by layout and reasons: those of a scale are alike
    for row in result["rows"]:
        fits = "" if row["fits"] else "; it does NOT fit"
        told.setdefault(f"{row['layout']}{fits}. {'; '.join(row['why'])}.", []).append(row["name"])
    return [*rows, *(f"- {', '.join(alike)}: {text}" for text, alike in told.items())]


def main() -> None:
    """Print the tables, or JSON with --json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, help=argparse.SUPPRESS)  # nothing is measured
    arguments = parser.parse_args()
    result = measure()
    print(json.dumps(result) if arguments.json else "\n".join(planned_time_rows(result)))


if __name__ == "__main__":
    main()
