"""ZeRO-3 from the initial values to text, where a parameter shows neither shape nor value.

That losses and gradient norms are those of one process, test_layouts.py shows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from cdrmix import runtime
from cdrmix.optimizers.adamw import parameter_groups
from tests.distributed.test_layouts import CUT, LATE
from tests.harness import run_ranks
from tests.layouts import Case, deviation, make_config, make_plan, run_steps, start

PARTITIONED = Case(data=2, moe=False, profile="zero3_offload", zero=CUT)
BF16 = {"precision": "bf16"}


def built(case: Case) -> nn.Module:
    from cdrmix.parallel.apply import build_model
    from cdrmix.parallel.topology import make_topology

    config = make_config(case)
    plan = make_plan(case, config)
    return build_model(config, plan, make_topology(plan.degrees))


def start_partitioned(case: Case) -> tuple[dict[str, torch.Tensor], list[tuple[int, int]], Any]:
    """Initial weights, elements that were whole before and after each cut, and the sizes of the
    optimizer's groups."""
    from cdrmix.parallel import apply

    runtime.initialize_distributed()
    cut, whole = apply.partition, []

    def watched(module: nn.Module, settings: dict[str, Any]) -> None:
        before = sum(p.numel() for p in module.parameters())
        cut(module, settings)
        whole.append((before, sum(p.numel() for p in module.parameters())))

    apply.partition = watched
    model = built(case)
    groups = {g["name"]: len(g["params"]) for g in parameter_groups(model, weight_decay=0.1)}
    named = dict(model.named_parameters())
    with runtime.import_deepspeed().zero.GatheredParameters(list(named.values())):
        values = {name: p.detach().float().clone() for name, p in named.items()}
    runtime.destroy_distributed()
    return values, whole, groups


@pytest.mark.parametrize("training", [{}, BF16], ids=["fp32", "bf16"])
def test_a_partitioned_model_starts_as_any_other_and_is_never_whole(training: dict) -> None:
    plain = built(Case(moe=False))
    expected = {
        name: value.to(torch.bfloat16).float() if training else value
        for name, value in plain.state_dict().items()
    }
    total = sum(value.numel() for value in expected.values())
    decayed = sum(value.dim() > 1 for value in expected.values())
    for values, whole, groups in run_ranks(
        start_partitioned, 2, replace(PARTITIONED, training=training)
    ):
        assert values.keys() == expected.keys()
        assert all(torch.equal(values[name], expected[name]) for name in expected)
        assert groups == {"matrices": decayed, "vectors": len(expected) - decayed}
        assert all(after == 0 for _, after in whole)
        # a block, and the embedding beside it
        assert max(before for before, _ in whole) + whole[-1][0] < total / 2


def text_and_loss(case: Case) -> tuple[float, list[int]]:
    """Loss and greedy text of an engine whose forward pass has not run yet."""
    from cdrmix.models.generate import generate
    from cdrmix.parallel.zero3 import next_token_nats

    runtime.initialize_distributed()
    model = start(case).engine.module
    tokens = torch.arange(12).view(2, 6)
    with torch.no_grad():
        nats = next_token_nats(model.embedding, model(tokens).hidden, tokens)
    new = generate(model, tokens, max_new_tokens=5, temperature=0, seed=0)
    runtime.destroy_distributed()
    return float(nats), new.flatten().tolist()


def test_evaluation_and_text_need_no_training_step_before() -> None:
    ((nats, text),) = run_ranks(text_and_loss, 1, Case(moe=False))
    for case in (replace(PARTITIONED, zero=LATE), Case(data=2, moe=False, profile="zero3")):
        for found_nats, found_text in run_ranks(text_and_loss, 2, case):
            assert found_nats == pytest.approx(nats, rel=1e-6)
            assert found_text == text


def in_bf16(cases: list[Case]) -> list[tuple[list[float], ...]]:
    runtime.initialize_distributed()
    return [run_steps(start(case), count=6) for case in cases]


def test_bf16_follows_zero2_in_bf16() -> None:
    dense = Case(data=2, moe=False, profile="zero2", accumulation=2, training=BF16)
    experts = Case(data=2, expert=2, profile="expert", accumulation=2, training=BF16)
    cases = [
        *(replace(dense, profile=name) for name in ("zero2", "zero2_offload", "zero3")),
        replace(PARTITIONED, accumulation=2, training=BF16),
        *(replace(experts, profile=name) for name in ("expert", "zero2_offload")),
    ]
    runs = run_ranks(in_bf16, 2, cases)[0]
    for case, (losses, norms) in zip(cases, runs, strict=True):
        expected_losses, expected_norms = runs[0 if not case.moe else -2]
        assert deviation(losses, expected_losses) < 1e-3, f"{case}: a weight has 8 bits"
        assert deviation(norms, expected_norms) < 1e-2, f"{case}"
