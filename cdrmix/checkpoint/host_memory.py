"""Host memory that each save is copied into, so that training can go on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from cdrmix.checkpoint.files import flat_bytes

# Torch rounds pinned memory up to a power of two: only the last chunk can waste any.
CHUNK_BYTES = 64 * 2**20


class HostMemory:
    """Chunks that are reused by each copy; pinned where they are filled from a GPU."""

    def __init__(self) -> None:
        self._chunks: list[torch.Tensor] = []

    def copier(self, tensors: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        """Returns a function that copies `tensors` as they are now, for any thread to call. It
        gives their bytes end to end, in chunks of host memory, uint8, all full except the last one,
        and valid until the next copy. The tensors are on the host or one GPU, and must not change
        before it returns. A GPU copies on a stream of its own, beside work queued from now on."""
        gpu = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        if gpu is None:
            return lambda: self._copy(tensors, pin=False)
        # The stream of the caller's thread: its queued work still writes what is to be copied.
        ready = torch.cuda.current_stream(gpu).record_event()

        def copy() -> list[torch.Tensor]:
            # A stream of its own, or the copy would wait behind the next step's kernels.
            stream = torch.cuda.Stream(gpu)
            stream.wait_event(ready)
            with torch.cuda.stream(stream):
                chunks = self._copy(tensors, pin=True)
            stream.synchronize()
            return chunks

        return copy

    def _copy(self, tensors: Sequence[torch.Tensor], *, pin: bool) -> list[torch.Tensor]:
        # Neighbours in memory are copied together: a vector takes less time than to start a copy.
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
        position = 0
        for first, num_bytes in runs:
            # Over the end of the first tensor into its neighbours, which share its storage.
            run = flat_bytes(first).as_strided((num_bytes,), (1,))
            copied = 0
            while copied < num_bytes:
                number, offset = divmod(position + copied, CHUNK_BYTES)
                part = run[copied : copied + CHUNK_BYTES - offset]
                # Chunks stay for later saves: of 288 MB the first copy, which meets each page for
                # the first time, takes 125 ms, a later one 27.
                if number == len(self._chunks):
                    self._chunks += [torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=pin)]
                chunk = self._chunks[number][offset : offset + part.numel()]
                # To pinned memory this returns before it is done: `copier` waits for its stream.
                chunk.copy_(part, non_blocking=True)
                copied += part.numel()
            position += copied
        full, rest = divmod(position, CHUNK_BYTES)
        return [*self._chunks[:full], *([self._chunks[full][:rest]] if rest else [])]
