"""Runs blocks, and recomputes them in the backward pass: selectively, whole, or in spans of tokens.

Selectively, cheap functions inside of a block are run again (`rebuild`). Recomputed whole, a block
saves its input for backward; while it is recomputed, activations of all T tokens are there. In
spans (sequence checkpointing) they are there for one span at a time, and the recurrent state
between spans is saved. Where a mixer looks at all tokens at once, it is recomputed over all of
them, and only the feed-forward in spans. Nothing is computed more than twice.
"""

# B batch, T time, D hidden, R routers, S statistics in a row

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cdrmix.config.schema import Recomputation
from cdrmix.models import wkv7_fla
from cdrmix.models.block import Block, BlockState
from cdrmix.models.compiled import train_block
from cdrmix.models.mixture_of_depths import RoutedBlock, RoutedState, RoutedStatistics
from cdrmix.models.rebuild import rebuilding


class Statistics(NamedTuple):
    """Statistics of consecutive blocks, each a sum over this rank's tokens; None where none has."""

    experts: Tensor | None  # of routers to experts, [R, S] as in `planning.blocks.routers`
    depth: Tensor | None  # of routed blocks, [L, S] as in `planning.depth.DEPTH_STATISTICS`


BlockStates = list[BlockState | RoutedState]  # one for each of consecutive blocks


class Context(TypedDict, total=False):
    """Surroundings of the tokens of a forward pass; by default whole sequences without a state."""

    segment_ids: Tensor | None  # document of each token, [B, T]: never falls, and nothing crosses
    state: BlockStates | None  # where an earlier call stopped
    return_state: bool  # return the states after token T too, views that hold on to whole tensors


def run_blocks(
    blocks: Iterable[nn.Module],
    x: Tensor,
    v_first: Tensor | None,
    *,
    segment_ids: Tensor | None = None,
    state: BlockStates | None = None,
    return_state: bool = False,
    recompute: Recomputation = "none",
    sequence_checkpoint_tokens: int | None = None,
    is_compiled: bool = False,
) -> tuple[Tensor, Tensor | None, Statistics, BlockStates | None]:
    """Runs consecutive blocks, all of a model or those of a pipeline stage.

    Args:
        x: residual stream, [B, T, D].
        v_first: value of the first RWKV layer, [B, T, D]; None before it.
        segment_ids, state, return_state: see `Context`.
        recompute: what is computed again in the backward pass; selective: what is called through
            `rebuild.cheaply`; block and spans save each block's input only.
        sequence_checkpoint_tokens: tokens of a span, where none begins from a state; None: all.
            Where tokens are dropped, each span has a capacity of its own.
        is_compiled: blocks run as `compiled.train_block` does, where gradients are wanted.
    Returns:
        residual stream, v_first, statistics, states or None.
    """
    if not torch.is_grad_enabled():
        recompute, is_compiled = "none", False
    assert not (is_compiled and return_state), "a sequence is trained on from its beginning"
    spans = _spans(x.shape[1], sequence_checkpoint_tokens)
    statistics = []
    depth = []
    states: BlockStates = []
    for i, block in enumerate(blocks):
        assert isinstance(block, Block), "the list holds blocks only"
        past = state[i] if state else None
        after: BlockState | RoutedState | None = None
        if not isinstance(block, RoutedBlock):
            assert past is None or isinstance(past, BlockState), "state of another block kind"
            x, v_first, part, after = _run_block(
                *(block, x, v_first, past, segment_ids),
                spans=spans,
                recompute=recompute,
                is_compiled=is_compiled,
            )
        elif return_state or past is not None:
            assert past is None or isinstance(past, RoutedState), "state of another block kind"
            assert segment_ids is None, "a state is of one document"
            x, parts, after = block.advance(x, v_first, past)
        else:
            x, parts = _choose(block, x, v_first, segment_ids, spans, recompute)
        if isinstance(block, RoutedBlock):
            part = parts.experts
            depth.append(parts.depth)
        statistics.append(part)
        if return_state:
            assert after is not None, "training in spans gives no state"
            states.append(after)
    routed = [part for part in statistics if part is not None]
    found = Statistics(torch.cat(routed) if routed else None, torch.stack(depth) if depth else None)
    return x, v_first, found, states if return_state else None


def _run_block(
    block: Block,
    x: Tensor,
    v_first: Tensor | None,
    past: BlockState | None,
    segment_ids: Tensor | None,
    *,
    spans: Sequence[slice],
    recompute: Recomputation,
    is_compiled: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, BlockState | None]:
    """Runs a block that takes every token: residual stream, v_first, statistics, state if any."""
    is_recomputed = recompute in ("block", "spans")
    if is_compiled:
        assert past is None, "a sequence is trained on from its beginning"
        assert not is_recomputed or len(spans) == 1, "rules refuse spans"
        run = functools.partial(_recomputed, train_block) if is_recomputed else train_block
        return (*run(block, x, v_first, segment_ids), None)
    if not is_recomputed:
        with _kept(block, recompute):
            return block(x, v_first, past, segment_ids)
    if len(spans) == 1:
        return _recomputed(block, x, v_first, past, segment_ids)
    assert past is None, "a sequence is trained on from its beginning"
    inputs = (block, x, v_first, segment_ids, spans)
    if block.mixer.carries_state:
        return (*_in_spans(*inputs), None)
    return (*_recomputed(_mix_then_feed, *inputs, []), None)


def _kept(block: Block, recompute: Recomputation) -> AbstractContextManager[None]:
    """Context of a block's forward pass in which autograd saves what this form keeps."""
    return rebuilding(block) if recompute == "selective" else nullcontext()


