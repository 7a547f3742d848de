"""Layers listed one by one: block types, experts in some of them."""

import pytest

from cdrmix.config.load import load_config, shipped
from cdrmix.config.model import BLOCK_TYPES, ModelConfig
from cdrmix.errors import ConfigError

TINY = shipped("model_configs") / "cdrmix-core-tiny.yaml"
LISTED = ("model.mixers=[rwkv*2, transformer, rwkv]", "model.moe.layers=[1, 3]")


def model(*overrides: str) -> ModelConfig:
    return load_config(TINY, overrides).model


def test_listed_layers_stand_in_place_of_the_schedule() -> None:
    listed = model(*LISTED)
    assert listed.layer_kinds() == ("rwkv", "rwkv", "transformer", "rwkv")
    assert listed.moe_layers() == (1, 3)
    assert [listed.has_experts(layer) for layer in range(4)] == [False, True, False, True]
    assert listed.has_dense_layers
    # as a run's own copy of its configuration is read
    assert ModelConfig.model_validate(listed.model_dump(mode="json")) == listed


def test_without_a_list_every_layer_has_experts_or_none() -> None:
    assert model().moe_layers() == (0, 1, 2, 3) and not model().has_dense_layers
    assert model("model.moe=null").moe_layers() == ()


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["model.mixers=[rwkv*3]"], "mixers names 3 layers, and num_layers = 4"),
        (["model.mixers=[rwkw*4]"], "'rwkw*4': give a block type"),
        (["model.mixers=[rwkv*4*2]"], "as in 'rwkv*3'. Known: rwkv, transformer"),
        (["model.mixers=[rwkv*0, rwkv*4]"], "'rwkv*0': give a block type"),
        ([*LISTED, "model.schedule=top-of-x"], "schedule has no meaning with mixers"),
        (["model.moe.layers=[1, 4]"], "moe.layers names layer 4, and num_layers = 4: the last one"),
        (["model.moe.layers=[2, 1]"], "numbers of layers from 0 on, each once, in rising order"),
        (["model.moe.layers=[-1]"], "numbers of layers from 0 on, each once, in rising order"),
        (["model.mamba.expand=2"], "mamba has no meaning without a layer of the type mamba or"),
        (
            ["model.mixers=[mamba*4]", "model.routing_mamba.num_experts=4"],
            "routing_mamba has no meaning without a layer of the type routing_mamba",
        ),
        (
            ["model.mixers=[routing_mamba*4]", "model.routing_mamba.top_k=9"],
            "top_k = 9 is more than num_experts = 8",
        ),
        (["model.ffn_activation=gelu"], "allowed is one of squared_relu, swiglu"),
    ],
)
def test_what_does_not_fit_is_told(overrides: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(TINY, overrides)
    assert told in str(caught.value)


def test_sections_of_mamba_are_filled_in_where_there_are_such_layers() -> None:
    routed = model("model.mixers=[mamba*3, routing_mamba]", "model.mamba.state_size=8")
    assert routed.mamba is not None and routed.routing_mamba is not None
    assert (routed.mamba.state_size, routed.mamba.rank(routed.hidden_size)) == (8, 8)
    assert (routed.routing_mamba.num_experts, routed.routing_mamba.top_k) == (8, 1)
    assert ModelConfig.model_validate(routed.model_dump(mode="json")) == routed
    plain = model("model.mixers=[mamba*4]")
    assert plain.mamba is not None and plain.routing_mamba is None
    assert model().mamba is None


def test_every_registered_type_can_be_listed() -> None:
    for kind in BLOCK_TYPES:
        assert model(f"model.mixers=[{kind}*4]").layer_kinds() == (kind,) * 4
