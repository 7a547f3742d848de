"""The model of `widened_targets` as one GGUF file of architecture rwkv7.

llama.cpp's graph of rwkv7 has LayerNorms, as flash-linear-attention has, and a group norm of one
eps for heads of any size.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import torch

from cdrmix.checkpoint.checkpoint_file import CheckpointFile
from cdrmix.checkpoint.files import FileRecord, digest, flat_bytes
from cdrmix.data.tokenizer_base import TOKENIZER_FILE
from cdrmix.errors import StateError
from cdrmix.export.configuration_cdrmix import CDRMixConfig
from cdrmix.export.weights import Target, pieces

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFWriter

MODEL_FILE = "model.gguf"
GROUP_NORM_EPS = 64e-5  # a constant of the graph
# Text is cut into words by a pattern that llama.cpp has under no name; a name of its own makes it
# refuse the vocabulary, where a similar one would give other tokens without a word.
PRE_TOKENIZER = "cdrmix"
_TOKEN_SHIFTS = 2  # of time mix and of channel mix

_OUTSIDE = {
    "model.embeddings.weight": "token_embd.weight",
    "model.layers.0.pre_norm": "token_embd_norm",
    "model.norm": "output_norm",
    "lm_head.weight": "output.weight",
}
_IN_BLOCK = {
    "attn_norm": "attn_norm",
    "ffn_norm": "attn_norm_2",
    "attn.k_k": "time_mix_k_k.weight",
    "attn.k_a": "time_mix_k_a.weight",
    "attn.r_k": "time_mix_r_k.weight",
    "attn.r_proj": "time_mix_receptance",
    "attn.k_proj": "time_mix_key",
    "attn.v_proj": "time_mix_value",
    "attn.o_proj": "time_mix_output",
    "attn.g_norm": "time_mix_ln",
    "ffn.x_k": "channel_mix_lerp_k.weight",
    "ffn.key": "channel_mix_key",
    "ffn.value": "channel_mix_value",
}
_LORA_PARTS = {"0.weight": "1", "2.weight": "2", "2.bias": "0"}


def check_gguf() -> None:
    """Raises StateError if the package is not installed."""
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise StateError(
            "--format gguf needs the package gguf: pip install 'cdrmix[gguf]'"
        ) from error


def gguf_targets(widened: Mapping[str, Target]) -> dict[str, Target]:
    """Renames and regroups tensors as the graph reads them, in float32 where it needs that."""
    targets: dict[str, Target] = {}
    for name, target in widened.items():
        mix = re.fullmatch(r"(model\.layers\.(\d+)\.attn\.x_)([rwkvag])", name)
        if mix is None:
            targets[_name(name)] = target
        elif mix[3] == "r":  # all six in one tensor
            parts = tuple(widened[f"{mix[1]}{letter}"].parts[0] for letter in "rwkvag")
            shape = (6, 1, 1, target.shape[-1])
            fused = Target(shape, parts, target.rounding, target.dtype)
            targets[f"blk.{mix[2]}.time_mix_lerp_fused.weight"] = fused
    for part in "012":  # of block 0: read, and not used
        targets[f"blk.0.time_mix_v{part}.weight"] = targets[f"blk.0.time_mix_a{part}.weight"]
    return {name: _typed(name, target) for name, target in targets.items()}


def _name(name: str) -> str:
    """Name in the file of a tensor of flash-linear-attention."""
    stem, _, kind = name.rpartition(".")
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    if stem in _OUTSIDE:
        return f"{_OUTSIDE[stem]}.{kind}"
    _, _, layer, inner = name.split(".", 3)
    if lora := re.fullmatch(r"attn\.([wavg])_lora\.lora\.(.*)", inner):
        return f"blk.{layer}.time_mix_{lora[1]}{_LORA_PARTS[lora[2]]}.weight"
    if inner in _IN_BLOCK:
        return f"blk.{layer}.{_IN_BLOCK[inner]}"
    return f"blk.{layer}.{_IN_BLOCK[inner.rpartition('.')[0]]}.{kind}"


def _typed(name: str, target: Target) -> Target:
    """Vectors, and the low ranks of the decay, are float32 in every file of this architecture."""
    shape = target.shape
    if name.endswith("time_mix_r_k.weight"):
        shape = (shape[0] * shape[1],)
    is_float = len(shape) != 2 or re.search(r"time_mix_w[12]\.", name) is not None
    dtype = torch.float32 if is_float else target.dtype
    return Target(shape, target.parts, target.rounding, dtype)


def write_gguf(
    folder: Path,
    reader: CheckpointFile,
    targets: Mapping[str, Target],
    config: CDRMixConfig,
    *,
    name: str,
    tokenizer_text: str,
    dtype: torch.dtype,
) -> FileRecord:
    """Writes the file durably, with a piece of a tensor in memory at a time; gives its record.

    Args:
        targets: of `gguf_targets`.
        name: of the model.
        tokenizer_text: content of the exported tokenizer.json.
        dtype: type of the matrices.
    Raises:
        OSError: naming the file.
    """
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFWriter

    path = folder / MODEL_FILE
    types = {
        torch.float32: GGMLQuantizationType.F32,
        torch.float16: GGMLQuantizationType.F16,
        torch.bfloat16: GGMLQuantizationType.BF16,
    }
    reader.open_files()
    writer = GGUFWriter(path, "rwkv7")
    try:
        writer.add_name(name)
        _add_sizes(writer, config, dtype)
        _add_tokenizer(writer, config, tokenizer_text)
        for key, target in targets.items():
            quantization = types[target.dtype]
            shape, size = target.shape, target.num_bytes
            writer.add_tensor_info(key, shape, np.dtype("f4"), size, raw_dtype=quantization)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for target in targets.values():
            streamed = cast("np.ndarray[Any, Any]", _Streamed(target, pieces(reader, target)))
            writer.write_tensor_data(streamed)
        writer.flush()
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        writer.close()
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return {"bytes": path.stat().st_size, "sha256": digest(path)}


class _Streamed:
    """A tensor that is written piece by piece: as much of an array as the writer asks for."""

    def __init__(self, target: Target, parts: Iterator[torch.Tensor]) -> None:
        self.nbytes = target.num_bytes
        self._parts = parts

    def tofile(self, file: IO[bytes]) -> None:
        """Writes the bytes."""
        for part in self._parts:
            file.write(flat_bytes(part).numpy().data)


def _add_sizes(writer: GGUFWriter, config: CDRMixConfig, dtype: torch.dtype) -> None:
    from gguf import LlamaFileType

    file_types = {
        torch.float32: LlamaFileType.ALL_F32,
        torch.float16: LlamaFileType.MOSTLY_F16,
        torch.bfloat16: LlamaFileType.MOSTLY_BF16,
    }
    writer.add_file_type(file_types[dtype])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(2 * config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(0)  # read, and not used
    writer.add_layer_norm_eps(config.rms_norm_eps)
    writer.add_wkv_head_size(config.head_dim)
    writer.add_token_shift_count(_TOKEN_SHIFTS)
    writer.add_decay_lora_rank(config.decay_rank)
    writer.add_iclr_lora_rank(config.iclr_rank)
    writer.add_value_residual_mix_lora_rank(config.value_rank)
    writer.add_gate_lora_rank(config.gate_rank)


def check_tokenizer(text: str, place: Path) -> None:
    """Refuses a tokenizer of which a vocabulary of model `gpt2` would give other tokens.

    Args:
        text: content of the exported tokenizer.json.
        place: its folder, for the message.
    Raises:
        StateError: unless it is a byte-level BPE.
    """
    content = json.loads(text)
    kind = content["model"]["type"]
    before = content.get("pre_tokenizer") or {}
    steps = before.get("pretokenizers", [before])
    if kind != "BPE":
        found = f"is a {kind} model"
    elif "ByteLevel" not in [step.get("type") for step in steps]:
        found = "is a BPE of characters (no pre-tokenizer ByteLevel)"
    else:
        return
    raise StateError(
        f"{place / TOKENIZER_FILE}: {found}, and --format gguf writes byte-level BPE alone. Try "
        "--format hf or fla"
    )


def vocabulary_of(text: str, size: int) -> tuple[list[str], list[int]]:
    """Names and types of the tokens with ids 0 to `size` - 1 of a tokenizer.json, by id.

    Tokens that stand beside the model's own vocabulary, as BOS and EOS of many models do, count.
    """
    from gguf import TokenType

    content = json.loads(text)
    added = {token["id"]: token for token in content.get("added_tokens") or ()}
    by_id = {index: name for name, index in content["model"]["vocab"].items()}
    by_id |= {index: token["content"] for index, token in added.items()}
    tokens: list[str] = []
    kinds: list[int] = []
    for index in range(size):
        tokens.append(by_id.get(index, f"[unused {index}]"))
        kind = TokenType.NORMAL if index in by_id else TokenType.UNUSED
        if index in added:
            kind = TokenType.CONTROL if added[index]["special"] else TokenType.USER_DEFINED
        kinds.append(kind)
    return tokens, kinds


def _add_tokenizer(writer: GGUFWriter, config: CDRMixConfig, text: str) -> None:
    """Adds the vocabulary with its merges, and tokenizer.json as a whole."""
    model = json.loads(text)["model"]
    tokens, kinds = vocabulary_of(text, config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE_TOKENIZER)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    # A merge is a pair, or in files of older versions a text with a blank between.
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    writer.add_token_merges(merges)
    writer.add_string("tokenizer.huggingface.json", text)
    assert isinstance(config.bos_token_id, int), "set by every export"
    assert isinstance(config.eos_token_id, int), "set by every export"
    assert isinstance(config.pad_token_id, int), "set by every export"
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_pad_token_id(config.pad_token_id)
    writer.add_add_bos_token(True)
