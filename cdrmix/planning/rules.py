"""The table of combinations that are refused, each with its reason and source.

A rule looks at a whole combination: configuration, degrees, DeepSpeed settings, world. All that are
broken are reported at once, before any process group starts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from cdrmix.errors import PlanError
from cdrmix.planning import zero
from cdrmix.planning.counts import count
from cdrmix.planning.layout import Combination

UNAVAILABLE = "not available in this version"
_OF_RANKS = "layout of ranks"  # as the source of a rule
THIS_VERSION = "this version"  # as the source of a rule: nothing but our own state speaks for it


@dataclass(frozen=True)
class Rule:
    """One combination.

    Attributes:
        id: short name, stable, for tests and documents.
        applies: True where the combination is present.
        message: what is given, why it is refused, what to try.
        source: where the reason comes from.
        about: what the message is about: the configuration or the profile.
    """

    id: str
    applies: Callable[[Combination], bool]
    message: Callable[[Combination], str]
    source: str
    about: Literal["config", "profile"] = "config"

    @property
    def is_about_this_version(self) -> bool:
        """True if the combination is sound, and only not built yet."""
        return self.source == THIS_VERSION

    def told(self, combination: Combination) -> str:
        """The message with its place: name of the configuration, or profile."""
        place = combination.config.name if self.about == "config" else combination.profile
        return f"{place}: {self.message(combination)}"


def check(combination: Combination, *, of_this_version: bool = True) -> None:
    """Refuse a combination that cannot run.

    Args:
        combination: what is checked.
        of_this_version: whether to refuse also what is sound, and only not built yet.

    Raises:
        PlanError: naming every rule that is broken, one to a line.
    """
    asked = [rule for rule in RULES if of_this_version or not rule.is_about_this_version]
    broken = [rule for rule in asked if rule.applies(combination)]
    if any(rule.source == _OF_RANKS for rule in broken):
        # how many ranks read samples is not known before the degrees are right
        broken = [rule for rule in broken if rule.id != "batch-divides"]
    if broken:
        raise PlanError("\n".join(rule.told(combination) for rule in broken))


def advise(combination: Combination) -> list[str]:
    """Warnings about what runs at a cost that the user may not expect, one line each."""
    return [rule.told(combination) for rule in WARNINGS if rule.applies(combination)]


def nearest_divisors(number: int, wanted: int) -> str:
    """The divisors of `number` on both sides of `wanted`, in words: '2 or 4'."""
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    divisors = sorted({*low, *(number // n for n in low)})
    below = [n for n in divisors if n < wanted][-1:]
    above = [n for n in divisors if n > wanted][:1]
    return " or ".join(str(n) for n in below + above)


def _nearest_multiples(step: int, wanted: int) -> str:
    lower = wanted - wanted % step
    return " or ".join(str(n) for n in (lower, lower + step) if n)


# What a degree must divide: name, number, why. Experts of a dense model have a rule of their own.
_Divided = tuple[str, Callable[[Combination], int], str]
_MUST_DIVIDE: dict[str, tuple[_Divided, ...]] = {
    "tensor": (
        ("model.num_heads", lambda x: x.model.num_heads, "heads are split"),
        ("model.num_kv_heads", lambda x: x.model.num_kv_heads, "heads are split"),
        ("model.vocab_size", lambda x: x.model.vocab_size, "embedding rows are split"),
        (
            "model.ffn_hidden_size",
            lambda x: 0 if x.model.moe else x.model.ffn_hidden_size,  # every number divides 0
            "inner features of a dense feed-forward are split",
        ),
    ),
    "sequence": (
        (
            "model.num_heads / parallel.tensor",
            lambda x: x.model.num_heads // x.degrees.tensor,
            "heads are exchanged for tokens",
        ),
        (
            "model.num_kv_heads / parallel.tensor",
            lambda x: x.model.num_kv_heads // x.degrees.tensor,
            "heads are exchanged for tokens",
        ),
        ("training.sequence_length", lambda x: x.training.sequence_length, "tokens are split"),
        ("parallel.data", lambda x: x.degrees.data, "sequence ranks are data ranks"),
    ),
    "expert": (
        (
            "model.moe.num_experts",
            lambda x: x.model.moe.num_experts if x.model.moe else x.degrees.expert,
            "ranks hold equally many experts",
        ),
        (
            "parallel.data * parallel.tensor",
            lambda x: x.degrees.data * x.degrees.tensor,
            "expert groups are consecutive ranks of a pipeline stage",
        ),
    ),
}


def _must_divide(degree: str, divided: _Divided) -> Rule:
    target, number, why = divided

    def given(combination: Combination) -> int:
        return int(getattr(combination.degrees, degree))

    def message(combination: Combination) -> str:
        common = math.gcd(*(other(combination) for _, other, _ in _MUST_DIVIDE[degree]))
        legal = nearest_divisors(common, given(combination))
        return (
            f"parallel.{degree} = {given(combination)} does not divide {target} = "
            f"{number(combination)} ({why}). Try parallel.{degree} = {legal}"
        )

    name = target.split(" / ")[0].rsplit(".", 1)[-1].replace("_", "-")
    return Rule(
        f"{degree}-divides-{name}",
        lambda combination: number(combination) % given(combination) != 0,
        message,
        _OF_RANKS,
    )


def _world_differs(combination: Combination) -> bool:
    return combination.degrees.world_size != combination.world_size


def _world_message(combination: Combination) -> str:
    degrees = combination.degrees
    world = combination.world_size
    inner = degrees.tensor * degrees.pipeline
    needs = (
        f"parallel.data * tensor * pipeline = {degrees.data} * {degrees.tensor} * "
        f"{degrees.pipeline} = {degrees.world_size} is not the number of ranks, {world}"
    )
    if world % inner:
        return f"{needs}. Try {_nearest_multiples(inner, world)} ranks"
    outer = world // inner
    is_open = not {"tensor", "pipeline"} <= _given(combination)
    legal = str(outer)
    if is_open and outer % degrees.data:  # what it leaves over, the other axes may take
        legal = nearest_divisors(outer, degrees.data)
    return f"{needs}. Try parallel.data = {legal}, or leave it out"


def _given(combination: Combination) -> set[str]:
    return combination.config.parallel.model_fields_set


def _batch_step(combination: Combination) -> int:
    return (combination.training.micro_batch_size or 1) * combination.degrees.sample_ranks


def _batch_message(combination: Combination) -> str:
    batch = combination.training.global_batch_size
    ranks = combination.degrees.sample_ranks
    micro = combination.training.micro_batch_size or 1
    given = (
        f"training.global_batch_size = {batch} is no multiple of {micro} * {ranks} (micro batch * "
        "data ranks with samples of their own)"
    )
    if batch % ranks == 0:
        legal = nearest_divisors(batch // ranks, micro)
        return f"{given}. Try training.micro_batch_size = {legal}"
    return (
        f"{given}. Try training.global_batch_size = {_nearest_multiples(ranks * micro, batch)}, "
        f"or {nearest_divisors(batch, ranks)} such ranks"
    )


def _borders_are_split(combination: Combination) -> bool:
    """True if tensor ranks share out what crosses a stage boundary, as DeepSpeed has by default."""
    pipeline = combination.deepspeed.get("pipeline", {})
    split = any(pipeline.get(key, True) for key in ("pipe_partitioned", "grad_partitioned"))
    return split and combination.degrees.pipeline > 1 and combination.degrees.tensor > 1


def _clipped_wrongly(combination: Combination) -> bool:
    spread = combination.degrees.expert > 1 or combination.degrees.pipeline > 1
    return combination.zero_stage == 0 and combination.training.gradient_clipping > 0 and spread


def _unfused(combination: Combination) -> bool:
    halved = combination.training.precision != "fp32"
    return combination.zero_stage == 0 and halved and combination.degrees.pipeline == 1


# Settings of ZeRO that DeepSpeed's MoE layer asserts, and whose other value is not its default.
_NEEDED_BY_EXPERTS = ("contiguous_gradients", "reduce_scatter")
# Settings of ZeRO++: what they keep beside a rank's share is not in our checkpoints.
_ZERO_PLUS_PLUS = (
    "zero_hpz_partition_size",
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients",
)


def _zero(combination: Combination) -> dict[str, Any]:
    section: dict[str, Any] = combination.deepspeed.get("zero_optimization", {})
    return section


def _withheld_from_experts(combination: Combination) -> list[str]:
    return [name for name in _NEEDED_BY_EXPERTS if not _zero(combination).get(name, True)]


def _quantized_or_doubled(combination: Combination) -> list[str]:
    # a group of one rank is DeepSpeed's default
    return [
        name
        for name in _ZERO_PLUS_PLUS
        if _zero(combination).get(name, 0) > (name.endswith("size"))
    ]


def _offloads(combination: Combination) -> list[str]:
    return [what for what in ("offload_optimizer", "offload_param") if combination.offloads(what)]


def _to_nvme(combination: Combination) -> list[str]:
    return [what for what in _offloads(combination) if _zero(combination)[what]["device"] == "nvme"]


def _partly_offloaded(combination: Combination) -> bool:
    section = _zero(combination).get("offload_optimizer", {})
    return section.get("ratio", 1.0) != 1.0 or section.get("super_offload", False)


def _keeps_a_large_models_activations(combination: Combination) -> bool:
    training = combination.training
    if "activation_checkpointing" not in training.model_fields_set:  # the plan decides
        return False
    if training.activation_checkpointing or training.stage == "b":  # which trains little of it
        return False
    return _total_params(combination) >= zero.STAGED_PARAMS


def _total_params(combination: Combination) -> int:
    return count(combination.model, combination.training.sequence_length).total_params


RULES: tuple[Rule, ...] = (
    Rule("world-is-the-product", _world_differs, _world_message, _OF_RANKS),
    *(_must_divide(degree, one) for degree, many in _MUST_DIVIDE.items() for one in many),
    Rule(
        "experts-of-a-dense-model",
        lambda x: x.model.moe is None and x.degrees.expert > 1,
        lambda x: (
            f"parallel.expert = {x.degrees.expert}: the model has no experts (model.moe is null). "
            "Try parallel.expert = 1"
        ),
        _OF_RANKS,
    ),
    Rule(
        "stage-without-blocks",
        lambda x: x.degrees.pipeline > x.model.num_layers,
        lambda x: (
            f"parallel.pipeline = {x.degrees.pipeline} is more than model.num_layers = "
            f"{x.model.num_layers}, and a stage needs a block. Try at most that"
        ),
        "a stage without MoE layers hangs: DeepSpeed 0.19.8 runtime/zero/stage_1_and_2.py",
    ),
    Rule(
        "batch-divides",
        lambda x: x.training.global_batch_size % _batch_step(x) != 0,
        _batch_message,
        "the global batch is the same on every cluster",
    ),
    Rule(
        "large-without-recomputation",
        _keeps_a_large_models_activations,
        lambda x: (
            f"training.activation_checkpointing = false with {_total_params(x) / 1e9:.3g}B "
            f"parameters: from {zero.STAGED_PARAMS / 1e9:.0f}B on every block is recomputed, as "
            "what blocks keep outgrows the weights. Try true, or leave it out"
        ),
        "rules of the model's size: planning/zero.py",
    ),
    Rule(
        "moe-with-stage-3",
        lambda x: x.zero_stage == 3 and x.model.moe is not None,
        lambda x: (
            "zero_optimization.stage = 3 cannot run with model.moe (DeepSpeed's MoE layer allows "
            "stages up to 2). Try profile 'zero2', or model.moe = null"
        ),
        "DeepSpeed 0.19.8 runtime/engine.py",
        about="profile",
    ),
    Rule(
        "pipeline-with-stage-2-or-3",
        lambda x: x.zero_stage >= 2 and x.degrees.pipeline > 1,
        lambda x: (
            f"zero_optimization.stage = {x.zero_stage} cannot run with "
            f"parallel.pipeline = {x.degrees.pipeline} (DeepSpeed's pipeline engine allows 0 or "
            "1). Try profile 'pipeline', or parallel.pipeline = 1"
        ),
        "DeepSpeed 0.19.8 runtime/pipe/engine.py",
        about="profile",
    ),
    Rule(
        "split-borders",
        _borders_are_split,
        lambda x: (
            "pipeline.pipe_partitioned and grad_partitioned must be false with "
            f"parallel.pipeline = {x.degrees.pipeline} and parallel.tensor = {x.degrees.tensor}: "
            "each tensor rank sends heads and counts of its own. Try profile 'pipeline'"
        ),
        "DeepSpeed 0.19.8 runtime/pipe/engine.py shares out the first tensor among tensor ranks",
        about="profile",
    ),
    Rule(
        "stage-0-clips-wrongly",
        _clipped_wrongly,
        lambda x: (
            "zero_optimization.stage = 0 takes a wrong gradient norm to clip by with "
            f"parallel.expert = {x.degrees.expert} and parallel.pipeline = {x.degrees.pipeline}. "
            f"Try profile '{'pipeline' if x.degrees.pipeline > 1 else 'zero1'}', or "
            "training.gradient_clipping = 0"
        ),
        "DeepSpeed 0.19.8 runtime/utils.py averages norms of ranks; DeepSpeed issue 8475",
        about="profile",
    ),
    Rule(
        "stage-0-in-half-precision",
        _unfused,
        lambda x: (
            f"zero_optimization.stage = 0 with training.precision = {x.training.precision} takes "
            "DeepSpeed's unfused fp16 optimizer, which leaves experts out of the gradient norm. "
            "Try profile 'zero1', or training.precision = fp32"
        ),
        "DeepSpeed 0.19.8 runtime/fp16/unfused_optimizer.py; DeepSpeed pull request 8613",
        about="profile",
    ),
    Rule(
        "fp16-on-cpu",
        lambda x: x.device == "cpu" and x.training.precision == "fp16",
        lambda x: (
            "training.precision = fp16 is not supported on CPUs by DeepSpeed. "
            "Try training.precision = fp32"
        ),
        "DeepSpeed 0.19.8 accelerator/cpu_accelerator.py",
    ),
    Rule(
        "round-robin-gradients",
        lambda x: bool(x.deepspeed.get("zero_optimization", {}).get("round_robin_gradients")),
        lambda x: (
            "zero_optimization.round_robin_gradients = true makes DeepSpeed lose track of which "
            "rank holds which weights, so that no checkpoint could be trusted. Try false"
        ),
        "DeepSpeed 0.19.8 runtime/zero/stage_1_and_2.py: _hp_mapping, seen in a run",
        about="profile",
    ),
    Rule(
        "experts-need-reduce-scatter",
        lambda x: x.model.moe is not None and bool(_withheld_from_experts(x)),
        lambda x: (
            f"zero_optimization.{_withheld_from_experts(x)[0]} = false cannot run with model.moe: "
            "DeepSpeed reduces the gradients of experts in their own groups on that path only. "
            "Try true, or profile 'expert'"
        ),
        "DeepSpeed 0.19.8 runtime/zero/stage_1_and_2.py: _configure_moe_settings",
        about="profile",
    ),
    Rule(
        "stage-3-with-tensor",
        lambda x: x.zero_stage == 3 and x.degrees.tensor > 1,
        lambda x: (
            f"zero_optimization.stage = 3 cannot run with parallel.tensor = {x.degrees.tensor}: "
            "parameters are shared out over all ranks, and tensor ranks hold different ones. "
            "Try profile 'zero2', or parallel.tensor = 1"
        ),
        "DeepSpeed 0.19.8 runtime/zero/partition_parameters.py: Init without a group",
        about="profile",
    ),
    Rule(
        "offload-param-below-stage-3",
        lambda x: x.offloads("offload_param") and x.zero_stage < 3,
        lambda x: (
            f"zero_optimization.offload_param with stage = {x.zero_stage}: below stage 3 every "
            "rank keeps all parameters on its device, and DeepSpeed passes over this setting. "
            "Try profile 'zero3_offload', or leave it out"
        ),
        "DeepSpeed 0.19.8 runtime/engine.py: only its third stage is given the section",
        about="profile",
    ),
    Rule(
        "partly-offloaded",
        lambda x: x.offloads("offload_optimizer") and _partly_offloaded(x),
        lambda x: (
            "zero_optimization.offload_optimizer with ratio below 1 or super_offload needs "
            "DeepSpeed's own Adam, and the loop's is torch's. Try ratio = 1 without super_offload"
        ),
        "DeepSpeed 0.19.8 runtime/zero/stage3.py: Hybrid Optimizer Only Supports DeepSpeedCPUAdam",
        about="profile",
    ),
    Rule(
        "nvme-unavailable",
        lambda x: bool(_to_nvme(x)),
        lambda x: (
            f"zero_optimization.{_to_nvme(x)[0]}.device = nvme: offloading to a disk is "
            f"{UNAVAILABLE}. Try device = cpu"
        ),
        THIS_VERSION,
        about="profile",
    ),
    Rule(
        "offload-in-a-pipeline-unavailable",
        lambda x: bool(_offloads(x)) and x.degrees.pipeline > 1,
        lambda x: (
            f"zero_optimization.{_offloads(x)[0]} with parallel.pipeline = {x.degrees.pipeline} is "
            f"{UNAVAILABLE}. Try parallel.pipeline = 1, or a profile that does not offload"
        ),
        THIS_VERSION,
        about="profile",
    ),
    Rule(
        "zero-plus-plus-unavailable",
        lambda x: bool(_quantized_or_doubled(x)),
        lambda x: (
            f"zero_optimization.{_quantized_or_doubled(x)[0]}: ZeRO++ is {UNAVAILABLE}. "
            "Try leaving it out"
        ),
        THIS_VERSION,
        about="profile",
    ),
    Rule(
        "fp16-in-a-pipeline-unavailable",
        lambda x: x.training.precision == "fp16" and x.degrees.pipeline > 1,
        lambda x: (
            f"training.precision = fp16 with parallel.pipeline = {x.degrees.pipeline} is "
            f"{UNAVAILABLE}. Try training.precision = bf16"
        ),
        THIS_VERSION,
    ),
    Rule(
        "stage-0-unavailable",
        lambda x: x.zero_stage == 0 and not _clipped_wrongly(x) and not _unfused(x),
        lambda x: (
            f"zero_optimization.stage = 0: checkpoints of unpartitioned optimizers are "
            f"{UNAVAILABLE}. Try profile 'zero1', which holds the same on one rank"
        ),
        THIS_VERSION,
        about="profile",
    ),
)

WARNINGS: tuple[Rule, ...] = (
    Rule(
        "warm-up-outlasts-the-run",
        lambda x: x.training.warmup_steps >= x.training.num_steps,
        lambda x: (
            f"training.warmup_steps = {x.training.warmup_steps} with a run of "
            f"{x.training.num_steps} steps: the peak learning rate is never reached. Try "
            f"training.warmup_steps = {x.training.num_steps // 10}"
        ),
        "linear warm-up, then cosine",
    ),
    Rule(
        "half-precision-on-cpu",
        lambda x: x.device == "cpu" and x.training.precision == "bf16",
        lambda x: (
            f"training.precision = {x.training.precision} on CPUs: those without native support "
            "multiply in it 60 times slower than in fp32. Try training.precision = fp32"
        ),
        "measured on two AVX2 cores: 1.2 GFLOP/s in bf16, 80 in fp32",
    ),
)
