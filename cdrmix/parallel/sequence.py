"""Sequence parallelism: ranks of a sequence group share samples and split their tokens.

Operations across tokens are replaced; the rest of a block is as on one rank. A token shift takes
one token from the rank before. Attention exchanges tokens for heads: H / P heads see all T tokens.
The recurrence does the same, or passes its state from rank to rank, whichever moves fewer bytes
(planning/blocks). Every rank runs the same operations, so that none skips a collective of
another in the backward pass.

In training only: in evaluation each rank reads whole samples of its own. `segment_ids` are those of
whole samples in both.
"""

# B batch, T time of a whole sample, P sequence ranks, t = T / P tokens of one, H heads of this
# tensor rank, C features of a head, K key dim, V value dim

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from cdrmix.config.schema import Config
from cdrmix.models.attention import AttentionState, attend
from cdrmix.models.block import Block
from cdrmix.models.rwkv7 import TokenShift
from cdrmix.models.wkv7 import wkv7
from cdrmix.parallel.topology import Topology
from cdrmix.planning.blocks.block_type import SequenceForm, layer_type
from cdrmix.planning.layout import ELEMENT_BYTES


def spread_tokens(block: Block, topology: Topology, config: Config) -> None:
    """Replaces parts of a block, in place, so that it runs on this rank's tokens of each sample."""
    if topology.sequence_group is None:
        return
    parts = topology.degrees.sequence
    part = SequencePart(topology.sequence_group, parts, index=topology.data_rank % parts)
    form = layer_type(block.config, block.layer).sequence_form(
        config.model,
        sequence_length=config.training.sequence_length,
        sequence=parts,
        element_bytes=ELEMENT_BYTES[config.training.precision],
    )
    mixer = block.mixer
    mixer.carries_state = False  # no spans: the ranks exchange in each call
    for attribute, operation in mixer.across_tokens.items():
        setattr(mixer, attribute, _SPREAD[operation, form](part))
    if block.ffn_shift is not None:
        block.ffn_shift.shift = SpreadShift(part)


