"""Bytes per rank worked out by hand, and how they follow the layout."""

from dataclasses import replace

import pytest

from cdrmix.config.load import load_config, shipped
from cdrmix.config.model import ModelConfig
from cdrmix.config.schema import Config, Recomputation
from cdrmix.planning.activations import SavedActivations
from cdrmix.planning.blocks.feed_forward import feed_forward_workspace
from cdrmix.planning.cluster import Memory, make_cluster
from cdrmix.planning.counts import (
    count,
    forward_flops_by_layer,
    head_flops,
    parameters,
    params_by_part,
)
from cdrmix.planning.layout import Degrees, Group, Layout
from cdrmix.planning.memory import MemoryModel
from cdrmix.planning.stages import stage_layers


def config(name: str, *overrides: str) -> Config:
    return load_config(shipped("model_configs") / f"cdrmix-core-{name}.yaml", overrides)


def arranged(
    data: int = 1, tensor: int = 1, pipeline: int = 1, sequence: int = 1, expert: int = 1,
    *, stage: int = 2, micro: int = 1, steps: int = 8, recompute: Recomputation = "none",
) -> Layout:  # fmt: skip
    degrees = Degrees(data, tensor, pipeline, sequence, expert)
    return Layout(degrees, stage, micro, steps, recompute, bucket_elements=200_000_000)


def estimate(name: str, layout: Layout, *overrides: str) -> Memory:
    return MemoryModel(config(name, *overrides), "cuda").estimate(layout)


def test_bf16_states_are_what_the_sizes_say() -> None:
    model = config("1b").model
    total, experts = count(model, 1).total_params, params_by_part(model)["experts"]
    dense = total - experts
    # eight ranks, one expert of each layer on each: 2 bytes a weight; 4 of gradient, 12 of
    # optimizer, shared out over 8 ranks where dense, over nobody where experts
    held = dense + experts // 8
    zero2 = estimate("1b", arranged(8, expert=8))
    assert zero2.weights == pytest.approx(2 * held, rel=1e-6)
    assert zero2.gradients == pytest.approx(4 * (dense / 8 + experts / 8), rel=1e-6)
    assert zero2.optimizer == pytest.approx(12 * total / 8, rel=1e-6)
    # ZeRO-1 keeps float32 gradients of all that a rank holds; those in bf16 are freed one by one
    zero1 = estimate("1b", arranged(8, expert=8, stage=1))
    assert zero1.gradients == pytest.approx(4 * held, rel=1e-6)
    assert (zero1.weights, zero1.optimizer) == (zero2.weights, zero2.optimizer)


def test_activations_follow_the_tokens_of_a_micro_batch() -> None:
    model = MemoryModel(config("1b"), "cuda")
    head = 4 * 2048 * 50272  # the embedding's gradient, formed in the forward pass
    one, four = (model.estimate(arranged(8, micro=n)).activations - head for n in (1, 4))
    assert four == pytest.approx(4 * one, rel=1e-3)  # the angles of positions are there once
    half = model.estimate(arranged(8, sequence=2)).activations - head
    assert one / 2 < half < 0.6 * one  # and what the exchange between the two keeps


def test_documents_apart_cost_a_mask_in_float32_on_gpus_alone() -> None:
    apart = "data.segment_documents=true"
    mask = 4 * 2 * 4096**2  # two samples: T queries by T keys, whatever is shared out
    for layout in (arranged(8, micro=2), arranged(8, sequence=2, micro=2)):
        for precision, expected in (("fp32", mask), ("bf16", 0)):
            given = f"training.precision={precision}"
            plain, masked = (estimate("1b", layout, given, *more) for more in ([], [apart]))
            assert masked.activations - plain.activations == 6 * expected  # of 24 layers, 6 attend
            # a byte for each pair on the way to it, twice
            assert masked.buffers.get("segment_mask", 0) == 2 * expected // 4
    recomputed = arranged(8, micro=2, recompute="block")
    given = "training.precision=fp32"
    plain, masked = (estimate("1b", recomputed, given, *more) for more in ([], [apart]))
    assert masked.activations - plain.activations <= mask  # of one block at a time


