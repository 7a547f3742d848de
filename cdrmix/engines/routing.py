"""Losses and metrics of routers: of tokens to experts, and of tokens into blocks."""

# L layers with a router, E experts, S statistics of a routed block

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cdrmix.config.model import ModelConfig
from cdrmix.models.backbone import Output
from cdrmix.objectives.depth import depth_monitors, predictor_loss
from cdrmix.objectives.router import router_losses, router_monitors, tokens_routed
from cdrmix.parallel.exchange import mean_over_ranks
from cdrmix.parallel.topology import Topology
from cdrmix.planning.counts import compute_share
from cdrmix.planning.depth import DEPTH_STATISTICS

ROUTER_METRICS = (
    "moe/overflow_fraction",
    "moe/routing_entropy_bits",
    "moe/load_balance_loss",
    "moe/z_loss",
)
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
    """Router statistics per token and router losses, detached and over all data ranks."""

    per_token: Tensor  # [L, 2E + 3]
    load_balance: Tensor  # scalar
    z: Tensor  # scalar


class Routing(NamedTuple):
    """Measures of the routers in one micro-step, or in all of a step."""

    experts: RouterMeasures | None = None  # None for a dense model
    depth: Tensor | None = None  # sums over this rank's tokens, [L, S]; None without routed blocks


def add_router_losses(
    loss: Tensor, output: Output, model: ModelConfig, topology: Topology, *, num_tokens: int
) -> tuple[Tensor, Routing]:
    """Adds the losses of all routers to that of a micro-batch of `num_tokens` tokens."""
    moe = model.moe
    experts = None
    if moe is not None and output.router_statistics is not None:
        # Before the loss: the load-balance loss multiplies means, and is not the mean of products.
        sums = mean_over_ranks(output.router_statistics, topology)
        if model.mod is None:
            per_token = sums / num_tokens
        else:  # over the tokens that reach the experts of a layer
            per_token = sums / tokens_routed(sums, num_experts=moe.num_experts, top_k=moe.top_k)
        losses = router_losses(per_token, num_experts=moe.num_experts, top_k=moe.top_k)
        loss = loss + moe.load_balance_weight * losses.load_balance + moe.z_loss_weight * losses.z
        detached = (per_token.detach(), losses.load_balance.detach(), losses.z.detach())
        experts = RouterMeasures(*detached)
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
    experts = [part.experts for part in parts if part.experts is not None]
    means = [torch.stack(values).mean(0) for values in zip(*experts, strict=True)]
    depth = [part.depth.double() for part in parts if part.depth is not None]
    return Routing(
        RouterMeasures(*means) if experts else None, torch.stack(depth).sum(0) if depth else None
    )


def routing_sums(model: ModelConfig, routing: Routing, topology: Topology) -> Tensor:
    """Returns what this rank adds to `routing_metrics`, a vector of the same length on all ranks,
    float64, on the CPU; zeros where others speak for the tokens."""
    moe = model.moe
    of_experts = torch.zeros(len(ROUTER_METRICS) if moe else 0, dtype=torch.float64)
    of_depth = torch.zeros(len(model.routed_layers()), len(DEPTH_STATISTICS), dtype=torch.float64)
    # One rank speaks for its pipeline stage: router statistics are means over data ranks.
    if moe and routing.experts and topology.counts_tokens and topology.data_rank == 0:
        monitors = router_monitors(
            routing.experts.per_token.cpu(), num_experts=moe.num_experts, top_k=moe.top_k
        )
        values = (
            float(monitors.overflow_fraction.mean()),
            float(monitors.entropy_bits.mean()),
            float(routing.experts.load_balance),
            float(routing.experts.z),
        )
        of_experts = torch.tensor(values, dtype=torch.float64)
    if routing.depth is not None and topology.counts_tokens:
        of_depth = routing.depth.cpu()
    return torch.cat([of_experts, of_depth.flatten()])


def routing_metrics(
    model: ModelConfig, sequence_length: int, totals: Sequence[float]
) -> dict[str, float]:
    """Makes metrics from the sums of all ranks' `routing_sums`."""
    names = ROUTER_METRICS if model.moe else ()
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
