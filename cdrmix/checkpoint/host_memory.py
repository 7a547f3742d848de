"""Memory of this host that one save after another is copied into, so that training can go on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from cdrmix.checkpoint.files import flat_bytes

# A power of two, which is what torch rounds pinned memory up to: nothing is lost to rounding but in
# the last chunk.
CHUNK_BYTES = 64 * 2**20


class HostMemory:
    """Chunks that are kept from one copy to the next; pinned where they are filled from a GPU."""

    def __init__(self) -> None:
        self._chunks: list[torch.Tensor] = []

    def copy(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The bytes of `tensors`, end to end, as they are now; valid until the next copy.

        Args:
            tensors: on any device, of any type.
        Returns:
            Chunks in host memory, uint8, each full but the last one.
        """
        pin = any(tensor.is_cuda for tensor in tensors)
        position = 0
        for run in _runs(tensors):
            copied = 0
            while copied < run.numel():
                number, start = divmod(position + copied, CHUNK_BYTES)
                part = run[copied : copied + CHUNK_BYTES - start]
                chunk = self._chunk(number, pin=pin)
                chunk[start : start + part.numel()].copy_(part, non_blocking=True)
                copied += part.numel()
            position += copied
        if pin:
            torch.cuda.current_stream().synchronize()
        full, rest = divmod(position, CHUNK_BYTES)
        return [*self._chunks[:full], *([self._chunks[full][:rest]] if rest else [])]

    def _chunk(self, number: int, *, pin: bool) -> torch.Tensor:
        if number == len(self._chunks):
            self._chunks.append(torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=pin))
        return self._chunks[number]


def _runs(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Bytes of the tensors, uint8, where they are; those of neighbours in memory at once.

    To start a copy takes longer than to copy a vector of weights.
    """
    runs: list[tuple[torch.Tensor, int]] = []
    end: tuple[int, int] | None = None
    for tensor in tensors:
        storage, start = tensor.untyped_storage().data_ptr(), tensor.data_ptr()
        num_bytes, is_dense = tensor.numel() * tensor.element_size(), tensor.is_contiguous()
        if is_dense and (storage, start) == end:
            runs[-1] = (runs[-1][0], runs[-1][1] + num_bytes)
        else:
            runs.append((tensor, num_bytes))
        end = (storage, start + num_bytes) if is_dense else None
    for first, num_bytes in runs:
        yield flat_bytes(first).as_strided((num_bytes,), (1,))
