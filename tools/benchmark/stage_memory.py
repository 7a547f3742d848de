"""The plan's bytes of each pipeline stage against what its rank holds while a step runs.

As `tools/benchmark/memory.py`, with the largest amount that autograd keeps at any moment of a step:
a stage keeps the activations of all micro-batches that are in flight.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from cdrmix import runtime
from cdrmix.planning.cluster import processes
from cdrmix.planning.memory import MemoryModel
from cdrmix.planning.profile import choose
from tools.benchmark.memory import (
    ACCUMULATION,
    PARTS,
    Case,
    largest_block,
    make_config,
    with_small_buckets,
    wkv_form,
)
from tools.benchmark.storages import (
    Storages,
    gradient_storages,
    optimizer_storages,
    storages,
    total,
)

STAGED_CASES = (
    Case("2 stages", world=2, pipeline=2),
    Case("4 stages, dense", hidden=256, world=4, pipeline=4, moe=False),
    Case("2 stages, bf16, checkpointing", world=2, pipeline=2, precision="bf16",
         checkpointing="block"),
    Case("2 stages x 2 data ranks", world=4, pipeline=2, length=512),
)  # fmt: skip


class LiveBytes:
    """Bytes that autograd keeps at each moment, without known tensors.

    Attributes:
        most: bytes at the fullest moment.
    """

    def __init__(self, known: Storages) -> None:
        self.known = known
        self.most = 0
        self._now, self._users = 0, Counter[int]()

    def pack(self, tensor: Tensor) -> _Kept:
        """Object that autograd keeps in the tensor's place."""
        piece = tensor.untyped_storage()
        if piece.data_ptr() not in self.known:
            self._now += piece.nbytes() * (self._users[piece.data_ptr()] == 0)
            self._users[piece.data_ptr()] += 1
            self.most = max(self.most, self._now)
        return _Kept(tensor, self)

    def release(self, tensor: Tensor) -> None:
        """Autograd lets go of a tensor."""
        piece = tensor.untyped_storage()
        if piece.data_ptr() not in self.known:
            self._users[piece.data_ptr()] -= 1
            self._now -= piece.nbytes() * (self._users[piece.data_ptr()] == 0)


class _Kept:
    def __init__(self, tensor: Tensor, live: LiveBytes) -> None:
        self.tensor = tensor
        self._live = live

    def __del__(self) -> None:
        self._live.release(self.tensor)


def measured(fields: dict[str, Any]) -> tuple[int, dict[str, int]]:
    """Stage of this rank, and what it holds; all ranks of a case call this."""
    from cdrmix.engines.loop import start_engine
    from cdrmix.engines.training_step import train_step
    from cdrmix.parallel.apply import build_model
    from cdrmix.parallel.topology import make_topology

    case = Case(**fields)
    runtime.initialize_distributed()
    config = make_config(case)
    plan = choose(config, processes(case.world), profile="pipeline")
    topology = make_topology(plan.degrees)
    model = build_model(config, plan, topology)
    engine = start_engine(model, config, with_small_buckets(plan), topology)
    weights = storages(engine.module.parameters())
    live = LiveBytes(weights)
    found = {"weights": total(weights)}
    tied = engine.module.get_tied_weights_and_groups

    def after_the_last_backward_pass() -> Any:
        found["gradients"] = total(gradient_storages(engine))
        return tied()

    engine.module.get_tied_weights_and_groups = after_the_last_backward_pass
    torch.manual_seed(topology.data_rank)
    ids = torch.randint(0, 512, (ACCUMULATION, case.micro_batch, case.length))
    with torch.autograd.graph.saved_tensors_hooks(live.pack, lambda kept: kept.tensor):
        train_step(
            engine, config, topology, {"input_ids": ids, "labels": ids}, step=0, weights=[1000]
        )
    found["activations"] = live.most
    if case.checkpointing != "none":
        blocks = engine.module.stage.blocks.values()
        found["activations"] += total(largest_block(blocks, case, known=weights))
    found["optimizer"] = total(optimizer_storages(engine))
    runtime.destroy_distributed()
    return topology.stage, found


def compare(case: Case) -> list[tuple[dict[str, int], dict[str, int]]]:
    """Predicted and measured bytes of each stage; of activations the mean over its ranks."""
    from tests.harness import run_ranks
    from tools.benchmark import stage_memory  # by a name that ranks can import, as a script too

    config = make_config(case)
    made = choose(config, processes(case.world), profile="pipeline")
    model = MemoryModel(config, "cpu", wkv=wkv_form())
    ranks = run_ranks(stage_memory.measured, case.world, asdict(case))
    rows = []
    for stage in range(case.pipeline):
        here = [found for place, found in ranks if place == stage]
        # nothing is offloaded in a pipeline: rules refuse it
        parts = {part: max(found[part] for found in here) for part in PARTS if part != "host"}
        parts["activations"] = sum(found["activations"] for found in here) // len(here)
        rows.append((model.on_stage(made, stage).to_json(), parts))
    return rows