@dataclass(frozen=True)
class SequencePart:
    """Part of a sequence on this rank."""

    group: ProcessGroup  # ranks that hold the parts
    parts: int  # their number, P
    index: int  # of this part, from 0 at the beginning

    def own(self, segment_ids: Tensor | None) -> Tensor | None:
        """Cuts segment ids to this rank's tokens, [B, T] -> [B, t]."""
        return None if segment_ids is None else segment_ids.chunk(self.parts, dim=1)[self.index]

    def goes_on(self, like: Tensor, segment_ids: Tensor | None) -> Tensor:
        """Returns True where the first token here continues the document before it, [B]."""
        if self.index == 0 or segment_ids is None:
            return torch.full(like.shape[:1], self.index > 0, device=like.device)
        first = self.index * (segment_ids.shape[1] // self.parts)
        return segment_ids[:, first] == segment_ids[:, first - 1]


class SpreadOperation(nn.Module):
    """Operation across tokens of which this rank holds a part."""

    def __init__(self, part: SequencePart) -> None:
        super().__init__()
        self.part = part


class SpreadShift(SpreadOperation, TokenShift):
    """Token shift whose first predecessor comes from the rank before."""

    def begin(
        self, last: Tensor, segment_ids: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Exchanges last tokens, and returns as `TokenShift.begin`."""
        if not self.training:
            return super().begin(last, segment_ids)
        # The ring gives the first rank the last rank's token: a rank that did not receive would not
        # send in the backward pass either. It begins every sample, so `goes_on` is false there.
        before = _NextRank.apply(last, self.part)  # [B, D]
        goes_on = self.part.goes_on(last, segment_ids)
        return before.masked_fill(~goes_on[:, None], 0), self.part.own(segment_ids)


class SpreadHeads(SpreadOperation):
    """Recurrence over all tokens for some heads: one exchange there, one back."""

    def forward(self, *inputs: Any, segment_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Computes `wkv7` on this rank's tokens; the state is of other heads, after all T."""
        if not self.training:
            return wkv7(*inputs, segment_ids=segment_ids)
        *tensors, s0 = inputs
        assert s0 is None, "a sequence is trained on from its beginning"
        y, s = wkv7(*Exchange.apply(self.part, True, *tensors), segment_ids=segment_ids)
        (y,) = Exchange.apply(self.part, False, y)
        return y, s


class PassedState(SpreadOperation):
    """Recurrence over this rank's tokens, its state passed on by one gathering.

    The tokens here take a state S, [V, K], to S M + Y. Both come from one run of the op over values
    [v, 0] that starts from [0; I]: its state is then [Y; M], and its output [y; p]. The output for
    an entering state S is y + S p.
    """

    def forward(self, *inputs: Any, segment_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Computes `wkv7` on this rank's tokens; the state is [Y; M]."""
        if not self.training:
            return wkv7(*inputs, segment_ids=segment_ids)
        r, lw, k, v, a, b, s0 = inputs
        assert s0 is None, "a sequence is trained on from its beginning"
        _, _, heads, key = r.shape
        sizes = (v.shape[-1], key)
        # a document that starts here sees nothing of the ranks before, nor do those behind it
        goes_on = self.part.goes_on(r, segment_ids).float()[:, None, None, None]
        identity = torch.eye(key, device=r.device) * goes_on.expand(-1, heads, -1, -1)
        start = F.pad(identity, (0, 0, sizes[0], 0))  # [B, H, V + K, K]
        ids = self.part.own(segment_ids)
        y, s = wkv7(r, lw, k, F.pad(v, (0, key)), a, b, start, segment_ids=ids)
        # state that enters each rank's tokens, by a scan over the ranks' [Y; M], in float32
        states = [torch.zeros_like(s[:, :, : sizes[0]])]
        for gathered in _Gather.apply(s, self.part)[:-1]:
            added, map_ = gathered.split(sizes, dim=2)
            states.append(states[-1] @ map_ + added)
        # stacked, so that autograd reaches all of them on every rank and none skips a collective
        entering = torch.stack(states)[self.part.index]  # [B, H, V, K]
        y, passing = y.split(sizes, dim=-1)
        passing = passing.transpose(1, 2).contiguous()  # [B, H, t, K]; frees y
        return y + (passing @ entering.mT.to(y.dtype)).transpose(1, 2), s


class SpreadAttention(SpreadOperation):
    """Attention to all tokens by some heads: one exchange there, one back."""

    def forward(
        self, query: Tensor, keys: Tensor, values: Tensor, state: AttentionState | None, *rest: Any
    ) -> tuple[Tensor, AttentionState]:
        """Computes `attend` on this rank's tokens; the state is of other heads, of all T."""
        if not self.training:
            return attend(query, keys, values, state, *rest)
        assert state is None, "a sequence is trained on from its beginning"
        query, keys, values = Exchange.apply(self.part, True, query, keys, values)
        mixed, after = attend(query, keys, values, None, *rest)
        (mixed,) = Exchange.apply(self.part, False, mixed)
        return mixed, after


# Operations across tokens, which mixers name in `across_tokens`, by the form of their exchange.
_SPREAD: dict[tuple[str, SequenceForm], type[SpreadOperation]] = {
    ("shift", "heads"): SpreadShift,
    ("shift", "state"): SpreadShift,
    ("wkv7", "heads"): SpreadHeads,
    ("wkv7", "state"): PassedState,
    ("attention", "heads"): SpreadAttention,
}


class Exchange(torch.autograd.Function):
    """Exchange of tokens for heads in one all-to-all: [B, t, H, C] -> [B, T, H / P, C], or back."""

    @staticmethod
    def forward(
        ctx: Any, part: SequencePart, to_heads: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.part = part
        ctx.to_heads = to_heads
        return _exchanged(part, tensors, to_heads=to_heads)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *_exchanged(ctx.part, gradients, to_heads=not ctx.to_heads)


def _exchanged(
    part: SequencePart, tensors: Sequence[Tensor], *, to_heads: bool
) -> tuple[Tensor, ...]:
    axis = 2 if to_heads else 1  # of what is divided here, heads or tokens
    entries = [x.unflatten(axis, (part.parts, -1)).movedim(axis, 0) for x in tensors]  # p to rank p
    # One message for all tensors, as each collective costs a latency. It has the narrowest type, in
    # which an element of a wider type is several: a cast would lose bits of a float32 decay.
    dtype = min((x.dtype for x in tensors), key=lambda dtype: dtype.itemsize)
    sizes = [x[0].numel() * x.element_size() // dtype.itemsize for x in entries]
    sent = tensors[0].new_empty(part.parts, sum(sizes), dtype=dtype)
    for x, place in zip(entries, sent.split(sizes, dim=1), strict=True):
        place.view(x.dtype).view(x.shape).copy_(x)
    received = torch.empty_like(sent)
    torch.distributed.all_to_all_single(received, sent, group=part.group)
    pieces = zip(entries, received.split(sizes, dim=1), strict=True)
    arrived = [piece.view(x.dtype).view(x.shape) for x, piece in pieces]
    # rank p's entry holds the p-th part of the tokens, or of the heads
    if to_heads:
        return tuple(x.transpose(0, 1).flatten(1, 2) for x in arrived)
    return tuple(x.movedim(0, 2).flatten(2, 3) for x in arrived)


class _NextRank(torch.autograd.Function):
    """Ring that sends x to the next rank: all send and receive, in both passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, part: SequencePart) -> Tensor:
        ctx.part = part
        return _around(x, part, step=1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _around(gradient, ctx.part, step=-1), None


def _around(x: Tensor, part: SequencePart, *, step: int) -> Tensor:
    """Returns x of the rank `step` places before, in a ring."""
    received = torch.empty_like(x, memory_format=torch.contiguous_format)
    # one collective for all, as sends and receives of single pairs would have to be put in an order
    # in which no rank waits for itself around the ring
    to, source = ((part.index + way * step) % part.parts for way in (1, -1))
    torch.distributed.all_to_all_single(
        received,
        x.contiguous(),
        [len(x) * (rank == source) for rank in range(part.parts)],
        [len(x) * (rank == to) for rank in range(part.parts)],
        group=part.group,
    )
    return received


class _Gather(torch.autograd.Function):
    """Gathering of x of every rank, [P, *x]; the gradient of each is summed over all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, part: SequencePart) -> Tensor:
        ctx.part = part
        gathered = x.new_empty(part.parts * len(x), *x.shape[1:])
        torch.distributed.all_gather_into_tensor(gathered, x.contiguous(), group=part.group)
        return gathered.unflatten(0, (part.parts, -1))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # every later rank reads this rank's [Y; M], so their gradients of it are added up
        summed = torch.empty_like(gradient[0])
        parts = gradient.contiguous().flatten(0, 1)
        torch.distributed.reduce_scatter_tensor(summed, parts, group=ctx.part.group)
        return summed, None
