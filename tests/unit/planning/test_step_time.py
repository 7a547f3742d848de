"""Seconds from FLOPs, bytes, launches and links."""

from dataclasses import replace

import pytest

from cdrmix.config.load import load_config, shipped
from cdrmix.models import wkv7_fla
from cdrmix.planning.activations import SavedActivations
from cdrmix.planning.blocks.block_type import BlockKernels
from cdrmix.planning.cluster import Cluster, make_cluster
from cdrmix.planning.cost import Cost, CostModel
from cdrmix.planning.layout import Degrees, Layout
from cdrmix.planning.memory import MemoryModel
from cdrmix.planning.step_time import (
    LAUNCH_SECONDS,
    MEMORY_SHARE,
    Work,
    exchange_seconds,
    hidden_seconds,
    pipeline_seconds,
    ring_bandwidth,
    seconds_of,
)

NODE = make_cluster(nodes=4, gpus_per_node=8, gpu="h100-80")
PEAK = NODE.peak_flops["bf16"]


def test_products_and_memory_add_up_and_launches_are_hidden_on_a_gpu() -> None:
    work = Work(flops=1e12, moved_bytes=3e9, launches=100)
    running = 1e12 / (NODE.efficiency * PEAK) + 3e9 / (MEMORY_SHARE * NODE.memory_bandwidth)
    assert seconds_of(work, NODE, PEAK) == pytest.approx(running)
    launching = 100_000 * LAUNCH_SECONDS["cuda"]
    assert seconds_of(replace(work, launches=100_000), NODE, PEAK) == pytest.approx(launching)
    core = make_cluster(nodes=1, gpus_per_node=1, gpu="cpu")
    alone = seconds_of(replace(work, launches=0), core, 80e9)
    assert seconds_of(work, core, 80e9) == pytest.approx(alone + 100 * LAUNCH_SECONDS["cpu"])


def test_a_ring_over_nodes_has_the_adapters_of_all_its_members_there() -> None:
    intra, inter = NODE.intra_bandwidth, NODE.inter_bandwidth
    assert ring_bandwidth(NODE, 8) == intra
    assert ring_bandwidth(NODE, 32) == 8 * inter
    assert ring_bandwidth(NODE, 16, stride=2) == 4 * inter
    assert ring_bandwidth(NODE, 4, stride=8) == inter
    assert ring_bandwidth(NODE, 4, stride=2) == intra
    fast = replace(NODE, inter_bandwidth=intra)
    assert ring_bandwidth(fast, 32) == intra, "no faster than its links inside a node"


def test_an_exchange_is_as_slow_as_what_leaves_the_node() -> None:
    inside = exchange_seconds(1e9, NODE, 8)
    assert inside == pytest.approx(1e9 * 7 / 8 / NODE.intra_bandwidth)
    assert exchange_seconds(1e9, NODE, 32) == pytest.approx(1e9 * 24 / 32 / NODE.inter_bandwidth)


def test_interleaving_divides_the_bubble() -> None:
    assert pipeline_seconds(1.0, micro_steps=8, stages=1) == 8
    assert pipeline_seconds(1.0, micro_steps=8, stages=5) == 12
    assert pipeline_seconds(1.0, micro_steps=8, stages=5, parts=4) == 9


def test_an_exchange_is_hidden_as_far_as_it_fits_under_what_runs_beside_it() -> None:
    assert hidden_seconds(2.0, 5.0, last=0.25) == 1.5
    assert hidden_seconds(2.0, 1.0, last=0.25) == 1.0
    assert hidden_seconds(2.0, 5.0, last=1.0) == 0.0, "one bucket is reduced behind the pass"


