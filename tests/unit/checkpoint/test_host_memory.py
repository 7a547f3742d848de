"""A copy in host memory is what the tensors held when it was taken."""

from __future__ import annotations

import pytest
import torch

from cdrmix.checkpoint import host_memory
from cdrmix.checkpoint.files import flat_bytes
from cdrmix.checkpoint.host_memory import HostMemory


def content(chunks: list[torch.Tensor]) -> bytes:
    return b"".join(chunk.numpy().tobytes() for chunk in chunks)


@pytest.mark.parametrize("chunk_bytes", [4, 64, 4096])
def test_a_copy_is_of_its_moment_and_the_next_takes_the_same_memory(
    chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "CHUNK_BYTES", chunk_bytes)
    tensors = [
        torch.randn(40, dtype=torch.float64)[::2],
        torch.randn(33),
        torch.tensor([True, False, True]),
        torch.empty(0),
    ]
    memory = HostMemory()
    expected = b"".join(flat_bytes(tensor).numpy().tobytes() for tensor in tensors)
    chunks = memory.copier(tensors)()
    for tensor in tensors:
        tensor.zero_()
    assert content(chunks) == expected
    assert all(len(chunk) == chunk_bytes for chunk in chunks[:-1])
    again = memory.copier(tensors[1:])()
    assert content(again) == bytes(len(expected) - 160)
    assert again[0].data_ptr() == chunks[0].data_ptr()


def test_nothing_to_copy_is_nothing() -> None:
    assert HostMemory().copier([])() == []
