"""Host memory that each save is copied into, so that training can go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from cdrmix.checkpoint.files import flat_bytes

# Torch rounds pinned memory up to a power of two: only the last chunk can waste any.
CHUNK_BYTES = 64 * 2**20


class HostMemory:
    """Chunks that are reused by each copy; pinned where they are filled from a GPU."""

    def __init__(self) -> None:
        self._chunks: list[torch.Tensor] = []

    def copier(self, tensors: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        """Returns a function that copies `tensors` as they are now, for any thread to call.

        It must return before they change. A GPU copies on a stream of its own, in parallel
        with the work that is queued from now on.

        Args:
            tensors: on the host or one GPU, of any type.
        Returns:
            The function; it returns their bytes end to end, in chunks of host memory, uint8, all
            full except the last one, and valid until the next copy.
        """
        gpu = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        if gpu is None:
            return lambda: self._copy(tensors, pin=False)
        ready = torch.cuda.current_stream(gpu).record_event()

        def copy() -> list[torch.Tensor]:
            stream = torch.cuda.Stream(gpu)
            stream.wait_event(ready)
            with torch.cuda.stream(stream):
                chunks = self._copy(tensors, pin=True)
            stream.synchronize()
            return chunks

        return copy

    def _copy(self, tensors: Sequence[torch.Tensor], *, pin: bool) -> list[torch.Tensor]:
        # Copies to pinned memory return before they are done: `copier` waits for its stream.
        position = 0
        for run in _runs(tensors):
            copied = 0
            while copied < run.numel():
                number, start = divmod(position + copied, CHUNK_BYTES)
                part = run[copied : copied + CHUNK_BYTES - start]
                if number == len(self._chunks):
                    chunk = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=pin)
                    self._chunks.append(chunk)
                chunk = self._chunks[number]
                chunk[start : start + part.numel()].copy_(part, non_blocking=True)
                copied += part.numel()
            position += copied
        full, rest = divmod(position, CHUNK_BYTES)
        return [*self._chunks[:full], *([self._chunks[full][:rest]] if rest else [])]


def _runs(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yields the bytes of the tensors, uint8, on their device; of neighbours in memory together.

    Starting a copy takes longer than copying a vector of weights.
    """
    runs: list[tuple[torch.Tensor, int]] = []
    end: tuple[int, int] | None = None
    for tensor in tensors:
        storage = tensor.untyped_storage().data_ptr()
        start = tensor.data_ptr()
        num_bytes = tensor.numel() * tensor.element_size()
        is_dense = tensor.is_contiguous()
        if is_dense and (storage, start) == end:
            runs[-1] = (runs[-1][0], runs[-1][1] + num_bytes)
        else:
            runs.append((tensor, num_bytes))
        end = (storage, start + num_bytes) if is_dense else None
    for first, num_bytes in runs:
        yield flat_bytes(first).as_strided((num_bytes,), (1,))