def _spans(length: int, step: int | None) -> list[slice]:
    """Cuts a row of `length` tokens into pieces of `step`; None: one piece."""
    step = step or length
    return [slice(first, min(first + step, length)) for first in range(0, length, step)]


def _choose(
    block: RoutedBlock,
    x: Tensor,
    v_first: Tensor | None,
    segment_ids: Tensor | None,
    spans: Sequence[slice],
    recompute: Recomputation,
) -> tuple[Tensor, RoutedStatistics]:
    """Runs a routed block on whole samples: residual stream, statistics."""
    inputs = (x, v_first, segment_ids)
    if recompute in ("block", "spans"):
        assert len(spans) == 1, "rules refuse spans"
        x, parts = _recomputed(block.choose, *inputs)
    else:
        with _kept(block, recompute):
            x, parts = block.choose(*inputs)
    if block.training:  # here, and not in the block, which may be run again for backward
        block.depth_router.observe(parts.depth)
    return x, parts


def _recomputed(run: Callable[..., Any], *inputs: Any) -> Any:
    """Saves the inputs and recomputes the rest in the backward pass."""
    # blocks draw no random numbers, whose state would cost a copy from the device for each call
    return checkpoint(_run_inside, run, *inputs, use_reentrant=False, preserve_rng_state=False)


def _run_inside(run: Callable[..., Any], *inputs: Any) -> Any:
    with wkv7_fla.inside_recomputation():
        return run(*inputs)


def _in_spans(
    block: Block,
    x: Tensor,
    v_first: Tensor | None,
    segment_ids: Tensor | None,
    spans: Sequence[slice],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Runs a block that carries a state span after span: residual stream, v_first, statistics."""
    outs = []
    values = []
    statistics = []
    state: tuple[Tensor, ...] = ()
    for span in spans:
        state, ids = _entering(state, segment_ids, span)
        value = None if v_first is None else v_first[:, span]
        out, value, part, state = _recomputed(_run_span, block, x[:, span], value, ids, *state)
        outs.append(out)
        values.append(value)
        if part is not None:
            statistics.append(part)
    if v_first is None and values[0] is not None:
        v_first = torch.cat(values, 1)
    return torch.cat(outs, 1), v_first, torch.stack(statistics).sum(0) if statistics else None


def _run_span(
    block: Block,
    x: Tensor,
    v_first: Tensor | None,
    segment_ids: Tensor | None,
    *state: Tensor,  # one by one, so that autograd sees tensors
) -> tuple[Tensor, Tensor | None, Tensor | None, tuple[Tensor, ...]]:
    state_type = block.mixer.state_type
    assert state_type is not None, "a mixer that carries a state has a type of it"
    past = None
    if state:
        of_mixer, of_shift = (state, None) if block.ffn_shift is None else (state[:-1], state[-1])
        past = BlockState(state_type(*of_mixer), of_shift)
    x, v_first, statistics, after = block(x, v_first, past, segment_ids)
    leaving = [getattr(after.mixer, part.name) for part in dataclasses.fields(state_type)]
    if after.channel_last is not None:
        leaving.append(after.channel_last)
    return x, v_first, statistics, tuple(map(_apart, leaving))


def _apart(state: Tensor) -> Tensor:
    """Copies what is a view of a larger tensor, as it would keep all of it: of a whole span."""
    is_part = state.untyped_storage().nbytes() > state.numel() * state.element_size()
    return state.clone() if is_part else state


def _mix_then_feed(
    block: Block,
    x: Tensor,
    v_first: Tensor | None,
    segment_ids: Tensor | None,
    spans: list[slice],
    runs: list[None],  # of this block on these inputs so far, one entry each
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Runs a block whose mixer looks at all tokens: residual stream, v_first, statistics.

    Run again in the backward pass, it stops at the inputs of the spans, which are recomputed from
    those one by one: their feed-forwards are not computed a third time.
    """
    is_again = bool(runs)
    runs.append(None)

    def feed(x: Tensor, last: Tensor | None, ids: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return (x, None) if is_again else block.feed(x, last, ids)[:2]

    x, v_first, _, of_mixer = block.mix(x, v_first, None, segment_ids)
    outs = []
    statistics = []
    for inputs in _feed_inputs(block, x, segment_ids, spans):
        out, part = _recomputed(feed, *inputs)
        outs.append(out)
        if part is not None:
            statistics.append(part)
    of_ffn = torch.stack(statistics).sum(0) if statistics else None
    return torch.cat(outs, 1), v_first, block.rows(of_mixer, of_ffn)


def _feed_inputs(
    block: Block, x: Tensor, segment_ids: Tensor | None, spans: list[slice]
) -> list[tuple[Tensor | None, ...]]:
    """Returns each span's residual stream, normalised token before it, and documents."""
    if block.ffn_shift is None:
        return [(x[:, span], None, None) for span in spans]
    ends = block.ffn_norm(x[:, [span.stop - 1 for span in spans]])  # [B, spans, D]
    last, segment_ids = block.ffn_shift.shift.begin(ends[:, -1], segment_ids)
    inputs: list[tuple[Tensor | None, ...]] = []
    for span, end in zip(spans, ends.unbind(1), strict=True):
        entering, ids = _entering(() if last is None else (last,), segment_ids, span)
        inputs.append((x[:, span], entering[0] if entering else None, ids))
        last = end
    return inputs


def _entering(
    state: tuple[Tensor, ...], segment_ids: Tensor | None, span: slice
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Returns the state that enters a span, zero where a document starts, and its segment ids."""
    if segment_ids is None:
        return state, None
    if span.start > 0:
        is_new = segment_ids[:, span.start] != segment_ids[:, span.start - 1]  # [B]
        state = tuple(x.masked_fill(is_new.view(-1, *[1] * (x.dim() - 1)), 0) for x in state)
    return state, segment_ids[:, span]
