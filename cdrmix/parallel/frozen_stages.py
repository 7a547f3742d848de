"""Frozen backbone over pipeline stages; every stage runs the same program.

All ranks of a pipeline call it in the same order with the same tokens and get the same hidden
states; they differ only in the blocks that they run. Everything around the backbone is replicated
on every stage and does the same there, including the choices of an agent.

    forward   residual stream and v_first go from stage to stage; the last one broadcasts the hidden
              states
    backward  the last stage's gradient of the hidden states counts, the others' are equal and
              ignored; gradients go from stage to stage; the first one broadcasts the gradient
              of its blocks' input, which every stage computed alike

The rows of a call go through the stages in pieces, so that stages compute at the same time, and a
piece is sent while its stage computes the next one. Autograd runs what was computed last first:
backward, pieces follow each other the other way round, on all stages alike.

A backward pass exchanges what its forward pass did, in reverse. A ticket, zero, goes into each
call and comes out of it, and the last one into the loss, so that autograd runs through every call
on all stages, the latest first, whatever of it the loss depends on. A call in which nothing learns
takes no ticket and exchanges nothing on the way back.
"""

# B batch, b rows of a piece of it, T time, D hidden

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar, Unpack, cast

import torch
import torch.distributed
from torch import Tensor, nn

from cdrmix.config.model import ModelConfig
from cdrmix.models.backbone import Backbone, Output
from cdrmix.models.block import Block
from cdrmix.models.recompute import BlockStates, Context, run_blocks
from cdrmix.models.state_rows import joined, part
from cdrmix.parallel import exchange
from cdrmix.parallel.exchange import Part, sum_over_ranks
from cdrmix.parallel.topology import Topology
from cdrmix.planning.blocks.block_type import is_v_first_made
from cdrmix.planning.lesson_sizes import pieces_of_rows

Measured = TypeVar("Measured")


class FrozenStages(Backbone):
    """Blocks of one stage, with embedding, head and norms of the whole; names as in `Backbone`."""

    def __init__(self, config: ModelConfig, topology: Topology, layers: range) -> None:
        def block(model: ModelConfig, layer: int) -> Block:
            return Block(model, layer) if layer in layers else cast(Block, nn.Identity())

        super().__init__(config, block=block)
        self.topology = topology
        self.layers = layers
        self.rows: slice | None = None  # of the call, which its blocks compute now
        self._sending = _Sending()
        self._ticket: Tensor | None = None
        self._learns_inside = False

    def forward(self, input_ids: Tensor, **context: Unpack[Context]) -> Output:
        """Computes `Backbone.forward`; the state is that of this stage's blocks."""
        x = self.embedding_norm(self.embedding(input_ids))  # on every stage: slots are read here
        learns = torch.is_grad_enabled() and (x.requires_grad or self._learns_inside)
        # float32, as the loss to which the last one is added
        ticket = x.new_zeros((), dtype=torch.float32)
        if learns:
            assert self._ticket is not None, "what learns is computed under `chained`"
            ticket = self._ticket
        rows, tokens = input_ids.shape
        pieces = pieces_of_rows(rows, tokens, self.topology.degrees.pipeline)
        entering = _Enter.apply(x, ticket, self.topology, self._sending)
        sizes = [piece.stop - piece.start for piece in pieces]
        left = []
        states = []
        for piece, embedded in zip(pieces, entering.split(sizes), strict=True):
            self.rows = piece
            leaving, after = self._run(embedded, part(context, piece))
            left.append(leaving)
            states.append(after)
        self._sending.wait()
        hidden, ticket = _Share.apply(torch.cat(left), self.topology)
        assert learns or not hidden.requires_grad, "`chained` is told what learns inside"
        if learns:
            self._ticket = ticket
        # no router statistics: frozen routers do not learn
        return Output(hidden, None, joined(states))

    def _run(self, x: Tensor, context: Context) -> tuple[Tensor, BlockStates | None]:
        """Runs this stage's blocks on a piece: hidden states [b, T, D] of the last stage, and
        states after the piece."""
        # residual stream, and v_first once a stage before has made it, both [b, T, D]
        v_first_arrives = is_v_first_made(self.config, self.layers.start)
        parts: list[Part] = [(tuple(x.shape), x.dtype)] * (2 if v_first_arrives else 1)
        size = exchange.num_elements(parts, x.dtype)
        arrived = _Arrive.apply(x, self.topology, size, self._sending)
        first = self.topology.is_first_stage
        entered = [arrived] if first else list(exchange.unpack(arrived, parts))
        v_first = entered[1] if v_first_arrives else None
        blocks = (self.blocks[layer] for layer in self.layers)
        out, v_first, _, after = run_blocks(blocks, entered[0], v_first, **context)
        if self.topology.is_last_stage:
            leaving = self.final_norm(out)
        else:
            leaving = exchange.pack(*([out] if v_first is None else [out, v_first]))
        return _Leave.apply(leaving, self.topology, x.shape, self._sending), after


def rows_that_run(backbone: Backbone) -> slice | None:
    """Returns the rows of a call that its blocks compute now; None if those are all rows."""
    return backbone.rows if isinstance(backbone, FrozenStages) else None


