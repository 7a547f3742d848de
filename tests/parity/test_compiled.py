"""Blocks through torch.compile against blocks as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from cdrmix.config.model import ModelConfig
from cdrmix.models import compiled
from cdrmix.models.backbone import Backbone

TOLERANCE = 2e-6  # relative, Frobenius: fused kernels round in another order


def backbone(**model: object) -> Backbone:
    moe = {"num_experts": 4, "top_k": 2, "expert_hidden_size": 64}
    sizes = {"hidden_size": 64, "num_layers": 4, "num_heads": 2, "vocab_size": 256, "moe": moe}
    made = Backbone(ModelConfig(**sizes | model))
    made.initialize(seed=0)
    for block in made.blocks:  # behind outputs of zero little would show
        torch.nn.init.normal_(block.mixer.output.weight, std=0.1)
    return made


def results(model: Backbone) -> dict[str, Tensor]:
    """Hidden states of some tokens in two documents, and the gradients of all weights."""
    ids = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(0))
    segments = torch.arange(32).div(20, rounding_mode="floor").expand(2, -1)
    model.zero_grad()
    out = model(ids, segment_ids=segments)
    # the square of normalised states would be nearly constant, and its gradient rounding alone
    loss = (out.hidden * torch.linspace(-1, 1, out.hidden.numel()).view_as(out.hidden)).mean()
    if out.router_statistics is not None:
        loss = loss + 1e-3 * out.router_statistics.sum()
    loss.backward()
    found = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    return {"hidden": out.hidden.detach(), **found}


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, exact in wanted.items():
        error = (found[name] - exact).norm() / exact.norm().clamp_min(1e-12)
        assert error <= TOLERANCE, (name, error.item())


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Compiles by the backend that a test is given, and forgets the graphs of others."""
    torch._dynamo.reset()
    compiled._compiled.cache_clear()
    monkeypatch.setattr(compiled, "_BACKEND", request.param)


@pytest.mark.parametrize("backend", ["aot_eager"], indirect=True)
def test_compiled_blocks_equal_blocks_and_keep_their_names(backend: None) -> None:
    model = backbone(mixers=["rwkv", "transformer"], num_layers=2)
    names = list(model.state_dict())
    wanted = results(model)
    model.is_compiled = True
    assert_equal(results(model), wanted)
    model.activation_checkpointing = "block"
    assert_equal(results(model), wanted)
    # so that a checkpoint of either goes on as the other
    assert list(model.state_dict()) == names


@pytest.mark.parametrize("backend", ["inductor"], indirect=True)
@pytest.mark.compiler
@pytest.mark.slow
def test_kernels_of_inductor_equal_blocks_and_are_kept(
    backend: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    compiled._prepare.cache_clear()
    model = backbone(moe=None, mixers=["rwkv"], num_layers=1)
    wanted = results(model)
    model.is_compiled = True
    assert_equal(results(model), wanted)
    assert list(tmp_path.rglob("*.so"))
