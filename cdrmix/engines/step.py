"""One optimizer step: forward, loss, backward; then clip, AdamW, zero gradients."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cdrmix.config.schema import Config
from cdrmix.engines.optim import learning_rate
from cdrmix.engines.stage_a import MicroStep, RouterMeasures, loss, micro_step
from cdrmix.models.backbone import Output
from cdrmix.parallel.stages import Pipeline
from cdrmix.parallel.topology import Topology

# tensors of one micro-batch, [B, T], by the names that `Loader` gives them
Batch = dict[str, Tensor]


class StepResult(NamedTuple):
    """What one optimizer step measured.

    Attributes:
        nats: summed cross-entropy over this rank's micro-steps, scalar; zero where another rank
            counts the same tokens.
        tokens: valid tokens of the global batch, or what they weigh.
        router: means over the micro-steps; None for a dense model, and before the last stage.
        seconds: wall time of the step; in the loop, with its wait for data and other ranks.
        waited: seconds of them that this rank waited for data; known to the loop.
    """

    nats: Tensor
    tokens: float
    router: RouterMeasures | None
    seconds: float
    waited: float = 0.0


def train_step(
    engine: Any,
    config: Config,
    topology: Topology,
    batch: dict[str, Tensor],
    *,
    step: int,
    tokens: float,
) -> StepResult:
    """One optimizer step over this rank's micro-batches.

    Args:
        engine: DeepSpeed engine.
        config: the run's configuration.
        topology: of this rank.
        batch: `input_ids` and `labels`, each [A, B, T], `segment_ids` if documents are apart, and
            `weights` of the labels if they differ.
        step: steps completed before this one.
        tokens: valid tokens of the global batch, all ranks, or what they weigh.
    """
    began = time.perf_counter()
    for group in engine.optimizer.param_groups:
        group["lr"] = learning_rate(step, config.training)
    here = {name: values.to(engine.device, non_blocking=True) for name, values in batch.items()}
    nats_scale = topology.degrees.data * len(here["input_ids"]) / tokens
    micro_batches = [
        dict(zip(here, micro_batch, strict=True))
        for micro_batch in zip(*here.values(), strict=True)
    ]
    run = _pass_through_stages if topology.degrees.pipeline > 1 else _pass_one_by_one
    parts = run(engine, config, topology, micro_batches, nats_scale)
    nats = torch.stack([part.nats for part in parts]).sum() if parts else torch.zeros(())
    return StepResult(
        nats=nats.to(engine.device) * float(topology.counts_tokens),
        tokens=tokens,
        router=RouterMeasures.mean([part.router for part in parts if part.router]),
        seconds=time.perf_counter() - began,
    )


def _pass_one_by_one(
    engine: Any, config: Config, topology: Topology, micro_batches: list[Batch], nats_scale: float
) -> list[MicroStep]:
    """Forward and backward of each micro-batch in turn."""
    parts = []
    for inputs in micro_batches:
        part = micro_step(engine, config, topology, **inputs, nats_scale=nats_scale)
        engine.backward(part.loss)
        engine.step()  # acts on the last micro-step: clip, AdamW, zero gradients
        parts.append(part)
    return parts


def _pass_through_stages(
    engine: Any, config: Config, topology: Topology, micro_batches: list[Batch], nats_scale: float
) -> list[MicroStep]:
    """DeepSpeed's schedule of one forward, one backward; losses are on the last stage only."""
    parts: list[MicroStep] = []
    pipeline: Pipeline = engine.module
    coming = iter(micro_batches)

    def objective(output: Output) -> Tensor:  # of each micro-batch in turn
        inputs, embedding = next(coming), pipeline.stage.embedding
        part = loss(
            *(output, embedding, inputs["labels"], config, topology),
            nats_scale=nats_scale,
            weights=inputs.get("weights"),
        )
        parts.append(part)
        return part.loss

    pipeline.stage.objective = objective
    names = [name for name in ("input_ids", "segment_ids") if name in micro_batches[0]]
    # DeepSpeed takes pairs: what enters the first stage, and what its own loss would be given
    engine.train_batch((tuple(inputs[name] for name in names), ()) for inputs in micro_batches)
    pipeline.align_embeddings()
    return parts
