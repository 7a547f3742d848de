"""Bytes that ranks hand to collectives in one step, against the plan's figure.

Every collective of ours and of DeepSpeed is counted where it enters torch.distributed. The plan
leaves out what does not grow with the model: router statistics and their counts, votes, norms.
"""

import collections
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from cdrmix import runtime
from cdrmix.planning import zero
from cdrmix.planning.cluster import make_cluster
from cdrmix.planning.cost import CostModel
from cdrmix.planning.memory import MemoryModel
from cdrmix.planning.profile import arrangement, choose
from tests.harness import run_ranks
from tools.benchmark.memory import Case, make_config

# by the collective's name, and whether the tensor group calls it
KINDS = {
    ("all_reduce", False): "gradients_all_reduce",
    ("all_gather_into_tensor", False): "weights_all_gather",
    ("reduce_scatter_tensor", False): "gradients_reduce_scatter",
    ("all_to_all_single", False): "expert_all_to_all",
    ("all_reduce", True): "tensor_all_reduce",
    ("all_gather_into_tensor", True): "tensor_all_gather",
}
SMALL_BYTES = 2_000  # of one message that does not grow with the model
TOLERANCE = 0.01


def count_calls() -> collections.Counter[tuple[str, Any]]:
    """Start to count the payload by collective and group, of large messages between ranks."""
    counted: collections.Counter[tuple[str, Any]] = collections.Counter()

    def counting(name: str) -> Any:
        called = getattr(torch.distributed, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            # what a rank has of a message: a reduce-scatter's output comes first, and is less
            sent = args[1:2] if name == "reduce_scatter_tensor" else args[:1]
            tensor = sent[0] if sent else next(iter(kwargs.values()))
            size = tensor.numel() * tensor.element_size()
            # DeepSpeed reduces experts that nobody else holds in a group of one
            if size > SMALL_BYTES and torch.distributed.get_world_size(kwargs.get("group")) > 1:
                counted[name, kwargs.get("group")] += size
            return called(*args, **kwargs)

        return wrapped

    for name in {name for name, _ in KINDS}:
        setattr(torch.distributed, name, counting(name))
    return counted


def exchanged(fields: dict[str, Any], zero: dict[str, Any] | None = None) -> dict[str, int]:
    """Payload of one step on this rank by the plan's names, once DeepSpeed knows the model."""
    from cdrmix.engines.loop import start_engine
    from cdrmix.engines.stage_a import micro_step
    from cdrmix.parallel.apply import build_model
    from cdrmix.parallel.topology import make_topology

    case = Case(**fields)
    counted = count_calls()  # before DeepSpeed looks the functions up
    runtime.initialize_distributed()
    config = make_config(case)
    choice = choose(config, world_size=case.world, profile=case.profile, device="cpu")
    changed = choice.deepspeed["zero_optimization"] | (zero or {})
    choice = replace(choice, deepspeed=choice.deepspeed | {"zero_optimization": changed})
    topology = make_topology(choice.degrees)
    engine = start_engine(build_model(config, choice, topology), config, choice, topology)
    torch.manual_seed(topology.data_rank)
    for _ in ("ZeRO-3 learns which modules follow", "counted"):
        counted.clear()
        for _ in range(choice.gradient_accumulation_steps):
            ids = torch.randint(0, 512, (case.micro_batch, case.length))
            engine.backward(
                micro_step(engine, config, topology, ids, ids.clone(), nats_scale=1e-3).loss
            )
            engine.step()
    found: collections.Counter[str] = collections.Counter()
    for (name, group), size in counted.items():
        found[KINDS[name, group is not None and group is topology.tensor_group]] += size
    runtime.destroy_distributed()
    return dict(found)


def planned(case: Case) -> dict[str, int]:
    config = make_config(case)
    cluster = make_cluster(nodes=1, gpus_per_node=case.world, gpu="cpu")
    choice = choose(config, world_size=case.world, profile=case.profile)
    cost = CostModel(MemoryModel(config, "cpu"), cluster).estimate(arrangement(choice))
    return {kind: traffic.payload for kind, traffic in cost.traffic.items() if traffic.payload}


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
        Case(
            "tensor and data, ZeRO-2, recomputed",
            world=4,
            tensor=2,
            profile="zero2",
            expert=2,
            length=512,
            checkpointing=True,
        ),
        Case("dense, ZeRO-3", world=2, profile="zero3", moe=False, hidden=512),
        Case(
            "dense, ZeRO-3 offloaded, bf16, recomputed",
            world=2,
            profile="zero3_offload",
            moe=False,
            hidden=512,
            precision="bf16",
            checkpointing=True,
        ),
        Case("ZeRO-2 offloaded", world=2, profile="zero2_offload", expert=2, length=512),
    ],
    ids=lambda case: case.name,
)
def test_ranks_exchange_as_many_bytes_as_planned(case: Case) -> None:
    ranks, plan = run_ranks(exchanged, case.world, asdict(case)), planned(case)
    for kind in KINDS.values():
        found = sum(rank.get(kind, 0) for rank in ranks) / case.world
        assert found == pytest.approx(plan.get(kind, 0), rel=TOLERANCE), kind


# with recomputation a block is read three times in a row: no distance is shorter than that
@pytest.mark.parametrize(
    ("distance", "recompute"), [(0, False), (8_000_000, False), (8_000_000, True)]
)
def test_what_zero3_lets_go_of_it_gathers_again(
    distance: int, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a model does that is larger than DeepSpeed's reuse distance of 1e9 elements."""
    case = Case(
        "large", world=2, profile="zero3", moe=False, hidden=512, checkpointing=recompute
    )  # 14e6 elements
    small = {"stage3_max_reuse_distance": distance, "stage3_prefetch_bucket_size": 0}
    monkeypatch.setattr(zero, "REUSE_DISTANCE", distance)
    found = run_ranks(exchanged, case.world, asdict(case), small)[0]
    # whole modules are let go of, the largest of which has a fifteenth of the elements
    assert found["weights_all_gather"] == pytest.approx(
        planned(case)["weights_all_gather"], rel=0.05
    )
