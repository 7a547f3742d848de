"""Bytes that ranks hand to collectives in one step, against the plan's figure.

Every collective of ours and of DeepSpeed is counted where it enters torch.distributed. The plan
leaves out what does not grow with the model: router statistics and their counts, votes, norms.
"""

import collections
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cdrmix import runtime
from cdrmix.planning import memory
from cdrmix.planning.cluster import processes
from cdrmix.planning.cost import CostModel
from cdrmix.planning.deepspeed_json import profile_path, read_profile
from cdrmix.planning.memory import MemoryModel
from cdrmix.planning.profile import choose
from tests.harness import run_ranks
from tools.benchmark.memory import ACCUMULATION, Case, make_config

# by the name of what is called, and the group that calls it where it is one of ours
KINDS = {
    ("all_reduce", ""): "gradients_all_reduce",
    ("all_gather_into_tensor", ""): "weights_all_gather",
    ("reduce_scatter_tensor", ""): "gradients_reduce_scatter",
    ("all_to_all_single", ""): "expert_all_to_all",
    ("all_reduce", "tensor_group"): "tensor_all_reduce",
    ("all_gather_into_tensor", "tensor_group"): "tensor_all_gather",
    ("all_to_all_single", "sequence_group"): "sequence_all_to_all",
    ("all_gather_into_tensor", "sequence_group"): "sequence_states_gathered",
    ("reduce_scatter_tensor", "sequence_group"): "sequence_states_reduced",
    ("send", ""): "pipeline_send",
    ("all_reduce", "embedding_group"): "embedding_all_reduce",
    ("broadcast", "embedding_group"): "embedding_broadcast",
}
SMALL_BYTES = 1_000  # of one message that does not grow with the model
TOLERANCE = 0.01