def test_attention_keeps_as_much_of_packed_documents_as_of_whole_samples() -> None:
    import torch

    from cdrmix.models.attention import Attention

    attention = Attention(config("tiny").model)
    x = torch.randn(2, 48, attention.query.in_features)
    sizes = []
    for documents in (None, torch.arange(48).div(9, rounding_mode="floor").expand(2, -1)):
        saved: dict[int, int] = {}

        def keep(tensor: torch.Tensor, saved: dict[int, int] = saved) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if tensor.is_floating_point():
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = attention(x, None, documents)  # held, so that no address is used twice
        sizes.append(sum(saved.values()))
        del out
    assert sizes[0] == sizes[1]


# one attention block: 512 * 128 + 4 * 128 * 128 + 2 * 128 * 512 = 262,144 elements of matrices,
# and four norms of 128
ONE_BLOCK = (
    "model.num_layers=1",
    "model.transformer_fraction=1.0",
    "model.moe=null",
    "model.vocab_size=512",
    "training.sequence_length=8",
)


def of_one_block(precision: str, **spread: int) -> Memory:
    given = config("tiny", *ONE_BLOCK, f"training.precision={precision}")
    layout = replace(arranged(**spread), bucket_elements=100_000)
    return MemoryModel(given, "cpu").estimate(layout)


def overlapped(model: MemoryModel, degrees: Degrees, parts: dict[Group, int]) -> int:
    """Elements of the parameters that the fullest rank's partitions overlap, rank by rank."""
    most = 0
    for rank in range(degrees.stage_ranks):
        elements = 0
        for group, size in parts.items():
            start = rank // degrees.split_ranks(group) * size
            end = 0
            for each in model._sizes(degrees, group):
                begin, end = end, end + each
                elements += each if begin < start + size and end > start else 0
        most = max(most, elements)
    return most


