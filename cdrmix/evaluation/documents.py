"""Nats of whole documents, each by itself behind a prefix token, in windows.

A document of more tokens than a window is read in several, in one of two ways. Reset: each window
begins from nothing, and repeats tokens of the one before it as context. Carried: windows follow
each other, and the recurrent state, token shifts with it, goes on from one to the next, while keys
and values are dropped and positions begin anew.

The labels of a window are summed in float64, and so are windows. All ranks run equally many passes.
"""

# n windows of a batch, T their longest input (tokens), N documents

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cdrmix import runtime
from cdrmix.config.model import ModelConfig
from cdrmix.models.attention import AttentionState
from cdrmix.models.backbone import LanguageModel, Output
from cdrmix.models.block import BlockState
from cdrmix.models.mixture_of_depths import RoutedState
from cdrmix.objectives.language_model import IGNORED_LABEL, LabelWeights
from cdrmix.parallel.topology import ALONE, Topology
from cdrmix.parallel.zero3 import next_token_losses
from cdrmix.planning.blocks.block_type import block_types


class Window(NamedTuple):
    """Inputs `begin` to `end` of a prefix token and the tokens behind it.

    The label of an input is the token after it. The last `num_scored` labels count.
    """

    begin: int
    end: int
    num_scored: int


@dataclass(frozen=True)
class Reading:
    """Documents, and the windows in which they are read.

    Attributes:
        documents: tokens of each, two or more: first a prefix token, which is not predicted.
        pad_id: token that fills rows at their ends, where no other token sees it.
        window: most tokens of an input.
        batch_size: windows of a pass.
        topology: of this rank; sequence ranks read whole windows of their own.
    """

    documents: Sequence[NDArray[np.int64]]
    pad_id: int
    window: int
    batch_size: int
    topology: Topology = ALONE


def windows_of(num_tokens: int, window: int, stride: int, *, overlap: bool = True) -> list[Window]:
    """Windows in which a document of so many tokens behind its prefix is read.

    The first one predicts `window` tokens, each later one `stride` more, the last one what is left.
    With `overlap` each is as long as it can be, so that its labels have tokens of the window before
    as their context; otherwise it holds the inputs of its labels alone, and stride is window.
    """
    assert overlap or stride == window, "labels without context are those of a whole window"
    windows: list[Window] = []
    done = 0
    while done < num_tokens:
        end = min(done + (stride if windows else window), num_tokens)
        begin = max(0, end - window) if overlap else done
        windows.append(Window(begin, end, end - done))
        done = end
    return windows


def carries_state(config: ModelConfig) -> bool:
    """True if a mixer of the model hands on a state of a fixed size, which can be carried."""
    if config.kind != "rwkx":
        return False
    return any(kind.carries_state for kind in block_types(config))


