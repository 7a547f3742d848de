"""Two ranks as data, tensor, sequence or pipeline ranks, at equal work.

A model of four blocks takes the same global batches in each layout; layouts take turns. Two numbers
of each, against data ranks: wall time, in which ranks wait for each other, and CPU time of both
ranks, in which exchanges and repeated work show. On one machine over loopback, so what a layout
sends is nearly free and its bytes are given beside it.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from cdrmix import runtime
from cdrmix.config.schema import Config
from cdrmix.planning.cluster import processes
from cdrmix.planning.cost import CostModel
from cdrmix.planning.memory import MemoryModel
from cdrmix.planning.profile import choose
from cdrmix.sessions.rehearse import run_ranks
from tools.benchmark.timing import report

RANKS = 2
STEPS = 3
BATCH = 8
LENGTH = 256
# axis -> degrees, profile
LAYOUTS: dict[str, tuple[dict[str, int], str]] = {
    "data": ({"data": 2}, "zero1"),
    "data, experts spread": ({"data": 2, "expert": 2}, "zero1"),
    "tensor": ({"tensor": 2}, "zero1"),
    "sequence": ({"data": 2, "sequence": 2}, "zero1"),
    "pipeline": ({"pipeline": 2}, "pipeline"),
}


def make_config(degrees: dict[str, int]) -> Config:
    """The run of one layout; one sample a micro-step and reader, so that a pipeline has four."""
    micro = BATCH // 4 // (degrees.get("data", 1) // degrees.get("sequence", 1))
    return Config.model_validate(
        {
            "name": "layouts",
            "model": {
                "hidden_size": 256,
                "num_layers": 4,
                "num_heads": 4,
                "vocab_size": 2048,
                "moe": {"num_experts": 8, "expert_hidden_size": 384, "drop_tokens": False},
            },
            "parallel": {"expert": 1} | degrees,
            "training": {
                "max_steps": 10,
                "global_batch_size": BATCH,
                "micro_batch_size": micro,
                "sequence_length": LENGTH,
                "precision": "fp32",
                "learning_rate": 1e-3,
                "min_learning_rate": 1e-4,
                "warmup_steps": 1,
            },
            "data": {"path": "none"},
        }
    )


def time_steps(name: str, out: Path) -> int:
    """Work of one rank: a step to warm up, then STEPS; rank 0 writes the seconds of all."""
    from cdrmix.engines.loop import start_engine
    from cdrmix.engines.training_step import train_step
    from cdrmix.parallel.apply import build_model
    from cdrmix.parallel.topology import make_topology, own_tokens

    degrees, profile = LAYOUTS[name]
    torch.set_num_threads(1)
    runtime.keep_freed_memory()
    runtime.initialize_distributed()
    config = make_config(degrees)
    plan = choose(config, processes(RANKS), profile=profile)
    topology = make_topology(plan.degrees)
    engine = start_engine(build_model(config, plan, topology), config, plan, topology)
    source = torch.Generator().manual_seed(topology.sample_rank)
    shape = (plan.gradient_accumulation_steps, plan.micro_batch_size, LENGTH + 1)
    ids = torch.randint(0, 2048, shape, generator=source)
    whole = {"input_ids": ids[..., :-1], "labels": ids[..., 1:].contiguous()}
    batch = own_tokens(whole, topology)
    tokens = BATCH * LENGTH

    def run(first: int, count: int) -> tuple[float, float]:
        runtime.barrier()
        wall = time.perf_counter()
        cpu = time.process_time()
        for step in range(first, first + count):
            train_step(engine, config, topology, batch, step=step, weights=[tokens])
        runtime.barrier()
        return time.perf_counter() - wall, time.process_time() - cpu

    run(0, 1)
    wall, cpu = run(1, STEPS)
    seconds = {"wall": wall / STEPS, "cpu": sum(runtime.all_gather_object(cpu)) / STEPS}
    if runtime.rank() == 0:
        out.write_text(json.dumps(seconds), encoding="utf-8")
    runtime.destroy_distributed()
    return 0


def planned_bytes(name: str) -> dict[str, int]:
    """Bytes that a rank hands to collectives in a step, by purpose, as `cdrmix plan` counts it."""
    degrees, profile = LAYOUTS[name]
    config = make_config(degrees)
    cluster = processes(RANKS)
    made = choose(config, cluster, profile=profile)
    cost = CostModel(MemoryModel(config, "cpu"), cluster).estimate(made)
    return {kind: payload for kind, payload in cost.communication_bytes.items() if payload}


def measure(rounds: int) -> dict[str, Any]:
    """Seconds of a step by layout, and their ratios to data ranks of the same round."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in LAYOUTS}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "seconds.json"
        log = Path(folder) / "ranks.log"
        for _ in range(rounds):
            for name, seconds in found.items():
                run_ranks(time_steps, RANKS, name, out, log=log, timeout=300)
                seconds.append(json.loads(out.read_text(encoding="utf-8")))
    rows = []
    for name, seconds in found.items():
        ratios = {
            kind: statistics.median(
                ours[kind] / theirs[kind]
                for ours, theirs in zip(seconds, found["data"], strict=True)
            )
            for kind in ("wall", "cpu")
        }
        median = {kind: statistics.median(s[kind] for s in seconds) for kind in ("wall", "cpu")}
        rows.append(
            {"layout": name, "seconds": median, "of_data": ratios, "bytes": planned_bytes(name)}
        )
    return {"rounds": rounds, "steps": STEPS, "tokens": BATCH * LENGTH, "rows": rows}


def show(result: dict[str, Any]) -> None:
    """Print a line per layout."""
    for row in result["rows"]:
        wall = row["of_data"]["wall"]
        cpu = row["of_data"]["cpu"]
        size = sum(row["bytes"].values()) / 1e6
        print(f"{row['layout']:22} wall {wall:.2f}  cpu {cpu:.2f}  {size:.1f} MB a step")


if __name__ == "__main__":
    report(measure, show, rounds=5, description=__doc__)
