"""Memory of this host that one save after another is copied into, so that training can go on."""

from __future__ import annotations

from collections.abc import Sequence

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
        for tensor in tensors:
            left = flat_bytes(tensor)
            while left.numel():
                number, start = divmod(position, CHUNK_BYTES)
                part = left[: CHUNK_BYTES - start]
                self._chunk(number, pin=pin)[start : start + part.numel()].copy_(
                    part, non_blocking=True
                )
                position += part.numel()
                left = left[part.numel() :]
        if pin:
            torch.cuda.current_stream().synchronize()
        full, rest = divmod(position, CHUNK_BYTES)
        return [*self._chunks[:full], *([self._chunks[full][:rest]] if rest else [])]

    def _chunk(self, number: int, *, pin: bool) -> torch.Tensor:
        if number == len(self._chunks):
            self._chunks.append(torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=pin))
        return self._chunks[number]
