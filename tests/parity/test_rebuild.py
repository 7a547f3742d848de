"""Selective recomputation against keeping all: equal bits, fewer bytes, nothing dear twice."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cdrmix.config.model import ModelConfig
from cdrmix.models import rwkv7_cpu
from cdrmix.models.backbone import Backbone
from cdrmix.models.rebuild import cheaply, rebuilding
from cdrmix.models.rwkv7 import TimeMix
from tools.benchmark.storages import saved, storages, total

MOE = {"num_experts": 4, "top_k": 2, "expert_hidden_size": 96}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "gated": {"ffn_activation": "swiglu", "moe": MOE | {"layers": [1, 3]}},
    "dropping": {"moe": MOE | {"drop_tokens": True, "capacity_factor": 1}},
    "mamba": {"moe": MOE, "mixers": ["rwkv", "mamba", "routing_mamba", "transformer"]},
    "routed": {"moe": MOE, "mod": {"capacity": 0.5, "mode": "topk"}},
    "further": {"mtp": {"kind": "deepseek", "num_tokens": 3}},
}


def make_model(**changes: Any) -> Backbone:
    sizes = {"hidden_size": 64, "num_layers": 4, "num_heads": 2, "vocab_size": 256}
    model = Backbone(ModelConfig.model_validate(sizes | changes)).train()
    model.initialize(seed=0)
    for parameter in model.parameters():  # zero output projections would hide what is inside
        if not parameter.any():
            nn.init.normal_(parameter, std=0.05)
    return model


def step(model: Backbone, segment_ids: Tensor | None = None) -> list[Tensor]:
    """Loss and gradients of the first tokens of two rows, those of further tokens included."""
    ids = torch.randint(0, 256, (2, 35), generator=torch.Generator().manual_seed(1))
    output = model(ids[:, :33], segment_ids=segment_ids)
    loss = output.hidden.square().sum()
    if output.router_statistics is not None:
        loss = loss + output.router_statistics.sum() / 100
    if model.mtp is not None:
        following = torch.stack([ids[:, 1:34], ids[:, 2:35]], -1)
        further = model.mtp(output.hidden, following, model.embedding, segment_ids)
        loss = loss + sum(each.square().sum() for each in further)
    model.zero_grad()
    loss.backward()
    gradients = [x.grad for x in model.parameters() if x.grad is not None]
    return [loss.detach(), *(x.clone() for x in gradients)]


@pytest.mark.parametrize("is_eager", [False, True], ids=["compiled", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_have_the_bits_of_keeping_all(
    name: str, is_eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_eager:  # the pointwise maths in PyTorch, as on GPUs
        monkeypatch.setattr(rwkv7_cpu, "can_run", lambda *_: False)
    model = make_model(**MODELS[name])
    documents = torch.arange(33).div(9, rounding_mode="floor").expand(2, -1)
    for segment_ids in (None, documents):
        results = []
        for form in ("none", "selective"):
            model.activation_checkpointing = form
            if model.mtp is not None:
                model.mtp.activation_checkpointing = form
            results.append(step(model, segment_ids))
        for found, expected in zip(*results, strict=True):
            assert torch.equal(found, expected)


def kept_by(model: Backbone, form: Any) -> int:
    """Bytes that autograd saves in a forward pass of the blocks."""
    model.activation_checkpointing = form
    ids = torch.zeros(1, 64, dtype=torch.int64)
    return total(saved(lambda: model(ids), known=storages(model.parameters()))[0])


@pytest.mark.compiler  # without the C++ passes all that they fuse is kept one by one
@pytest.mark.parametrize(("name", "share"), [("dense", 0.5), ("dropping", 0.6), ("mamba", 0.7)])
def test_half_the_bytes_are_kept(name: str, share: float) -> None:
    model = make_model(**MODELS[name])
    assert kept_by(model, "selective") < share * kept_by(model, "none")


def counting(calls: list[int], function: Any, *inputs: Any, **options: Any) -> Any:
    """Calls a function, and notes that."""
    calls.append(1)
    return function(*inputs, **options)


def test_no_recurrence_and_no_large_product_runs_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    model.activation_checkpointing = "selective"
    calls: list[int] = []
    for block in model.blocks:
        if isinstance(block.mixer, TimeMix):
            counted = partial(counting, calls, block.mixer.recurrence)
            monkeypatch.setattr(block.mixer, "recurrence", counted)
        for module in block.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(lambda *_: calls.append(1))
    step(model)
    in_forward = len(calls)
    calls.clear()
    with torch.no_grad():
        model(torch.zeros(2, 33, dtype=torch.int64))
    assert in_forward == len(calls) > 0


def test_a_result_is_made_again_once_for_all_that_read_it() -> None:
    runs = []

    def double(x: Tensor) -> Tensor:
        runs.append(1)
        return x * 2

    x, weights = torch.randn(2, 5, requires_grad=True)
    leaf = x.detach().requires_grad_()
    with rebuilding(nn.Identity()):
        twice = cheaply(double, leaf)
        again = cheaply(double, twice)
        out = (twice.exp() * again.sin()).square() @ weights.detach()
    assert len(runs) == 2
    out.backward()
    assert len(runs) == 4
    expected = ((2 * x).exp() * (4 * x).sin()).square() @ weights.detach()
    torch.testing.assert_close(leaf.grad, torch.autograd.grad(expected, x)[0])


def test_what_is_kept_goes_through_hooks_outside() -> None:
    """As those are that count bytes, or move them to the host."""
    model = make_model(**MODELS["dropping"])
    model.activation_checkpointing = "selective"
    expected = step(model)
    moved = []

    def pack(x: Tensor) -> list[Tensor]:
        moved.append(x.shape)
        return [x.clone()]

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda each: each[0]):
        found = step(model)
    assert len(moved) > 100
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_nothing_is_rebuilt_outside_of_a_block_or_without_gradients() -> None:
    x = torch.ones(3, requires_grad=True)
    assert type(cheaply(torch.exp, x).grad_fn).__name__ == "ExpBackward0"
    with rebuilding(nn.Identity()):
        assert cheaply(torch.exp, x.detach()).grad_fn is None
        with torch.no_grad():
            assert cheaply(torch.exp, x).grad_fn is None
        assert type(cheaply(torch.exp, x).grad_fn).__name__ == "_CheapBackward"
