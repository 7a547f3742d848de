"""A whole training step's objective and gradients against its definition, written in float64.

B batch, T time, V vocabulary, E experts, k experts per token.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from cdrmix.config.load import load_config
from cdrmix.config.schema import Config
from cdrmix.engines.stage_a import StepResult, train_step
from cdrmix.models.backbone import Backbone
from cdrmix.models.moe import Router
from cdrmix.objectives.language_model import sum_weights
from cdrmix.parallel.topology import ALONE
from tests.conftest import TINY
from tests.parity.test_backbone import small_model

NUM_EXPERTS, TOP_K, NUM_LAYERS = 4, 2, 2
# Unequal, and large enough for each term to weigh in the sum and in the gradient of the router.
BALANCE_WEIGHT, Z_WEIGHT = 0.7, 0.3
SHARP = 8.0


class Engine:
    """The parts of DeepSpeed's engine that a step on one rank calls.

    Divides each loss by the accumulation steps, as DeepSpeed does.
    """

    def __init__(self, module: Backbone, num_micro_steps: int) -> None:
        self.module = module
        self.device = torch.device("cpu")
        self.optimizer = SimpleNamespace(param_groups=[{"lr": 0.0}])
        self.objective = 0.0
        self._num_micro_steps = num_micro_steps

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def backward(self, loss: Tensor) -> None:
        share = loss / self._num_micro_steps
        self.objective += share.item()
        share.backward()

    def step(self) -> None:
        pass


def two_layer_model(moe: dict[str, Any] | None = None) -> Backbone:
    moe = {"num_experts": NUM_EXPERTS, "top_k": TOP_K, "expert_hidden_size": 48, **(moe or {})}
    # a sharp embedding and sharp routers, so that no softmax is nearly uniform
    return small_model(num_layers=NUM_LAYERS, init_std_scale=SHARP, moe=moe)


def configured(model: Backbone) -> Config:
    return load_config(TINY).model_copy(update={"model": model.config})


def make_batch(*, weighted: bool) -> dict[str, Tensor]:
    """Two micro-batches [A, B, T] of unequal numbers of predicted tokens."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, 300, (2, 2, 19), generator=generator)
    batch = {"input_ids": ids[..., :-1], "labels": ids[..., 1:].clone()}
    batch["labels"][0, 0, 3:] = -100
    batch["labels"][1, 1, 7] = -100
    if weighted:
        batch["weights"] = torch.rand(batch["labels"].shape, generator=generator) * 2
    return batch


def defined_objective(model: Backbone, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Terms of the objective, float64 and differentiable, from hidden states and router inputs."""
    router_inputs: list[tuple[Tensor, Tensor]] = []
    hooks = [
        module.register_forward_pre_hook(
            lambda router, inputs: router_inputs.append((inputs[0], router.weight))
        )
        for module in model.modules()
        if isinstance(module, Router)
    ]
    nats, worth, balances, zs = [], [], [], []
    for number, ids in enumerate(batch["input_ids"]):
        router_inputs.clear()
        hidden = model(ids).hidden.double()
        logits = hidden @ model.embedding.weight.double().T  # [B, T, V]
        labels = batch["labels"][number]
        weights = batch.get("weights", torch.ones(batch["labels"].shape))[number].double()
        for row, position in (labels != -100).nonzero().tolist():
            scores = logits[row, position]
            surprise = scores.exp().sum().log() - scores[labels[row, position]]
            nats.append(weights[row, position] * surprise)
            worth.append(weights[row, position])
        assert len(router_inputs) == NUM_LAYERS
        for tokens, weight in router_inputs:
            router_logits = tokens.double() @ weight.double().T  # [B T, E]
            chosen = F.one_hot(router_logits.topk(TOP_K, -1).indices, NUM_EXPERTS).sum(1)
            fraction = chosen.sum(0) / (len(tokens) * TOP_K)
            probability = (router_logits.exp() / router_logits.exp().sum(-1, True)).mean(0)
            balances.append(NUM_EXPERTS * (fraction * probability).sum())
            zs.append(router_logits.exp().sum(-1).log().square().mean())
    for hook in hooks:
        hook.remove()
    return {
        # over the tokens of the global batch, not a mean over micro-batches
        "nats": torch.stack(nats).sum() / torch.stack(worth).sum(),
        # means over layers and micro-steps
        "balance": torch.stack(balances).mean(),
        "z": torch.stack(zs).mean(),
    }


def trained_step(model: Backbone, batch: dict[str, Tensor]) -> tuple[Engine, StepResult]:
    engine = Engine(model, len(batch["input_ids"]))
    tokens = float(sum_weights(batch["labels"], batch.get("weights")))
    return engine, train_step(engine, configured(model), ALONE, batch, step=0, weights=[tokens])


@pytest.mark.parametrize("weighted", [False, True])
def test_the_objective_is_cross_entropy_balance_and_z_loss_as_weighted(weighted: bool) -> None:
    model = two_layer_model({"load_balance_weight": BALANCE_WEIGHT, "z_loss_weight": Z_WEIGHT})
    batch = make_batch(weighted=weighted)
    terms = defined_objective(model, batch)
    expected = terms["nats"] + BALANCE_WEIGHT * terms["balance"] + Z_WEIGHT * terms["z"]
    assert min(BALANCE_WEIGHT * terms["balance"], Z_WEIGHT * terms["z"]) > 0.05 * expected

    engine, result = trained_step(model, batch)
    assert engine.objective == pytest.approx(expected.item(), rel=2e-6)  # float32
    assert result.nats.item() / result.combination.tokens == pytest.approx(
        terms["nats"].item(), rel=2e-6
    )
    experts = result.routing.experts["ffn"]
    assert experts.load_balance.item() == pytest.approx(terms["balance"].item(), rel=2e-6)
    assert experts.z.item() == pytest.approx(terms["z"].item(), rel=2e-6)

    wanted = torch.autograd.grad(expected, list(model.parameters()))
    for (name, parameter), gradient in zip(model.named_parameters(), wanted, strict=True):
        assert parameter.grad is not None, name
        error = (parameter.grad - gradient).abs().max()
        assert error <= 2e-5 * gradient.abs().max(), name


def test_the_shipped_weights_reach_the_objective() -> None:
    model = two_layer_model()
    batch = make_batch(weighted=False)
    terms = defined_objective(model, batch)
    engine, _ = trained_step(model, batch)
    expected = terms["nats"] + 0.01 * terms["balance"] + 0.001 * terms["z"]
    assert engine.objective == pytest.approx(expected.item(), rel=1e-6)
    assert 0.001 * terms["z"] > 1e-4 * expected, "a z-loss that is left out would go unnoticed"


def test_each_router_term_reaches_the_routers_of_both_layers() -> None:
    for only in ("load_balance_weight", "z_loss_weight"):
        other = {"load_balance_weight", "z_loss_weight"} - {only}
        model = two_layer_model({only: 100.0, **dict.fromkeys(other, 0.0)})
        batch = make_batch(weighted=False)
        terms = defined_objective(model, batch)
        term = terms["balance" if only == "load_balance_weight" else "z"]
        routers = [module.weight for module in model.modules() if isinstance(module, Router)]
        wanted = torch.autograd.grad(100 * term + terms["nats"], routers)
        trained_step(model, batch)
        for router, gradient in zip(routers, wanted, strict=True):
            assert gradient.abs().max() > 1e-2
            error = (router.grad - gradient).abs().max()
            assert error <= 2e-5 * gradient.abs().max(), only