def count_calls() -> collections.Counter[tuple[str, Any]]:
    """Start to count the payload by collective and group, of large messages between ranks."""
    counted: collections.Counter[tuple[str, Any]] = collections.Counter()

    def counting(name: str) -> Any:
        called = getattr(torch.distributed, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            # what a rank has of a message: a reduce-scatter's output comes first, and is less
            given = args or tuple(kwargs.values())
            tensor = given[1] if name == "reduce_scatter_tensor" else given[0]
            size = tensor.numel() * tensor.element_size()
            # DeepSpeed reduces experts that nobody else holds in a group of one
            if size > SMALL_BYTES and torch.distributed.get_world_size(kwargs.get("group")) > 1:
                counted[name, kwargs.get("group")] += size
            return called(*args, **kwargs)

        return wrapped

    for name in {name for name, _ in KINDS}:
        setattr(torch.distributed, name, counting(name))
    return counted


def exchanged(
    fields: dict[str, Any], settings: dict[str, Any] | None = None
) -> tuple[int, dict[str, int]]:
    """Stage of this rank, and its payload of one step by the plan's names.

    Of the second step: in the first one ZeRO-3 learns which modules follow.
    """
    from cdrmix.engines.loop import start_engine
    from cdrmix.engines.training_step import train_step
    from cdrmix.parallel.apply import build_model
    from cdrmix.parallel.topology import make_topology

    case = Case(**fields)
    counted = count_calls()  # before DeepSpeed looks the functions up
    runtime.initialize_distributed(timeout_minutes=7)
    config = make_config(case)
    plan = choose(config, processes(case.world), profile=case.profile)
    changed = plan.deepspeed["zero_optimization"] | (settings or {})
    plan = replace(plan, deepspeed=plan.deepspeed | {"zero_optimization": changed})
    topology = make_topology(plan.degrees)
    engine = start_engine(build_model(config, plan, topology), config, plan, topology)
    groups = torch.distributed.distributed_c10d._world.pg_map
    backends = [group._get_backend(torch.device("cpu")) for group in groups]
    assert {backend.options._timeout.total_seconds() for backend in backends} == {7 * 60}
    torch.manual_seed(topology.data_rank)
    shape = (ACCUMULATION, case.micro_batch, case.length // case.sequence)
    for step in range(2):  # ZeRO-3 learns which modules follow; then one is counted
        counted.clear()
        ids = torch.randint(0, 512, shape)
        batch = {"input_ids": ids, "labels": ids}
        train_step(engine, config, topology, batch, step=step, weights=[1000])
    ours = {id(getattr(topology, name)): name for _, name in KINDS if name}
    found: collections.Counter[str] = collections.Counter()
    for (name, group), size in counted.items():
        found[KINDS[name, "" if group is None else ours.get(id(group), "")]] += size
    runtime.destroy_distributed()
    return topology.stage, dict(found)


def planned(case: Case) -> dict[str, int]:
    config = make_config(case)
    cluster = processes(case.world)
    made = choose(config, cluster, profile=case.profile)
    cost = CostModel(MemoryModel(config, "cpu"), cluster).estimate(made)
    return {kind: payload for kind, payload in cost.communication_bytes.items() if payload}


def compare(case: Case) -> None:
    ranks, plan = run_ranks(exchanged, case.world, asdict(case)), planned(case)
    for kind in KINDS.values():
        # of the busiest stage; which rank's experts are in demand is chance
        stages = collections.defaultdict(list)
        for stage, sent in ranks:
            stages[stage].append(sent.get(kind, 0))
        found = max(sum(sent) / len(sent) for sent in stages.values())
        assert found == pytest.approx(plan.get(kind, 0), rel=TOLERANCE), kind


# What ZeRO-3 exchanges are parameters, however few tokens meet them. Few are quicker: on CPUs
# products in bf16 take ten times as long.
ZERO3: dict[str, Any] = {"world": 2, "moe": False, "hidden": 512, "length": 16}

# Samples enough for the tokens that shifts take from other ranks to count.
SEQUENCE: dict[str, Any] = {"world": 2, "sequence": 2, "micro_batch": 8}


@pytest.mark.parametrize(
    "case",
    [
        Case("ZeRO-1", world=2),
        Case("ZeRO-2", world=2, profile="zero2"),
        Case("ZeRO-2, experts spread", world=2, profile="zero2", expert=2, length=512),
        Case("ZeRO-1, experts spread, recomputed", world=2, expert=2, checkpointing=True),
        Case("dense, ZeRO-2", world=2, profile="zero2", moe=False),
        Case("bf16, ZeRO-1", world=2, precision="bf16"),
        Case("bf16, ZeRO-2, experts spread", world=2, precision="bf16", profile="zero2", expert=2),
        Case("tensor", world=2, tensor=2),
        Case("tensor, dense, recomputed", world=2, tensor=2, moe=False, checkpointing=True),
        Case(
            "tensor, experts spread, bf16",
            world=2,
            tensor=2,
            expert=2,
            precision="bf16",
            length=512,
        ),
        Case("two stages", world=2, pipeline=2, profile="pipeline"),
        Case("two stages, bf16", world=2, pipeline=2, profile="pipeline", precision="bf16"),
        Case(
            "four stages, recomputed", world=4, pipeline=4, profile="pipeline", checkpointing=True
        ),
        Case(
            "two stages, data, experts spread",
            world=4,
            pipeline=2,
            expert=2,
            profile="pipeline",
            length=512,
        ),
        Case("two stages, tensor", world=4, pipeline=2, tensor=2, profile="pipeline"),
        Case(
            "tensor and data, ZeRO-2, recomputed",
            world=4,
            tensor=2,
            profile="zero2",
            expert=2,
            length=512,
            checkpointing=True,
        ),
        Case("sequence by heads", length=32, kv_heads=2, **SEQUENCE),
        Case(
            "sequence by heads, spans", length=32, moe=False, checkpointing=True, span=8, **SEQUENCE
        ),
        Case("bf16, sequence by heads", length=32, precision="bf16", expert=2, **SEQUENCE),
        Case("sequence by states", length=512, **SEQUENCE),
        Case(
            "sequence of 4 by states, recomputed",
            length=512,
            checkpointing=True,
            moe=False,
            **SEQUENCE | {"world": 4, "sequence": 4},
        ),
        Case("dense, ZeRO-3", profile="zero3", **ZERO3),
        Case(
            "dense, ZeRO-3 offloaded, bf16, recomputed",
            profile="zero3_offload",
            precision="bf16",
            checkpointing=True,
            **ZERO3,
        ),
        Case("ZeRO-2 offloaded", world=2, profile="zero2_offload", expert=2, length=512),
    ],
    ids=lambda case: case.name,
)
def test_ranks_exchange_as_many_bytes_as_planned(case: Case) -> None:
    compare(case)


# float32 beside weights of two bytes, which on CPUs multiply ten times as long as float32
@pytest.mark.parametrize("profile", ["zero1", "zero2"])
def test_gradients_are_reduced_in_the_type_that_the_profile_gives(
    profile: str, tmp_path: Path
) -> None:
    settings = read_profile(profile_path(profile)) | {"communication_data_type": "fp32"}
    given = tmp_path / f"{profile}.json"
    given.write_text(json.dumps(settings))
    case = Case(f"{profile} in bf16", world=2, moe=False, precision="bf16", profile=str(given))
    reduced = planned(case)["gradients_all_reduce"]
    assert reduced == 2 * planned(replace(case, profile=profile))["gradients_all_reduce"]
    compare(case)


# with recomputation a block is read three times in a row: no distance is shorter than that
@pytest.mark.parametrize(
    ("distance", "recompute"), [(0, False), (8_000_000, False), (8_000_000, True)]
)
def test_what_zero3_lets_go_of_it_gathers_again(
    distance: int, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a model does that is larger than DeepSpeed's reuse distance of 1e9 elements."""
    case = Case("large", profile="zero3", checkpointing=recompute, **ZERO3)  # 14e6 elements
    small = {"stage3_max_reuse_distance": distance, "stage3_prefetch_bucket_size": 0}
    monkeypatch.setattr(memory, "REUSE_DISTANCE", distance)
    _, found = run_ranks(exchanged, case.world, asdict(case), small)[0]
    # whole modules are let go of, the largest of which has a fifteenth of the elements
    assert found["weights_all_gather"] == pytest.approx(
        planned(case)["weights_all_gather"], rel=0.05
    )
