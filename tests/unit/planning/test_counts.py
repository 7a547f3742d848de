"""Counts against figures that were worked out by hand, in closed form.

That they equal the built model is test_model_size.py's business.
"""

import pytest

from cdrmix.config.load import load_config, shipped
from cdrmix.config.model import ModelConfig
from cdrmix.config.schema import Config
from cdrmix.planning.counts import (
    attended_tokens,
    compute_share,
    count,
    forward_flops_by_layer,
    head_flops,
    parameters,
    params_by_part,
    stage_b_params,
)

TINY = load_config(shipped("model_configs") / "cdrmix-core-tiny.yaml").model


def variant(name: str) -> Config:
    return load_config(shipped("model_configs") / f"cdrmix-{name}.yaml")


def changed(**changes: object) -> ModelConfig:
    return ModelConfig.model_validate(TINY.model_dump() | changes)


def active_by_hand(
    *, width: int, layers: int, inner: int, ranks: tuple[int, int, int, int], vocab: int
) -> int:
    """Parameters that one token meets, a quarter of the blocks Transformer, 2 of 8 experts.

    `ranks` are those of decay, in-context learning rate, value and gate, from the table of
    RWKV-LM's sizes.
    """
    transformer = layers // 4
    rwkv = layers - transformer
    decay, iclr, value, gate = ranks
    # Per RWKV block: 4 matrices, 4 low-rank pairs with 3 biases; vectors: 6 mixes, 3 of keys and
    # bonus, 2 of the group norm, 1 of the feed-forward's shift. The first one has no value path.
    time_mix = (
        4 * width**2 + 2 * width * (decay + iclr + value + gate) + (3 + 6 + 3 + 2 + 1) * width
    )
    no_value_path = 2 * width * value + width
    # Per block: 2 norms, router of 8, two matrices of each of 2 experts.
    shared = 2 * width + 8 * width + 2 * 2 * width * inner
    return (
        rwkv * time_mix
        - no_value_path
        + transformer * 4 * width**2
        + layers * shared
        + vocab * width
        + 2 * width
    )


@pytest.mark.parametrize(
    ("scale", "width", "layers", "inner", "ranks"),
    [
        ("1b", 2048, 24, 4608, (128, 128, 64, 224)),
        ("4b", 3072, 36, 8192, (128, 128, 96, 288)),
        ("40b", 6144, 64, 16384, (192, 192, 128, 384)),
        ("200b", 12288, 96, 32768, (288, 288, 192, 544)),
    ],
)
@pytest.mark.parametrize("family", ["core", "reason"])
def test_active_parameters_equal_a_count_by_hand(
    family: str, scale: str, width: int, layers: int, inner: int, ranks: tuple
) -> None:
    by_hand = active_by_hand(width=width, layers=layers, inner=inner, ranks=ranks, vocab=50272)
    counts = count(variant(f"{family}-{scale}").model, 4096)
    assert counts.active_params == by_hand
    assert counts.total_params == by_hand + layers * 6 * 2 * width * inner  # 6 idle experts


@pytest.mark.parametrize(
    ("scale", "active", "total", "gflop"),
    [
        ("1b", 1.45e9, 4.17e9, 9.13),
        ("4b", 5.24e9, 16.1e9, 32.4),
        ("40b", 36.3e9, 113.6e9, 221),
        ("200b", 215.5e9, 679e9, 1303),
    ],
)
def test_the_variants_have_the_published_sizes(
    scale: str, active: float, total: float, gflop: float
) -> None:
    counts = count(variant(f"core-{scale}").model, 4096)
    assert counts.active_params == pytest.approx(active, rel=2e-3)
    assert counts.total_params == pytest.approx(total, rel=2e-3)
    assert counts.train_flops_per_token == pytest.approx(gflop * 1e9, rel=2e-3)


def test_flops_follow_the_formula_of_each_kind_of_block() -> None:
    width, inner, length, head_dim = 128, 256, 512, 32
    ranks = 32 + 32 + 32 + 64  # of decay, learning rate, value and gate
    experts = 2 * 4 * width * inner + 2 * width * 8
    rwkv = 8 * width**2 + 4 * width * ranks + 9 * width * head_dim + experts
    first = rwkv - 4 * width * 32  # makes v_first, and so has no value path
    attention = 8 * width**2 + 2 * length * width + experts
    assert forward_flops_by_layer(TINY, length) == [first, rwkv, rwkv, attention]
    head = 2 * width * 4096
    assert head_flops(TINY) == head
    forward = first + rwkv + rwkv + attention + head
    assert count(TINY, length).train_flops_per_token == 3 * forward


def test_fewer_key_value_heads_cost_smaller_projections_but_the_same_scores() -> None:
    length = 512
    full, grouped = (forward_flops_by_layer(m, length)[3] for m in (TINY, changed(num_kv_heads=1)))
    saved_rows = 2 * (128 - 32)  # of key and value
    assert full - grouped == 2 * saved_rows * 128
    assert count(TINY, 1).total_params - count(changed(num_kv_heads=1), 1).total_params == (
        saved_rows * 128
    )


