"""Compiled blocks on a GPU against blocks as they are, in bf16."""

from __future__ import annotations

import pytest
import torch

from cdrmix.models import compiled
from cdrmix.models.backbone import Backbone
from tests.parity.test_compiled import backbone

pytestmark = pytest.mark.gpu
# bf16 rounds by up to 2^-9 each time, and fused kernels round less often.
TOLERANCE = 0.03


def test_compiled_blocks_equal_blocks_in_bfloat16() -> None:
    def results(model: Backbone) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 256, (2, 128), generator=torch.Generator().manual_seed(0)).cuda()
        model.zero_grad()
        hidden = model(ids).hidden.float()
        (
            hidden * torch.linspace(-1, 1, hidden.numel(), device="cuda").view_as(hidden)
        ).mean().backward()
        found = {name: x.grad.float() for name, x in model.named_parameters() if x.grad is not None}
        return {"hidden": hidden.detach(), **found}

    torch._dynamo.reset()
    compiled._compiled.cache_clear()
    model = backbone(hidden_size=128, moe=None).bfloat16().cuda()
    wanted = results(model)
    model.is_compiled = True
    found = results(model)
    assert found.keys() == wanted.keys()
    for name, exact in wanted.items():
        error = ((found[name] - exact).norm() / exact.norm().clamp_min(1e-12)).item()
        assert error <= TOLERANCE, (name, error)
