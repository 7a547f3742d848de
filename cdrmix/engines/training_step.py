"""Step of Stage A: forward, loss, backward of each micro-batch; then clip, update, zero gradients.

A accumulation steps, B micro batch, T time, W data ranks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cdrmix.config.schema import Config
from cdrmix.engines.combination import Batch, Combination, FurtherLabels
from cdrmix.engines.routing import Routing, add_router_losses, of_step
from cdrmix.engines.users_terms import UsersTerms
from cdrmix.models.backbone import Output, Scorer
from cdrmix.models.packing import remember
from cdrmix.objectives.language_model import ALL_ALIKE, LabelWeights
from cdrmix.optimizers.schedule import group_rate
from cdrmix.parallel.pipeline import Pipeline
from cdrmix.parallel.thresholds import move_thresholds
from cdrmix.parallel.topology import Topology
from cdrmix.parallel.zero3 import next_token_losses
from cdrmix.runtime.phases import phase


class MicroStep(NamedTuple):
    """Result of the forward pass of one micro-batch."""

    loss: Tensor  # to run backward from, scalar
    # Summed cross-entropy of this rank's tokens, scalar, detached: weighted as `data.token_weights`
    # say, or with `objectives` not at all.
    nats: Tensor
    parts: Tensor  # `HeadLoss.nats` and `HeadLoss.squares`, one after the other, detached
    routing: Routing
    totals: Tensor  # of each term of a user's, detached


def micro_step(
    engine: Any,
    config: Config,
    topology: Topology,
    input_ids: Tensor,
    labels: Tensor,
    *,
    nats_scale: float,
    segment_ids: Tensor | None = None,
    weights: LabelWeights = ALL_ALIKE,
    further: FurtherLabels | None = None,
    terms: UsersTerms | None = None,
) -> MicroStep:
    """Forward pass and loss of one micro-batch; see `loss` and `train_step`.

    `segment_ids` [B, T] is the document of each token; None: a sample is one document.
    """
    output: Output = engine(input_ids, segment_ids=segment_ids)
    known = (output, engine.module.embedding, labels, config, topology)
    return loss(*known, nats_scale=nats_scale, weights=weights, further=further, terms=terms)


def loss(
    output: Output,
    embedding: Scorer,
    labels: Tensor,
    config: Config,
    topology: Topology,
    *,
    nats_scale: float,
    weights: LabelWeights = ALL_ALIKE,
    further: FurtherLabels | None = None,
    terms: UsersTerms | None = None,
) -> MicroStep:
    """Loss of one micro-batch from the output of the backbone.

    Args:
        labels: [B, T]; -100 is ignored.
        nats_scale: factor on the summed loss of the labels: W * A / valid tokens of the global
            batch, or their weight. DeepSpeed divides by A and averages over W, which leaves the
            mean over all tokens.
        weights: of the labels, [B, T].
        further: tokens beyond the next one that are predicted too; None: no others.
        terms: of a user's; None: there are none.
        output, embedding, config, topology: of this rank.
    """
    losses_of = partial(next_token_losses, embedding) if further is None else further.losses
    head = losses_of(output.hidden, labels, weights)
    loss = head.loss * nats_scale
    totals = head.loss.new_zeros(0)
    if terms is not None:
        of_terms, totals = terms.losses(output.hidden)
        loss = loss + of_terms * nats_scale
    num_tokens = labels.numel()
    loss, routing = add_router_losses(loss, output, config.model, topology, num_tokens=num_tokens)
    # The factor is 1, or not a number where the loss is not finite: DeepSpeed skips a step by its
    # gradients, which can be finite where the loss is infinite: softmax minus target, where the
    # target's logit is minus infinity.
    nats = head.of_heads[0] if weights.sums is None else head.nats[: weights.sums.shape[-1]].sum()
    parts = torch.cat([head.nats, head.squares])
    return MicroStep(loss * (1 + 0 * loss.detach()), nats, parts, routing, totals)


class StepResult(NamedTuple):
    """Result of one optimizer step on this rank."""

    # Summed cross-entropy of all micro-steps, scalar; zero where another rank counts these tokens.
    nats: Tensor
    parts: Tensor  # as of `MicroStep`, of all micro-steps; zeros likewise
    totals: Tensor  # likewise
    combination: Combination
    routing: Routing  # of all micro-steps; nothing before the last pipeline stage
    seconds: float  # wall time, without the waits for data and for other ranks before it


def train_step(
    engine: Any,
    config: Config,
    topology: Topology,
    batch: Batch,
    *,
    step: int,
    weights: Sequence[float],
    rate_scale: float = 1.0,
) -> StepResult:
    """Take one optimizer step over this rank's micro-batches.

    Args:
        engine, config, topology: of this rank; the engine is DeepSpeed's around the backbone.
        batch: `input_ids` and `labels`, each [A, B, T], `segment_ids` if documents are apart,
            `weights` of the labels if they differ, and their `kinds` under `objectives`.
        step: steps completed before this one.
        weights: of the global batch, all ranks, by `weight_names`.
        rate_scale: factor of the schedule's learning rate; see `Health.rate_scale`.
    """
    began = time.perf_counter()
    # A function of the step and of the run's health, and no scheduler with a state of its own.
    for group in engine.optimizer.param_groups:
        group["lr"] = group_rate(step, config.training, group) * rate_scale
    here = {name: values.to(engine.device, non_blocking=True) for name, values in batch.items()}
    combination = Combination(config, weights, step=step)
    micro_batches = [
        dict(zip(here, tensors, strict=True)) for tensors in zip(*here.values(), strict=True)
    ]
    for inputs, on_host in zip(micro_batches, batch.get("segment_ids", ()), strict=False):
        remember(inputs["segment_ids"], on_host)
    scale = combination.nats_scale(topology.degrees.data * len(micro_batches))
    skipped = engine.skipped_steps
    run = _pass_through_stages if topology.degrees.pipeline > 1 else _accumulate
    parts = run(engine, config, topology, micro_batches, combination, scale)
    is_skipped = engine.skipped_steps > skipped
    move_thresholds(engine.module, config, topology, step=step, is_skipped=is_skipped)
    nats = _sum([part.nats for part in parts])
    sums = _sum([part.parts for part in parts], 2 * combination.num_sums)
    totals = _sum([part.totals for part in parts], combination.num_terms)
    return StepResult(
        nats=nats.to(engine.device) * float(topology.counts_tokens),
        parts=sums.to(engine.device) * float(topology.counts_tokens),
        totals=totals.to(engine.device) * float(topology.counts_tokens),
        combination=combination,
        routing=of_step([part.routing for part in parts]),
        seconds=time.perf_counter() - began,
    )


def _sum(tensors: Sequence[Tensor], *shape: int) -> Tensor:
    """Sum of tensors of a shape; zeros of none: pipeline stages before the last have no parts."""
    return torch.stack(list(tensors)).sum(0) if tensors else torch.zeros(shape)


def _accumulate(
    engine: Any,
    config: Config,
    topology: Topology,
    micro_batches: list[Batch],
    combination: Combination,
    nats_scale: float,
) -> list[MicroStep]:
    """Run forward and backward of each micro-batch, with the optimizer's step behind the last."""
    parts: list[MicroStep] = []
    for inputs in micro_batches:
        with phase("forward"):
            part = micro_step(
                *(engine, config, topology, inputs["input_ids"], inputs["labels"]),
                nats_scale=nats_scale,
                segment_ids=inputs.get("segment_ids"),
                weights=combination.label_weights(inputs),
                further=combination.further_labels(inputs, engine.module),
                terms=combination.terms(inputs, engine.module.embedding),
            )
        with phase("backward"):
            engine.backward(part.loss)
        with phase("optimizer"):
            engine.step()  # DeepSpeed clips and updates at the last micro-step alone
        parts.append(part)
    return parts


def _pass_through_stages(
    engine: Any,
    config: Config,
    topology: Topology,
    micro_batches: list[Batch],
    combination: Combination,
    nats_scale: float,
) -> list[MicroStep]:
    """Run DeepSpeed's schedule of one forward, one backward; the last stage alone has losses."""
    parts: list[MicroStep] = []
    pipeline: Pipeline = engine.module
    coming = iter(micro_batches)

    def objective(output: Output) -> Tensor:  # called for each micro-batch in order
        inputs = next(coming)
        part = loss(
            *(output, pipeline.stage.embedding, inputs["labels"], config, topology),
            nats_scale=nats_scale,
            weights=combination.label_weights(inputs),
            further=combination.further_labels(inputs, pipeline.stage),
            terms=combination.terms(inputs, pipeline.stage.embedding),
        )
        parts.append(part)
        return part.loss

    pipeline.stage.objective = objective
    names = [name for name in ("input_ids", "segment_ids") if name in micro_batches[0]]
    # DeepSpeed takes pairs: inputs of the first stage, and labels of a loss of its own.
    engine.train_batch((tuple(inputs[name] for name in names), ()) for inputs in micro_batches)
    pipeline.align_embeddings()
    return parts