def chained(
    backbone: Backbone,
    compute: Callable[[], tuple[Tensor, Measured]],
    *,
    learning: Iterator[Tensor],
    learns_inside: bool,
) -> tuple[Tensor, Measured]:
    """Runs `compute` so that all stages start the backward pass of its loss together.

    Args:
        backbone: the one that `compute` calls; for a whole one nothing is done.
        compute: returns the loss, scalar, and any further result.
        learning: parameters that the backward pass is run for.
        learns_inside: True if parameters inside the blocks learn, on every stage.
    """
    if not isinstance(backbone, FrozenStages):
        return compute()
    backbone._ticket = _Issue.apply(next(learning))
    backbone._learns_inside = learns_inside
    try:
        loss, measured = compute()
        assert backbone._ticket is not None, "it was issued above"
        return loss + backbone._ticket, measured
    finally:
        # also after an error: a call outside `chained` must not hang its exchanges on an old graph
        backbone._ticket = None
        backbone._learns_inside = False


def mean_over_layers(values: Tensor, backbone: Backbone) -> Tensor:
    """Averages over all layers from `values`, [n], of this stage's layers; differentiable."""
    if not isinstance(backbone, FrozenStages):
        return values.mean()
    # stages may have different numbers of layers, so sum and count are summed, in one message
    count = values.new_tensor(float(len(values)))
    sums = torch.stack([values.sum(), count])
    total, number = sum_over_ranks(sums, backbone.topology.pipeline_group)
    return total / number.detach()


class _Sending:
    """One piece on its way to another stage while the next one is computed.

    A send that waited for its receiver would keep the stages in step, and each of them would take
    as long as the slower one with every piece.
    """

    def __init__(self) -> None:
        self._piece: tuple[torch.distributed.Work, Tensor] | None = None

    def send(self, piece: Tensor, rank: int) -> None:
        """Begins to send a piece once the one before has left."""
        self.wait()
        work = torch.distributed.isend(piece, rank)
        assert work is not None, "both ranks are of the pipeline"
        self._piece = work, piece  # its memory is not used again before it has left

    def wait(self) -> None:
        """Waits until nothing is on its way."""
        if self._piece is not None:
            self._piece[0].wait()
            self._piece = None


class _Issue(torch.autograd.Function):
    """Ticket that depends on a parameter, as autograd visits only nodes that lead to one."""

    @staticmethod
    def forward(ctx: Any, learning: Tensor) -> Tensor:
        return learning.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


class _Enter(torch.autograd.Function):
    """Embedded tokens of a call, whose gradient comes from the first stage."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, ticket: Tensor, topology: Topology, sending: _Sending
    ) -> Tensor:
        ctx.topology = topology
        ctx.sending = sending
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        topology = ctx.topology
        ctx.sending.wait()
        ticket = grad.new_zeros((), dtype=torch.float32)
        if not ctx.needs_input_grad[0]:  # alike on all stages
            return None, ticket, None, None
        # after all pieces: the first stage has its gradients last
        entered = grad.contiguous()
        torch.distributed.broadcast(entered, src=topology.rank_at(0), group=topology.pipeline_group)
        return entered, ticket, None, None


class _Arrive(torch.autograd.Function):
    """Input of a stage's blocks: embedded tokens, or the flat tensor of the stage before."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, topology: Topology, num_elements: int, sending: _Sending
    ) -> Tensor:
        ctx.topology = topology
        ctx.sending = sending
        ctx.shape = x.shape
        if topology.is_first_stage:
            return x.view_as(x)
        arrived = x.new_empty(num_elements)
        torch.distributed.recv(arrived, topology.rank_at(topology.stage - 1))
        return arrived

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        topology = ctx.topology
        if topology.is_first_stage:
            return grad, None, None, None
        # a send takes memory as it lies; a gradient may be expanded
        ctx.sending.send(grad.contiguous(), topology.rank_at(topology.stage - 1))
        return grad.new_zeros(ctx.shape), None, None, None  # the first stage's counts


class _Leave(torch.autograd.Function):
    """Hidden states of the last stage; of others, room for them."""

    @staticmethod
    def forward(
        ctx: Any, leaving: Tensor, topology: Topology, shape: torch.Size, sending: _Sending
    ) -> Tensor:
        ctx.topology = topology
        ctx.shape = leaving.shape
        if topology.is_last_stage:
            return leaving.view_as(leaving)
        sending.send(leaving.detach(), topology.rank_at(topology.stage + 1))
        return leaving.new_empty(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        topology = ctx.topology
        if topology.is_last_stage:
            return grad, None, None, None
        # this stage's own `grad` equals the last stage's, which counts; what its blocks need is the
        # gradient of the flat tensor that they sent on
        arrived = grad.new_empty(ctx.shape)
        torch.distributed.recv(arrived, topology.rank_at(topology.stage + 1))
        return arrived, None, None, None


class _Share(torch.autograd.Function):
    """Hidden states of the last stage on all stages, and a ticket for the next call."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, topology: Topology) -> tuple[Tensor, Tensor]:
        last = topology.rank_at(topology.degrees.pipeline - 1)
        torch.distributed.broadcast(hidden, src=last, group=topology.pipeline_group)
        ctx.mark_dirty(hidden)
        return hidden, hidden.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None
