"""Rules that refuse combinations of settings, each with its reason and source.

A rule reads a whole combination: configuration, degrees, DeepSpeed settings, number of ranks. All
broken rules are reported at once, before any process group starts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from cdrmix.config.hugging_face import TESTED_FAMILIES
from cdrmix.errors import PlanError
from cdrmix.planning.block_rules import BLOCK_RULES
from cdrmix.planning.compile_rules import COMPILE_RULES
from cdrmix.planning.depth_rules import DEPTH_RULES
from cdrmix.planning.folder_model import folder_model
from cdrmix.planning.hf_rules import WHOLE_MODELS
from cdrmix.planning.layout import Combination
from cdrmix.planning.muon import ratio_warning
from cdrmix.planning.plugin_rules import PLUGIN_RULES
from cdrmix.planning.reading_rules import READING_RULES
from cdrmix.planning.recompute_rules import RECOMPUTE_RULES
from cdrmix.planning.rule import OF_RANKS, THIS_VERSION, Rule
from cdrmix.planning.suite_rules import SUITE_RULES


def check(combination: Combination, *, of_this_version: bool = True) -> None:
    """Raises PlanError with the messages of all `broken` rules, one to a line."""
    messages = broken(combination, of_this_version=of_this_version)
    if messages:
        raise PlanError("\n".join(messages))


def broken(combination: Combination, *, of_this_version: bool = True) -> list[str]:
    """Messages of all rules that a combination breaks; without `of_this_version` those are left out
    that only refuse what is valid but not implemented yet."""
    rules = [rule for rule in RULES if of_this_version or rule.source != THIS_VERSION]
    found = [rule for rule in rules if rule.applies(combination)]
    if any(rule.source == OF_RANKS for rule in found):
        # the number of ranks that read samples follows from the degrees
        found = [rule for rule in found if rule.id != "batch-divides"]
    return [rule.report(combination) for rule in found]


def advise(combination: Combination) -> list[str]:
    """Warns of settings with a cost that the user may not expect, one line each."""
    return [rule.report(combination) for rule in WARNINGS if rule.applies(combination)]


def nearest_divisors(number: int, wanted: int) -> str:
    """Formats the divisors of `number` below and above `wanted`: '2 or 4'."""
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    divisors = sorted({*low, *(number // n for n in low)})
    below = [n for n in divisors if n < wanted][-1:]
    above = [n for n in divisors if n > wanted][:1]
    return " or ".join(str(n) for n in below + above)


# Rules that any number of data ranks may break, beside those of the layout of ranks.
_OF_EVERY_WORLD = ("batch-divides", "stage-without-blocks", "stage-without-experts")
_MOST_MULTIPLES = 64  # tried in search of a number of ranks


def _nearest_multiples(step: int, wanted: int) -> str:
    lower = wanted - wanted % step
    return " or ".join(str(n) for n in (lower, lower + step) if n)


# A number that a degree must divide: name, value, reason. A dense model is exempt for experts.
_Divided = tuple[str, Callable[[Combination], int], str]
_MUST_DIVIDE: dict[str, tuple[_Divided, ...]] = {
    "tensor": (
        ("model.num_heads", lambda x: x.model.num_heads, "heads are split"),
        ("model.num_kv_heads", lambda x: x.model.num_kv_heads, "heads are split"),
        ("model.vocab_size", lambda x: x.model.vocab_size, "embedding rows are split"),
        (
            "model.ffn_hidden_size",
            # every number divides 0
            lambda x: x.model.ffn_hidden_size if x.model.has_dense_feed_forwards else 0,
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

    def applies(combination: Combination) -> bool:
        if combination.model.kind == "hf":  # refused by a rule of its own
            return False
        return number(combination) % getattr(combination.degrees, degree) != 0

    def message(combination: Combination) -> str:
        value = getattr(combination.degrees, degree)
        common = math.gcd(*(other(combination) for _, other, _ in _MUST_DIVIDE[degree]))
        return (
            f"parallel.{degree} = {value} does not divide {target} = {number(combination)} "
            f"({why}). Try parallel.{degree} = {nearest_divisors(common, value)}"
        )

    name = target.split(" / ")[0].rsplit(".", 1)[-1].replace("_", "-")
    return Rule(f"{degree}-divides-{name}", applies, message, OF_RANKS)


def _world_message(combination: Combination) -> str:
    degrees = combination.degrees
    world = combination.world_size
    inner = degrees.model_ranks
    needs = (
        f"parallel.data * tensor * pipeline = {degrees.data} * {degrees.tensor} * "
        f"{degrees.pipeline} = {degrees.world_size} is not the number of ranks, {world}"
    )
    if world % inner:
        possible = _nearest_worlds(combination)
        if not possible:  # the degrees are impossible on any number of ranks near this one
            return (
                f"{needs}. Try parallel.tensor and parallel.pipeline whose product divides {world}"
            )
        return f"{needs}. Try {' or '.join(map(str, possible))} ranks"
    data = world // inner
    legal = str(data)
    is_open = not {"tensor", "pipeline"} <= combination.config.parallel.model_fields_set
    if is_open and data % degrees.data:  # the remaining factor can go to the open axes
        legal = nearest_divisors(data, degrees.data)
    return f"{needs}. Try parallel.data = {legal}, or leave it out"


def _nearest_worlds(combination: Combination) -> list[int]:
    """Nearest numbers of ranks, below and above, on which the tensor and pipeline degrees are legal
    with any number of data ranks that the configuration allows; empty if there is none near."""
    parallel = combination.config.parallel
    inner = combination.degrees.model_ranks
    kept = parallel.expert or 1
    depends = [rule for rule in RULES if rule.source == OF_RANKS or rule.id in _OF_EVERY_WORLD]

    def is_legal(world: int) -> bool:
        data = world // inner
        degrees = replace(combination.degrees, data=data, expert=kept)
        tried = replace(combination, degrees=degrees, world_size=world)
        is_free = parallel.data in (None, data)
        return is_free and not any(rule.applies(tried) for rule in depends)

    lower = combination.world_size - combination.world_size % inner
    below = (world for world in range(lower, 0, -inner) if is_legal(world))
    highest = lower + _MOST_MULTIPLES * inner
    above = (world for world in range(lower + inner, highest, inner) if is_legal(world))
    return [world for each in (below, above) if (world := next(each, None)) is not None]


def _batch_message(combination: Combination) -> str:
    batch = combination.training.global_batch_size
    ranks = combination.degrees.sample_ranks
    micro = combination.training.fixed_micro_batch_size or 1
    problem = (
        f"training.global_batch_size = {batch} is no multiple of {micro} * {ranks} (micro batch * "
        "data ranks with samples of their own)"
    )
    if batch % ranks == 0:
        legal = nearest_divisors(batch // ranks, micro)
        return f"{problem}. Try training.micro_batch_size = {legal}"
    return (
        f"{problem}. Try training.global_batch_size = {_nearest_multiples(ranks * micro, batch)}, "
        f"or {nearest_divisors(batch, ranks)} such ranks"
    )


def _clips_wrongly(combination: Combination) -> bool:
    spread = combination.degrees.expert > 1 or combination.degrees.pipeline > 1
    return combination.zero_stage == 0 and combination.training.gradient_clipping > 0 and spread


def _is_unfused(combination: Combination) -> bool:
    is_half = combination.training.precision != "fp32"
    return combination.zero_stage == 0 and is_half and combination.degrees.pipeline == 1


# Settings by which DeepSpeed splits what crosses a stage boundary over tensor ranks.
_SPLIT_BORDERS = ("pipe_partitioned", "grad_partitioned")
# Settings of ZeRO that DeepSpeed's MoE layer asserts, and whose other value is not its default.
_NEEDED_BY_EXPERTS = ("contiguous_gradients", "reduce_scatter")
# Settings of ZeRO++: its secondary partitions and quantised copies are not in our checkpoints.
_ZERO_PLUS_PLUS = (
    "zero_hpz_partition_size",
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients",
)


def _offloads(combination: Combination, device: str | None = None) -> list[str]:
    """Sections of DeepSpeed's settings that offload, to any device or to the given one."""
    names = [name for name in ("offload_optimizer", "offload_param") if combination.offloads(name)]
    return [name for name in names if device in (None, combination.zero[name]["device"])]


