"""One optimizer step: forward, loss, backward; then clip, AdamW, zero gradients."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cdrmix.config.schema import Config
from cdrmix.engines.optim import learning_rate
from cdrmix.engines.stage_a import MicroStep, RouterMeasures, micro_step
from cdrmix.parallel.topology import Topology


class StepResult(NamedTuple):
    """What one optimizer step measured.

    Attributes:
        nats: summed cross-entropy over this rank's micro-steps, scalar; zero where another rank
            counts the same tokens.
        tokens: valid tokens of the global batch.
        router: means over the micro-steps, or None for a dense model.
        seconds: wall time of the step; in the loop, with its wait for data and other ranks.
    """

    nats: Tensor
    tokens: int
    router: RouterMeasures | None
    seconds: float


def train_step(
    engine: Any,
    config: Config,
    topology: Topology,
    batch: dict[str, Tensor],
    *,
    step: int,
    tokens: int,
) -> StepResult:
    """One optimizer step over this rank's micro-batches.

    Args:
        engine: DeepSpeed engine.
        config: the run's configuration.
        topology: of this rank.
        batch: `input_ids` and `labels`, each [A, B, T], and `segment_ids` if documents are apart.
        step: steps completed before this one.
        tokens: valid tokens of the global batch, all ranks.
    """
    began = time.perf_counter()
    for group in engine.optimizer.param_groups:
        group["lr"] = learning_rate(step, config.training)
    here = {name: values.to(engine.device, non_blocking=True) for name, values in batch.items()}
    nats_scale = topology.degrees.data * len(here["input_ids"]) / tokens
    parts: list[MicroStep] = []
    for micro_batch in zip(*here.values(), strict=True):
        inputs = dict(zip(here, micro_batch, strict=True))
        part = micro_step(engine, config, topology, **inputs, nats_scale=nats_scale)
        engine.backward(part.loss)
        engine.step()  # acts on the last micro-step: clip, AdamW, zero gradients
        parts.append(part)
    return StepResult(
        nats=torch.stack([part.nats for part in parts]).sum() * float(topology.counts_tokens),
        tokens=tokens,
        router=RouterMeasures.mean([part.router for part in parts if part.router]),
        seconds=time.perf_counter() - began,
    )
