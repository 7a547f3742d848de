"""A micro-step on expert ranks waits for the device where sizes of an exchange come, alone."""

from __future__ import annotations

import pytest

from tests.harness import run_ranks
from tests.waits import NUM_BLOCKS, waits_of_expert_ranks

# Times that a step runs a block's forward pass.
FORWARD_PASSES = {"none": 1, "selective": 1, "block": 2}


@pytest.mark.parametrize("drop_tokens", [False, True])
def test_a_block_waits_for_the_sizes_of_its_exchange_alone(drop_tokens: bool) -> None:
    cases = [
        {"drop_tokens": drop_tokens, "is_packed": is_packed, "recompute": recompute}
        for recompute in FORWARD_PASSES
        for is_packed in (False, True)
    ]
    for found_on_rank in run_ranks(waits_of_expert_ranks, 2, cases):
        for case, found in zip(cases, found_on_rank, strict=True):
            ((what, where),) = found
            assert (what, where.split(":")[0]) == ("tolist", "moe.py"), (case, found)
            passes = FORWARD_PASSES[str(case["recompute"])]
            assert found[what, where] == passes * NUM_BLOCKS, (case, found)


def test_a_block_that_a_threshold_routes_waits_for_its_lengths_too() -> None:
    mod = {"mode": "threshold", "capacity": 0.5}
    case = {"drop_tokens": False, "is_packed": False, "recompute": "none", "mod": mod}
    for (found,) in run_ranks(waits_of_expert_ranks, 2, [case]):
        by_file = {where.split(":")[0]: number for (_, where), number in found.items()}
        # the first block has experts, and is not routed
        assert by_file == {"moe.py": NUM_BLOCKS, "mixture_of_depths.py": NUM_BLOCKS - 1}
        assert len(found) == 2
