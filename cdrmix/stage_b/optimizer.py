"""Parameter groups, rates and clips of Stage B: each part has its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch import Tensor, nn

from cdrmix import runtime
from cdrmix.checkpoint.fragments import PARTS, Part, part_of
from cdrmix.config.reasoning import Phase, StageBTraining
from cdrmix.config.schema import Config, TrainingConfig
from cdrmix.engines.optim import parameter_groups
from cdrmix.parallel.topology import ALONE, Topology


class ParameterPlace(NamedTuple):
    """Where a step of Stage B stands.

    Attributes:
        phase: that it belongs to.
        step: steps of the phase before it.
        length: steps of the phase.
    """

    phase: Phase
    step: int
    length: int


def place_of(step: int, training: StageBTraining) -> ParameterPlace:
    """Place of a step, from 0; steps beyond the end stand behind the last phase."""
    for phase, length in training.phases:
        if step < length:
            return ParameterPlace(phase, step, length)
        step -= length
    last, length = training.phases[-1]
    return ParameterPlace(last, length + step, length)


def learning_rates(
    place: ParameterPlace, learning: Collection[Part], config: Config
) -> dict[Part, float]:
    """Rate of every part at a step.

    Args:
        place: warm-up, then cosine over the phase.
        learning: parts that learn in it; the others' rate is 0.
        config: peaks.
    """
    assert config.stage_b is not None, "Stage B has its section"
    training = config.stage_b.training
    peaks: dict[Part, float] = {
        "memory": training.memory_learning_rate,
        "adapters": training.adapter_learning_rate,
        "policy": training.policy_learning_rate,
        "backbone": training.backbone_lr_scale * config.training.learning_rate,
    }
    factor = _factor(place, training)
    return {part: factor * peaks[part] if part in learning else 0.0 for part in PARTS}


def _factor(place: ParameterPlace, training: StageBTraining) -> float:
    if place.step < training.warmup_steps:
        return (place.step + 1) / training.warmup_steps
    behind = place.step - training.warmup_steps
    progress = min(1.0, behind / max(1, place.length - 1 - training.warmup_steps))
    lowest = training.min_learning_rate_ratio
    return lowest + (1 - lowest) * 0.5 * (1 + math.cos(math.pi * progress))


def stage_b_adamw(
    clip: Clip,
) -> Callable[[nn.Module, TrainingConfig], torch.optim.Optimizer]:
    """What makes the optimizer: AdamW without decay, after `clip`; the loop sets its rates."""

    def make(model: nn.Module, training: TrainingConfig) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(
            part_groups(model),
            lr=0.0,
            betas=(training.beta1, training.beta2),
            eps=training.epsilon,
            weight_decay=0.0,
            fused=True,
        )
        optimizer.register_step_pre_hook(clip)
        return optimizer

    return make


def part_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Groups of a model's parameters, each with the part that it belongs to under `part`."""
    by_part: dict[Part, list[nn.Parameter]] = {part: [] for part in PARTS}
    for name, parameter in model.named_parameters():
        by_part[part_of(name)].append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": parameters, "part": part}
        for part, parameters in by_part.items()
        if parameters and part != "backbone"
    ]
    if by_part["backbone"]:
        backbone = next(m for name, m in model.named_modules() if name.endswith("backbone"))
        groups += [
            {**group, "part": "backbone"}
            for group in parameter_groups(backbone, weight_decay=0.0)
            if group["params"]
        ]
    return groups


