"""Plastic adapters: fast weights beside the linear layers of a backbone, written while it reads.

For a token of an adapted layer with y0 = W x, p = normalize(A x - mean) and
q = normalize(B^T y0 - mean), each less its mean over the tokens of the sequence before:

    y = y0 + alpha g B (H p)          H: fast weights of this sequence, zero at its start
    H' = rule(H, q, e, m)             e: trace of the p before, m = sigmoid(w_m . x + b)

A, B, g, w_m, b, the trace's decay and H's half-life are parameters, learned slowly; H is state, see
`fast_weights`. The adapters are attached by forward hooks, so that a backbone's code, its parameter
names and, with plasticity off, its numbers stay what they are.
"""

# B sequences, T tokens, I inputs and O outputs of the layer, r rank

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cdrmix.config.reasoning import AdapterConfig
from cdrmix.models.backbone import Backbone, Output
from cdrmix.models.block import Block, BlockState
from cdrmix.models.feed_forward import FeedForward
from cdrmix.models.initialize import normal_
from cdrmix.models.state_rows import joined, part
from cdrmix.parallel.frozen_stages import mean_over_layers, rows_that_run
from cdrmix.planning.blocks.block_type import layer_type
from cdrmix.planning.blocks.feed_forward import linears
from cdrmix.reasoning.fast_weights import (
    Chunks,
    FastWeights,
    Rule,
    Writes,
    centred,
    chunks_of,
    correlation_loss,
    limited,
    scan_chunks,
    traces,
)

# alpha * g is 2 at alpha = .2: a recalled pattern of length 1 then weighs as much as the layer's
# own output, and the binding task is learned in hundreds of steps instead of thousands.
_INITIAL_GAIN = 10.0
# Largest ||alpha g B H p|| / ||W x|| of a token. A bound on H alone that would keep to this for
# every p, ||alpha g B H|| <= .5 ||W||, keeps the binding task from being learned at all.
LARGEST_RELATIVE_CHANGE = 0.5
_TINY = 1e-12  # added to lengths that are divided by, which may be zero


class Adapted(NamedTuple):
    """Output of an adapter."""

    y: Tensor  # output of the layer with its change
    after: FastWeights  # fast weights after the last token
    correlation: Tensor | None = None  # local objective; None unless asked for


