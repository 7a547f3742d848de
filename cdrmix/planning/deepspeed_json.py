"""Reads a DeepSpeed profile and refuses keys that DeepSpeed would silently ignore.

DeepSpeed 0.19.8 ignores unknown top-level keys, and a key that belongs to the run (batch size,
precision) would be set in two places. So the allowed keys of a profile are listed here with the
kind of their values; a test compares the list with the installed DeepSpeed.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cdrmix.config.load import shipped
from cdrmix.config.problems import shown
from cdrmix.errors import PlanError

DEEPSPEED_VERSION = "0.19.8"

# By key: a type, a tuple of values, a dict of nested keys, or `dict` for a section whose keys
# DeepSpeed itself checks.
Allowed = dict[str, Any]

_DEVICES = ("none", "cpu", "nvme")
_FLOAT_TYPES = ("fp32", "fp16", "bf16")

_OFFLOAD_PARAM: Allowed = {
    "device": _DEVICES,
    "nvme_path": str,
    "buffer_count": int,
    "buffer_size": int,
    "max_in_cpu": int,
    "pin_memory": bool,
}
_OFFLOAD_OPTIMIZER: Allowed = {
    "device": _DEVICES,
    "nvme_path": str,
    "buffer_count": int,
    "pin_memory": bool,
    "pipeline_read": bool,
    "pipeline_write": bool,
    "fast_init": bool,
    "ratio": float,
    "super_offload": bool,
    "cpuadam_cores_perc": float,
}
ZERO_KEYS: Allowed = {
    "stage": (0, 1, 2, 3),
    "contiguous_gradients": bool,
    "reduce_scatter": bool,
    "reduce_bucket_size": int,
    "use_multi_rank_bucket_allreduce": bool,
    "allgather_partitions": bool,
    "allgather_bucket_size": int,
    "overlap_comm": bool,
    "load_from_fp32_weights": bool,
    "elastic_checkpoint": bool,
    "offload_param": _OFFLOAD_PARAM,
    "offload_optimizer": _OFFLOAD_OPTIMIZER,
    "sub_group_size": int,
    "stage3_prefetch_bucket_size": int,
    "stage3_param_persistence_threshold": int,
    "stage3_model_persistence_threshold": int,
    "stage3_max_live_parameters": int,
    "stage3_max_reuse_distance": int,
    "stage3_gather_16bit_weights_on_model_save": bool,
    "stage3_use_all_reduce_for_fetch_params": bool,
    "stage3_allgather_sequential": bool,
    "ignore_unused_parameters": bool,
    "round_robin_gradients": bool,
    "parameter_alignment": bool,
    "zero_hpz_partition_size": int,
    "zero_quantized_weights": bool,
    "zero_quantized_nontrainable_weights": bool,
    "zero_quantized_gradients": bool,
    "memory_efficient_linear": bool,
    "pipeline_loading_checkpoint": bool,
    "override_module_apply": bool,
    "log_trace_cache_warnings": bool,
    "enable_sanity_checks": bool,
    "save_muon_momentum_buffer_in_memory": bool,
    "leaf_module": dict,
}
PROFILE_KEYS: Allowed = {
    "zero_optimization": ZERO_KEYS,
    "zero_allow_untested_optimizer": bool,
    "communication_data_type": _FLOAT_TYPES,
    "pipeline": {"pipe_partitioned": bool, "grad_partitioned": bool},
    "steps_per_print": int,
    "wall_clock_breakdown": bool,
    "memory_breakdown": bool,
    "comms_logger": dict,
    "flops_profiler": dict,
}

_OLD_NAME = "an old name. Give"
# Settings that a profile must not have, with the reason and advice.
REFUSED_KEYS = {
    "data_types": "gradients are summed in float32, as bf16 loses small ones over many micro-steps",
    "zero_optimization.legacy_stage1": "DeepSpeed 0.19 has it no more",
    "zero_optimization.stage3_module_granularity_threshold": (
        "blocks meet parameters that it did not gather"
    ),
    "zero_optimization.compute_grad_norm": "the gradient norm is always taken: it is logged",
    "zero_optimization.zenflow": "ZenFlow is not supported",
    "zero_optimization.cpu_offload": f"{_OLD_NAME} zero_optimization.offload_optimizer",
    "zero_optimization.cpu_offload_param": f"{_OLD_NAME} zero_optimization.offload_param",
    "zero_optimization.cpu_offload_use_pin_memory": f"{_OLD_NAME} pin_memory where it offloads",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        f"{_OLD_NAME} stage3_gather_16bit_weights_on_model_save"
    ),
}
# Settings of the run: key of DeepSpeed -> path in the YAML.
OWNED_BY_YAML = {
    "train_batch_size": "training.global_batch_size",
    "train_micro_batch_size_per_gpu": "training.micro_batch_size",
    "gradient_accumulation_steps": "training.global_batch_size and training.micro_batch_size",
    "gradient_clipping": "training.gradient_clipping",
    "fp16": "training.precision",
    "bf16": "training.precision",
    "bfloat16": "training.precision",
    "torch_autocast": "training.precision",
    "optimizer": "training.learning_rate, weight_decay, beta1, beta2 and epsilon",
    "scheduler": "training.schedule, learning_rate, min_learning_rate and warmup_steps",
    "activation_checkpointing": "training.activation_checkpointing",
    "tensor_parallel": "parallel.tensor",
    "expert_parallel": "parallel.expert",
    "sequence_parallel_size": "parallel.sequence",
}

_KINDS = {
    int: "a whole number from 0",
    float: "a number from 0",
    bool: "true or false",
    str: "text",
    dict: "a section",
}


def profile_path(profile: str) -> Path:
    """Returns the file of a profile; raises PlanError if none of that name is shipped."""
    if profile.endswith(".json") or "/" in profile:
        return Path(profile)
    known = {file.stem: file for file in sorted(shipped("ds_configs").glob("*.json"))}
    if profile in known:
        return known[profile]
    near = difflib.get_close_matches(profile, known, n=1)
    advice = f"Did you mean '{near[0]}'? " if near else ""
    raise PlanError(
        f"--profile {profile}: unknown profile. {advice}Known: {', '.join(known)}, or a path to a "
        "JSON file"
    )


def read_profile(path: Path) -> dict[str, Any]:
    """Reads the settings of a profile; raises PlanError with all in the file that is none."""

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in pairs:
            if key in values:
                raise PlanError(f"{path}: {key}: this key stands here a second time")
            values[key] = value
        return values

    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text, object_pairs_hook=without_duplicates)
    except FileNotFoundError:
        raise PlanError(f"{path}: no such file") from None
    except OSError as error:
        raise PlanError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise PlanError(f"{path}: not UTF-8 text ({error.reason} at {error.start})") from None
    except json.JSONDecodeError as error:
        lines = text.splitlines()[error.lineno - 1 : error.lineno]
        where = f"{path}: line {error.lineno}, column {error.colno}: {error.msg}"
        raise PlanError("\n  ".join([where, *lines])) from None
    if not isinstance(values, dict):
        raise PlanError(f"{path}: given {shown(values)}, allowed is an object of settings")
    problems = list(_problems(values, PROFILE_KEYS, ""))
    if problems:
        raise PlanError("\n".join(f"{path}: {problem}" for problem in problems))
    return values


def _problems(values: dict[str, Any], allowed: Allowed, path: str) -> Iterator[str]:
    for key, value in values.items():
        place = f"{path}{key}"
        kind = allowed.get(key)
        if place in OWNED_BY_YAML:
            yield f"{place}: belongs to the run, not to a profile. Set {OWNED_BY_YAML[place]}"
        elif place in REFUSED_KEYS:
            yield f"{place}: {REFUSED_KEYS[place]}"
        elif kind is None:
            near = difflib.get_close_matches(key, allowed, n=1)
            advice = f" Did you mean '{near[0]}'?" if near else ""
            yield (
                f"{place}: unknown key (DeepSpeed would ignore it).{advice} "
                f"Known: {', '.join(sorted(allowed))}"
            )
        elif isinstance(kind, dict) and isinstance(value, dict):
            yield from _problems(value, kind, f"{place}.")
        elif isinstance(kind, tuple):
            if isinstance(value, bool) or value not in kind:
                words = ", ".join(map(str, kind))
                yield f"{place}: given {shown(value)}, allowed is one of {words}"
        else:
            python_type = dict if isinstance(kind, dict) else kind
            has_kind = isinstance(value, python_type)
            if kind in (int, float):
                # true is a number to Python, and DeepSpeed files write whole numbers as 5e8
                is_number = isinstance(value, int | float) and not isinstance(value, bool)
                is_whole = kind is float or (is_number and float(value).is_integer())
                has_kind = is_number and value >= 0 and is_whole
            if not has_kind:
                yield f"{place}: given {shown(value)}, allowed is {_KINDS[python_type]}"
