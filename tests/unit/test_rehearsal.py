"""Plans made small: every axis is kept, no more processes than a laptop runs."""

import pytest

from cdrmix.config.load import load_config, shipped
from cdrmix.planning import rules
from cdrmix.planning.cluster import make_cluster
from cdrmix.planning.deepspeed_json import profile_path, read_profile
from cdrmix.planning.layout import Degrees, Layout
from cdrmix.planning.plan import plan
from cdrmix.planning.rehearsal import (
    MOST_RANKS,
    Rehearsal,
    _small_degrees,
    aspects,
    rehearsals,
)

AXES = ("pipeline", "tensor", "sequence", "sample_ranks", "expert")
CLUSTERS = {"1b": (1, 8), "4b": (4, 8), "40b": (16, 8), "200b": (32, 8)}
VARIANTS = [f"cdrmix-{family}-{size}" for family in ("core", "reason") for size in CLUSTERS]


@pytest.mark.parametrize(
    "planned",
    [
        Degrees(data=8, tensor=1, pipeline=1, sequence=1, expert=8),
        Degrees(data=16, tensor=4, pipeline=2, sequence=1, expert=8),
        Degrees(data=4, tensor=8, pipeline=8, sequence=4, expert=8),
        Degrees(data=8, tensor=8, pipeline=4, sequence=4, expert=8),
        Degrees(data=4, tensor=1, pipeline=1, sequence=4, expert=2),
        Degrees(data=1, tensor=1, pipeline=1, sequence=1, expert=1),
    ],
)
def test_every_axis_is_kept_on_at_most_eight_ranks(planned: Degrees) -> None:
    small = _small_degrees(planned)
    assert len(small) <= 2
    assert all(degrees.world_size <= MOST_RANKS for degrees in small)
    for axis in AXES:
        largest = max(getattr(degrees, axis) for degrees in small)
        assert largest == min(2, getattr(planned, axis)), axis


def test_what_does_not_fit_at_once_is_split_so_that_axes_meet() -> None:
    small = _small_degrees(Degrees(data=8, tensor=8, pipeline=4, sequence=4, expert=8))
    assert [(d.pipeline, d.tensor, d.sequence, d.sample_ranks) for d in small] == [
        (2, 2, 2, 1),
        (2, 1, 2, 2),
    ]


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_small_layouts_of_every_variant_are_sound(variant: str) -> None:
    nodes, gpus = CLUSTERS[variant.rsplit("-", 1)[1]]
    config = load_config(shipped("model_configs") / f"{variant}.yaml")
    made = plan(config, make_cluster(nodes=nodes, gpus_per_node=gpus, gpu="a100-80"))
    small = rehearsals(config, made.pick)
    for each in small:
        settings = read_profile(profile_path(each.profile))
        ranks = each.degrees.world_size
        layout = Layout(each.config, each.degrees, settings, each.profile, ranks, "cpu")
        rules.check(layout, of_this_version=False)
        kinds = set(each.config.model.layer_kinds())
        assert kinds == {"rwkv", "transformer"}
    unseen = {each.name for each in aspects(config, made.pick, small) if each.is_exercised is False}
    assert unseen == {
        "precision",
        "hidden size",
        "layers",
        "tokens a sample",
        "ranks",
        "devices and links",
        "tokens beyond an expert's capacity",
        *(["Stage B"] if "reason" in variant else []),
    }


def small_and_unseen(*overrides: str) -> tuple[list[Rehearsal], set[str]]:
    config = load_config(shipped("model_configs") / "cdrmix-core-tiny.yaml", overrides)
    made = plan(config, make_cluster(nodes=1, gpus_per_node=6, gpu="a100-80"))
    small = rehearsals(config, made.pick)
    unseen = {each.name for each in aspects(config, made.pick, small) if each.is_exercised is False}
    return small, unseen


def test_an_odd_number_of_experts_is_rehearsed_with_one_more() -> None:
    (small,), unseen = small_and_unseen(
        "model.moe.num_experts=9", "parallel.expert=3", "training.global_batch_size=12"
    )
    assert small.config.model.moe is not None
    assert (small.degrees.expert, small.config.model.moe.num_experts) == (2, 10)
    assert "experts a layer" in unseen


def test_what_the_corpus_cannot_show_of_the_data_is_told() -> None:
    (small,), unseen = small_and_unseen(
        "training.global_batch_size=12",
        "data.token_weights.text=0",
        "data.token_weights.answer=2",
        "data.mixture.temperature=2",
        "data.order=windowed",
    )
    assert small.config.data.token_weights is not None, "the weighted loss is exercised"
    assert small.config.data.token_weights.text == 1
    assert {"weights of tokens", "mixture", "order of samples"} <= unseen
