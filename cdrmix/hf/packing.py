"""Documents packed into one row stay apart in every kind of layer.

Attention keeps them apart by positions that start anew, as long as there is neither a cache nor a
mask of two dimensions: transformers 5.23 looks at positions only then. FlashAttention looks at them
in a batch of one row alone. Layers with a convolution and a recurrent state never look at them, and
run document by document here.
"""

# B rows, T time, D hidden, N documents of all rows

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# Boundaries of documents for FlashAttention, which layers hand on to whatever they call.
_OF_FLASH_ATTENTION = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


class Span(NamedTuple):
    """Place of one document: tokens [start, stop) of a row."""

    row: int
    start: int
    stop: int


def document_positions(segment_ids: Tensor) -> Tensor:
    """Positions that start at 0 in each document, [B, T] -> [B, T], int64."""
    index = torch.arange(segment_ids.shape[1], device=segment_ids.device)
    is_first = torch.ones_like(segment_ids, dtype=torch.bool)
    is_first[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    return index - (index * is_first).cummax(dim=1).values


def document_spans(positions: Tensor) -> list[Span]:
    """Documents of positions [B, T] in order, row by row; waits for the device."""
    spans = []
    for row, of_row in enumerate((positions == 0).cpu()):
        starts = of_row.nonzero().flatten().tolist()
        ends = [*starts[1:], positions.shape[1]]
        spans += [Span(row, start, stop) for start, stop in zip(starts, ends, strict=True)]
    return spans


def flash_attention_boundaries(spans: list[Span], device: torch.device) -> dict[str, Any]:
    """Arguments that tell FlashAttention the documents of rows laid end to end."""
    lengths = [span.stop - span.start for span in spans]
    ends = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    return dict(zip(_OF_FLASH_ATTENTION, (ends, ends, max(lengths), max(lengths)), strict=True))


class Documents:
    """Documents of the batch that a model works on; None: each row is one.

    They stay for the backward pass, in which layers may run again.
    """

    def __init__(self) -> None:
        self.spans: list[Span] | None = None

    def keep_apart_in(self, mixers: Iterable[nn.Module]) -> None:
        """Makes modules that take [B, T, D] first, and give the same, run document by document."""
        for mixer in mixers:
            # the call of the module, with its hooks, stays one, however many documents there are:
            # under ZeRO-3 each call gathers weights on all ranks together
            mixer.forward = partial(self._one_by_one, mixer.forward)

    def _one_by_one(self, forward: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.spans is None:
            return forward(hidden_states, *args, **kwargs)
        others = {key: kwargs[key] for key in kwargs if key not in _OF_FLASH_ATTENTION}
        parts = [
            forward(hidden_states[span.row : span.row + 1, span.start : span.stop], *args, **others)
            for span in self.spans
        ]
        return torch.cat(parts, dim=1).view(hidden_states.shape)


def stateful_mixers(model: nn.Module) -> list[nn.Module]:
    """Modules that mix tokens by a convolution of their own, such as Mamba's."""
    return [
        module
        for module in model.modules()
        if any(isinstance(child, nn.Conv1d) for child in module.children())
    ]
