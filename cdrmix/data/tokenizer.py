"""Tokenizers of this package, byte-level BPE, and the loading of any tokenizer.

They are trained with Hugging Face tokenizers and encode with tiktoken, which, loaded from the same
merges and the same pattern, gives the same ids 6 to 8 times as fast per CPU-second.
"""

import json
import os
from collections.abc import Iterable
from itertools import chain, islice
from pathlib import Path
from typing import Any

import tiktoken
import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from cdrmix.data.foreign_tokenizer import Choices, load_foreign
from cdrmix.data.shards import read_regular
from cdrmix.data.tokenizer_base import (
    CHAIN_ROLES,
    FIM_ROLES,
    MAX_TOKENIZER_BYTES,
    TOKENIZER_FILE,
    Tokenizer,
)
from cdrmix.errors import DataError

__all__ = (
    "MAX_TOKENIZER_BYTES",
    "TOKENIZER_FILE",
    "Choices",
    "Tokenizer",
    "load_tokenizer",
    "train_tokenizer",
)

EOS = "<|eos|>"
PAD = "<|pad|>"
FIM_TOKENS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
THOUGHT = "<|thought|>"
ANSWER = "<|answer|>"
MEMORY = "<|memory|>"
# In this order they take the lowest ids. They are never produced from text.
SPECIAL_TOKENS = (EOS, "<|bos|>", PAD, *FIM_TOKENS, "<|fim_pad|>", THOUGHT, ANSWER, MEMORY)

# GPT-4's pre-tokenisation: a word may take one sign or space before it, digits go by three, line
# ends join the characters before them. On Python source it gives 3.78 bytes per
# token where GPT-2's pattern gives 3.71 (4,096 tokens), and 4.67 against 4.35 (50,272). GPT-4's
# rule for English contractions is left out: the word rule covers "don't", and in code it would
# cut 'self' into 's and elf.
_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
# tiktoken's pattern engine overflows its stack on about a million blanks in a row.
_BLANK_BLOCK = 2**16
_FIRST_MERGE = len(SPECIAL_TOKENS) + 256
# Vocabularies of tokenizers that have no tokenizer.json.
_SLOW_FILES = (
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
)
_UNASSIGNED = "\N{REPLACEMENT CHARACTER}".encode()
# Byte behind each character of a vocabulary entry: GPT-2's table, which writes an unprintable byte
# as the character at 256 plus its index among those.
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_UNPRINTABLE = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE}
_BYTE_OF |= {chr(256 + index): byte for index, byte in enumerate(_UNPRINTABLE)}


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
    """Trains a byte-level BPE tokenizer with at most `vocab_size` tokens, special ones included.

    Raises:
        DataError: if `vocab_size` has no room for the special tokens and the 256 bytes.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    smallest = len(SPECIAL_TOKENS) + len(alphabet)
    if vocab_size < smallest:
        raise DataError(
            f"vocab_size = {vocab_size}: at least {smallest} tokens are needed, "
            f"{len(SPECIAL_TOKENS)} special ones and {len(alphabet)} bytes."
        )
    # No normaliser: ids must give back every byte of the text.
    tokenizer = tokenizers.Tokenizer(models.BPE())
    by_pattern = pre_tokenizers.Split(Regex(_PATTERN), behavior="isolated")
    by_byte = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([by_pattern, by_byte])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


class TrainedTokenizer(Tokenizer):
    """A tokenizer of `train_tokenizer`: every byte of a text comes back."""

    kind = "cdrmix"
    document_prefix = ()

    def __init__(self, encoding: tiktoken.Encoding) -> None:
        self._encoding = encoding
        self.vocab_size = encoding.n_vocab
        self.eos_id, self.pad_id = map(encoding.encode_single_token, (EOS, PAD))
        names = dict(zip((*FIM_ROLES, *CHAIN_ROLES), (*FIM_TOKENS, THOUGHT, ANSWER), strict=True))
        names["memory"] = MEMORY
        self.special_ids = frozenset(map(encoding.encode_single_token, SPECIAL_TOKENS))
        self.roles = {role: encoding.encode_single_token(name) for role, name in names.items()}

    def encode(self, text: str, *, continues: bool = False) -> list[int]:
        """Ids of `text`; the name of a special token inside it is text like any other.

        Equal to the result of Hugging Face tokenizers, except for text with 65,536 blanks in a row,
        which is cut there. Text that continues another has the same ids.
        """
        return [i for piece in _cut(text) for i in self._encoding.encode_ordinary(piece)]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text, encoded on all cores that this process may use."""
        # One flat batch, so that the threads share the pieces of a long text.
        pieces = [_cut(text) for text in texts]
        flat = list(chain.from_iterable(pieces))
        threads = len(os.sched_getaffinity(0))
        encoded = iter(self._encoding.encode_ordinary_batch(flat, num_threads=threads))
        return [list(chain.from_iterable(islice(encoded, len(cut)))) for cut in pieces]

    def decode(self, ids: Iterable[int], *, continues: bool = False) -> str:
        """Text of `ids`, with special tokens by name, whether it continues another or not.

        U+FFFD for an id without a token (a model may have more rows than tokens) and for bytes that
        are not UTF-8.
        """
        decode = self._encoding.decode_single_token_bytes
        pieces = (decode(i) if 0 <= i < self.vocab_size else _UNASSIGNED for i in map(int, ids))
        return b"".join(pieces).decode("utf-8", errors="replace")


