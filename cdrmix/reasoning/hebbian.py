"""The plastic adapter of one linear layer.

For a token with features p = normalize(A x) and q = normalize(B^T y0), where y0 = W x:

    y = y0 + alpha g B (H p)          H: fast weights of this sequence, zero at its start
    H' = rule(H, q, e, m)             e: trace of the p before, m = sigmoid(w_m . x + b)

A, B, g, w_m, b and the trace's decay are parameters, learned slowly; H is state.

A backbone that learns while it reads: plastic adapters on its linear layers.

The adapters hang on the layers by forward hooks, so that a backbone's code, its parameter names
and, with plasticity off, its numbers stay what they are.
"""

# B sequences, T time, I inputs and O outputs of the layer, r rank

# B sequences, T time

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cdrmix.config.reasoning import AdapterConfig
from cdrmix.models.attention import Attention
from cdrmix.models.backbone import Backbone, Output
from cdrmix.models.block import BlockState
from cdrmix.models.feed_forward import FeedForward
from cdrmix.models.initialize import normal_
from cdrmix.models.rwkv7 import TimeMix
from cdrmix.objectives.representation import correlation_loss
from cdrmix.parallel.frozen_stages import mean_over_layers
from cdrmix.reasoning.fast_weights import (
    FastWeights,
    Rule,
    Writes,
    blank,
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
_TINY = 1e-12  # keeps a length of zero from being divided by


class Guards(NamedTuple):
    """How often the guards stepped in, and how large things grew; scalars over layers and rows.

    Attributes:
        limited_writes: tokens whose write was lowered to `LARGEST_WRITE`.
        skipped_writes: tokens whose features were not finite; they store nothing.
        limited_changes: tokens whose change was scaled down to `LARGEST_RELATIVE_CHANGE`.
        largest_weight: of the magnitudes of H after the last token.
    """

    limited_writes: Tensor
    skipped_writes: Tensor
    limited_changes: Tensor
    largest_weight: Tensor


class Adapted(NamedTuple):
    """What an adapter makes of a layer's output."""

    y: Tensor
    after: FastWeights
    correlation: Tensor | None = None
    guards: Guards | None = None


class PlasticAdapter(nn.Module):
    """The slow parameters of one adapted layer.

    Args:
        in_features: I.
        out_features: O.
        config: rank, scale, decay and clamp.
        rule: hebb, delta or oja.
    """

    def __init__(
        self, in_features: int, out_features: int, config: AdapterConfig, rule: Rule
    ) -> None:
        super().__init__()
        self.config = config
        self.rule = rule
        self.down = nn.Parameter(torch.empty(config.rank, in_features))  # A
        self.up = nn.Parameter(torch.empty(out_features, config.rank))  # B
        # single numbers are vectors of one: DeepSpeed broadcasts no other (0.19.8, engine.py)
        self.gain = nn.Parameter(torch.empty(1))  # g
        self.modulator = nn.Parameter(torch.empty(in_features))
        self.modulator_bias = nn.Parameter(torch.empty(1))
        self.trace_decay = nn.Parameter(torch.empty(1))  # before its sigmoid

    @torch.no_grad()
    def initialize(self, *, seed: int, name: str) -> None:
        """Random factors; a modulator of 1/2 and a trace that halves twice, for every token."""
        normal_(self.down, self.down.shape[1] ** -0.5, seed=seed, name=f"{name}.down")
        normal_(self.up, self.config.rank**-0.5, seed=seed, name=f"{name}.up")
        self.gain.fill_(_INITIAL_GAIN)
        for parameter in (self.modulator, self.modulator_bias, self.trace_decay):
            parameter.zero_()

    def forward(
        self,
        x: Tensor,
        y0: Tensor,
        before: FastWeights,
        *,
        start: int,
        writes: bool,
        with_correlation: bool,
        mask: Tensor | None = None,
    ) -> Adapted:
        """The layer's output with what is remembered, and the fast weights after the last token.

        Args:
            x: input of the layer, [B, T, I].
            y0: its output, [B, T, O].
            before: fast weights before the first token.
            start: tokens of the episode before x.
            writes: False reads the fast weights and leaves them as they are.
            with_correlation: also give the local objective.
            mask: which tokens are text, [B, T]; the others are filling and store nothing.
        """
        if not writes:
            return Adapted(self._recalled(x, y0, before.weights), before)
        pre = F.normalize(F.linear(x, self.down).float(), dim=-1)  # p, [B, T, r]
        post = F.normalize((y0 @ self.up).float(), dim=-1)  # q, [B, T, r]
        strength = torch.sigmoid((x @ self.modulator + self.modulator_bias).float())  # m, [B, T]
        finite = (pre.sum(-1) + post.sum(-1) + strength).isfinite()
        stores = finite if mask is None else finite & mask
        pre, post = (torch.where(stores.unsqueeze(-1), part, 0) for part in (pre, post))
        trace = traces(pre, before.trace, 0.5 * torch.sigmoid(self.trace_decay.float()))
        wanted = torch.where(stores, strength, 0)
        stored = Writes(post, trace[:, :-1], limited(wanted, post, trace[:, :-1]))
        lookups = [pre, stored.trace] if with_correlation else [pre]
        read, weights = scan_chunks(
            before.weights,
            torch.stack(lookups, dim=2),
            stored,
            rule=self.rule,
            decay=self.config.decay,
            start=start,
            border=self._clamped,
        )
        correlation = None
        if with_correlation:
            correlation = correlation_loss(
                stored.post,
                stored.strength,
                read[:, :, 1],
                weights,
                decay=self.config.decay,
                decorrelation_weight=self.config.decorrelation_weight,
            )
        after = FastWeights(weights, trace[:, -1])
        y, limited_changes = self._changed(y0, read[:, :, 0])
        guards = Guards(
            limited_writes=(stored.strength < wanted).sum(),
            skipped_writes=(~finite).sum(),
            limited_changes=limited_changes,
            largest_weight=weights.detach().abs().max(),
        )
        return Adapted(y, after, correlation, guards)

    def _clamped(self, weights: Tensor) -> Tensor:
        clamp = self.config.clamp
        return clamp * torch.tanh(weights / clamp)

    def _recalled(self, x: Tensor, y0: Tensor, weights: Tensor) -> Tensor:
        """`_changed` in as few operations as can be, which is what a single token costs."""
        features = F.linear(x, self.down).float()  # p, not normalised
        recalled = torch.bmm(features, weights.transpose(1, 2)).to(y0.dtype)
        change = F.linear(recalled, self.up)
        size, own, length = (
            torch.linalg.vector_norm(part, dim=-1, keepdim=True, dtype=torch.float32)
            for part in (change, y0, features)
        )
        largest = LARGEST_RELATIVE_CHANGE * own / (size + _TINY)
        scale = torch.clamp(self.gain * self.config.alpha / (length + _TINY), -largest, largest)
        return torch.addcmul(y0, change, scale.to(y0.dtype))

    def _changed(self, y0: Tensor, recalled: Tensor) -> tuple[Tensor, Tensor]:
        """y0 + alpha g B (H p), [B, T, O], and the number of tokens at which it was bounded."""
        change = self.config.alpha * self.gain * self.up  # [O, r]
        spread = change.transpose(0, 1).float() @ change.float()
        # ||change recalled||^2 in r dimensions instead of O
        size = ((recalled @ spread) * recalled).sum(-1).clamp(min=1e-12).sqrt()  # [B, T]
        own = torch.linalg.vector_norm(y0, dim=-1, dtype=torch.float32)
        scale = (LARGEST_RELATIVE_CHANGE * own / size).clamp(max=1)
        bounded = (recalled * scale.unsqueeze(-1)).to(y0.dtype)
        return y0 + F.linear(bounded, change.to(y0.dtype)), (scale < 1).sum()


_ADAPTED: dict[type[nn.Module], tuple[str, ...]] = {
    TimeMix: ("receptance", "key", "value"),
    Attention: ("query", "key", "value", "output"),
    FeedForward: ("up", "down"),
}


@dataclass(frozen=True)
class PlasticState:
    """Fast weights of a batch of episodes.

    Attributes:
        layers: by the name of the adapted layer.
        num_tokens: tokens that every row has read since its episode began.
    """

    layers: Mapping[str, FastWeights]
    num_tokens: int


@dataclass(frozen=True)
class EpisodeState:
    """All that a sequence carries: the backbone's state and the fast weights.

    Attributes:
        blocks: state and cache of the backbone; None where its window begins anew.
        plastic: fast weights, which outlive the window.
    """

    blocks: list[BlockState] | None
    plastic: PlasticState


class PlasticOutput(NamedTuple):
    """What a forward pass with plasticity gives.

    Attributes:
        output: of the backbone; its `state` is part of `state` here.
        state: after the last token.
        correlation: objective of all adapters, summed over sequences and averaged over layers;
            None unless asked for.
        guards: what the guards did in the layers here; None where nothing was written.
    """

    output: Output
    state: EpisodeState
    correlation: Tensor | None
    guards: Guards | None


class PlasticBackbone(nn.Module):
    """A backbone whose linear layers have plastic adapters.

    Adapted are receptance, key and value of RWKV blocks, query, key, value and output of
    Transformer blocks, and dense feed-forwards; experts are not.

    Args:
        backbone: taken over as it is, and trained or not as its parameters say.
        config: rank, scale, decay and clamp of the adapters.
        rule: how fast weights are written.
    Raises:
        ValueError: if the backbone recomputes its activations: a block that is run again
            would write its tokens again.
    """

    def __init__(self, backbone: Backbone, config: AdapterConfig, *, rule: Rule = "hebb") -> None:
        super().__init__()
        if backbone.activation_checkpointing:
            raise ValueError("plastic adapters need a backbone without activation checkpointing")
        self.backbone = backbone
        self._layers = dict(_adapted_layers(backbone))
        self.adapters = nn.ModuleDict(
            {
                _key(name): PlasticAdapter(layer.in_features, layer.out_features, config, rule)
                for name, layer in self._layers.items()
            }
        )
        self.adapter_config = config

    @torch.no_grad()
    def initialize(self, *, seed: int) -> None:
        """Set the initial values of the adapters from the seed; the backbone stays."""
        for name in self._layers:
            self.adapter(name).initialize(seed=seed, name=f"adapters.{name}")

    def start(self, batch_size: int) -> EpisodeState:
        """State of a batch of episodes before their first token."""
        device = self.backbone.device
        layers = {
            name: blank(batch_size, self.adapter_config.rank, device=device)
            for name in self._layers
        }
        return EpisodeState(blocks=None, plastic=PlasticState(layers, num_tokens=0))

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
        """Read tokens.

        Args:
            input_ids: [B, T], int64.
            state: from `start` or an earlier call; not changed.
            segment_ids: where the backbone forgets, as in `Backbone.forward`; fast weights do not.
            return_blocks: keep the backbone's state and cache in the state that is given back.
            writes: False reads the fast weights and leaves them as they are.
            with_correlation: also give the local objective.
            mask: which tokens are text, [B, T]; the others are filling, and fast weights only
                fade over them.
        """
        reading = _Reading(self, state.plastic, writes, with_correlation and writes, mask)
        with contextlib.ExitStack() as hooks:
            for name, layer in self._layers.items():
                hooks.callback(layer.register_forward_hook(reading.hook(name)).remove)
            output = self.backbone(
                input_ids,
                segment_ids=segment_ids,
                state=state.blocks,
                return_state=return_blocks,
            )
        after = PlasticState(
            {name: result.after for name, result in reading.results.items()},
            state.plastic.num_tokens + (input_ids.shape[1] if writes else 0),
        )
        results = list(reading.results.values())
        correlations = [result.correlation for result in results if result.correlation is not None]
        return PlasticOutput(
            output=output,
            state=EpisodeState(output.state, after),
            correlation=(
                mean_over_layers(torch.stack(correlations), self.backbone) if correlations else None
            ),
            guards=_combined([result.guards for result in results if result.guards is not None]),
        )

    def adapter(self, name: str) -> PlasticAdapter:
        """The adapter of a layer, by the layer's name in the backbone."""
        adapter = self.adapters[_key(name)]
        assert isinstance(adapter, PlasticAdapter), "the table holds adapters only"
        return adapter


class _Reading:
    """One forward pass: what goes into the adapters and what comes out, by layer."""

    def __init__(
        self,
        model: PlasticBackbone,
        before: PlasticState,
        writes: bool,
        with_correlation: bool,
        mask: Tensor | None,
    ) -> None:
        self._model = model
        self._before = before
        self._mask = mask
        self._writes = writes
        self._with_correlation = with_correlation
        self.results: dict[str, Adapted] = {}

    def hook(self, name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
        """What runs after a layer's forward and replaces its output."""

        def adapt(_: nn.Module, inputs: tuple[Tensor, ...], y0: Tensor) -> Tensor:
            self.results[name] = self._model.adapter(name)(
                inputs[0],
                y0,
                self._before.layers[name],
                start=self._before.num_tokens,
                writes=self._writes,
                with_correlation=self._with_correlation,
                mask=self._mask,
            )
            return self.results[name].y

        return adapt


def _adapted_layers(backbone: Backbone) -> Iterator[tuple[str, nn.Linear]]:
    for name, module in backbone.named_modules():
        for part in _ADAPTED.get(type(module), ()):
            layer = getattr(module, part)
            assert isinstance(layer, nn.Linear), f"{name}.{part} is no linear layer"
            yield f"{name}.{part}", layer


def _key(name: str) -> str:
    """A layer's name as a key of a module table, which allows no dots."""
    return name.replace(".", "/")


def _combined(guards: list[Guards]) -> Guards | None:
    if not guards:
        return None
    limited_writes, skipped_writes, limited_changes, largest = (
        torch.stack(values) for values in zip(*guards, strict=True)
    )
    return Guards(limited_writes.sum(), skipped_writes.sum(), limited_changes.sum(), largest.max())