@pytest.mark.parametrize("data", [1, 2, 3, 4, 12, 32, 300])
def test_gradients_at_the_borders_of_partitions_are_those_of_the_fullest_rank(data: int) -> None:
    model = MemoryModel(config("tiny"), "cuda")
    for tensor, expert in ((1, 1), (2, 1), (1, 4), (2, 4)):
        degrees = Degrees(data, tensor, expert=expert)
        if degrees.stage_ranks % expert:
            continue
        held = model.held(degrees, 0)
        ranks = {group: degrees.optimizer_ranks(group) for group in held}
        parts = {group: -(-n // (2 * ranks[group])) * 2 for group, n in held.items()}
        assert model._overlapped(degrees, parts) == overlapped(model, degrees, parts)


def test_gradients_and_their_buffers_are_those_worked_out_by_hand() -> None:
    # ZeRO-2 in float32: the bucket, and as much again for slices on their way to one rank; the
    # step's float32 copy of a partition fits where the activations were
    spread = of_one_block("fp32", data=4, stage=2)
    assert spread.buffers["gradient_buckets"] == 4 * 100_000 + 4 * 100_000
    # ZeRO-1 in float32 on one rank: the bucket, and what the copy of all takes beyond activations
    alone = of_one_block("fp32", stage=1)
    assert alone.buffers["gradient_buckets"] == 400_000 + 4 * 262_144 - alone.activations
    assert alone.gradients == 4 * (262_144 + 512)
    # ZeRO-1 in bf16: matrices are cast in one piece after the last backward pass; float32 sums, to
    # which gradients are added where the pass makes them
    half = of_one_block("bf16", stage=1)
    assert half.buffers["gradient_buckets"] == 2 * 262_144 - half.activations > 0
    assert half.gradients == 4 * (262_144 + 512)
    # ZeRO-2 in bf16: a float32 partition of each group
    assert of_one_block("bf16", data=4, stage=2).gradients == 4 * (65_536 + 128)


def test_checkpointing_keeps_the_borders_and_one_block() -> None:
    plain, recomputed = (
        estimate("1b", arranged(8, recompute=r)).activations for r in ("none", "block")
    )
    tokens, width, layers = 4096, 2048, 24
    borders = 2 * tokens * width * (layers + 1)  # inputs of blocks, and v_first
    assert borders < recomputed < plain / 5


def test_sequence_checkpointing_keeps_states_instead_of_the_activations_of_all_tokens() -> None:
    whole = arranged(8, recompute="block")
    spans = replace(whole, activation_checkpointing="spans", sequence_checkpoint_tokens=512)
    head = 4 * 2048 * 50272
    borders = 2 * 4096 * 2048 * (24 + 1) + 2 * 4096 * 2048 * 6  # also between halves of attention
    plain, spanned = (estimate("1b", made).activations - head for made in (whole, spans))
    states = 18 * 7 * (4 * 128 * 2048 + 2 * 2 * 2048)
    assert borders + states < spanned < borders + states + (plain - borders) / 3


def test_a_wider_layout_never_takes_more_weights_or_optimizer() -> None:
    model = MemoryModel(config("40b"), "cuda")
    base = model.estimate(arranged(8, stage=1, expert=1, recompute="block"))
    for wider in (
        arranged(8, tensor=2, stage=1, recompute="block"),
        arranged(8, pipeline=2, stage=1, recompute="block"),
        arranged(8, expert=8, stage=1, recompute="block"),
    ):
        found = model.estimate(wider)
        assert found.weights < base.weights
        assert found.optimizer <= base.optimizer


def test_stages_cover_all_blocks_in_order_and_share_the_work() -> None:
    model = MemoryModel(config("200b"), "cuda")
    for pipeline in (1, 2, 4, 16, 32, 96):
        stages = model.stages(pipeline)
        assert [layer for stage in stages for layer in stage] == list(range(96))
        sizes = [len(stage) for stage in stages]
        assert min(sizes) >= 1
        assert max(sizes) <= 96 / pipeline + 1.5


def test_the_first_stage_of_a_pipeline_keeps_as_many_micro_batches_as_there_are_stages() -> None:
    model = MemoryModel(config("40b"), "cuda")
    few, many = (
        model.estimate(arranged(8, pipeline=8, stage=1, steps=steps)).activations
        for steps in (2, 64)
    )
    # all share the angles of positions
    assert many == pytest.approx(4 * few, rel=1e-4), "eight in flight instead of two"


def test_offloading_moves_the_optimizer_to_the_host() -> None:
    kept = estimate("1b", arranged(8))
    moved = estimate("1b", replace(arranged(8), offloads_optimizer=True))
    assert moved.optimizer == 0
    assert moved.gradients == kept.gradients, "bf16 is summed in float32 on the device"
    assert moved.host > kept.optimizer
    small_host = replace(make_cluster(nodes=1, gpus_per_node=8, gpu="a100-80"), host_memory_gib=10)
    assert not moved.fits(small_host, share=0.9)


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_a_copy_of_what_a_rank_saves_is_counted(zero_stage: int) -> None:
    moe = "model.moe=null" if zero_stage == 3 else "model.moe.top_k=2"
    given = config("1b", moe)
    in_front = config("1b", moe, "checkpoint.background=false")
    layout = arranged(8, stage=zero_stage)
    copied, without, on_cpu = (
        MemoryModel(chosen, device).estimate(layout)
        for chosen, device in ((given, "cuda"), (in_front, "cuda"), (given, "cpu"))
    )
    # masters and moments are all that is saved; the optimizer's memory is padded
    assert copied.checkpoint == pytest.approx(copied.optimizer, rel=1e-5)
    assert on_cpu.buffers["checkpoint_copy"] == copied.checkpoint
    assert (without.checkpoint, without.total) == (0, copied.total)
    small_host = replace(make_cluster(nodes=1, gpus_per_node=8, gpu="a100-80"), host_memory_gib=10)
    assert without.fits_host(small_host, share=0.9)
    assert not copied.fits_host(small_host, share=0.9)


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_an_average_takes_a_third_of_masters_and_moments_where_they_are(zero_stage: int) -> None:
    moe = "model.moe=null" if zero_stage == 3 else "model.moe.top_k=2"
    averaged = (moe, "training.ema_decay=0.999")
    layout = arranged(8, stage=zero_stage)
    plain, kept = (estimate("1b", layout, *given) for given in ([moe], averaged))
    more = kept.optimizer - plain.optimizer
    assert more == pytest.approx(plain.optimizer / 3, rel=1e-6)
    assert kept.checkpoint == plain.checkpoint * 4 // 3
    assert (kept.weights, kept.gradients, kept.host) == (plain.weights, plain.gradients, plain.host)
    moved = replace(layout, offloads_optimizer=True)
    plain, kept = (estimate("1b", moved, *given) for given in ([moe], averaged))
    assert (kept.host - plain.host, kept.optimizer) == (more, 0)


def test_nine_tenths_of_the_memory_may_be_filled() -> None:
    cluster = make_cluster(nodes=1, gpus_per_node=8, gpu_memory_gib=100)
    memory = Memory(80 * 2**30, 0, 0, 5 * 2**30, {"logits": 5 * 2**30})
    assert memory.fits(cluster, share=0.9)
    assert not replace(memory, gradients=1).fits(cluster, share=0.9)


def test_parts_add_up_to_the_total() -> None:
    memory = estimate("4b", arranged(16, expert=8))
    parts = memory.to_json()
    assert parts["total"] == sum(size for part, size in parts.items() if part != "total")
    assert parts["total"] == memory.total
    assert parts["buffers"] == sum(memory.buffers.values())


def test_a_gradient_on_the_border_of_two_partitions_is_kept_by_both() -> None:
    # float32 under ZeRO-2: no separate accumulator, so each rank keeps whole gradients
    model = MemoryModel(config("tiny"), "cpu")
    kept = model.estimate(arranged(2)).gradients
    total = count(config("tiny").model, 1).total_params
    assert 4 * total / 2 < kept < 4 * total


def test_parameters_are_listed_in_the_order_in_which_deepspeed_flattens_them() -> None:
    from cdrmix.models.backbone import Backbone, logical_name

    model = config("tiny").model
    built = [logical_name(name) for name, _ in Backbone(model).named_parameters()]
    assert built == [parameter.name for parameter in parameters(model)]


@pytest.mark.parametrize("pipeline", [2, 8, 16, 32])
def test_no_stage_takes_more_than_the_estimate(pipeline: int) -> None:
    model = MemoryModel(config("200b"), "cuda")
    wide = arranged(4, 2, pipeline, 2, 8, stage=1, steps=64, recompute="block")
    every = [model.on_stage(wide, stage).total for stage in range(pipeline)]
    assert max(every) == model.estimate(wide).total


def test_the_head_weighs_as_much_as_the_blocks_that_it_costs() -> None:
    settings = {"hidden_size": 64, "num_layers": 6, "num_heads": 2, "transformer_fraction": 0.0}
    small = ModelConfig(**settings, vocab_size=256)
    block = forward_flops_by_layer(small, 64)[0]
    head_per_token_id = head_flops(small) // 256
    model = ModelConfig(**settings, vocab_size=2 * block // head_per_token_id)
    assert head_flops(model) == pytest.approx(2 * block, rel=0.01)
    # six blocks and a head of two are eight: four for each of two stages, two for each of four
    assert stage_layers(model, 64, 2) == [range(4), range(4, 6)]
    assert stage_layers(model, 64, 4) == [range(2), range(2, 4), range(4, 5), range(5, 6)]


@pytest.mark.parametrize("mtp", ["{kind: deepseek, num_tokens: 2}", "{head: block, num_tokens: 2}"])
def test_a_dense_block_of_a_further_token_takes_its_workspace(mtp: str) -> None:
    wide = ("model.ffn_hidden_size=65536", "training.sequence_length=64")
    given = [config("tiny", *wide, f"model.mtp={each}") for each in (mtp, "{num_tokens: 2}")]
    dense, linear = (feed_forward_workspace(SavedActivations(x, "cpu").setting) for x in given)
    assert dense == 2 * 4 * 65536
    assert linear == 2 * 4 * 2 * 256


def test_experts_of_a_mixer_have_gradients_on_every_rank() -> None:
    family = load_config(shipped("model_configs") / "cdrmix-moe5b.yaml")
    model = MemoryModel(family, "cuda")
    stacks = 3 * 8 * 2048 * 4096  # input, gate and output of eight experts
    # two experts of a feed-forward are fewer, sixteen are more
    assert model.block_gradients(arranged(8, expert=8), 0) == pytest.approx(2 * stacks, rel=0.01)
    assert model.block_gradients(arranged(8), 0) == 2 * 16 * 3 * 2048 * 2816
