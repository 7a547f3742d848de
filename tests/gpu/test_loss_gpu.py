"""The loss on a CUDA device in bfloat16 against the CPU in float64, over several chunks."""

import pytest
import torch

from cdrmix.objectives import language_model
from cdrmix.objectives.language_model import LabelWeights, linear_losses

pytestmark = pytest.mark.gpu


def test_losses_and_gradients_equal_the_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products with float32 results, and sums inside of a product, exist on CUDA alone."""
    monkeypatch.setattr(language_model, "chunk_positions", lambda *_: 96)
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 150, 64), torch.randn(1000, 64)
    labels = torch.randint(0, 1000, (2, 150))
    labels[0, :20] = -100
    weights = [torch.rand(2, 150), torch.rand(2, 150), torch.rand(2, 150, 3)]
    found = []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.bfloat16)):
        # the same values on both: those that bfloat16 has
        leaves = [x.bfloat16().to(device, dtype).requires_grad_() for x in (hidden, weight)]
        losses = linear_losses(
            *leaves, labels.to(device), LabelWeights(*(x.to(device) for x in weights))
        )
        gradients = torch.autograd.grad(losses.loss, leaves)
        found.append([x.detach().cpu().double() for x in (*losses, *gradients)])
    for exact, ours in zip(*found, strict=True):
        # logits are not rounded: sums of nats are exact to float32
        scale = exact.abs().max()
        assert (ours - exact).abs().max() <= (1e-2 if exact.ndim > 1 else 1e-5) * scale