class Clip:
    """Clips the gradients of each part by their own norm, on the way into the optimizer's step.

    DeepSpeed would clip all of them by one norm, in which the adapters' is the largest by far. Its
    own clipping is off; under ZeRO 1 and 2 a group's gradients are one flat partition per rank.

    Args:
        limits: largest L2 norm by part; 0 does not clip.
        topology: of this rank. What all stages hold has the first one's gradients on all of them:
            data ranks are summed in orders that may differ, and copies would part in the last bits.

    Attributes:
        norms: L2 norm of each part's gradients before clipping, at the last step.
    """

    def __init__(self, limits: dict[Part, float], topology: Topology = ALONE) -> None:
        self._limits = limits
        self._topology = topology
        self.norms: dict[Part, float] = {}
        self._coming: dict[Part, float] = {}

    @torch.no_grad()
    def prepare(self, optimizer: Any) -> None:
        """Measure the gradients of the coming step, between its last backward pass and itself.

        ZeRO 1 and 2 hand over a group at a time (0.19.8, zero/stage_1_and_2.py), and a part may
        have several. Every rank calls this.

        Args:
            optimizer: DeepSpeed's; others hand over all groups together and are measured then.
        """
        averaged = getattr(optimizer, "averaged_gradients", None)
        if averaged is not None:
            gradients = [averaged[number] for number in range(len(optimizer.param_groups))]
            self._coming = self._measured(
                optimizer.param_groups, gradients, scale=optimizer.loss_scale
            )

    @torch.no_grad()
    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Hook of `torch.optim.Optimizer.register_step_pre_hook`; every rank calls it."""
        groups = optimizer.param_groups
        gradients = [[p.grad for p in each["params"] if p.grad is not None] for each in groups]
        self.norms = self._coming or self._measured(groups, gradients)
        for group, own in zip(groups, gradients, strict=True):
            self._align(group, own)
            norm = self.norms.get(group["part"], 0.0)
            limit = self._limits[group["part"]]
            if limit and norm > limit:
                for gradient in own:
                    gradient.mul_(limit / norm)

    def _measured(
        self, groups: list[dict[str, Any]], gradients: list[list[Tensor]], *, scale: float = 1.0
    ) -> dict[Part, float]:
        """L2 norm over all ranks and groups of each part that learns.

        Args:
            groups: of an optimizer; a rate of 0 does not learn, or a checkpoint is being read.
            gradients: of this rank, by group.
            scale: by which they are too large.
        """
        learning = [part for part in PARTS if any(g["part"] == part and g["lr"] for g in groups)]
        if not learning:
            return {}
        sums = torch.zeros(len(learning), dtype=torch.float64, device=runtime.device())
        for group, own in zip(groups, gradients, strict=True):
            counts = self._topology.is_first_stage or group["part"] == "adapters"
            for gradient in own if group["lr"] and counts else ():
                sums[learning.index(group["part"])] += gradient.double().square().sum()
        totals = runtime.all_reduce_sum(sums).sqrt().div(scale).tolist()
        return dict(zip(learning, totals, strict=True))

    def _align(self, group: dict[str, Any], gradients: list[Tensor]) -> None:
        """Give a group that all stages hold, and share out alike, the first one's gradients."""
        topology = self._topology
        if topology.pipeline_group is None or group["part"] == "adapters" or not group["lr"]:
            return
        for gradient in gradients:
            torch.distributed.broadcast(
                gradient, src=topology.rank_at(0), group=topology.pipeline_group
            )


def make_clip(config: Config, topology: Topology = ALONE) -> Clip:
    """The clips that a configuration asks for, on a rank."""
    assert config.stage_b is not None, "Stage B has its section"
    others = config.stage_b.training.gradient_clipping
    limits: dict[Part, float] = dict.fromkeys(PARTS, others)
    limits["adapters"] = config.stage_b.adapters.gradient_clipping
    return Clip(limits, topology)


def set_learning(engine: Any, rates: dict[Part, float]) -> None:
    """Give each group its rate, and gradients only to those that learn."""
    for group in engine.optimizer.param_groups:
        group["lr"] = rates[group["part"]]
    for name, parameter in engine.module.named_parameters():
        parameter.requires_grad_(rates[part_of(name)] > 0)


def in_order(engine: Any, loss: Tensor | None) -> Tensor:
    """Something whose backward pass gives the gradients of a loss, in the order of the parameters.

    ZeRO-2 exchanges gradients in the order in which they come about. That of a lesson depends on
    what it asks of the reader, so that ranks with different lessons would add different parameters.

    Args:
        engine: holds the parameters, all of which get a gradient where they learn.
        loss: scalar, or None for gradients of zero.
    """
    learning = [p for p in engine.module.parameters() if p.requires_grad]
    if loss is None:
        return _Given.apply([torch.zeros_like(p) for p in learning], 1.0, *learning)
    # of fp16, whose small gradients would vanish; the optimizer of bf16 has none
    raised = float(getattr(engine.optimizer, "loss_scale", 1.0))
    found = torch.autograd.grad(raised * loss, learning, allow_unused=True, materialize_grads=True)
    return _Given.apply(found, raised, *learning)


class _Given(torch.autograd.Function):
    """Zero, with gradients that are given, each raised by a factor."""

    @staticmethod
    def forward(
        ctx: Any, gradients: Sequence[Tensor], raised: float, *parameters: Tensor
    ) -> Tensor:
        ctx.gradients = gradients
        ctx.raised = raised
        return parameters[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        each = float(factor) / ctx.raised
        return (None, None, *(each * gradient for gradient in ctx.gradients))


class TrainedParameters(nn.Module):
    """The parameters of a reader that Stage B trains, as DeepSpeed sees them.

    A frozen backbone stays outside: DeepSpeed refuses experts that no optimizer group holds.

    Args:
        reader: gives its parameters, and keeps them.
    """

    def __init__(self, reader: nn.Module) -> None:
        super().__init__()
        for name, parameter in reader.named_parameters():
            if part_of(name) != "backbone":
                self.register_parameter(name.replace(".", "/"), parameter)