def test_only_attention_depends_on_the_sequence_length() -> None:
    short, long = (forward_flops_by_layer(TINY, length) for length in (256, 512))
    assert [b - a for a, b in zip(short, long, strict=True)] == [0, 0, 0, 2 * 256 * 128]


def test_documents_apart_are_counted_as_shorter_than_their_sample() -> None:
    tiny = load_config(
        shipped("model_configs") / "cdrmix-core-tiny.yaml",
        ["training.sequence_length=4096", "data.segment_documents=true"],
    )
    whole = tiny.data.model_copy(update={"segment_documents": False})
    assert attended_tokens(tiny.model_copy(update={"data": whole})) == 4096
    assert attended_tokens(tiny) == 1024
    short = tiny.training.model_copy(update={"sequence_length": 512})
    assert attended_tokens(tiny.model_copy(update={"training": short})) == 512


@pytest.mark.parametrize("mtp", [{}, {"kind": "deepseek"}, {"head": "block"}, None])
def test_the_share_of_computation_is_that_of_the_counts(mtp: dict[str, str] | None) -> None:
    family = variant("moe5b").model
    assert family.mod is not None
    given = ModelConfig.model_validate(family.model_dump() | {"mtp": mtp})
    whole = given.model_copy(update={"mod": None})
    fractions = dict.fromkeys(given.routed_layers(), family.mod.capacity)
    routed, all_tokens = (count(each, 2048).train_flops_per_token for each in (given, whole))
    share = compute_share(given, 2048, fractions)
    assert share == pytest.approx(routed / all_tokens, rel=1e-9)
    if mtp == {}:
        assert share == pytest.approx(0.795, abs=5e-4), "heads and maps are of every token"


def test_a_dense_model_is_active_as_a_whole() -> None:
    model = changed(moe=None, ffn_hidden_size=512)
    counts = count(model, 256)
    assert counts.active_params == counts.total_params
    moe = count(TINY, 256)
    # Two active experts of 256 are a dense feed-forward of 512, but for the routers.
    assert moe.active_params - counts.active_params == 4 * 8 * 128


def test_v_first_is_made_by_the_first_rwkv_block_wherever_it_stands() -> None:
    names = [parameter.name for parameter in parameters(TINY)]
    assert "blocks.0.mixer.value_bias" not in names
    assert "blocks.1.mixer.value_bias" in names
    attentive = parameters(changed(transformer_fraction=1.0))
    assert not [parameter for parameter in attentive if "value_bias" in parameter.name]


def test_parts_and_layers_add_up_to_the_total() -> None:
    for model in (TINY, changed(moe=None), variant("core-1b").model):
        total = count(model, 256).total_params
        assert params_by_part(model).total() == total
        outside = model.hidden_size * (model.vocab_size + 2)
        blocks = (p.num_elements for p in parameters(model) if p.layer is not None)
        assert sum(blocks) + outside == total


@pytest.mark.parametrize(
    ("scale", "adapters", "retrieval", "plastic_state"),
    [
        ("1b", 2_555_904, 2_097_152, 4_992),
        ("4b", 8_626_176, 3_932_160, 16_848),
        ("40b", 40_894_464, 9_437_184, 53_248),
        ("200b", 184_025_088, 25_165_824, 179_712),
    ],
)
def test_stage_b_parts_have_the_specified_sizes(
    scale: str, adapters: int, retrieval: int, plastic_state: int
) -> None:
    config = variant(f"reason-{scale}")
    assert config.stage_b is not None
    counts = stage_b_params(config.model, config.stage_b)
    found = (counts.adapters, counts.retrieval, counts.plastic_state)
    assert found == (adapters, retrieval, plastic_state)


def test_a_reasoning_variant_counts_the_backbone_of_its_core_twin() -> None:
    assert count(variant("reason-1b").model, 4096) == count(variant("core-1b").model, 4096)


def test_every_fourth_block_is_a_transformer_block_or_the_last_ones_are() -> None:
    sizes = {"hidden_size": 64, "num_layers": 6, "num_heads": 2, "vocab_size": 256}

    def places(**settings: object) -> list[int]:
        kinds = ModelConfig.model_validate({**sizes, **settings}).layer_kinds()
        return [layer for layer, kind in enumerate(kinds) if kind == "transformer"]

    assert places() == [3]
    assert places(transformer_fraction=0.5) == [1, 3, 5]
    assert places(transformer_fraction=1.0) == [0, 1, 2, 3, 4, 5]
    assert places(transformer_fraction=0.0) == []
    assert places(schedule="top-of-x", transformer_fraction=0.5) == [3, 4, 5]
    assert places(schedule="top-of-x", transformer_fraction=0.3) == [5]
