"""The model's configuration, its code and its tokenizer as transformers reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers.processors import TemplateProcessing
from transformers import GenerationConfig

from cdrmix.config.model import ModelConfig
from cdrmix.config.schema import Config
from cdrmix.data.foreign_tokenizer import whole_and_certain
from cdrmix.data.shards import read_regular
from cdrmix.data.tokenizer import EOS, PAD, SPECIAL_TOKENS, load_tokenizer
from cdrmix.data.tokenizer_base import MAX_TOKENIZER_BYTES, TOKENIZER_FILE, Tokenizer
from cdrmix.errors import StateError
from cdrmix.export.configuration_cdrmix import LAYER_KINDS, CDRMixConfig
from cdrmix.export.modeling_cdrmix import CDRMixForCausalLM
from cdrmix.models.block import NORM_EPS

CODE_FILES = ("configuration_cdrmix.py", "modeling_cdrmix.py")
PREFIX = "model."  # of a parameter's name, before the logical one of checkpoints
_AUTO_MAP = {
    "AutoConfig": "configuration_cdrmix.CDRMixConfig",
    "AutoModel": "modeling_cdrmix.CDRMixModel",
    "AutoModelForCausalLM": "modeling_cdrmix.CDRMixForCausalLM",
}


def check_translatable(model: ModelConfig) -> None:
    """Raises StateError if `modeling_cdrmix.py` does not know a part of the model."""
    unknown = sorted(set(model.layer_kinds()) - set(LAYER_KINDS))
    reasons = [f"it has no blocks of the type {', '.join(unknown)}"] if unknown else []
    if model.ffn_activation != "squared_relu":
        reasons.append(f"its feed-forwards know no model.ffn_activation = {model.ffn_activation}")
    if model.moe is not None and model.has_dense_layers:
        reasons.append("all its feed-forwards are of experts or none is (model.moe.layers)")
    if reasons:
        raise StateError(
            "--format hf writes its own code of the model, modeling_cdrmix.py, and "
            f"{'; '.join(reasons)}. Models of these parts are evaluated and continued from their "
            "checkpoints: cdrmix evaluate, cdrmix generate, training.start_from"
        )


def model_config(config: Config, tokenizer: Tokenizer, dtype: torch.dtype) -> CDRMixConfig:
    """Translates the configuration of a run for transformers."""
    model: ModelConfig = config.model
    ranks = model.low_rank_sizes()
    experts: dict[str, Any] = {}
    if model.moe is not None:
        experts = {
            "num_experts": model.moe.num_experts,
            "num_experts_per_tok": model.moe.top_k,
            "moe_intermediate_size": model.moe.expert_hidden_size,
        }
    further: dict[str, Any] = {} if model.mtp is None else {"mtp": model.mtp.model_dump()}
    translated = CDRMixConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        layer_kinds=list(model.layer_kinds()),
        intermediate_size=model.ffn_hidden_size,
        **experts,
        **further,
        decay_rank=ranks.decay,
        iclr_rank=ranks.iclr,
        value_rank=ranks.value,
        gate_rank=ranks.gate,
        rope_theta=model.rope_theta,
        rms_norm_eps=NORM_EPS,
        max_position_embeddings=config.training.sequence_length,
        initializer_range=model.init_std,
        # The EOS that each document in training follows, if there is no other prefix.
        bos_token_id=tokenizer.prefix_ids[0],
        eos_token_id=tokenizer.eos_id,
        pad_token_id=tokenizer.pad_id,
        architectures=[CDRMixForCausalLM.__name__],
        dtype=str(dtype).removeprefix("torch."),
    )
    translated.auto_map = _AUTO_MAP  # the classes of each Auto class, in files of the folder
    return translated


def parameter_shapes(config: CDRMixConfig) -> dict[str, tuple[int, ...]]:
    """Shape of each parameter by its logical name, in the order of the model."""
    with torch.device("meta"):
        model = CDRMixForCausalLM(config)
    parameters = model.named_parameters()  # the tied head is not named twice
    return {name.removeprefix(PREFIX): tuple(each.shape) for name, each in parameters}


def small_files(config: CDRMixConfig, tokenizer_folder: Path) -> dict[str, str]:
    """Text of each file but weights, card and metadata, by its name."""
    here = Path(__file__).parent
    files = {name: (here / name).read_text(encoding="utf-8") for name in CODE_FILES}
    files["config.json"] = config.to_json_string()
    return files | plain_files(config, tokenizer_folder)


def plain_files(config: CDRMixConfig, tokenizer_folder: Path) -> dict[str, str]:
    """Text of the files that do not depend on the code of the model: tokenizer and generation."""
    generation = GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )
    files = {"generation_config.json": generation.to_json_string()}
    tokenizer = load_tokenizer(tokenizer_folder)
    ids = (tokenizer.prefix_ids[0], tokenizer.eos_id, tokenizer.pad_id)
    text = tokenizer_text(tokenizer_folder)
    engine = tokenizers.Tokenizer.from_str(text)
    bos, eos, pad = map(engine.id_to_token, ids)
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # takes tokenizer.json as it is
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": pad,
        "padding_side": "left",
        "model_max_length": config.max_position_embeddings,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
    }
    if tokenizer.kind == "cdrmix":
        names = [token for token in SPECIAL_TOKENS if token not in (EOS, PAD)]
        described["extra_special_tokens"] = names
    files[TOKENIZER_FILE] = text
    files["tokenizer_config.json"] = json.dumps(described, indent=2) + "\n"
    return files


def tokenizer_text(folder: Path) -> str:
    """Text of tokenizer.json of a run, changed to begin each text as documents in training do."""
    content = json.loads(read_regular(folder / TOKENIZER_FILE, MAX_TOKENIZER_BYTES))
    engine = tokenizers.Tokenizer.from_str(json.dumps(whole_and_certain(content)))
    # transformers 5 ignores `add_bos_token` in tokenizer_config.json beside a tokenizer.json.
    ids = load_tokenizer(folder).prefix_ids
    prefix = [(str(engine.id_to_token(id)), id) for id in ids]
    first = " ".join(name for name, _ in prefix)
    second = " ".join(f"{name}:1" for name, _ in prefix)
    engine.post_processor = TemplateProcessing(
        single=f"{first} $A", pair=f"{first} $A {second} $B:1", special_tokens=prefix
    )
    return engine.to_str(pretty=True)
