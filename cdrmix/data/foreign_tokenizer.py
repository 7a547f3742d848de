"""Tokenizers of others: any tokenizer.json of the package tokenizers.

Texts are encoded as `tokenizers` encodes them, but for special tokens, which never come from text:
their names are cut like other words. What the file says about truncation, padding and dropout is
left out, as a data set has all tokens of a text, and the same ones each time.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import tokenizers

from cdrmix.data.special_tokens import Choices, SpecialTokens, special_tokens, unknown_token
from cdrmix.data.tokenizer_base import TOKENIZER_FILE, Tokenizer
from cdrmix.errors import DataError

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Settings of models that cut a text another way each time (BPE; Unigram).
_RANDOM = ("dropout", "alpha", "nbest_size")
_MALFORMED = (
    AttributeError,
    IndexError,
    KeyError,
    OverflowError,
    RecursionError,
    TypeError,
    ValueError,
)


class ForeignTokenizer(Tokenizer):
    """A tokenizer that this package has not trained.

    Attributes:
        tokens: names of its special tokens.
    """

    kind = "foreign"

    def __init__(
        self,
        first: tokenizers.Tokenizer,
        later: tokenizers.Tokenizer,
        tokens: SpecialTokens,
        unknown: str | None,
    ) -> None:
        """Makes one of two engines.

        Args:
            first, later: for texts that begin a document, and for those that continue one.
            unknown: token for unknown characters.
        """
        self._first = first
        self._later = later
        vocabulary = first.get_vocab(with_added_tokens=True)
        self._ids = frozenset(vocabulary.values())
        self.vocab_size = max(self._ids) + 1
        self.eos_id = vocabulary[tokens.eos]
        self.pad_id = vocabulary[tokens.pad]
        self.roles = {role: vocabulary[name] for role, name in tokens.roles.items()}
        if tokens.prefix is None:
            prefix_ids = _own_prefix(first)
        else:
            prefix_ids = tuple(vocabulary[name] for name in tokens.prefix)
        # The EOS before each document is the prefix already.
        self.document_prefix = prefix_ids[prefix_ids[:1] == (self.eos_id,) :]
        prefix = tuple(str(first.id_to_token(id)) for id in self.document_prefix)
        self.tokens = tokens.model_copy(update={"prefix": prefix})
        added = first.get_added_tokens_decoder().items()
        special = {id for id, token in added if token.special and not _is_byte(token.content)}
        if unknown is not None:
            special.discard(vocabulary.get(unknown, -1))  # text does give this one
        self._never_text = special | {self.eos_id, *self.document_prefix, *self.roles.values()}
        self._spelled: dict[int, list[int]] = {}  # by id, ids of the characters of its name

    def encode(self, text: str, *, continues: bool = False) -> list[int]:
        """Ids of `text`; the name of a special token inside it is text like any other."""
        return self._encode(self._later if continues else self._first, [text])[0]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text, encoded on all cores, unless TOKENIZERS_PARALLELISM is false."""
        return self._encode(self._first, texts)

    def _encode(self, engine: tokenizers.Tokenizer, texts: list[str]) -> list[list[int]]:
        # The fast way leaves out the places of tokens in the text, which take half of the time.
        try:
            encoded = engine.encode_batch_fast(texts, add_special_tokens=False)
        except TypeError:  # half of a surrogate pair, which UTF-8 cannot hold
            whole = [text.encode("utf-16", "surrogatepass") for text in texts]
            texts = [text.decode("utf-16", "replace") for text in whole]
            encoded = engine.encode_batch_fast(texts, add_special_tokens=False)
        return [self._without_special(each.ids) for each in encoded]

    def _without_special(self, ids: list[int]) -> list[int]:
        """Spells out special tokens, which some models find among their words (Unigram)."""
        if self._never_text.isdisjoint(ids):
            return ids
        return [piece for id in ids for piece in self._spell(id)]

    def _spell(self, id: int) -> list[int]:
        if id not in self._never_text:
            return [id]
        if id not in self._spelled:
            characters = list(str(self._later.id_to_token(id)))
            encoded = self._later.encode_batch_fast(characters, add_special_tokens=False)
            ids = (piece for each in encoded for piece in each.ids)
            self._spelled[id] = [piece for piece in ids if piece not in self._never_text]
        return self._spelled[id]

    def decode(self, ids: Iterable[int], *, continues: bool = False) -> str:
        """Text of `ids`, with special tokens by name, as the tokenizer's own decoder writes it.

        U+FFFD for an id without a token and for bytes that are not UTF-8.
        """
        text: list[str] = []
        for is_known, run in groupby(map(int, ids), self._ids.__contains__):
            if not is_known:
                text += [_REPLACEMENT for _ in run]
                continue
            engine = self._later if continues or text else self._first
            text.append(engine.decode(list(run), skip_special_tokens=False))
        return "".join(text)


