"""Folders of tokenizers as models of Hugging Face have them, made in a moment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

TEXTS = [Path(json.__file__).with_name(name).read_text() for name in ("decoder.py", "encoder.py")]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
KINDS = ("byte_level", "sentencepiece", "unigram", "wordpiece")


def byte_level() -> Tokenizer:
    """Byte-level BPE with roles that are no special tokens, and an added word, as Qwen's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=alphabet, show_progress=False, special_tokens=[]
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_end|>"])
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>"])
    tokenizer.add_tokens(["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"])
    return tokenizer


def sentencepiece() -> Tokenizer:
    """BPE whose words begin with their blank, with bytes for what it lacks, and BOS: Llama's."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    special = ["<unk>", "<s>", "</s>", *BYTES]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens([AddedToken(f"\u2581<{name}>") for name in ("PRE", "SUF", "MID")])
    tokenizer.add_tokens(["[THINK]", "[/THINK]"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]
    )
    # Neither belongs to a data set.
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding()
    values = json.loads(tokenizer.to_str())
    values["model"]["dropout"] = 0.5
    return Tokenizer.from_str(json.dumps(values))


def unigram() -> Tokenizer:
    """Unigram, whose search finds the names of special tokens among its pieces, as T5's does."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=400,
        special_tokens=["<pad>", "</s>", "<unk>"],
        unk_token="<unk>",
        initial_alphabet=["<", "/", ">"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B:1 </s>:1", special_tokens=[("</s>", 1)]
    )
    return tokenizer


def wordpiece() -> Tokenizer:
    """WordPiece, which loses blanks, as BERT's does."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return tokenizer


_CONFIGS: dict[str, dict[str, Any]] = {
    "byte_level": {"eos_token": "<|endoftext|>", "add_bos_token": False, "bos_token": None},
    "sentencepiece": {"eos_token": {"content": "</s>"}, "bos_token": "<s>", "pad_token": "<unk>"},
    "unigram": {"eos_token": "</s>", "pad_token": "<pad>"},
    "wordpiece": {"eos_token": "[SEP]", "cls_token": "[CLS]", "pad_token": "[PAD]"},
}


def make_folder(folder: Path, kind: str, **changes: Any) -> Path:
    """Makes the folder of a kind; `changes` go into its tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    makers = {
        "byte_level": byte_level,
        "sentencepiece": sentencepiece,
        "unigram": unigram,
        "wordpiece": wordpiece,
    }
    makers[kind]().save(str(folder / "tokenizer.json"))
    config = _CONFIGS[kind] | changes
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
