"""Mixture of Depths: blocks that take some tokens of a row, and let the others pass.

A router scores each token in float32, r = w . x. A token that is chosen goes on as
x + sigmoid(r) f(x), where x + f(x) is the block's output, any other as x. The block runs on the
chosen tokens alone, gathered in order: keys and values of others do not exist, a recurrent state
and a token shift are carried past them, and rotary positions are those in the whole row. v_first
has a value for each token, as the RWKV block that makes it is never routed.

* threshold: chosen is who scores above a threshold, and the weight is sigmoid(r - threshold). It
  looks at no other token, so training and decoding choose alike. After each step the threshold
  moves towards the wanted fraction.
* topk: in training the highest scores of a row are chosen, which is known at its end alone. A
  predictor learns beside it from the same input, without a gradient to it, who will be; evaluation
  and decoding choose those that it expects. The sign of the router's own score is not offered: its
  fraction is what training happens to make it.

Source: Raposo et al., arXiv 2404.02258; the moving threshold is ours.
"""

# B batch, T tokens of a row, M gathered ones, D hidden, P inner width of a predictor, S statistics

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cdrmix.config.model import ModelConfig
from cdrmix.config.model_parts import ModConfig
from cdrmix.models.block import Block, BlockState
from cdrmix.models.initialize import normal_
from cdrmix.models.mixer import Gathered
from cdrmix.planning.depth import DEPTH_STATISTICS, num_chosen

# Of the predictor's initial share, whose logit must be finite.
_MOST_CERTAIN = 0.99


class Decision(NamedTuple):
    """Choice of one block among the tokens of whole rows."""

    is_chosen: Tensor  # [B, T]
    weights: Tensor  # of what the block adds to a token, [B, T], float32
    statistics: Tensor  # `DEPTH_STATISTICS`, [S], float32


class DepthRouter(nn.Module):
    """Router of one block, with the predictor or the threshold of its mode."""

    threshold: Tensor  # [1], float32 whatever the type of the model

    def __init__(self, mod: ModConfig, hidden_size: int) -> None:
        super().__init__()
        self.capacity = mod.capacity
        self.mode: Literal["threshold", "topk"] = mod.mode
        self.weight = nn.Parameter(torch.empty(hidden_size))
        if mod.mode == "topk":
            inner = mod.predictor_hidden
            self.predictor_in = nn.Parameter(torch.empty(inner, hidden_size))
            self.predictor_in_bias = nn.Parameter(torch.empty(inner))
            self.predictor_out = nn.Parameter(torch.empty(inner))
            self.predictor_out_bias = nn.Parameter(torch.empty(1))
        else:
            self.register_buffer("threshold", torch.zeros(1))
        # Sums of this step's micro-batches, float64, [S]; see `observe`.
        self.observed: Tensor | None = None

    def _apply(self, fn: Any, recurse: bool = True) -> DepthRouter:
        # DeepSpeed casts a model with its buffers to the type of the run, in which the steps of a
        # threshold would be rounded away.
        kept = self._buffers.pop("threshold", None)
        super()._apply(fn, recurse)
        if kept is not None:
            moved = fn(kept)
            same = moved.device == kept.device
            # the same tensor, if it can be: it has the marks that a checkpoint reads; one on meta
            # has no values to take along
            if not same:
                kept = moved if kept.is_meta else kept.to(moved.device)
            self._buffers["threshold"] = kept
        return self

    def forward(self, x: Tensor) -> Decision:
        """Chooses among the tokens of whole rows, [B, T, D] of any float type."""
        rows, length, _ = x.shape
        wide = x.float()
        scores = wide @ self.weight.float()  # [B, T]
        nats = matches = threshold = scores.new_zeros(())
        if self.mode == "threshold":
            threshold = self.threshold[0]
            scores = scores - threshold
            is_chosen = scores > 0
        else:
            logits = self._predict(wide.detach())
            is_chosen = logits > 0
            if self.training:
                top = scores.topk(num_chosen(self.capacity, length), dim=1).indices
                is_top = torch.zeros_like(is_chosen).scatter(1, top, value=True)
                nats = F.binary_cross_entropy_with_logits(logits, is_top.float(), reduction="sum")
                matches = (is_chosen == is_top).sum()
                is_chosen = is_top
        with torch.no_grad():
            # exact multiples of 1 / T, so that the positions of a row add up to 0
            ends = (torch.arange(length, device=x.device) * 2 - (length - 1)) / length
            number = scores.new_tensor(scores.numel())
            others = (
                *(number, is_chosen.sum(), scores.sum(), scores.square().sum(), nats, matches),
                *((is_chosen * ends).sum(), rows * ends.square().sum(), threshold * number),
            )
            statistics = torch.stack([value.detach().float() for value in others])
        if nats.requires_grad:
            statistics = statistics.index_put(
                (torch.tensor(DEPTH_STATISTICS.index("predictor_nats"), device=x.device),), nats
            )
        return Decision(is_chosen, torch.sigmoid(scores), statistics)

    def _predict(self, x: Tensor) -> Tensor:
        """Logits of membership, [B, T, D] -> [B, T], float32."""
        inner = F.linear(x, self.predictor_in.float(), self.predictor_in_bias.float())
        return F.gelu(inner) @ self.predictor_out.float() + self.predictor_out_bias.float()

    @torch.no_grad()
    def observe(self, statistics: Tensor) -> None:
        """Adds the statistics of a micro-batch of training, [S], to those of the step."""
        added = statistics.detach().double()
        self.observed = added if self.observed is None else self.observed + added

    @torch.no_grad()
    def initialize(self, *, seed: int, name: str, std: float) -> None:
        """Sets a normal router and predictor, which expects the capacity, and a threshold of 0."""
        normal_(self.weight, std, seed=seed, name=f"{name}.weight")
        if self.mode == "threshold":
            self.threshold.zero_()
            return
        normal_(self.predictor_in, std, seed=seed, name=f"{name}.predictor_in")
        self.predictor_in_bias.zero_()
        self.predictor_out.zero_()
        share = min(self.capacity, _MOST_CERTAIN)
        self.predictor_out_bias.fill_(math.log(share / (1 - share)))


