"""A backbone that learns while it reads: plastic adapters on its linear layers.

The adapters hang on the layers by forward hooks, so that a backbone's code, its parameter names
and, with plasticity off, its numbers stay what they are.
"""

# B sequences, T time

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cdrmix.config.reasoning import AdapterConfig
from cdrmix.models.attention import Attention
from cdrmix.models.backbone import Backbone, Output
from cdrmix.models.block import BlockState
from cdrmix.models.feed_forward import FeedForward
from cdrmix.models.rwkv7 import TimeMix
from cdrmix.parallel.frozen_stages import mean_over_layers
from cdrmix.reasoning.adapter import Adapted, Guards, PlasticAdapter
from cdrmix.reasoning.fast_weights import FastWeights, Rule, blank

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
        self._model, self._before, self._mask = model, before, mask
        self._writes, self._with_correlation = writes, with_correlation
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