RULES: tuple[Rule, ...] = (
    Rule(
        "world-is-the-product",
        lambda x: x.degrees.world_size != x.world_size,
        _world_message,
        OF_RANKS,
    ),
    *(_must_divide(degree, one) for degree, many in _MUST_DIVIDE.items() for one in many),
    Rule(
        "experts-of-a-dense-model",
        lambda x: x.model.kind != "hf" and x.model.moe is None and x.degrees.expert > 1,
        lambda x: (
            f"parallel.expert = {x.degrees.expert}: the model has no experts "
            + (
                "in feed-forwards (model.moe is null), and those of Routing Mamba are ordinary "
                "parameters, which each rank holds and applies to its own tokens"
                if x.model.routing_mamba is not None
                else "(model.moe is null)"
            )
            + ". Try parallel.expert = 1"
        ),
        OF_RANKS,
    ),
    Rule(
        "stage-without-blocks",
        lambda x: x.model.kind != "hf" and x.degrees.pipeline > x.model.num_layers,
        "parallel.pipeline = {x.degrees.pipeline} is more than model.num_layers = "
        "{x.model.num_layers}, and a stage needs a block. Try at most that",
        "a stage without MoE layers hangs: DeepSpeed 0.19.8 runtime/zero/stage_1_and_2.py",
    ),
    Rule(
        "batch-divides",
        lambda x: (
            x.training.global_batch_size
            % ((x.training.fixed_micro_batch_size or 1) * x.degrees.sample_ranks)
            != 0
        ),
        _batch_message,
        "the global batch is the same on every cluster",
    ),
    *RECOMPUTE_RULES,
    *COMPILE_RULES,
    *WHOLE_MODELS,
    *BLOCK_RULES,
    *DEPTH_RULES,
    *SUITE_RULES,
    *READING_RULES,
    *PLUGIN_RULES,
    Rule(
        "moe-with-stage-3",
        lambda x: x.zero_stage == 3 and x.model.has_deepspeed_experts,
        "zero_optimization.stage = 3 cannot run with model.moe (DeepSpeed's MoE layer allows "
        "stages up to 2). Try profile 'zero2', or model.moe = null",
        "DeepSpeed 0.19.8 runtime/engine.py",
    ),
    Rule(
        "pipeline-with-stage-2-or-3",
        lambda x: x.zero_stage >= 2 and x.degrees.pipeline > 1,
        "zero_optimization.stage = {x.zero_stage} cannot run with parallel.pipeline = "
        "{x.degrees.pipeline} (DeepSpeed's pipeline engine allows 0 or 1). Try profile "
        "'pipeline', or parallel.pipeline = 1",
        "DeepSpeed 0.19.8 runtime/pipe/engine.py",
    ),
    Rule(
        "split-borders",
        # DeepSpeed splits them over tensor ranks by default
        lambda x: (
            x.degrees.pipeline > 1
            and x.degrees.tensor > 1
            and any(x.deepspeed.get("pipeline", {}).get(key, True) for key in _SPLIT_BORDERS)
        ),
        "pipeline.pipe_partitioned and grad_partitioned must be false with parallel.pipeline = "
        "{x.degrees.pipeline} and parallel.tensor = {x.degrees.tensor}: each tensor rank sends "
        "heads and counts of its own. Try profile 'pipeline'",
        "DeepSpeed 0.19.8 runtime/pipe/engine.py shares out the first tensor among tensor ranks",
    ),
    Rule(
        "stage-0-clips-wrongly",
        _clips_wrongly,
        lambda x: (
            "zero_optimization.stage = 0 takes a wrong gradient norm to clip by with "
            f"parallel.expert = {x.degrees.expert} and parallel.pipeline = {x.degrees.pipeline}. "
            f"Try profile '{'pipeline' if x.degrees.pipeline > 1 else 'zero1'}', or "
            "training.gradient_clipping = 0"
        ),
        "DeepSpeed 0.19.8 runtime/utils.py averages norms of ranks; DeepSpeed issue 8475",
    ),
    Rule(
        "stage-0-in-half-precision",
        _is_unfused,
        "zero_optimization.stage = 0 with training.precision = {x.training.precision} takes "
        "DeepSpeed's unfused fp16 optimizer, which leaves experts out of the gradient norm. Try "
        "profile 'zero1', or training.precision = fp32",
        "DeepSpeed 0.19.8 runtime/fp16/unfused_optimizer.py; DeepSpeed pull request 8613",
    ),
    Rule(
        "fp16-on-cpu",
        lambda x: x.device == "cpu" and x.training.precision == "fp16",
        "training.precision = fp16 is not supported on CPUs by DeepSpeed. Try training.precision "
        "= fp32",
        "DeepSpeed 0.19.8 accelerator/cpu_accelerator.py",
    ),
    Rule(
        "round-robin-gradients",
        lambda x: x.zero.get("round_robin_gradients"),
        "zero_optimization.round_robin_gradients = true makes DeepSpeed lose track of which rank "
        "holds which weights, so that no checkpoint could be trusted. Try false",
        "DeepSpeed 0.19.8 runtime/zero/stage_1_and_2.py: _hp_mapping, seen in a run",
    ),
    Rule(
        "experts-need-reduce-scatter",
        lambda x: (
            [n for n in _NEEDED_BY_EXPERTS if not x.zero.get(n, True)]
            if x.model.has_deepspeed_experts
            else []
        ),
        "zero_optimization.{found[0]} = false cannot run with model.moe: DeepSpeed reduces the "
        "gradients of experts in their own groups on that path only. Try true, or profile 'expert'",
        "DeepSpeed 0.19.8 runtime/zero/stage_1_and_2.py: _configure_moe_settings",
    ),
    Rule(
        "stage-3-with-tensor",
        lambda x: x.zero_stage == 3 and x.degrees.tensor > 1,
        "zero_optimization.stage = 3 cannot run with parallel.tensor = {x.degrees.tensor}: "
        "parameters are shared out over all ranks, and tensor ranks hold different ones. Try "
        "profile 'zero2', or parallel.tensor = 1",
        "DeepSpeed 0.19.8 runtime/zero/partition_parameters.py: Init without a group",
    ),
    Rule(
        "offload-param-below-stage-3",
        lambda x: x.offloads("offload_param") and x.zero_stage < 3,
        "zero_optimization.offload_param with stage = {x.zero_stage}: below stage 3 every rank "
        "keeps all parameters on its device, and DeepSpeed passes over this setting. Try profile "
        "'zero3_offload', or leave it out",
        "DeepSpeed 0.19.8 runtime/engine.py: only its third stage is given the section",
    ),
    Rule(
        "muon-with-tensor",
        lambda x: (
            x.config.optimizer.kind == "muon"
            and x.config.optimizer.tensor == "refuse"
            and x.degrees.tensor > 1
        ),
        "optimizer.kind = muon with parallel.tensor = {x.degrees.tensor}: a tensor rank holds a "
        "part of a matrix, and the part of an orthogonal matrix is not orthogonal. Try "
        "parallel.tensor = 1, or optimizer.tensor = blockwise, another algorithm, which "
        "orthogonalises each rank's part by itself",
        "Newton-Schulz of a part is not a part of Newton-Schulz",
    ),
    Rule(
        "neuron-norm-with-tensor",
        lambda x: (
            x.config.optimizer.kind == "muon"
            and x.config.optimizer.neuron_norm
            and x.degrees.tensor > 1
        ),
        "optimizer.neuron_norm = true with parallel.tensor = {x.degrees.tensor}: a mean over a "
        "row would be one over a part of it on each rank. Try parallel.tensor = 1, or "
        "optimizer.neuron_norm = false",
        "NorMuon, arXiv 2510.05491: one mean square for each row",
    ),
    Rule(
        "muon-with-adapters",
        lambda x: x.config.optimizer.kind == "muon" and x.model.lora is not None,
        "optimizer.kind = muon with model.lora: the factors of an adapter are AdamW's, and no "
        "matrix would be left to Muon. Try optimizer.kind = adamw",
        "an orthogonalised factor moves the product of two factors by its square",
    ),
    Rule(
        "muon-of-an-unknown-family",
        lambda x: (
            x.config.optimizer.kind == "muon"
            and x.model.kind == "hf"
            and not folder_model(x.model).is_known
        ),
        "optimizer.kind = muon with a model of another family than "
        + ", ".join(TESTED_FAMILIES)
        + ": nothing tells embedding, routers and convolutions from the matrices that Muon is "
        "for. Try optimizer.kind = adamw",
        THIS_VERSION,
    ),
    Rule(
        "partly-offloaded",
        lambda x: (
            x.offloads("offload_optimizer")
            and (
                x.zero["offload_optimizer"].get("ratio", 1.0) != 1.0
                or x.zero["offload_optimizer"].get("super_offload", False)
            )
        ),
        "zero_optimization.offload_optimizer with ratio below 1 or super_offload needs "
        "DeepSpeed's own Adam, and the loop's is torch's. Try ratio = 1 without super_offload",
        "DeepSpeed 0.19.8 runtime/zero/stage3.py: Hybrid Optimizer Only Supports DeepSpeedCPUAdam",
    ),
    Rule(
        "nvme-unavailable",
        lambda x: _offloads(x, "nvme"),
        "zero_optimization.{found[0]}.device = nvme: offloading to a disk is {unavailable}. Try "
        "device = cpu",
        THIS_VERSION,
    ),
    Rule(
        "offload-in-a-pipeline-unavailable",
        lambda x: _offloads(x) if x.degrees.pipeline > 1 else [],
        "zero_optimization.{found[0]} with parallel.pipeline = {x.degrees.pipeline} is "
        "{unavailable}. Try parallel.pipeline = 1, or a profile that does not offload",
        THIS_VERSION,
    ),
    Rule(
        "zero-plus-plus-unavailable",
        # a group of one rank is DeepSpeed's default
        lambda x: [n for n in _ZERO_PLUS_PLUS if x.zero.get(n, 0) > n.endswith("size")],
        "zero_optimization.{found[0]}: ZeRO++ is {unavailable}. Try leaving it out",
        THIS_VERSION,
    ),
    Rule(
        "fp16-in-a-pipeline-unavailable",
        lambda x: x.training.precision == "fp16" and x.degrees.pipeline > 1,
        "training.precision = fp16 with parallel.pipeline = {x.degrees.pipeline} is "
        "{unavailable}. Try training.precision = bf16",
        THIS_VERSION,
    ),
    Rule(
        "stage-0-unavailable",
        lambda x: x.zero_stage == 0 and not _clips_wrongly(x) and not _is_unfused(x),
        "zero_optimization.stage = 0: checkpoints of unpartitioned optimizers are {unavailable}. "
        "Try profile 'zero1', which holds the same on one rank",
        THIS_VERSION,
    ),
)