class RoutedState(NamedTuple):
    """State of a routed block between calls; rows may have chosen other numbers of tokens."""

    block: BlockState | None  # None as long as no row has chosen a token
    seen: int  # tokens so far, chosen or not


class RoutedStatistics(NamedTuple):
    """Statistics of a routed block."""

    experts: Tensor | None  # those of the block inside, over its chosen tokens
    depth: Tensor  # `DEPTH_STATISTICS`, [S]


class RoutedBlock(Block):
    """Block at `layer` that runs on the tokens which its router chooses."""

    def __init__(self, config: ModelConfig, layer: int, *, expert_parallel_size: int = 1) -> None:
        super().__init__(config, layer, expert_parallel_size=expert_parallel_size)
        assert config.mod is not None, "a model without it has no routed blocks"
        self.depth_router = DepthRouter(config.mod, config.hidden_size)
        # True where ranks call the block together, so that each must, even without a token of its
        # own: experts of other ranks, and parameters that are gathered.
        self.is_collective = False

    def choose(
        self, x: Tensor, v_first: Tensor | None, segment_ids: Tensor | None
    ) -> tuple[Tensor, RoutedStatistics]:
        """Runs whole rows from their beginning: residual stream, [B, T, D], and statistics.

        Rows with fewer chosen tokens than another are filled up at their end, where no token looks,
        with tokens that are not chosen and stay as they are.
        """
        decision = self.depth_router(x)
        is_ragged = not (self.training and self.depth_router.mode == "topk")
        counts = decision.is_chosen.sum(1)  # [B]
        if is_ragged:
            lengths = counts.tolist()  # the one wait for the device
            longest = max(1, *lengths)
        else:
            longest = num_chosen(self.depth_router.capacity, x.shape[1])
        # chosen tokens first, in their order; no token twice
        index = (~decision.is_chosen).byte().argsort(dim=1, stable=True)[:, :longest]  # [B, M]
        is_token = tokens = None
        weights = decision.weights.gather(1, index)
        if is_ragged:
            is_token = torch.arange(longest, device=x.device) < counts.unsqueeze(1)
            weights = weights.masked_fill(~is_token, 0)
            tokens = (~is_token).flatten().byte().argsort(stable=True)[: sum(lengths)]
        ids = None if segment_ids is None else segment_ids.gather(1, index)
        if ids is not None and is_token is not None:  # a last document, as those of a row only rise
            ids = ids.masked_fill(~is_token, torch.iinfo(ids.dtype).max)
        own = gather(x, index)
        value = None if v_first is None else gather(v_first, index)
        out, _, experts, _ = super().forward(own, value, None, ids, Gathered(index, tokens))
        out = torch.lerp(own, out, weights.unsqueeze(-1).to(x.dtype))
        out = x.scatter(1, index.unsqueeze(-1).expand_as(out), out)
        return out, RoutedStatistics(experts, decision.statistics)

    def advance(
        self, x: Tensor, v_first: Tensor | None, state: RoutedState | None
    ) -> tuple[Tensor, RoutedStatistics, RoutedState]:
        """Runs tokens behind those of a state, [B, T, D]; gives the state after them too.

        Rows with equally many chosen tokens run together, so that a state is that after the last of
        them. Of one token at a time those are all that have chosen it. Where ranks call the block
        together they must as often, so that x is of one row or of one token then.
        """
        assert not self.is_collective or 1 in x.shape[:2], (
            "rows of several tokens choose other numbers of them on each rank"
        )
        decision = self.depth_router(x)
        past, seen = state or RoutedState(None, 0)
        after = past
        experts: list[Tensor] = []
        out = x.clone()
        counts = decision.is_chosen.sum(1)
        numbers = sorted(set(counts.tolist()) - {0})
        if self.is_collective and not numbers:  # for the other ranks alone
            first = Gathered(torch.zeros(1, 1, dtype=torch.int64, device=x.device), None)
            super().forward(x[:1, :1], None if v_first is None else v_first[:1, :1], gathered=first)
        for number in numbers:
            rows = (counts == number).nonzero().squeeze(1)
            index = decision.is_chosen[rows].nonzero()[:, 1].view(len(rows), number)
            own = gather(x[rows], index)
            value = None if v_first is None else gather(v_first[rows], index)
            before = None if past is None else _rows_of(past, rows)
            gathered = Gathered(index + seen, None)
            new, _, part, reached = super().forward(own, value, before, None, gathered)
            weights = decision.weights[rows].gather(1, index).unsqueeze(-1).to(x.dtype)
            out[rows.unsqueeze(1), index] = torch.lerp(own, new, weights)
            after = _with_rows(after, rows, reached, len(x))
            if part is not None:
                experts.append(part)
        total = torch.stack(experts).sum(0) if experts else self.no_rows(x)
        statistics = RoutedStatistics(total, decision.statistics)
        return out, statistics, RoutedState(after, seen + x.shape[1])

    def initialize(self, *, seed: int, std: float, expert_parallel_rank: int = 0) -> None:
        """Sets the initial values; see the parts."""
        super().initialize(seed=seed, std=std, expert_parallel_rank=expert_parallel_rank)
        self.depth_router.initialize(seed=seed, name=f"blocks.{self.layer}.depth_router", std=std)