@torch.no_grad()
def reset_nats(
    model: LanguageModel, reading: Reading, *, stride: int, overlap: bool = True
) -> NDArray[np.float64]:
    """Sums the nats of each document, [N], in windows that begin from nothing.

    Windows are those of `windows_of`; with a stride of the window they are the ones in which
    lm-evaluation-harness reads a text. The result is the same on every rank; collective.
    """
    was_training = model.training
    model.eval()
    pieces = [
        (document, each)
        for document, tokens in enumerate(reading.documents)
        for each in windows_of(len(tokens) - 1, reading.window, stride, overlap=overlap)
    ]
    # Of like length together, which have little to fill up.
    pieces.sort(key=lambda piece: piece[1].begin - piece[1].end)
    batches = _batches(len(pieces), reading.batch_size)
    topology = reading.topology
    nats = torch.zeros(len(pieces), dtype=torch.float64, device=model.device)
    for turn in range(-(-len(batches) // topology.degrees.data)):
        place = turn * topology.degrees.data + topology.data_rank
        # A rank without a batch of its own runs the first one, for the experts and the parts of
        # others, and counts nothing.
        batch = batches[place if place < len(batches) else 0]
        inputs, labels = _rows(reading, [pieces[i] for i in batch])
        output = model(inputs.to(model.device))
        found = _scored(model, output, labels, topology)
        if found is not None and place < len(batches) and topology.counts_tokens:
            nats[batch.start : batch.stop] = found
    model.train(was_training)
    totals = np.zeros(len(reading.documents))
    np.add.at(totals, [document for document, _ in pieces], _on_all_ranks(nats))
    return totals


@torch.no_grad()
def carried_nats(model: LanguageModel, reading: Reading) -> NDArray[np.float64]:
    """Sums the nats of each document, [N], in windows through which the recurrent state is carried.

    The windows follow each other without an overlap. The result is the same on every rank;
    collective.
    """
    was_training = model.training
    model.eval()
    windows = [
        windows_of(len(tokens) - 1, reading.window, reading.window, overlap=False)
        for tokens in reading.documents
    ]
    order = sorted(range(len(windows)), key=lambda document: -len(reading.documents[document]))
    topology = reading.topology
    # Ranks that choose tokens of Mixture of Depths together read a row at a time.
    is_alone = model.config.mod is not None and topology.degrees.world_size > 1
    batches = _batches(len(order), 1 if is_alone else reading.batch_size)
    nats = torch.zeros(len(order), dtype=torch.float64, device=model.device)
    num_ranks = topology.degrees.data
    for turn in range(-(-len(batches) // num_ranks)):
        place = turn * num_ranks + topology.data_rank
        is_counted = place < len(batches) and topology.counts_tokens
        batch = batches[place if place < len(batches) else 0]
        state: Any = None
        # The longest document of a turn is the first one, whichever rank reads it.
        for step in range(len(windows[order[turn * num_ranks * len(batches[0])]])):
            inputs, labels = _rows(
                reading,
                [(order[i], (windows[order[i]][step:] or [_NOTHING])[0]) for i in batch],
            )
            output = model(inputs.to(model.device), state=state, return_state=True)
            state = _recurrent(output.state)
            found = _scored(model, output, labels, topology)
            if found is not None and is_counted:
                nats[batch.start : batch.stop] += found
    model.train(was_training)
    totals = np.zeros(len(order))
    totals[order] = _on_all_ranks(nats)
    return totals


_NOTHING = Window(0, 0, 0)  # of a document that has ended


def _batches(count: int, size: int) -> list[range]:
    return [range(first, min(first + size, count)) for first in range(0, count, size)]


def _rows(reading: Reading, pieces: Sequence[tuple[int, Window]]) -> tuple[Tensor, Tensor]:
    """Inputs and labels of windows, [n, T], those that do not count ignored; T is one or more."""
    length = max(1, *(window.end - window.begin for _, window in pieces))
    inputs = np.full((len(pieces), length), reading.pad_id)
    labels = np.full((len(pieces), length), IGNORED_LABEL)
    for row, (document, window) in enumerate(pieces):
        tokens = reading.documents[document]
        size = window.end - window.begin
        inputs[row, :size] = tokens[window.begin : window.end]
        first = size - window.num_scored
        labels[row, first:size] = tokens[window.end + 1 - window.num_scored : window.end + 1]
    return torch.from_numpy(inputs), torch.from_numpy(labels)


def _scored(
    model: LanguageModel, output: Output, labels: Tensor, topology: Topology
) -> Tensor | None:
    """Sums the nats of each row of labels, [n, T] -> [n], float64; None without the head."""
    if not topology.is_last_stage:
        return None
    rows = torch.eye(len(labels), dtype=torch.float64, device=model.device)
    sums = rows.unsqueeze(1).expand(-1, labels.shape[1], -1)
    weights = LabelWeights(sums=sums)
    return next_token_losses(model.embedding, output.hidden, labels.to(model.device), weights).nats


def _recurrent(states: Sequence[BlockState | RoutedState]) -> list[BlockState | RoutedState]:
    """States of blocks without keys and values, and so without positions."""
    return list(_kept(states))


def _kept(
    states: Sequence[BlockState | RoutedState],
) -> Iterator[BlockState | RoutedState]:
    for state in states:
        block = state.block if isinstance(state, RoutedState) else state
        if block is not None and isinstance(block.mixer, AttentionState):
            block = block._replace(mixer=None)
        if isinstance(state, RoutedState):
            yield RoutedState(block, 0)
        else:
            assert block is not None, "a block that is not routed has run"
            yield block


def _on_all_ranks(nats: Tensor) -> NDArray[np.float64]:
    """Sums of all ranks, each of which has other windows, on every rank."""
    found: NDArray[np.float64] = runtime.all_reduce_sum(nats).cpu().numpy()
    return found
