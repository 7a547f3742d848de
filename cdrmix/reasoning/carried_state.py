"""Recurrent state of a backbone that goes on from window to window, without the key-value cache.

What lies before a window reaches it through the state of RWKV and Mamba layers alone: attention
looks at its own window.
"""

# n rows of tokens, W tokens of a window

from __future__ import annotations

from collections.abc import Sequence

import torch

from cdrmix.models.attention import AttentionState
from cdrmix.models.backbone import Backbone
from cdrmix.models.block import BlockState
from cdrmix.models.state_rows import joined, map_tensors, select


def carry(
    backbone: Backbone, rows: Sequence[Sequence[int]], *, window_tokens: int
) -> list[BlockState]:
    """Reads rows of tokens window by window; returns the state behind the last token of each.

    The first window of a row takes what the others, which are full, leave; a row has one token or
    more, so that there is no padding. The state of attention is without keys.
    """
    device = backbone.device
    firsts = [(len(row) - 1) % window_tokens + 1 for row in rows]
    full = torch.tensor([(len(row) - 1) // window_tokens for row in rows])  # windows after it

    def read(tokens: list[Sequence[int]], before: list[BlockState] | None) -> list[BlockState]:
        ids = torch.tensor([list(each) for each in tokens], device=device)
        after = backbone(ids, state=before, return_state=True).state
        assert after is not None, "asked for"
        return without_cache(after)

    # rows of equally long first windows together
    states = []
    order: list[int] = []
    for length in sorted(set(firsts)):
        places = [place for place, first in enumerate(firsts) if first == length]
        states.append(read([rows[place][:length] for place in places], None))
        order += places
    state = select(joined(states), torch.tensor(order, device=device).argsort())
    # rows end together, so that those with more windows begin earlier
    for left in range(int(full.max()), 0, -1):
        numbers = torch.nonzero(full >= left).flatten()
        chosen = [rows[number] for number in numbers.tolist()]
        windows = [row[len(row) - left * window_tokens :][:window_tokens] for row in chosen]
        rows_read = numbers.to(device)
        after = read(windows, select(state, rows_read))
        state = map_tensors(
            state,
            lambda old, new, rows_read=rows_read: old.index_copy(0, rows_read, new.to(old.dtype)),
            after,
        )
    return state


def without_cache(state: list[BlockState]) -> list[BlockState]:
    """Drops the keys and values of attention layers; the next window begins at position 0."""
    kept = []
    for each in state:
        mixer = each.mixer
        if isinstance(mixer, AttentionState):
            mixer = AttentionState(mixer.keys[:, :, :0], mixer.values[:, :, :0])
        kept.append(each._replace(mixer=mixer))
    return kept
