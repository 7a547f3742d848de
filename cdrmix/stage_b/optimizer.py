"""Parameter groups, learning rates and gradient clipping of Stage B, separate for each part."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed
from torch import Tensor, nn

from cdrmix import runtime
from cdrmix.checkpoint.fragments import PARTS, Part, part_of
from cdrmix.config.reasoning import Phase, StageBTraining
from cdrmix.config.schema import Config, TrainingConfig
from cdrmix.optimizers.adamw import parameter_groups
from cdrmix.parallel.topology import ALONE, Topology
from cdrmix.stage_b.phases import stage_b_section

# Parts that are clipped by a norm of their own. The value head is of the policy's part, and apart
# from it here: its error, of returns, would shrink the policy's gradient with its own.
Clipped = Literal["memory", "adapters", "policy", "value", "backbone"]
CLIPPED: tuple[Clipped, ...] = get_args(Clipped)


def clipped_with(name: str) -> Clipped:
    """Parts by whose norm a reader's parameter is clipped, by its name there."""
    part = part_of(name)
    own = name.replace("/", ".").rpartition("policy.")[2]
    is_value = part == "policy" and own.startswith(("value.", "feature_value_"))
    return "value" if is_value else part


class PhasePlace(NamedTuple):
    """Position of a step of Stage B: `step` of the `length` of its phase, from 0."""

    phase: Phase
    step: int
    length: int


def place_of(step: int, training: StageBTraining) -> PhasePlace:
    """Position of a step, from 0; steps beyond the end follow the last phase."""
    for phase, length in training.phases:
        if step < length:
            return PhasePlace(phase, step, length)
        step -= length
    last, length = training.phases[-1]
    return PhasePlace(last, length + step, length)


def learning_rates(
    place: PhasePlace, learning: Collection[Part], config: Config
) -> dict[Part, float]:
    """Learning rate of every part, 0 if it does not learn: warm-up, then cosine over the phase."""
    training = stage_b_section(config).training
    peaks: dict[Part, float] = {
        "memory": training.memory_learning_rate,
        "adapters": training.adapter_learning_rate,
        "policy": training.policy_learning_rate,
        "backbone": training.backbone_lr_scale * config.training.learning_rate,
    }
    if place.step < training.warmup_steps:
        factor = (place.step + 1) / training.warmup_steps
    else:
        # The last step has the lowest rate; a phase that is all warm-up has no cosine.
        behind = place.step - training.warmup_steps
        progress = min(1.0, behind / max(1, place.length - 1 - training.warmup_steps))
        lowest = training.min_learning_rate_ratio
        factor = lowest + (1 - lowest) * 0.5 * (1 + math.cos(math.pi * progress))
    return {part: factor * peaks[part] if part in learning else 0.0 for part in PARTS}


def stage_b_adamw(
    model: nn.Module, training: TrainingConfig, *, clip: Clip
) -> torch.optim.Optimizer:
    """AdamW without decay, with `clip` before each step; each group has its part under `part`, and
    what it is clipped with under `clip`.

    Its rates are 0 until `StageB.train_step` sets them.
    """
    by_clip: dict[Clipped, list[nn.Parameter]] = {clipped: [] for clipped in CLIPPED}
    for name, parameter in model.named_parameters():
        by_clip[clipped_with(name)].append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": each, "part": "policy" if clipped == "value" else clipped, "clip": clipped}
        for clipped, each in by_clip.items()
        if each and clipped != "backbone"
    ]
    if by_clip["backbone"]:
        # DeepSpeed needs experts in groups of their own, which a backbone may have.
        backbone = next(m for name, m in model.named_modules() if name.endswith("backbone"))
        groups += [
            {**group, "part": "backbone", "clip": "backbone"}
            for group in parameter_groups(backbone, weight_decay=0.0)
            if group["params"]
        ]
    optimizer = torch.optim.AdamW(
        groups,
        lr=0.0,
        betas=(training.beta1, training.beta2),
        eps=training.epsilon,
        weight_decay=0.0,
        fused=True,
    )
    # A hook: DeepSpeed takes the step itself, once it has reduced the gradients.
    optimizer.register_step_pre_hook(clip)
    return optimizer