WARNINGS: tuple[Rule, ...] = (
    Rule(
        "warm-up-outlasts-the-run",
        lambda x: (
            x.training.stage != "b"  # whose phases have their own
            and x.training.warmup_steps >= x.training.num_steps
        ),
        lambda x: (
            f"training.warmup_steps = {x.training.warmup_steps} with a run of "
            f"{x.training.num_steps} steps: the peak learning rate is never reached. Try "
            f"training.warmup_steps = {x.training.num_steps // 10}"
        ),
        "linear warm-up, then cosine",
    ),
    Rule(
        "dear-newton-schulz",
        lambda x: bool(ratio_warning(x.config)),
        lambda x: ratio_warning(x.config),
        "5 (4 n^2 m + 2 n^3) FLOPs of an n x m matrix, once a step whatever the batch",
    ),
    Rule(
        "half-precision-on-cpu",
        lambda x: x.device == "cpu" and x.training.precision == "bf16",
        "training.precision = {x.training.precision} on CPUs: those without native support "
        "multiply in it 60 times slower than in fp32, and the plan's times are theirs; a run "
        "measures both when it starts. Try training.precision = fp32 unless it says that bf16 pays",
        "measured on two AVX2 cores: 1.2 GFLOP/s in bf16, 80 in fp32",
    ),
)
