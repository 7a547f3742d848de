"""Token batches in an order that depends on nothing but the global sample number.

Global sample n is sample n mod N of epoch n div N, permuted under the key (seed, epoch), or the
sample at that place of a mixture, or of old data among new. So the position is one number, the
samples consumed, whatever the data-parallel size, and the batches are the same however ranks share
them.
"""

# A accumulation steps, B micro batch (samples), W data ranks, G = A * B * W global batch, T time

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cdrmix import runtime
from cdrmix.config.schema import TokenWeights
from cdrmix.data.document import KINDS, ROLES
from cdrmix.data.mixture import MixedDataset
from cdrmix.data.read_ahead import ReadAhead, ReadFigures, ReadLimits
from cdrmix.data.replay import ReplayDataset
from cdrmix.data.token_dataset import TokenDataset
from cdrmix.errors import PlanError, StateError

# Sample numbers permuted in one call: a call costs 30 us for 8 numbers and 180 us for 4,096.
_ORDER_BLOCK = 4096

IGNORED_LABEL = -100  # left out of the loss by cdrmix.objectives

Batch = dict[str, torch.Tensor]


class Loader:
    """Batches of one data rank; an epoch rolls into the next, nothing is padded or dropped.

    Args:
        global_batch_size: samples per optimizer step over all data ranks, G.
        micro_batch_size: samples per forward pass of one data rank, B.
        data_rank: number of this rank among `data_size` data ranks, W.
        seed: key of the order; used if `shuffle` is set.
        shuffle: True: a permutation per epoch. False: stored order.
        window_samples: shuffle windows of that many samples, and the samples in each, so that
            few shards are read at a time; None: all samples of the epoch together.
        segment_documents: add the number of each token's document.
        token_weights: add the weight of each label in the loss; None: all weigh the same.
        fim_ids: add the kind of each label, told by these ids as in `label_kinds`; None: do not.
        num_targets: tokens that are predicted from each position, n; added from 2 on.
        prefetch: steps that are read ahead; 0 reads in `next`.
        readers: threads that read ahead; batches and their order do not depend on it.
        queue_samples: most samples of this rank that are read ahead, if more than a batch; None:
            those of `prefetch` steps.
        pin: read into memory that a GPU copies from while it computes, to begin with.
    Attributes:
        samples_consumed: samples handed out to all ranks together, without those read ahead.
    Raises:
        PlanError: if B * W does not divide G.
    """

    def __init__(
        self,
        dataset: TokenDataset | MixedDataset | ReplayDataset,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        data_rank: int,
        data_size: int,
        seed: int,
        shuffle: bool,
        window_samples: int | None = None,
        segment_documents: bool = False,
        token_weights: TokenWeights | None = None,
        fim_ids: tuple[int, ...] | None = None,
        num_targets: int = 1,
        prefetch: int = 2,
        readers: int = 1,
        queue_samples: int | None = None,
        pin: bool = False,
    ) -> None:
        if global_batch_size % (micro_batch_size * data_size):
            raise PlanError(
                f"training.global_batch_size = {global_batch_size} cannot be shared out: it is "
                f"not a multiple of micro_batch_size * data ranks = {micro_batch_size} * "
                f"{data_size}. Change one of the three."
            )
        assert 0 <= data_rank < data_size, f"data rank {data_rank} of {data_size}"
        self.samples_consumed = 0
        self._dataset = dataset
        self._global_batch_size = global_batch_size
        self._micro_batch_size = micro_batch_size
        self._seed = seed if shuffle else None
        self._window = window_samples if shuffle else None
        self._segment_documents = segment_documents
        self._num_targets = num_targets
        self._fim_ids = fim_ids
        self._weight_of_role = None
        if token_weights is not None:
            weights = [getattr(token_weights, role) for role in ROLES]
            self._weight_of_role = np.array(weights, dtype=np.float32)
        # Micro-step m covers B * W consecutive samples, of which rank r takes B from r * B on.
        micro_starts = np.arange(0, global_batch_size, micro_batch_size * data_size)
        rank_samples = np.arange(micro_batch_size) + data_rank * micro_batch_size
        self._offsets = (micro_starts[:, None] + rank_samples).ravel()  # [A * B]
        self._queue_samples = queue_samples
        self._begin(self._within_queue(ReadLimits(prefetch, readers, pins=pin)))

    def next(self) -> Batch:
        """Returns the rank's share of the next step: `input_ids` and `labels`, int64 [A, B, T].

        labels[..., t] is the token after input_ids[..., t]. Both are views of one array and so not
        contiguous: reshape them rather than view them. Further entries, by option:
        segment_documents: `segment_ids`, and labels ignored at ends of documents.
        token_weights: `weights` of the labels, float32 [A, B, T].
        fim_ids: `kinds` of the labels, places in KINDS, uint8 [A, B, T].
        num_targets above 1: labels of further heads, `targets`, int64 [A, B, T, n].
        """
        batch = self._batches.next()
        self.samples_consumed += self._global_batch_size
        return batch

    @property
    def limits(self) -> ReadLimits:
        """Bounds of reading ahead."""
        return self._batches.limits

    @property
    def batch_bytes(self) -> int | None:
        """Bytes of this rank's share of a step; None before the first was read."""
        return self._batches.batch_bytes

    @property
    def folder(self) -> Path:
        """Folder of the data set, on this host."""
        return self._dataset.folder

    def set_limits(self, limits: ReadLimits) -> None:
        """Changes the bounds of reading ahead; batches and position stay as they are."""
        self._batches.set_limits(self._within_queue(limits))

    def take_read_figures(self) -> ReadFigures:
        """Returns the work of the reading threads since the last call."""
        return self._batches.take_figures()

    def state_dict(self) -> dict[str, Any]:
        """Position and the identity of the order that it counts in; plain numbers and strings."""
        order = "sequential" if self._seed is None else "shuffled"
        if self._window is not None:
            order = f"shuffled by {self._window} samples"
        return {
            "samples_consumed": self.samples_consumed,
            "manifest_digest": self._dataset.manifest_digest,
            "split": self._dataset.split,
            "num_samples": self._dataset.num_samples,
            "sequence_length": self._dataset.sequence_length,
            "order": order,
            "seed": self._seed,
            "mixture": self._dataset.mixture,
            "replay": self._dataset.replay,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Moves to a saved position; a StateError if it is of another data set or order."""
        # batch sizes and the number of ranks may differ
        differing = {
            key: (state.get(key), value)
            for key, value in self.state_dict().items()
            if key != "samples_consumed" and state.get(key) != value
        }
        if "manifest_digest" in differing:
            there, here = (str(digest)[:12] for digest in differing["manifest_digest"])
            raise StateError(
                f"{self._dataset.folder}: is another data set than the checkpoint's.\n"
                f"  digest {here} here, {there} in the checkpoint\n"
                "Give --set data.path=DIR with the folder of that digest, or begin a new run"
            )
        if differing:
            lines = (
                f"  {key}: the checkpoint has {there!r}, this run has {here!r}\n"
                for key, (there, here) in differing.items()
            )
            raise StateError(
                "The samples of this run come in another order than the checkpoint's:\n"
                f"{''.join(lines)}Resume with data.order, data.mixture, cpt.replay, training.seed "
                "and training.sequence_length of the checkpoint, or begin a new run"
            )
        self.close()  # the threads read from the old position
        self.samples_consumed = state["samples_consumed"]
        self._begin(self._batches.limits)

    def sample_rows(self, start: int, stop: int) -> NDArray[np.int64]:
        """Rows [stop - start, T + 1] of global samples start .. stop - 1, of all ranks together."""
        numbers = np.arange(start, stop, dtype=np.int64)
        return self._dataset.rows(self._dataset.order(numbers, self._seed, self._window))

    def close(self) -> None:
        """Ends the threads that read ahead; `next` must not be called afterwards."""
        self._batches.close()

    def _begin(self, limits: ReadLimits) -> None:
        self._batches = ReadAhead(
            self._indices_from(self.samples_consumed),
            self._read,
            num_bytes=_num_bytes,
            limits=limits,
        )

    def _within_queue(self, limits: ReadLimits) -> ReadLimits:
        if self._queue_samples is None or limits.batches == 0:
            return limits
        most = max(1, self._queue_samples // len(self._offsets))
        return limits._replace(batches=min(limits.batches, most))

    def _indices_from(self, start: int) -> Iterator[NDArray[np.int64]]:
        """Samples of this rank in step after step, [A * B], beginning at global sample `start`."""
        step = self._global_batch_size
        num_steps = min(_ORDER_BLOCK // len(self._offsets), self._dataset.num_samples // step)
        num_steps = max(1, num_steps)
        numbers = (start + step * np.arange(num_steps))[:, None] + self._offsets  # [steps, A * B]
        following = self._dataset.order(numbers, self._seed, self._window)
        while True:
            block = following
            # One block ahead, so that a remote folder has time to copy its shards.
            numbers = numbers + step * num_steps
            following = self._dataset.order(numbers, self._seed, self._window)
            self._dataset.expect(np.concatenate([block, following]))
            yield from block

    def _read(self, indices: NDArray[np.int64]) -> Batch:
        """Reads the batch of a step; several threads at once do."""
        shape = (-1, self._micro_batch_size, self._dataset.sequence_length + 1)
        eos_id = self._dataset.manifest.eos_id
        rows = self._dataset.rows(indices).reshape(shape)  # [A, B, T + 1]
        labels = rows[..., 1:]
        further: dict[str, NDArray[Any]] = {}
        if self._segment_documents:
            labels, further["segment_ids"] = split_documents(rows, eos_id)
        if self._weight_of_role is not None or self._fim_ids is not None:
            roles = self._dataset.roles(indices).reshape(shape)
            if self._weight_of_role is not None:
                # The weight of a label, which is the token after its position.
                further["weights"] = self._weight_of_role[roles[..., 1:]]
            if self._fim_ids is not None:
                further["kinds"] = label_kinds(rows, roles, eos_id, self._fim_ids)
        if self._num_targets > 1:
            further["targets"] = next_targets(rows, labels, self._num_targets, eos_id)
        whole = torch.from_numpy(rows)
        batch = {
            "input_ids": whole[..., :-1],
            "labels": torch.from_numpy(labels) if self._segment_documents else whole[..., 1:],
            **{name: torch.from_numpy(values) for name, values in further.items()},
        }
        if self._batches.limits.pins:
            # A thread's device is the first one until it is set, and would get a context there.
            torch.cuda.set_device(runtime.device())
            batch = {name: each.contiguous().pin_memory() for name, each in batch.items()}
        return batch


def _num_bytes(batch: Batch) -> int:
    """Bytes of a batch; inputs and labels may be views of one array."""
    storages = (tensor.untyped_storage() for tensor in batch.values())
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def split_documents(
    rows: NDArray[np.int64], eos_id: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Labels and document numbers of packed samples, so that each document stands alone.

    A document ends with its EOS. The EOS is an input of its own document, where its label would be
    the first token of the next one: that label is ignored, because with the documents apart nothing
    precedes that token. So a packed sample weighs the same as its documents one by one.

    Returns:
        From rows [..., T + 1], labels [..., T], `IGNORED_LABEL` at ends of documents, and
        segment_ids [..., T]: 0 for the document that a sample begins in, 1 for the next, and so on.
    """
    ends = rows[..., :-1] == eos_id
    labels = rows[..., 1:].copy()
    labels[ends] = IGNORED_LABEL
    segment_ids = np.zeros(ends.shape, dtype=np.int64)
    np.cumsum(ends[..., :-1], axis=-1, out=segment_ids[..., 1:])
    return labels, segment_ids


def label_kinds(
    rows: NDArray[np.int64], roles: NDArray[np.int64], eos_id: int, fim_ids: tuple[int, ...]
) -> NDArray[np.uint8]:
    """Kinds of the labels of samples: places in KINDS of the tokens that follow each position.

    A document ends with its EOS. One is rearranged for infilling if a token of `fim_ids`, which no
    text encodes to, is in it; behind the last of the three its middle begins, which with the suffix
    first is prefix and middle in one, and reaches to the EOS. Of a document whose head is outside
    of the sample the rest is judged alike: with none of these tokens in it, it counts as text.

    Args:
        rows: tokens, [..., T + 1].
        roles: of the tokens, of the same shape.
        fim_ids: prefix, suffix and middle, or () where the tokenizer has none.
    """
    kinds = roles.astype(np.uint8)
    if not fim_ids or not (is_mark := np.isin(rows, fim_ids)).any():
        return kinds[..., 1:]
    length = rows.shape[-1]
    ends = rows.reshape(-1, length) == eos_id
    begins = np.ones_like(ends)  # of a sample, or behind an EOS
    begins[:, 1:] = ends[:, :-1]
    documents = begins.cumsum().reshape(rows.shape) - 1  # numbered over all samples
    is_fim = np.zeros(int(documents.max()) + 1, dtype=np.bool_)
    is_fim[documents[is_mark]] = True
    kinds[is_fim[documents] & (roles == ROLES.index("text"))] = KINDS.index("fim")
    # Marks of a middle before each token, less those before its document.
    before = (rows == fim_ids[-1]).ravel().cumsum() - (rows == fim_ids[-1]).ravel()
    earlier = before[begins.ravel()][documents.ravel()]
    behind = (before > earlier).reshape(rows.shape)
    kinds[behind & (kinds == KINDS.index("fim"))] = KINDS.index("fim_middle")
    return kinds[..., 1:]


def next_targets(
    rows: NDArray[np.int64], labels: NDArray[np.int64], num_targets: int, eos_id: int
) -> NDArray[np.int64]:
    """The next n tokens at each position, [..., T, n], of which the first is its label.

    A further one is `IGNORED_LABEL` if it belongs to another document than the position or lies
    beyond the sample: a head that predicts i tokens further has no target at the last i positions.
    Rows are [..., T + 1], labels [..., T].
    """
    length = labels.shape[-1]
    documents = np.zeros(rows.shape, dtype=np.int64)
    np.cumsum(rows[..., :-1] == eos_id, axis=-1, out=documents[..., 1:])
    targets = np.full((*labels.shape, num_targets), IGNORED_LABEL)
    targets[..., 0] = labels
    for further in range(1, min(num_targets, length)):
        begin = 1 + further  # index of the first position's target
        same = documents[..., begin:] == documents[..., : length - further]
        in_document = np.where(same, rows[..., begin:], IGNORED_LABEL)
        targets[..., : length - further, further] = in_document
    return targets
