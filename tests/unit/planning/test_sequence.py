"""Which form of the recurrence exchanges less between sequence ranks, and when it is chosen."""

import pytest

from cdrmix.config.load import load_config, shipped
from cdrmix.planning.blocks.block_type import block_type

MODEL = load_config(shipped("model_configs") / "cdrmix-core-1b.yaml", ()).model
RWKV = block_type("rwkv")


def test_bytes_are_what_the_shapes_say() -> None:
    assert (MODEL.hidden_size, MODEL.num_heads, MODEL.head_dim) == (2048, 16, 128)
    # bf16 r, k, v, a, b, y and float32 lw of a token; [Y; M] of 16 heads, float32
    assert RWKV.heads_bytes(MODEL, 1, 2) == 2048 * (6 * 2 + 4)
    assert RWKV.states_bytes(MODEL, 3, 4) == 4 * 3 * 16 * (128 + 128) * 128 * 4


@pytest.mark.parametrize(
    ("length", "sequence", "form"),
    [
        (4096, 1, "whole"),
        (4096, 2, "state"),
        (4096, 8, "heads"),  # as many bytes either way, and less to compute
        (32_768, 8, "state"),
        (128, 2, "heads"),
    ],
)
def test_states_are_passed_where_a_rank_has_many_tokens(
    length: int, sequence: int, form: str
) -> None:
    found = RWKV.sequence_form(MODEL, sequence_length=length, sequence=sequence, element_bytes=2)
    assert found == form