def gather(x: Tensor, index: Tensor) -> Tensor:
    """Takes tokens of each row, [B, T, D] by [B, M] -> [B, M, D]."""
    return x.gather(1, index.unsqueeze(-1).expand(-1, -1, x.shape[2]))


# A state is a tree of tuples and dataclasses whose leaves are tensors with a row for each sequence.
State = Any


def _children(state: State) -> dict[str, State]:
    """Parts of a state by name."""
    if is_dataclass(state):
        return {field.name: getattr(state, field.name) for field in fields(state)}
    return dict(state._asdict())


def _rebuilt(state: State, children: dict[str, State]) -> State:
    rebuilt: State = type(state)(**children)
    return rebuilt


def _rows_of(state: State, rows: Tensor) -> State:
    """Returns the given rows of a state."""
    if state is None or torch.is_tensor(state):
        return None if state is None else state[rows]
    return _rebuilt(state, {name: _rows_of(x, rows) for name, x in _children(state).items()})


def _with_rows(whole: State, rows: Tensor, part: State, number: int) -> State:
    """Puts rows into the state of a batch of `number`, whose other rows stay; None is zeros.

    Rows that have become longer than others, such as keys, make all longer.
    """
    if part is None or torch.is_tensor(part):
        if part is None:
            return None
        if whole is None:
            whole = part.new_zeros(number, *part.shape[1:])
        sizes = [max(pair) for pair in zip(whole.shape[1:], part.shape[1:], strict=True)]
        longer = whole.new_zeros(number, *sizes)
        longer[tuple(slice(0, n) for n in whole.shape)] = whole
        longer[(rows, *(slice(0, n) for n in part.shape[1:]))] = part
        return longer
    children = {} if whole is None else _children(whole)
    parts = _children(part).items()
    new = {name: _with_rows(children.get(name), rows, x, number) for name, x in parts}
    return _rebuilt(part, new)


def routed_blocks(model: nn.Module) -> list[RoutedBlock]:
    """Routed blocks of a model or a pipeline stage, from the input."""
    return [module for module in model.modules() if isinstance(module, RoutedBlock)]


def make_block(config: ModelConfig, layer: int, *, expert_parallel_size: int = 1) -> Block:
    """Makes the block at `layer`, routed where the configuration says so; see `Block`."""
    kind = RoutedBlock if layer in config.routed_layers() else Block
    return kind(config, layer, expert_parallel_size=expert_parallel_size)
