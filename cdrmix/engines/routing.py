"""Losses and metrics of routers: of tokens to experts, and of tokens into blocks."""

# L layers with a router, E experts, S statistics of a routed block

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cdrmix.config.model import ModelConfig
from cdrmix.config.model_parts import MoEConfig, RoutingMambaConfig
from cdrmix.models.backbone import Output
from cdrmix.models.moe import rows_of
from cdrmix.objectives.depth import depth_monitors, predictor_loss
from cdrmix.objectives.router import router_losses, router_monitors, tokens_routed
from cdrmix.parallel.exchange import mean_over_ranks
from cdrmix.parallel.topology import Topology
from cdrmix.planning.blocks.routers import RouterPart, routers_in
from cdrmix.planning.counts import compute_share
from cdrmix.planning.depth import DEPTH_STATISTICS

# By the half of a block: of experts in feed-forwards, and of Routing Mamba, which has no capacity.
ROUTER_METRICS: dict[RouterPart, tuple[str, ...]] = {
    "ffn": (
        "moe/overflow_fraction",
        "moe/routing_entropy_bits",
        "moe/load_balance_loss",
        "moe/z_loss",
    ),
    "mixer": (
        "routing_mamba/routing_entropy_bits",
        "routing_mamba/load_balance_loss",
        "routing_mamba/z_loss",
    ),
}
# Fields of `DepthMonitors` by metric, for each mode.
_DEPTH_METRICS = {"mod/fraction": "fraction", "mod/position_correlation": "position_correlation"}
_OF_MODE = {
    "threshold": {"mod/threshold": "threshold"},
    "topk": {
        "mod/predictor_accuracy": "predictor_accuracy",
        "mod/predictor_loss": "predictor_nats",
    },
}


class RouterMeasures(NamedTuple):
    """Statistics per token and losses of the routers in one half of the blocks, detached and over
    all data ranks."""

    per_token: Tensor  # [L, 2E + 3]
    load_balance: Tensor  # scalar
    z: Tensor  # scalar


class Routing(NamedTuple):
    """Measures of the routers in one micro-step, or in all of a step."""

    experts: dict[RouterPart, RouterMeasures] = {}  # by the half of the blocks
    depth: Tensor | None = None  # sums over this rank's tokens, [L, S]; None without routed blocks


def router_parts(model: ModelConfig) -> dict[RouterPart, MoEConfig | RoutingMambaConfig]:
    """Halves of the blocks that have routers, with the sizes and loss weights of these."""
    parts: tuple[RouterPart, ...] = ("ffn", "mixer")
    found = {part: routers_in(model, part) for part in parts}
    return {part: sizes for part, sizes in found.items() if sizes is not None}


def add_router_losses(
    loss: Tensor, output: Output, model: ModelConfig, topology: Topology, *, num_tokens: int
) -> tuple[Tensor, Routing]:
    """Adds the losses of all routers to that of a micro-batch of `num_tokens` tokens."""
    experts: dict[RouterPart, RouterMeasures] = {}
    if output.router_statistics is not None:
        # Before the loss: the load-balance loss multiplies means, and is not the mean of products.
        sums = mean_over_ranks(output.router_statistics, topology)
        for part, sizes in router_parts(model).items():
            choices = {"num_experts": sizes.num_experts, "top_k": sizes.top_k}
            rows = rows_of(sums, model, part)
            if model.mod is None:
                per_token = rows / num_tokens
            else:  # over the tokens that reach the router of a layer
                per_token = rows / tokens_routed(rows, **choices)
            found = router_losses(per_token, **choices)
            loss = loss + sizes.load_balance_weight * found.load_balance
            loss = loss + sizes.z_loss_weight * found.z
            detached = (per_token.detach(), found.load_balance.detach(), found.z.detach())
            experts[part] = RouterMeasures(*detached)
    depth = output.depth_statistics
    if depth is not None:
        assert model.mod is not None, "no other model has routed blocks"
        if model.mod.mode == "topk":
            # all ranks have equally many tokens, so the mean over ranks is that over all tokens
            loss = loss + model.mod.predictor_weight * predictor_loss(depth)
        depth = depth.detach()
    return loss, Routing(experts, depth)


def of_step(parts: Sequence[Routing]) -> Routing:
    """Joins the measures of micro-steps: means of the experts', sums of the blocks'."""
    experts = {}
    for part in parts[0].experts if parts else ():
        of_part = [each.experts[part] for each in parts]
        means = (torch.stack(values).mean(0) for values in zip(*of_part, strict=True))
        experts[part] = RouterMeasures(*means)
    depth = [part.depth.double() for part in parts if part.depth is not None]
    return Routing(experts, torch.stack(depth).sum(0) if depth else None)


def _router_names(model: ModelConfig) -> list[str]:
    return [name for part in router_parts(model) for name in ROUTER_METRICS[part]]


def routing_sums(model: ModelConfig, routing: Routing, topology: Topology) -> Tensor:
    """Returns what this rank adds to `routing_metrics`, a vector of the same length on all ranks,
    float64, on the CPU; zeros where others speak for the tokens."""
    of_experts = torch.zeros(len(_router_names(model)), dtype=torch.float64)
    of_depth = torch.zeros(len(model.routed_layers()), len(DEPTH_STATISTICS), dtype=torch.float64)
    # One rank speaks for its pipeline stage: router statistics are means over data ranks.
    if routing.experts and topology.counts_tokens and topology.data_rank == 0:
        values: list[float] = []
        for part, sizes in router_parts(model).items():
            measures = routing.experts[part]
            monitors = router_monitors(
                measures.per_token.cpu(), num_experts=sizes.num_experts, top_k=sizes.top_k
            )
            if part == "ffn":
                values.append(float(monitors.overflow_fraction.mean()))
            values.append(float(monitors.entropy_bits.mean()))
            values += [float(measures.load_balance), float(measures.z)]
        of_experts = torch.tensor(values, dtype=torch.float64)
    if routing.depth is not None and topology.counts_tokens:
        of_depth = routing.depth.cpu()
    return torch.cat([of_experts, of_depth.flatten()])


def routing_metrics(
    model: ModelConfig, sequence_length: int, totals: Sequence[float]
) -> dict[str, float]:
    """Makes metrics from the sums of all ranks' `routing_sums`."""
    names = _router_names(model)
    metrics = dict(zip(names, totals, strict=False))
    routed = model.routed_layers()
    if model.mod is None or not routed:
        return metrics
    statistics = torch.tensor(totals[len(names) :], dtype=torch.float64)
    found = depth_monitors(statistics.view(len(routed), len(DEPTH_STATISTICS)))
    for name, field in (_DEPTH_METRICS | _OF_MODE[model.mod.mode]).items():
        metrics[name] = float(getattr(found, field).mean())
    fractions = dict(zip(routed, found.fraction.tolist(), strict=True))
    return metrics | {"mod/compute_share": compute_share(model, sequence_length, fractions)}