def load_foreign(folder: Path, content: Any, choices: Choices) -> ForeignTokenizer:
    """Makes the tokenizer of a folder.

    Args:
        content: its parsed tokenizer.json.
        choices: for special tokens, before what the files of the folder say.
    Raises:
        DataError: if it is damaged, of an unknown kind, or names no EOS.
    """
    path = folder / TOKENIZER_FILE
    try:
        if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
            raise ValueError("it has no model")
        tokens = special_tokens(folder, content, choices)
        # The others keep their flag: a vocabulary may have added words that are text.
        special = {tokens.eos, tokens.pad, *(tokens.prefix or ()), *tokens.roles.values()}
        added = content.get("added_tokens") or []
        marked = [
            each | {"special": True} if each["content"] in special else each for each in added
        ]
        content = whole_and_certain(content) | {"added_tokens": marked}
        first = _engine(content)
        continuing = _continuing(content)
        later = first if continuing == content else _engine(continuing)
        return ForeignTokenizer(first, later, tokens, unknown_token(content["model"]))
    except _MALFORMED as error:
        raise DataError(
            f"{path}: not a tokenizer.json of the package tokenizers "
            f"{tokenizers.__version__} ({type(error).__name__}: {error}). Copy it again from where "
            "it is whole; one of a later version needs a later `pip install tokenizers`."
        ) from error


def whole_and_certain(content: dict[str, Any]) -> dict[str, Any]:
    """A parsed tokenizer.json that gives all ids of a text, and the same ones each time."""
    model = {key: value for key, value in content["model"].items() if key not in _RANDOM}
    return content | {"model": model, "truncation": None, "padding": None}


def _engine(content: dict[str, Any]) -> tokenizers.Tokenizer:
    model = content["model"]
    # Reading a BPE with others ends the process, in tokenizers 0.23.
    if mark := model.get("continuing_subword_prefix"):
        merges = model.get("merges") or []
        pairs = (each.split(" ") if isinstance(each, str) else each for each in merges)
        if not all(second.startswith(mark) for _, second in pairs):
            raise ValueError(f"a merge has a second part without {mark!r}")
    with _faults_as_values():
        engine = tokenizers.Tokenizer.from_str(json.dumps(content))
        engine.encode_special_tokens = True
        # The second is no character: a vocabulary that lacks some and has no token for unknown
        # ones would fail at the first document that has them.
        engine.encode_batch_fast(["a", "\U0010ffff"], add_special_tokens=False)
    return engine


@contextlib.contextmanager
def _faults_as_values() -> Iterator[None]:
    """Makes a ValueError of what the package tokenizers raises about a file."""
    try:
        yield
    # Exception itself, and where its own code is wrong a PanicException, which is none.
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise ValueError(str(error)) from error
        raise


def _own_prefix(engine: tokenizers.Tokenizer) -> tuple[int, ...]:
    """Ids that the tokenizer puts before a text by itself."""
    with _faults_as_values():
        encoding = engine.encode("a", add_special_tokens=True)
    length = next((i for i, is_put in enumerate(encoding.special_tokens_mask) if not is_put), 0)
    return tuple(encoding.ids[:length])


def _is_byte(name: str) -> bool:
    """True for the token of a single byte, as <0x0A>, for characters without a token."""
    return len(name) == 6 and name.startswith("<0x") and name.endswith(">")


def _continuing(content: dict[str, Any]) -> dict[str, Any]:
    """tokenizer.json without the blank that it puts before a text, or takes away when decoding."""
    return content | {
        "normalizer": _without_blank(content.get("normalizer"), "normalizers", drops="Prepend"),
        "pre_tokenizer": _without_blank(content.get("pre_tokenizer"), "pretokenizers"),
        "decoder": _without_blank(content.get("decoder"), "decoders", drops="Strip"),
    }


def _without_blank(part: Any, parts: str, *, drops: str = "") -> Any:
    """A component without its blank; `drops` is the kind that does nothing else."""
    if not isinstance(part, dict):
        return part
    kind = part.get("type")
    if kind == "Sequence":
        inner = _each_without_blank(part[parts], parts, drops)
        return part | {parts: list(inner)}
    if kind == drops:
        return None
    if kind == "Metaspace":
        kept = {key: value for key, value in part.items() if key != "add_prefix_space"}
        return kept | {"prepend_scheme": "never"}
    # In a decoder it says nothing, and another engine would take as much time and memory again.
    if kind == "ByteLevel" and parts != "decoders" and part.get("add_prefix_space"):
        return part | {"add_prefix_space": False}
    return part


def _each_without_blank(components: list[Any], parts: str, drops: str) -> Iterator[Any]:
    for each in components:
        inner = _without_blank(each, parts, drops=drops)
        if inner is not None:
            yield inner