class PlasticAdapter(nn.Module):
    """Slow parameters of one adapted layer, and the use of its fast weights."""

    def __init__(
        self, in_features: int, out_features: int, config: AdapterConfig, rule: Rule
    ) -> None:
        super().__init__()
        self.config = config
        self.rule = rule
        self.down = nn.Parameter(torch.empty(config.rank, in_features))  # A
        self.up = nn.Parameter(torch.empty(out_features, config.rank))  # B
        # vectors of one number, as DeepSpeed does not broadcast scalars (0.19.8, engine.py)
        self.gain = nn.Parameter(torch.empty(1))  # g
        self.modulator = nn.Parameter(torch.empty(in_features))
        self.modulator_bias = nn.Parameter(torch.empty(1))
        self.trace_decay = nn.Parameter(torch.empty(1))  # before its sigmoid
        # place of the half-life between the two bounds, before its sigmoid
        self.half_life: nn.Parameter | None = None
        if config.half_life_tokens is not None:
            self.half_life = nn.Parameter(torch.empty(1))

    @property
    def decay(self) -> float | Tensor:
        """Decay of H per token, in float32 where it is learned."""
        if self.half_life is None or self.config.half_life_tokens is None:
            assert self.config.decay is not None, "the schema asks for one of the two"
            return self.config.decay
        shortest, longest = self.config.half_life_tokens
        place = torch.sigmoid(self.half_life.float())
        # even in the logarithm: each doubling of the half-life is as far as the next
        half_life = shortest * (longest / shortest) ** place
        return torch.exp2(-1 / half_life)

    @torch.no_grad()
    def initialize(self, *, seed: int, name: str, gain: float = _INITIAL_GAIN) -> None:
        """Sets random factors, a modulator of 1/2 and a trace decay of 1/4."""
        normal_(self.down, self.down.shape[1] ** -0.5, seed=seed, name=f"{name}.down")
        normal_(self.up, self.config.rank**-0.5, seed=seed, name=f"{name}.up")
        self.gain.fill_(gain)
        for parameter in (self.modulator, self.modulator_bias, self.trace_decay):
            parameter.zero_()
        if self.half_life is not None:
            # apart from each other, so that some remember long from the beginning
            normal_(self.half_life, 1.5, seed=seed, name=f"{name}.half_life")

    def forward(
        self,
        x: Tensor,
        y0: Tensor,
        before: FastWeights,
        *,
        chunks: Sequence[Chunks] | None,
        with_correlation: bool,
        mask: Tensor | None = None,
    ) -> Adapted:
        """Changes the layer's output y0 [B, T, O] of x [B, T, I] by fast weights, and writes them.

        `before` are the fast weights before x, `chunks` those of its tokens, None to read without
        writing; other arguments are as of `PlasticBackbone.forward`.
        """
        if chunks is None:
            return Adapted(self._read_only(x, y0, before), before)
        # the recurrence runs in float32: in bf16, writes below 1/256 of H would be lost
        features = torch.cat([F.linear(x, self.down), y0 @ self.up], dim=-1).float()
        strength = torch.sigmoid((x @ self.modulator + self.modulator_bias).float())  # m, [B, T]
        # a single token that is not finite would spoil H and the mean for the rest of the text
        finite = (features.sum(-1) + strength).isfinite()
        stores = finite if mask is None else finite & mask
        features = torch.where(stores.unsqueeze(-1), features, 0)
        features, mean, count = centred(features, before.mean, before.count, stores=stores)
        pairs = F.normalize(features.unflatten(-1, (2, -1)), dim=-1)
        pairs = torch.where(stores[..., None, None], pairs, 0)
        pre, post = pairs.unbind(2)  # p and q, [B, T, r]
        trace = traces(pre, before.trace, 0.5 * torch.sigmoid(self.trace_decay.float()))
        strength = torch.where(stores, strength, 0)
        stored = Writes(post, trace[:, :-1], limited(strength, post, trace[:, :-1]))
        # the objective asks what H gives for the trace under which the token is stored
        lookups = [pre, stored.trace] if with_correlation else [pre]
        decay = self.decay
        read, weights = scan_chunks(
            before.weights,
            torch.stack(lookups, dim=2),
            stored,
            chunks,
            rule=self.rule,
            decay=decay,
            largest=self.config.clamp,
        )
        correlation = None
        if with_correlation:
            correlation = correlation_loss(
                stored,
                read[:, :, 1],
                weights,
                # the objective moves what is stored, not the time that it stays
                decay=decay.detach() if isinstance(decay, Tensor) else decay,
                decorrelation_weight=self.config.decorrelation_weight,
            )
        after = FastWeights(weights, trace[:, -1], mean, count)
        return Adapted(self._change(y0, read[:, :, 0]), after, correlation)

    def _read_only(self, x: Tensor, y0: Tensor, before: FastWeights) -> Tensor:
        """Computes `_change` in as few operations as possible, which decide the cost of one token.

        p is not normalised: its length divides the scale instead.
        """
        features = F.linear(x, self.down) - before.mean[:, None, : self.config.rank]  # in float32
        recalled = torch.bmm(features, before.weights.transpose(1, 2)).to(y0.dtype)
        change = F.linear(recalled, self.up)
        size, layer_size, length = (
            torch.linalg.vector_norm(part, dim=-1, keepdim=True, dtype=torch.float32)
            for part in (change, y0, features)
        )
        largest = LARGEST_RELATIVE_CHANGE * layer_size / (size + _TINY)
        scale = torch.clamp(self.gain * self.config.alpha / (length + _TINY), -largest, largest)
        return torch.addcmul(y0, change, scale.to(y0.dtype))

    def _change(self, y0: Tensor, recalled: Tensor) -> Tensor:
        """Returns y0 + alpha g B (H p), bounded, [B, T, O]."""
        change = self.config.alpha * self.gain * self.up  # [O, r]
        spread = change.transpose(0, 1).float() @ change.float()
        # ||change recalled||^2 in r dimensions instead of O
        size = ((recalled @ spread) * recalled).sum(-1).clamp(min=1e-12).sqrt()  # [B, T]
        layer_size = torch.linalg.vector_norm(y0, dim=-1, dtype=torch.float32)
        scale = (LARGEST_RELATIVE_CHANGE * layer_size / size).clamp(max=1)
        bounded = (recalled * scale.unsqueeze(-1)).to(y0.dtype)
        return y0 + F.linear(bounded, change.to(y0.dtype))


def _adapted(backbone: Backbone) -> Iterator[tuple[str, nn.Linear]]:
    """Names and layers that get adapters: those that block types name, dense feed-forwards."""
    for block in backbone.blocks:
        if not isinstance(block, Block):  # of another pipeline stage
            continue
        kind = layer_type(backbone.config, block.layer)
        names = [f"mixer.{name}" for name in kind.adapted]
        if isinstance(block.ffn, FeedForward):
            names += [f"ffn.{name}" for name in linears(backbone.config)]
        for name in names:
            layer = block.get_submodule(name)
            assert isinstance(layer, nn.Linear), f"{name} is no linear layer"
            yield f"blocks.{block.layer}.{name}", layer


@dataclass(frozen=True)
class EpisodeState:
    """State of a batch of episodes."""

    # fast weights by the name of the adapted layer; they outlive the window
    layers: Mapping[str, FastWeights]
    num_tokens: int  # tokens of the episode so far, padding included; equal for all rows
    # state and cache of the backbone; None at the start of a window
    blocks: list[BlockState] | None = None


class PlasticOutput(NamedTuple):
    """Output of a forward pass with plasticity."""

    output: Output  # of the backbone; its `state` is `state.blocks`
    state: EpisodeState  # after the last token
    # local objective, summed over sequences and averaged over layers; None unless asked for
    correlation: Tensor | None