def estimated(
    cluster: Cluster,
    *,
    micro: int = 2,
    kernels: BlockKernels = "own",
    data: int = 1,
    **changes: object,
) -> Cost:
    overrides = ["training.compile=blocks"] if kernels == "compiled" else []
    config = load_config(shipped("model_configs") / "cdrmix-core-1b.yaml", overrides)
    layout = Layout(Degrees(data), 1, micro, 128 // micro // data, "none")
    memory = MemoryModel(config, cluster.device)
    assert isinstance(memory.activations, SavedActivations)
    memory.activations.setting = replace(memory.activations.setting, kernels=kernels)
    return CostModel(memory, cluster).estimate(replace(layout, **changes))  # type: ignore[arg-type]


H200 = make_cluster(nodes=1, gpus_per_node=1, gpu="h200-141")


def test_a_step_of_core_1b_on_an_h200_is_half_products_and_half_memory() -> None:
    """Counted by hand of operators one by one: 38 us a token, 24 % of the peak, before the sum of
    gradients and the loss took half of their bytes: 16 in products, the rest in memory."""
    cost = estimated(H200, kernels="operators")
    tokens = 128 * 4096
    assert 0.19 < cost.mfu < 0.29
    assert 1e6 * cost.step_seconds / tokens == pytest.approx(38.3, rel=0.1)
    assert 1e6 * cost.product_seconds / tokens == pytest.approx(18.8, rel=0.05)
    # 10 bytes for each of 4.17e9 parameters and micro-step of 8,192 tokens
    assert 1e6 * cost.accumulation_seconds / tokens == pytest.approx(1.18, rel=0.02)
    assert cost.launch_seconds < cost.compute_seconds


def test_memory_bandwidth_and_efficiency_change_their_own_parts() -> None:
    plain = estimated(H200)
    faster = estimated(replace(H200, memory_bandwidth=2 * H200.memory_bandwidth))
    assert faster.memory_seconds == pytest.approx(plain.memory_seconds / 2)
    assert faster.product_seconds == plain.product_seconds
    better = estimated(replace(H200, efficiency=2 * H200.efficiency))
    assert better.product_seconds == pytest.approx(plain.product_seconds / 2)
    assert better.memory_seconds == plain.memory_seconds


def test_recomputed_blocks_run_forward_again_and_the_head_does_not() -> None:
    kept, again = estimated(H200), estimated(H200, activation_checkpointing="block")
    blocks = again.product_seconds / kept.product_seconds
    assert 1.2 < blocks < 4 / 3, "less than a third more, as the head is not recomputed"
    cheap = estimated(H200, activation_checkpointing="selective")
    assert cheap.product_seconds == kept.product_seconds
    assert kept.memory_seconds < cheap.memory_seconds <= again.memory_seconds


def test_our_kernels_and_a_compiler_move_fewer_bytes_in_fewer_launches() -> None:
    plain, own, compiled = (
        estimated(H200, kernels=each) for each in ("operators", "own", "compiled")
    )
    assert own.product_seconds == compiled.product_seconds == plain.product_seconds
    # 1,349 KB less of 1,969 in each of 18 RWKV blocks, 180 of 697 in each of six of attention
    tokens = 128 * 4096
    saved = tokens * 1e3 * (18 * 1_349 + 6 * 180) / (MEMORY_SHARE * H200.memory_bandwidth)
    assert plain.memory_seconds - own.memory_seconds == pytest.approx(saved, rel=0.03)
    assert own.memory_seconds < compiled.memory_seconds < 0.75 * plain.memory_seconds
    assert compiled.launch_seconds < own.launch_seconds < 0.75 * plain.launch_seconds


def estimated_zero2(node: Cluster, *, overlaps: bool) -> Cost:
    bucket = 200_000_000
    return estimated(
        node, data=8, zero_stage=2, bucket_elements=bucket, overlaps_reduction=overlaps
    )


def test_gradients_reduced_under_the_backward_pass_take_less_of_a_step() -> None:
    node = replace(H200, gpus_per_node=8)
    behind, under = (estimated_zero2(node, overlaps=each) for each in (False, True))
    assert behind.hidden_seconds == 0
    assert under.communication_seconds == behind.communication_seconds
    hidden = under.hidden_seconds
    assert behind.step_seconds - under.step_seconds == pytest.approx(hidden)
    # all but the last bucket of 4.17e9 elements, as links are fast
    reduced = under.communication_seconds["gradients_all_reduce"]
    assert hidden == pytest.approx((1 - 0.2 / 4.17) * reduced, rel=1e-3)
    # slow ones hide no more than the backward pass lasts, which is about two thirds of the work
    slow = replace(node, intra_bandwidth=node.intra_bandwidth / 100)
    bound = estimated_zero2(slow, overlaps=True)
    share = bound.hidden_seconds / bound.compute_seconds
    assert 0.5 < share < 0.75
    assert bound.hidden_seconds < bound.communication_seconds["gradients_all_reduce"] / 2


def test_zero1_hides_nothing_as_it_reduces_after_the_last_backward_pass() -> None:
    node = replace(H200, gpus_per_node=8)
    assert estimated(node, data=8).hidden_seconds == 0


def test_a_larger_micro_batch_sums_gradients_less_often() -> None:
    assert estimated(H200, micro=4).accumulation_seconds == pytest.approx(
        estimated(H200, micro=2).accumulation_seconds / 2
    )


def test_the_warning_without_fla_tells_what_the_plan_says() -> None:
    config = load_config(shipped("model_configs") / "cdrmix-core-1b.yaml")
    layout = Layout(Degrees(), 1, 2, 64, "none")
    chunked, fla = (
        CostModel(MemoryModel(config, "cuda", wkv=form), H200).estimate(layout).step_seconds
        for form in ("chunked", "fla")
    )
    assert f"takes {chunked / fla:.1f} times as long" in wkv7_fla._COST


def test_the_chunked_recurrence_is_bound_by_its_launches() -> None:
    """Without fla there are thousands of small operators: about 60 us a token."""
    config = load_config(shipped("model_configs") / "cdrmix-core-1b.yaml")
    memory = MemoryModel(config, "cuda", wkv="chunked")
    cost = CostModel(memory, H200).estimate(Layout(Degrees(), 1, 2, 64, "none"))
    assert cost.launch_seconds == cost.compute_seconds
    assert 1e6 * cost.step_seconds / (128 * 4096) == pytest.approx(72, rel=0.1)
