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
from cdrmix.config.objectives import ObjectivesConfig
from cdrmix.config.schema import Config
from cdrmix.data.document import KINDS
from cdrmix.engines.combination import objective_of, own_weights
from cdrmix.engines.training_step import StepResult, train_step
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
        self.skipped_steps = 0
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


LAMBDAS = {"text": 1.0, "fim": 0.5, "prompt": 0.25, "thought": 2.0, "answer": 1.5}


def batch_of_kinds() -> dict[str, Tensor]:
    """Two micro-batches whose labels are of every kind, unequally many."""
    batch = make_batch(weighted=False)
    shares = torch.tensor([8.0, 1.0, 4.0, 2.0, 3.0, 2.0])
    drawn = torch.multinomial(
        shares,
        batch["labels"].numel(),
        replacement=True,
        generator=torch.Generator().manual_seed(3),
    )
    return batch | {"kinds": drawn.view(batch["labels"].shape).to(torch.uint8)}


def gradients_of(
    model: Backbone, batch: dict[str, Tensor], **objectives: float
) -> tuple[list[Tensor], StepResult]:
    """Gradients of a step on one rank under these objectives; without any, of the plain mean."""
    config = configured(model).model_copy(
        update={"objectives": ObjectivesConfig(**objectives) if objectives else None}
    )
    engine = Engine(model, len(batch["input_ids"]))
    model.zero_grad()
    weights = own_weights(batch, config)
    result = train_step(engine, config, ALONE, batch, step=0, weights=weights)
    return [p.grad.clone() for p in model.parameters() if p.grad is not None], result


def dense_model() -> Backbone:
    return small_model(num_layers=NUM_LAYERS, init_std_scale=SHARP, moe=None)


def only(batch: dict[str, Tensor], *kinds: str) -> dict[str, Tensor]:
    """The batch with labels of these kinds alone."""
    places = torch.tensor([KINDS.index(kind) for kind in kinds])
    here = torch.isin(batch["kinds"].long(), places)
    return batch | {"labels": batch["labels"].masked_fill(~here, -100)}


def test_gradients_of_a_combination_are_the_sum_of_separate_passes() -> None:
    model, batch = dense_model(), batch_of_kinds()
    passes = [0]
    model.register_forward_hook(lambda *_: passes.__setitem__(0, passes[0] + 1))
    ours, result = gradients_of(model, batch, **LAMBDAS)
    assert passes == [2], "one forward pass of the trunk per micro-batch"
    total = [torch.zeros_like(gradient) for gradient in ours]
    metrics = result.combination.metrics(*result.parts.view(2, -1).tolist())
    for name, weight in LAMBDAS.items():
        kinds = ("fim", "fim_middle") if name == "fim" else (name,)
        alone, of_part = gradients_of(model, only(batch, *kinds))
        total = [a + weight * b for a, b in zip(total, alone, strict=True)]
        mean = of_part.nats.item() / of_part.combination.tokens
        assert metrics[f"objective/{name}/loss"] == pytest.approx(mean, rel=1e-6)
    _, middles = gradients_of(model, only(batch, "fim_middle"))
    mean = middles.nats.item() / middles.combination.tokens
    assert metrics["objective/fim_middle/loss"] == pytest.approx(mean, rel=1e-6)
    for gradient, wanted in zip(ours, total, strict=True):
        assert (gradient - wanted).abs().max() <= 1e-6 * max(1.0, float(wanted.abs().max()))
    # Means of the two micro-batches, each over its own labels, are another loss.
    halves = [{name: x[n : n + 1] for name, x in batch.items()} for n in range(2)]
    parts = [gradients_of(model, half, **LAMBDAS)[0] for half in halves]
    apart = [(a + b) / 2 for a, b in zip(*parts, strict=True)]
    assert max(float((a - b).abs().max()) for a, b in zip(apart, ours, strict=True)) > 1e-3


def test_an_objective_that_weighs_nothing_is_one_that_is_not_there() -> None:
    model, batch = dense_model(), batch_of_kinds()
    without = only(batch, "text", "thought", "answer")
    for z_loss in (0.0, 0.1):
        weights = LAMBDAS | {"z_loss": z_loss}
        nothing, _ = gradients_of(model, batch, **weights | {"fim": 0.0, "prompt": 0.0})
        absent, _ = gradients_of(model, without, **weights)
        assert all(torch.equal(a, b) for a, b in zip(nothing, absent, strict=True))
        learned, _ = gradients_of(model, batch, **weights)
        assert not all(torch.equal(a, b) for a, b in zip(learned, absent, strict=True))


def test_text_alone_is_the_plain_mean_to_the_last_bit() -> None:
    model, batch = dense_model(), make_batch(weighted=False)
    plain, of_plain = gradients_of(model, batch)
    kinds = torch.zeros(batch["labels"].shape, dtype=torch.uint8)
    ours, result = gradients_of(model, batch | {"kinds": kinds}, **LAMBDAS)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
    assert result.nats == of_plain.nats
    assert result.combination.tokens == of_plain.combination.tokens


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_prompts_alone_have_no_gradient_where_they_weigh_nothing(z_loss: float) -> None:
    model, batch = dense_model(), only(batch_of_kinds(), "prompt")
    gradients, result = gradients_of(model, batch, **LAMBDAS | {"prompt": 0.0, "z_loss": z_loss})
    assert not any(gradient.any() for gradient in gradients)
    metrics = result.combination.metrics(*result.parts.view(2, -1).tolist())
    assert metrics.pop("objective/prompt/loss") > 1
    assert not any(metrics.values()), "neither a part nor a number that is none"


def test_squares_are_a_mean_over_the_tokens_that_are_learned() -> None:
    model, batch = dense_model(), batch_of_kinds()
    weights = LAMBDAS | {"prompt": 0.0}
    plain, _ = gradients_of(model, batch, **weights)
    ours, result = gradients_of(model, batch, **weights, z_loss=1.0)
    total = worth = torch.zeros((), dtype=torch.float64)
    for ids, labels, kinds in zip(
        *(batch[n] for n in ("input_ids", "labels", "kinds")), strict=True
    ):
        logits = (model(ids).hidden @ model.embedding.weight.T).double()
        table = [weights[objective_of(kind)] for kind in KINDS]
        each = torch.tensor(table, dtype=torch.float64)[kinds.long()] * (labels != -100)
        total = total + (each * logits.exp().sum(-1).log().square()).sum()
        worth = worth + each.sum()
    mean = total / worth
    metrics = result.combination.metrics(*result.parts.view(2, -1).tolist())
    assert metrics["objective/z_loss"] == pytest.approx(mean.item(), rel=1e-6)
    parts = sum(weight * metrics[f"objective/{name}/loss"] for name, weight in weights.items())
    assert metrics["objective/total"] == pytest.approx(parts + mean.item(), rel=1e-6)
    used = [p for p in model.parameters() if p.grad is not None]
    wanted = torch.autograd.grad(mean, used)
    for gradient, without, of_z in zip(ours, plain, wanted, strict=True):
        assert (gradient - without - of_z).abs().max() <= 2e-5 * of_z.abs().max()
    # Prompts that are packed beside change nothing.
    alone, _ = gradients_of(model, only(batch, "text", "thought", "answer", "fim", "fim_middle"),
                            **weights, z_loss=1.0)  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(ours, alone, strict=True))