class Clip:
    """Clips the gradients of each part by the part's norm, just before the optimizer's step; the
    value head counts as a part.

    DeepSpeed would clip all of them by one norm, which that of the adapters dominates. Its clipping
    is off; under ZeRO 1 and 2 a group's gradients are one flat partition per rank.
    """

    def __init__(self, config: Config, topology: Topology = ALONE) -> None:
        stage_b = stage_b_section(config)
        # Largest L2 norm by part; 0 does not clip.
        self._limits = dict.fromkeys(CLIPPED, stage_b.training.gradient_clipping)
        self._limits["adapters"] = stage_b.adapters.gradient_clipping
        self._limits["value"] = stage_b.policy.value_gradient_clipping
        self._topology = topology
        self.norms: dict[Clipped, float] = {}  # L2, before clipping, at the last step
        self._next_norms: dict[Clipped, float] = {}

    @torch.no_grad()
    def prepare(self, optimizer: Any) -> None:
        """Measures the gradients of the next step, after its last backward pass; collective.

        ZeRO 1 and 2 step one group at a time (0.19.8, zero/stage_1_and_2.py), and a part may have
        several groups, so that the step itself is too late. Other optimizers of DeepSpeed step all
        groups together, and are measured then.
        """
        averaged = getattr(optimizer, "averaged_gradients", None)
        if averaged is not None:
            gradients = [averaged[number] for number in range(len(optimizer.param_groups))]
            self._next_norms = self._measured(
                optimizer.param_groups, gradients, scale=optimizer.loss_scale
            )

    @torch.no_grad()
    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Hook of `torch.optim.Optimizer.register_step_pre_hook`; collective."""
        groups = optimizer.param_groups
        gradients = [[p.grad for p in each["params"] if p.grad is not None] for each in groups]
        self.norms = self._next_norms or self._measured(groups, gradients)
        topology = self._topology
        for group, of_group in zip(groups, gradients, strict=True):
            # Adapters are on their layers' stages; all other parts are on every stage. Their sums
            # over data ranks may differ in order, and the copies would differ in the last bits: so
            # all take the first stage's gradients.
            is_shared = topology.pipeline_group is not None and group["part"] != "adapters"
            for gradient in of_group if is_shared and group["lr"] else ():
                torch.distributed.broadcast(
                    gradient, src=topology.rank_at(0), group=topology.pipeline_group
                )
            norm = self.norms.get(group["clip"], 0.0)
            limit = self._limits[group["clip"]]
            # By the norm of the whole part: clipping each group alone would turn the gradient.
            if limit and norm > limit:
                for gradient in of_group:
                    gradient.mul_(limit / norm)

    def _measured(
        self, groups: list[dict[str, Any]], gradients: list[list[Tensor]], *, scale: float = 1.0
    ) -> dict[Clipped, float]:
        """L2 norm, over all ranks and groups, of each part that learns; `scale` is divided out."""
        # A rate of 0 means that the part does not learn, or that a checkpoint is being read.
        learning = [each for each in CLIPPED if any(g["clip"] == each and g["lr"] for g in groups)]
        if not learning:
            return {}
        # In float64: a float32 sum of millions of squares loses the small ones.
        sums = torch.zeros(len(learning), dtype=torch.float64, device=runtime.device())
        for group, of_group in zip(groups, gradients, strict=True):
            # Parts that all stages hold would be counted once per stage.
            counts = self._topology.is_first_stage or group["part"] == "adapters"
            for gradient in of_group if group["lr"] and counts else ():
                sums[learning.index(group["clip"])] += gradient.double().square().sum()
        # Partitions of the ranks are disjoint, so that their squares add up to the whole norm.
        totals = runtime.all_reduce_sum(sums).sqrt().div(scale).tolist()
        return dict(zip(learning, totals, strict=True))


def in_order(engine: Any, loss: Tensor | None) -> Tensor:
    """Returns a scalar whose backward pass yields the gradients of `loss` in parameter order.

    ZeRO-2 exchanges gradients in the order in which the backward pass produces them. In a lesson
    that depends on its tasks, so that ranks with different lessons would add up gradients of
    different parameters. Without a loss, all that learns gets a gradient of zero.
    """
    learning = [p for p in engine.module.parameters() if p.requires_grad]
    if loss is None:
        return _PrecomputedGradients.apply([torch.zeros_like(p) for p in learning], 1.0, *learning)
    # fp16 needs the loss scale, or small gradients vanish; the optimizer of bf16 has none.
    scale = float(getattr(engine.optimizer, "loss_scale", 1.0))
    gradients = torch.autograd.grad(
        scale * loss, learning, allow_unused=True, materialize_grads=True
    )
    return _PrecomputedGradients.apply(gradients, scale, *learning)


class _PrecomputedGradients(torch.autograd.Function):
    """Zero, whose backward pass yields precomputed gradients, each larger by a factor `scale`."""

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[Tensor], scale: float, *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        ctx.scale = scale
        return parameters[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        # `factor` is what DeepSpeed makes of the loss: loss scale and share of the micro-step. The
        # gradients hold the loss scale already.
        each = float(factor) / ctx.scale
        return (None, None, *(each * gradient for gradient in ctx.gradients))


class TrainedParameters(nn.Module):
    """Module for DeepSpeed that shares the parameters of a reader, all but a frozen backbone's.

    DeepSpeed refuses experts that no optimizer group holds.
    """

    def __init__(self, reader: nn.Module) -> None:
        super().__init__()
        for name, parameter in reader.named_parameters():
            if part_of(name) != "backbone":
                # torch refuses names with dots.
                self.register_parameter(name.replace(".", "/"), parameter)
