"""A state on a GPU is copied to pinned memory as it is, whatever the GPU does next."""

from __future__ import annotations

import pytest
import torch

from cdrmix.checkpoint import host_memory
from cdrmix.checkpoint.host_memory import HostMemory

pytestmark = pytest.mark.gpu


def test_a_copy_from_a_gpu_is_of_its_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "CHUNK_BYTES", 2**20)
    flat = torch.randn(2_000_003, device="cuda")
    tensors = [flat[:7], flat[7:1_000_000], flat[1_500_000:], torch.ones(3, dtype=torch.bool)]
    expected = b"".join(tensor.cpu().numpy().tobytes() for tensor in tensors)
    memory = HostMemory()
    for _ in range(2):
        before = flat.clone()
        chunks = memory.copier(tensors)()
        flat.add_(1.0)
        assert b"".join(chunk.numpy().tobytes() for chunk in chunks) == expected
        assert all(chunk.is_pinned() for chunk in chunks)
        flat.copy_(before)
