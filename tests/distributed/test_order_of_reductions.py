"""All ranks reduce the same gradients in the same order, under the backward pass or behind it.

DeepSpeed puts gradients into a bucket as the backward pass makes them, and a bucket is reduced as a
row of numbers: another order on one rank would mix up gradients, or have ranks wait for each other.
A rank whose experts get no token is where the passes differ.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.harness import run_ranks
from tests.layouts import Case, train

_COLLECTIVES = ("all_reduce", "reduce", "broadcast", "all_gather_into_tensor", "all_to_all_single")


def recorded(case: Case, planted: str) -> tuple[Any, list[str], list[tuple[Any, ...]]]:
    """Losses, norms and masters of a rank; its gradients in the order in which they were put into
    buckets; its collectives with group, type and size."""
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    from cdrmix.models.moe import GroupedExperts, Router

    gradients: list[str] = []
    collectives: list[tuple[Any, ...]] = []
    names: dict[int, str] = {}
    put = DeepSpeedZeroOptimizer.reduce_independent_p_g_buckets_and_remove_grads
    choose, apply = Router.forward, GroupedExperts.forward

    def put_and_record(zero: Any, parameter: Any, group: int) -> None:
        names.update({id(each): name for each, name in zero.param_names.items()})
        gradients.append(names[id(parameter)])
        put(zero, parameter, group)

    def choose_first(router: Router, x: torch.Tensor) -> Any:
        experts, *rest = choose(router, x)
        if torch.distributed.get_rank() >= case.world_size - 2:  # the last expert group
            experts = torch.arange(router.top_k).expand_as(experts)
        return experts, *rest

    def apply_in_another_order(experts: GroupedExperts, rows: Any, ends: Any) -> Any:
        if len(rows):
            return apply(experts, rows, ends)
        return rows + 0 * sum(parameter.sum() for parameter in experts.parameters())

    def recording(name: str) -> None:
        original = getattr(torch.distributed, name)

        def collective(*args: Any, **kwargs: Any) -> Any:
            given = (*args, *kwargs.values())
            tensor = next(each for each in given if isinstance(each, torch.Tensor))
            group = kwargs.get("group") or torch.distributed.group.WORLD
            ranks = tuple(torch.distributed.get_process_group_ranks(group))
            # what a rank sends to each other one is its own affair
            size = 0 if name == "all_to_all_single" else tensor.numel()
            collectives.append((ranks, name, str(tensor.dtype), size))
            return original(*args, **kwargs)

        setattr(torch.distributed, name, collective)

    DeepSpeedZeroOptimizer.reduce_independent_p_g_buckets_and_remove_grads = put_and_record
    Router.forward = choose_first  # type: ignore[method-assign]
    if planted:
        GroupedExperts.forward = apply_in_another_order  # type: ignore[method-assign]
    for name in _COLLECTIVES:
        recording(name)
    losses, norms, masters, _ = train(case)
    held = [(name, values.tobytes()) for name, _, _, values in masters]
    return (losses, norms, held), gradients, collectives


def in_order(ranks: list[tuple[Any, list[str], list[tuple[Any, ...]]]]) -> bool:
    """Whether all ranks put gradients into buckets, and call the collectives of each group, in one
    order."""
    orders = [gradients for _, gradients, _ in ranks]
    alike = all(order == orders[0] for order in orders)
    groups = {call[0] for _, _, calls in ranks for call in calls}
    for group in groups:
        sequences = [[c for c in ranks[rank][2] if c[0] == group] for rank in group]
        alike = alike and all(sequence == sequences[0] for sequence in sequences)
    return alike


def spread(world: int, **zero: Any) -> Case:
    return Case(data=world, expert=2, mixed=True, profile="zero2", optimizer="sgd", zero=zero)


@pytest.mark.parametrize("world", [2, 4])
def test_reductions_are_in_one_order_and_overlap_changes_no_bit(world: int) -> None:
    cases = [
        spread(world, overlap_comm=overlap, reduce_bucket_size=20_000) for overlap in (False, True)
    ]
    behind, under = (run_ranks(recorded, world, case, "") for case in cases)
    for ranks in (behind, under):
        assert in_order(ranks)
        assert len(ranks[0][1]) > 100 and len(ranks[0][2]) > 100
    assert [rank[0] for rank in behind] == [rank[0] for rank in under]


def test_another_order_on_one_rank_is_noticed() -> None:
    ranks = run_ranks(recorded, 4, spread(4), "another order")
    assert not in_order(ranks)
