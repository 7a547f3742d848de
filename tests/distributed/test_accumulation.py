"""A bf16 gradient is added to its float32 sum where the backward pass makes it, and freed there."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.harness import run_ranks
from tests.layouts import Case, train

BF16 = {"precision": "bf16"}
CASES = [
    Case(accumulation=2, training=BF16),
    Case(data=2, expert=2, accumulation=2, training=BF16 | {"activation_checkpointing": True}),
    Case(pipeline=2, accumulation=2, profile="pipeline", training=BF16),
]


def train_and_digest(case: Case, form: str) -> Any:
    """Losses, gradient norms and the bytes of this rank's master weights."""
    import deepspeed

    from cdrmix.engines import loop

    original, ours = deepspeed.initialize, loop.add_without_copies
    changed = []

    def started(*args: Any, **kwargs: Any) -> Any:
        settings = copy.deepcopy(kwargs["config"])
        assert settings["bf16"]["immediate_grad_update"]
        settings["bf16"]["immediate_grad_update"] = form != "afterwards"
        return original(*args, **kwargs | {"config": settings})

    deepspeed.initialize = started
    loop.add_without_copies = lambda engine: changed.append(form != "deepspeed" and ours(engine))
    losses, norms, masters, _ = train(case)
    assert changed == [form == "ours"]
    return losses, norms, [(name, values.tobytes()) for name, _, _, values in masters]


@pytest.mark.parametrize("case", CASES, ids=["one rank", "experts spread", "two stages"])
def test_gradients_added_at_once_and_as_they_are_give_the_same_bits(case: Case) -> None:
    ours, deepspeeds, afterwards = (
        run_ranks(train_and_digest, case.world_size, case, form)
        for form in ("ours", "deepspeed", "afterwards")
    )
    assert ours == deepspeeds == afterwards
