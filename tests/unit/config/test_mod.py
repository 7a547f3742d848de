"""Section model.mod: which blocks are routed, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from cdrmix.config.model import ModelConfig


def model(**changes: Any) -> ModelConfig:
    sizes = {"hidden_size": 64, "num_layers": 4, "num_heads": 2, "vocab_size": 256}
    return ModelConfig(**sizes | changes)


@pytest.mark.parametrize(
    ("mod", "changes", "routed"),
    [
        (None, {}, ()),
        ({}, {}, (1, 2, 3)),
        ({}, {"transformer_fraction": 1.0}, (0, 1, 2, 3)),
        ({}, {"mixers": ["transformer", "rwkv", "mamba", "rwkv"]}, (0, 2, 3)),
        ({"layers": [1, 3]}, {}, (1, 3)),
    ],
)
def test_the_block_that_makes_v_first_is_never_routed(
    mod: Any, changes: dict[str, Any], routed: tuple[int, ...]
) -> None:
    assert model(mod=mod, **changes).routed_layers() == routed


@pytest.mark.parametrize(
    ("mod", "message"),
    [
        ({"layers": [0]}, "mod.layers holds 0, the first RWKV block"),
        ({"layers": [1, 1]}, "each once, in rising order"),
        ({"layers": [3, 1]}, "each once, in rising order"),
        ({"layers": [1, 4]}, "mod.layers holds 4, and the blocks are 0 to 3"),
        ({"capacity": 0}, "greater than 0"),
        ({"capacity": 1.5}, "less than or equal to 1"),
        ({"mode": "sign"}, "'threshold' or 'topk'"),
    ],
)
def test_blocks_and_modes_that_cannot_be_are_refused(mod: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        model(mod=mod)


def test_a_single_rwkv_block_has_nothing_to_route() -> None:
    with pytest.raises(ValidationError, match="mod has no block to route"):
        model(num_layers=1, mod={})
    attention = model(num_layers=1, mod={}, transformer_fraction=1.0)
    assert attention.routed_layers() == (0,)