def _cut(text: str) -> list[str]:
    """Cuts text at whole blocks of blanks; nearly always it stays in one piece."""
    if len(text) < _BLANK_BLOCK:
        return [text]
    starts = range(_BLANK_BLOCK, len(text) - _BLANK_BLOCK + 1, _BLANK_BLOCK)
    cuts = [start for start in starts if text[start : start + _BLANK_BLOCK].isspace()]
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def load_tokenizer(folder: Path, choices: Choices | None = None) -> Tokenizer:
    """Loads the tokenizer of a folder: of this package, or any of the package tokenizers.

    Args:
        choices: for the special tokens of a foreign one, before what its files say.
    Raises:
        DataError: if there is none, it is damaged or too large, or names no EOS.
    """
    path = Path(folder) / TOKENIZER_FILE
    try:
        content = json.loads(read_regular(path, MAX_TOKENIZER_BYTES).decode())
    except OSError as error:
        slow = next((name for name in _SLOW_FILES if (path.parent / name).is_file()), None)
        if slow is not None and isinstance(error, FileNotFoundError):
            raise DataError(
                f"{path}: not found, and {slow} alone is not read. Convert it once, with "
                'transformers and sentencepiece: python -c "from transformers import '
                f"AutoTokenizer; AutoTokenizer.from_pretrained('{folder}')"
                ".save_pretrained('NEW_FOLDER')\""
            ) from error
        raise DataError(
            f"{path}: cannot be read: {error.strerror}. A folder of token shards holds its "
            "tokenizer; copy it from there, or build the folder again."
        ) from error
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path}: not a tokenizer.json ({type(error).__name__}: {error}). Copy it again from "
            "where it is whole, or build the folder again."
        ) from error
    if not _claims_to_be_ours(content):
        return load_foreign(Path(folder), content, choices or Choices())
    if choices is not None and choices != Choices():
        raise DataError(
            f"{path}: was trained by this package, which decides its special tokens. Leave out "
            "tokenizer.eos_token, tokenizer.add_bos and tokenizer.roles."
        )
    try:
        return TrainedTokenizer(_to_tiktoken(content))
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path}: not a byte-level BPE tokenizer as this package trains it "
            f"({type(error).__name__}: {error}). Copy it again from where it is whole, or build "
            "the folder again."
        ) from error


def _claims_to_be_ours(content: Any) -> bool:
    """True for a parsed tokenizer.json with most of our special tokens: others have a few."""
    try:
        names = {token["content"] for token in content["added_tokens"]}
        return 2 * len(names.intersection(SPECIAL_TOKENS)) > len(SPECIAL_TOKENS)
    except (KeyError, TypeError):
        return False


def _to_tiktoken(content: dict[str, Any]) -> tiktoken.Encoding:
    """The encoding that a parsed tokenizer.json describes; any error if it is of another kind."""
    # The file may be untrusted, and another pattern could take for ever on some text.
    if content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] != _PATTERN:
        raise ValueError("it cuts text by another pattern")
    special = {token["content"]: token["id"] for token in content["added_tokens"]}
    if tuple(sorted(special, key=special.__getitem__)) != SPECIAL_TOKENS:
        raise ValueError(f"its special tokens are {', '.join(special)}")
    vocabulary = content["model"]["vocab"]
    # tiktoken ends the process at ids that stand twice, or where a byte has no token.
    if sorted(vocabulary.values()) != list(range(len(vocabulary))):
        raise ValueError("its ids are not 0, 1, 2, ...")
    if missing := [name for name in (*SPECIAL_TOKENS, *_BYTE_OF) if name not in vocabulary]:
        raise ValueError(f"it has no token for {missing[0]!r}")
    if special != {name: vocabulary[name] for name in SPECIAL_TOKENS}:
        raise ValueError("its special tokens have two ids")
    merged = ["".join(pair) for pair in content["model"]["merges"]]
    # tiktoken merges by the id of the result, Hugging Face by the place in the list of merges.
    if [vocabulary[token] for token in merged] != list(range(_FIRST_MERGE, len(vocabulary))):
        raise ValueError("its ids are not in the order of its merges")
    ranks = {
        bytes(_BYTE_OF[character] for character in token): rank
        for token, rank in vocabulary.items()
        if token not in special
    }
    return tiktoken.Encoding(
        TOKENIZER_FILE, pat_str=_PATTERN, mergeable_ranks=ranks, special_tokens=special
    )
