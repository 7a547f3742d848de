"""Blocks through torch.compile against blocks as they are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from cdrmix.config.model import ModelConfig
from cdrmix.models import compiled
from cdrmix.models.backbone import Backbone

TOLERANCE = 2e-6  # relative, Frobenius: fused kernels round in another order
MIXERS = ("rwkv", "transformer", "mamba", "routing_mamba")


def backbone(mixers: list[str], *, experts_in: Sequence[int]) -> Backbone:
    """A model of these layers, dense but for the layers `experts_in`."""
    moe = {"num_experts": 4, "expert_hidden_size": 64, "layers": list(experts_in)}
    sizes = {"hidden_size": 64, "num_layers": len(mixers), "num_heads": 2, "vocab_size": 256}
    mamba = {"routing_mamba": {"num_experts": 3}} if "routing_mamba" in mixers else {}
    made = Backbone(ModelConfig(mixers=mixers, moe=moe if experts_in else None, **sizes, **mamba))
    made.initialize(seed=0)
    for parameter in made.parameters():  # behind outputs of zero little would show
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)
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
@pytest.mark.parametrize("has_experts", [True, False])
def test_every_kind_of_block_is_one_graph_that_equals_it_and_keeps_its_names(
    backend: None, has_experts: bool
) -> None:
    # the first RWKV layer makes v_first, the second takes it
    mixers = ["rwkv", *MIXERS]
    model = backbone(mixers, experts_in=range(len(mixers)) if has_experts else ())
    names = list(model.state_dict())
    wanted = results(model)
    model.is_compiled = True
    counters.clear()
    assert_equal(results(model), wanted)
    model.activation_checkpointing = "block"
    assert_equal(results(model), wanted)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == len(mixers)
    # so that a checkpoint of either goes on as the other
    assert list(model.state_dict()) == names


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of compiled kernels. It is shared, as each would have C++ headers compiled anew."""
    return tmp_path_factory.mktemp("kernels")


@pytest.mark.parametrize("backend", ["inductor"], indirect=True)
@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.compiler
@pytest.mark.slow
def test_kernels_of_inductor_equal_blocks_and_are_kept(
    backend: None, mixer: str, monkeypatch: pytest.MonkeyPatch, kernels: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(kernels))
    compiled._prepare.cache_clear()
    before = set(kernels.rglob("*.so"))
    model = backbone([mixer, mixer], experts_in=[1])  # a dense layer and one of experts
    wanted = results(model)
    model.is_compiled = True
    counters.clear()
    assert_equal(results(model), wanted)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 2
    assert set(kernels.rglob("*.so")) - before
