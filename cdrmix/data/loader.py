"""Token batches in an order that depends on nothing but the global sample number.

Global sample n is sample n mod N of epoch n div N, permuted under the key (seed, epoch). So the
position is one number, the samples consumed, whatever the data-parallel size, and the batches are
the same whichever ranks share them out.
"""

# A accumulation steps, B micro batch (samples), W data ranks, G = A * B * W global batch, T time

import queue
import threading
from collections.abc import Generator, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cdrmix.data.permutation import Permutation
from cdrmix.data.shards import TokenDataset
from cdrmix.errors import PlanError, StateError

# Sample numbers permuted in one call: a call costs 30 us for 8 numbers and 180 us for 4,096.
_ORDER_BLOCK = 4096


class Loader:
    """Batches of one data rank; an epoch rolls into the next, nothing is padded or dropped.

    Args:
        global_batch_size: samples per optimizer step over all data ranks, G.
        micro_batch_size: samples per forward pass of one data rank, B.
        data_rank: this rank's place among `data_size` data ranks, W.
        seed: key of the order; used when `shuffle` is set.
        shuffle: True: a permutation per epoch. False: stored order.
        prefetch: steps read ahead by a thread; 0 reads in `next`.
    Attributes:
        samples_consumed: samples handed out to all ranks together; what is read ahead is not
            counted.
    Raises:
        PlanError: if B * W does not divide G.
    """

    def __init__(
        self,
        dataset: TokenDataset,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        data_rank: int,
        data_size: int,
        seed: int,
        shuffle: bool,
        prefetch: int = 2,
    ) -> None:
        if global_batch_size % (micro_batch_size * data_size):
            raise PlanError(
                f"training.global_batch_size = {global_batch_size} cannot be shared out: it is "
                f"not a multiple of micro_batch_size * data ranks = {micro_batch_size} * "
                f"{data_size}. Change one of the three."
            )
        assert 0 <= data_rank < data_size, f"data rank {data_rank} of {data_size}"
        self.samples_consumed = 0
        self._dataset, self._global_batch_size = dataset, global_batch_size
        self._micro_batch_size = micro_batch_size
        self._seed, self._shuffle, self._prefetch = seed, shuffle, prefetch
        # Micro-step m covers B * W consecutive samples, of which rank r takes B from r * B on.
        micro_starts = np.arange(0, global_batch_size, micro_batch_size * data_size)
        own = np.arange(micro_batch_size) + data_rank * micro_batch_size
        self._offsets = (micro_starts[:, None] + own).ravel()  # [A * B]
        self._batches = self._start()

    def next(self) -> dict[str, torch.Tensor]:
        """The rank's share of the next step: `input_ids` and `labels`, int64 [A, B, T].

        labels[..., t] is the token after input_ids[..., t]. Both are views of one array and so
        not contiguous: reshape them rather than view them.

        Raises:
            DataError: if a shard is missing or truncated.
        """
        rows = next(self._batches)
        rows = rows.reshape(-1, self._micro_batch_size, rows.shape[-1])  # [A, B, T + 1]
        self.samples_consumed += self._global_batch_size
        return {
            "input_ids": torch.from_numpy(rows[..., :-1]),
            "labels": torch.from_numpy(rows[..., 1:]),
        }

    def state_dict(self) -> dict[str, Any]:
        """Position and what gives it a meaning; plain numbers and strings."""
        return {"samples_consumed": self.samples_consumed} | self._identity()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position. Batch sizes and the number of ranks may differ.

        Raises:
            StateError: if the state belongs to another data set or order.
        """
        differing = [
            f"{key}: the checkpoint has {state.get(key)!r}, this run has {value!r}"
            for key, value in self._identity().items()
            if state.get(key) != value
        ]
        if differing:
            raise StateError(
                "The data position of the checkpoint does not fit this run: "
                + "; ".join(differing)
                + ". Resume with the data set, data.order, training.seed and "
                "training.sequence_length of the checkpoint, or start a new run."
            )
        self.close()
        self.samples_consumed = state["samples_consumed"]
        self._batches = self._start()

    def sample_rows(self, start: int, stop: int) -> NDArray[np.int64]:
        """Rows [stop - start, T + 1] of global samples start .. stop - 1, all ranks' alike.

        The position stays where it is.
        """
        return self._dataset.rows(self._sample_indices(np.arange(start, stop, dtype=np.int64)))

    def close(self) -> None:
        """End the thread that reads ahead; `next` must not be called after it."""
        self._batches.close()

    def _identity(self) -> dict[str, Any]:
        return {
            "manifest_digest": self._dataset.manifest_digest,
            "split": self._dataset.split,
            "num_samples": self._dataset.num_samples,
            "sequence_length": self._dataset.sequence_length,
            "order": "shuffled" if self._shuffle else "sequential",
            "seed": self._seed if self._shuffle else None,
        }

    def _start(self) -> Generator[NDArray[np.int64]]:
        rows = self._rows_from(self.samples_consumed)
        return _read_ahead(rows, self._prefetch) if self._prefetch else rows

    def _rows_from(self, start: int) -> Generator[NDArray[np.int64]]:
        """Rows [A * B, T + 1] of step after step, beginning at global sample `start`."""
        step = self._global_batch_size
        num_steps = max(
            1, min(_ORDER_BLOCK // len(self._offsets), self._dataset.num_samples // step)
        )
        while True:
            starts = start + step * np.arange(num_steps)
            for indices in self._sample_indices(starts[:, None] + self._offsets):
                yield self._dataset.rows(indices)
            start += step * num_steps

    def _sample_indices(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sample of the data set for each global sample number, any shape."""
        num_samples = self._dataset.num_samples
        epochs, indices = np.divmod(numbers, num_samples)
        if self._shuffle:
            for epoch in np.unique(epochs).tolist():
                chosen = epochs == epoch
                order = Permutation(num_samples, (self._seed, epoch))
                indices[chosen] = order(indices[chosen])
        return indices


def _read_ahead(batches: Iterator[NDArray[np.int64]], depth: int) -> Generator[NDArray[np.int64]]:
    """The same batches, up to `depth` of them read ahead by a thread that ends on close.

    What is raised while reading is raised here, at the batch that it hit.
    """
    ready: queue.SimpleQueue[NDArray[np.int64] | Exception] = queue.SimpleQueue()
    room: queue.SimpleQueue[None] = queue.SimpleQueue()
    stopping = threading.Event()

    def read() -> None:
        try:
            while room.get() is None and not stopping.is_set():
                ready.put(next(batches))
        except Exception as error:
            ready.put(error)

    thread = threading.Thread(target=read, name="read-ahead", daemon=True)
    thread.start()
    try:
        for _ in range(depth):
            room.put(None)
        while True:
            batch = ready.get()
            if isinstance(batch, Exception):
                raise batch
            room.put(None)
            yield batch
    finally:
        stopping.set()
        room.put(None)
        thread.join()
