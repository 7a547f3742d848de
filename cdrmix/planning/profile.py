"""Config and world -> DeepSpeed profile, degrees, batch sizes, and why.

In this version there is no model of memory yet: the choice goes by sizes that `counts` knows, and
whether a model fits is found out on the device.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cdrmix.config.schema import Config
from cdrmix.planning import rules
from cdrmix.planning.counts import count, params_by_part
from cdrmix.planning.deepspeed_json import profile_path, read_profile
from cdrmix.planning.layout import Degrees, Layout

# Total parameters from which gradients are worth spreading: 1e9 are 2 GB of them in bf16 on every
# rank, and a reduce-scatter in each micro-step is then cheaper than the memory.
LARGE_PARAMS = 1_000_000_000
# Experts are held whole by every rank up to here; weight and gradient in bf16 are 4 bytes.
WHOLE_EXPERT_BYTES = 2**30
EXPERT_BYTES_PER_PARAM = 4
# Expert groups stay inside a node of 8 devices, where all-to-all is cheap.
LARGEST_EXPERT_GROUP = 8
# Tokens of one forward pass that keep a small model's matrices busy; more only takes memory.
SMALL_MICRO_STEP_TOKENS = 8_192


@dataclass(frozen=True)
class Choice:
    """How a run is laid out.

    Attributes:
        name: profile, shipped name or stem of the user's file.
        path: its JSON file.
        degrees: parallel degrees.
        micro_batch_size: samples per data rank and forward pass.
        gradient_accumulation_steps: forward passes per optimizer step.
        deepspeed: complete settings for `deepspeed.initialize`.
        reasons: why each was chosen, one line each.
        warnings: what runs at a cost that the user may not expect, one line each.
    """

    name: str
    path: Path
    degrees: Degrees
    micro_batch_size: int
    gradient_accumulation_steps: int
    deepspeed: dict[str, Any]
    reasons: list[str]
    warnings: list[str]

    def to_json(self) -> dict[str, Any]:
        """The plan as plain values, as it stands in plan.json."""
        return {
            "profile": self.name,
            "profile_path": str(self.path),
            "degrees": asdict(self.degrees),
            "micro_batch_size": self.micro_batch_size,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "reasons": self.reasons,
            "warnings": self.warnings,
        }


def choose(
    config: Config, *, world_size: int, profile: str | None = None, device: str | None = None
) -> Choice:
    """Lay a run out on `world_size` ranks; what the configuration gives is kept.

    Args:
        config: of the run.
        world_size: ranks.
        profile: name of a shipped profile or path of a JSON file; chosen when left out.
        device: "cpu" or "cuda", for advice about precision; None where it is not known.

    Raises:
        PlanError: if the combination cannot run, naming everything that is wrong with it.
    """
    degrees, expert_reason = _degrees(config, world_size)
    name, profile_reason = _profile(config, degrees, profile)
    path = profile_path(name)
    settings = read_profile(path)
    label = f"ds_configs/{path.name}" if name == path.stem else name
    layout = Layout(config, degrees, settings, label, world_size, device)
    rules.check(layout)
    micro, micro_reason = _micro_batch_size(config, degrees)
    steps = config.training.global_batch_size // (micro * degrees.sample_ranks)
    return Choice(
        name=path.stem,
        path=path,
        degrees=degrees,
        micro_batch_size=micro,
        gradient_accumulation_steps=steps,
        deepspeed=settings | _of_the_run(config, degrees, micro, steps),
        reasons=[
            f"profile {path.stem}: {profile_reason}",
            f"degrees: data {degrees.data} = {world_size} ranks / (tensor {degrees.tensor} * "
            f"pipeline {degrees.pipeline}), sequence {degrees.sequence}",
            f"expert {degrees.expert}: {expert_reason}",
            f"micro batch {micro}: {micro_reason}",
            f"accumulation {steps} = global batch {config.training.global_batch_size} / "
            f"(micro batch {micro} * {degrees.sample_ranks} data ranks)",
        ],
        warnings=rules.advise(layout),
    )


def _degrees(config: Config, world_size: int) -> tuple[Degrees, str]:
    given = config.parallel
    data = given.data or max(1, world_size // (given.tensor * given.pipeline))
    expert, reason = _expert_degree(config, data * given.tensor)
    return Degrees(data, given.tensor, given.pipeline, given.sequence, expert), reason


def _expert_degree(config: Config, ranks: int) -> tuple[int, str]:
    """Expert degree among the `ranks` of a pipeline stage, and why."""
    model, given = config.model, config.parallel
    if given.expert is not None:
        return given.expert, "parallel.expert as given"
    if model.moe is None:
        return 1, "a dense model has no experts"
    held = params_by_part(model)["experts"] // (given.tensor * given.pipeline)
    held_bytes = held * EXPERT_BYTES_PER_PARAM
    size = f"all experts take {held_bytes / 2**30:.2g} GiB of weights and gradients"
    if held_bytes <= WHOLE_EXPERT_BYTES:
        return 1, f"{size}, which every rank can hold: no exchange of tokens"
    common = math.gcd(model.moe.num_experts, ranks)
    degree = max(n for n in range(1, LARGEST_EXPERT_GROUP + 1) if common % n == 0)
    if degree == 1:
        return 1, f"{size}, and {ranks} ranks cannot share {model.moe.num_experts} experts"
    return degree, f"{size}, spread over groups of {degree} ranks that a node holds"


def _profile(config: Config, degrees: Degrees, given: str | None) -> tuple[str, str]:
    """Name or path of the profile, and why."""
    if given is not None:
        return given, "--profile as given"
    if degrees.pipeline > 1:
        return "zero1", "DeepSpeed's pipeline engine partitions no gradients"
    if degrees.data == 1:
        return "zero1", "one data rank: there is nobody to share gradients with"
    total = count(config.model, config.training.sequence_length).total_params
    if total < LARGE_PARAMS:
        return "zero1", f"{total / 1e6:.3g}M parameters: gradients are small, one exchange a step"
    return "zero2", (
        f"{total / 1e9:.3g}B parameters: gradients are spread over the data ranks; whether all of "
        "it fits is not estimated in this version"
    )


def _micro_batch_size(config: Config, degrees: Degrees) -> tuple[int, str]:
    """Samples per forward pass, and why; divides what a rank takes of the global batch."""
    training = config.training
    if training.micro_batch_size is not None:
        return training.micro_batch_size, "training.micro_batch_size as given"
    total = count(config.model, training.sequence_length).total_params
    if total >= LARGE_PARAMS:
        return 1, "the safest where memory is not estimated; give training.micro_batch_size"
    per_rank = training.global_batch_size // degrees.sample_ranks
    cap = max(1, SMALL_MICRO_STEP_TOKENS // training.sequence_length)
    micro = max(n for n in range(1, min(cap, per_rank) + 1) if per_rank % n == 0)
    return micro, (
        f"largest share of {per_rank} samples a rank with at most {SMALL_MICRO_STEP_TOKENS} "
        "tokens a forward pass"
    )


def _of_the_run(config: Config, degrees: Degrees, micro: int, steps: int) -> dict[str, Any]:
    """DeepSpeed settings that belong to the run and follow from the configuration."""
    training = config.training
    settings: dict[str, Any] = {
        # Sequence ranks are data ranks to DeepSpeed, so its batch counts a shared sample by rank.
        "train_batch_size": micro * steps * degrees.data,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
        "gradient_clipping": training.gradient_clipping,
    }
    if training.precision == "bf16":
        settings["bf16"] = {"enabled": True}
        # hundreds of micro-steps summed in bf16 would lose the small ones
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    if training.precision == "fp16":
        settings["fp16"] = {"enabled": True, "loss_scale": 0}  # 0: scaled dynamically
    return settings
