"""Construction of a Hugging Face model without values, as the plan of a run lays it out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, initialization
from transformers.utils.import_utils import is_flash_attn_2_available

from cdrmix import runtime
from cdrmix.config.base_checks import runs_own_code
from cdrmix.config.schema import Config
from cdrmix.errors import ConfigError
from cdrmix.hf.lora import add_adapters
from cdrmix.hf.model import HuggingFaceModel
from cdrmix.log import get_logger
from cdrmix.planning.plan import Plan

logger = get_logger(__name__)

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def build_model(config: Config, plan: Plan, *, folder: Path | None = None) -> HuggingFaceModel:
    """Builds the model of a folder on this rank's device, in the type of the run; collective.

    Weights are read later, by each rank those of its own share: until then they have no values, but
    for low-rank adapters.

    Args:
        config, plan: of this start.
        folder: with config.json; None: `model.path`.
    Raises:
        ConfigError: on every rank, if its layers cannot be recomputed, or it has no usual head.
    """
    causal = build_causal(config, plan, folder=folder or Path(str(config.model.path)))
    model = causal
    if config.model.lora is not None:
        # before recomputation, for which peft would have gradients of the embeddings computed
        model = add_adapters(causal, config.model.lora, seed=config.training.seed)
    if plan.recomputes_blocks:
        if not causal.supports_gradient_checkpointing:
            raise ConfigError(
                f"training.activation_checkpointing = block: layers of {type(causal).__name__} "
                "cannot be recomputed. Try none"
            )
        causal.activation_checkpointing_enable({"use_reentrant": False})
    return HuggingFaceModel(model, config.model)


def build_causal(config: Config, plan: Plan | None, *, folder: Path) -> Any:
    """Builds transformers' own module, partitioned where the plan has ZeRO-3; None: whole."""
    if runtime.rank() != 0:  # its advice is the same on all ranks
        transformers.logging.set_verbosity_error()
    remote = runs_own_code(folder, config.model.remote_code)
    settings = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=remote)
    _warn_of_length(config, settings)
    dtype = _DTYPES[config.training.precision]
    make = partial(
        AutoModelForCausalLM.from_config, settings, dtype=dtype, trust_remote_code=remote
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(initialization.no_init_weights())
        # Once without memory, for its class, and for its imports: a class that is made inside of
        # zero.Init would lose on leaving it what a decorator did to its constructor (0.19.8).
        with torch.device("meta"):
            attention = _attention(config, make())
        if plan is not None and plan.zero_stage == 3:
            stack.enter_context(_given_types_stay())
            zero = runtime.import_deepspeed().zero
            # the type is that of the settings: one given here would be bf16 on CPUs (0.19.8)
            stack.enter_context(zero.Init(config_dict_or_path=plan.deepspeed))
        with torch.device(runtime.device()):
            causal = make(attn_implementation=attention)
    if causal.get_output_embeddings() is None:
        raise ConfigError(
            f"model.path: {folder}: {type(causal).__name__} has no head of the usual kind, a "
            "linear layer behind the last hidden states"
        )
    causal.tie_weights()  # left out where no values are made
    return causal


def _warn_of_length(config: Config, settings: Any) -> None:
    """Warns, on rank 0, of samples that are longer than those the model was made for."""
    longest = getattr(settings, "max_position_embeddings", None)
    length = config.training.sequence_length
    if runtime.rank() == 0 and longest is not None and length > longest:
        logger.warning(
            "warning: training.sequence_length = %d is more than max_position_embeddings = %d of "
            "model.path: later positions are new to it",
            *(length, longest),
        )


def _attention(config: Config, model: nn.Module) -> str:
    """Name of a model's attention for these devices, with the reason in the log."""
    if not getattr(model, "_supports_sdpa", False):
        name, why = "eager", f"{type(model).__name__} has no faster one"
    elif runtime.use_cpu():
        name, why = "sdpa", "on CPUs"
    elif config.training.precision == "fp32":
        name, why = "sdpa", "FlashAttention has no float32"
    elif not getattr(model, "_supports_flash_attn", False):
        name, why = "sdpa", f"{type(model).__name__} has no FlashAttention"
    elif not is_flash_attn_2_available():
        name, why = "sdpa", "flash-attn is not installed"
    else:
        name, why = "flash_attention_2", "flash-attn is installed"
    logger.info("attention: %s: %s", name, why)
    return name


@contextlib.contextmanager
def _given_types_stay() -> Iterator[None]:
    """Has zero.Init leave the type of a tensor that is made with one; entered before it.

    DeepSpeed would make all tensors of floats in the type of the run, also the frequencies of
    rotary positions, which are float32 in any model (0.19.8, runtime/zero/partition_parameters.py).
    """
    partition_parameters = runtime.import_deepspeed().runtime.zero.partition_parameters
    original = partition_parameters.zero_wrapper_for_fp_tensor_constructor

    def wrapper(
        make: Callable, target_fp_dtype: torch.dtype, target_device: torch.device
    ) -> Callable:
        cast = original(make, target_fp_dtype, target_device)
        as_given = original(make, None, target_device)

        def wrapped(*args: Any, **kwargs: Any) -> torch.Tensor:
            return (cast if kwargs.get("dtype") is None else as_given)(*args, **kwargs)

        return wrapped

    partition_parameters.zero_wrapper_for_fp_tensor_constructor = wrapper
    try:
        yield
    finally:
        partition_parameters.zero_wrapper_for_fp_tensor_constructor = original