class PlasticBackbone(nn.Module):
    """A backbone whose linear layers have plastic adapters.

    Adapted are the layers that block types name (receptance, key and value of RWKV blocks; query,
    key, value and output of Transformer blocks), and dense feed-forwards; experts are not.

    Raises:
        ValueError: if the backbone recomputes its activations: a block that is run again would
            write its tokens again.
    """

    def __init__(self, backbone: Backbone, config: AdapterConfig, *, rule: Rule = "hebb") -> None:
        super().__init__()
        if backbone.activation_checkpointing != "none":
            raise ValueError("plastic adapters need a backbone without activation checkpointing")
        self.backbone = backbone
        self.adapter_config = config
        self.adapters = nn.ModuleDict()
        self._layers: dict[str, nn.Linear] = {}
        for name, layer in _adapted(backbone):
            self._layers[name] = layer
            # keys of an nn.ModuleDict have no dots
            key = name.replace(".", "/")
            sizes = (layer.in_features, layer.out_features)
            self.adapters[key] = PlasticAdapter(*sizes, config, rule)

    @torch.no_grad()
    def initialize(self, *, seed: int, gain: float = _INITIAL_GAIN) -> None:
        """Sets the initial values of the adapters from the seed; the backbone stays."""
        for name in self._layers:
            self.adapter(name).initialize(seed=seed, name=f"adapters.{name}", gain=gain)

    def start(self, batch_size: int) -> EpisodeState:
        """Returns the state of a batch of episodes before their first token."""
        # one for all of them, as a state is never written in place
        zero = FastWeights.blank(batch_size, self.adapter_config.rank, device=self.backbone.device)
        return EpisodeState(dict.fromkeys(self._layers, zero), num_tokens=0)

    def forward(
        self,
        input_ids: Tensor,
        *,
        state: EpisodeState,
        segment_ids: Tensor | None = None,
        return_blocks: bool = False,
        writes: bool = True,
        with_correlation: bool = False,
        mask: Tensor | None = None,
    ) -> PlasticOutput:
        """Reads tokens, [B, T] int64.

        Args:
            state: from `start` or an earlier call; not changed.
            segment_ids: documents, as in `Backbone.forward`; fast weights pass their boundaries.
            return_blocks: return the backbone's state and cache too.
            writes: False reads the fast weights and leaves them as they are.
            with_correlation: compute the local objective too.
            mask: True for text, [B, T]; over padding, fast weights stay as they are.
        """
        results: dict[str, list[Adapted]] = defaultdict(list)  # of each piece of the rows
        length = input_ids.shape[1]

        @functools.cache  # the same for all adapters
        def chunks_of_rows(first: int | None, end: int | None) -> tuple[Chunks, ...]:
            passes = None if mask is None else mask[first:end]
            device = input_ids.device
            return chunks_of(length, start=state.num_tokens, passes=passes, device=device)

        def adapt(name: str, _: nn.Module, inputs: tuple[Tensor, ...], y0: Tensor) -> Tensor:
            before, passes = state.layers[name], mask
            rows = rows_that_run(self.backbone)
            if rows is not None:
                before, passes = part((before, passes), rows)
            ends = (None, None) if rows is None else (rows.start, rows.stop)
            adapted = self.adapter(name)(
                inputs[0],
                y0,
                before,
                chunks=chunks_of_rows(*ends) if writes else None,
                with_correlation=with_correlation,
                mask=passes,
            )
            results[name].append(adapted)
            return adapted.y

        # only for this call, so that the same backbone can also be run without its adapters
        with contextlib.ExitStack() as hooks:
            for name, layer in self._layers.items():
                hooks.enter_context(layer.register_forward_hook(partial(adapt, name)))
            output = self.backbone(
                input_ids, segment_ids=segment_ids, state=state.blocks, return_state=return_blocks
            )
        layers = {name: joined([each.after for each in pieces]) for name, pieces in results.items()}
        num_tokens = state.num_tokens + (length if writes else 0)
        after = EpisodeState(layers, num_tokens, output.state)
        return PlasticOutput(output, after, self._correlation(results.values()))

    def _correlation(self, results: Iterable[Sequence[Adapted]]) -> Tensor | None:
        """Local objective of the layers, each in pieces of the rows; None unless asked for."""
        objectives = []
        for pieces in results:
            parts = [piece.correlation for piece in pieces if piece.correlation is not None]
            if parts:
                objectives.append(torch.stack(parts).sum(0))
        if not objectives:
            return None
        # a stage of a pipeline holds some layers; the mean is over those of all stages
        return mean_over_layers(torch.stack(objectives), self.backbone)

    def adapter(self, name: str) -> PlasticAdapter:
        """Returns the adapter of a layer, by the layer's name in the backbone."""
        adapter = self.adapters[name.replace(".", "/")]
        assert isinstance(adapter, PlasticAdapter), "the table holds adapters only"
        return adapter
