"""Names of the special tokens of a foreign tokenizer: EOS, PAD, prefix of a document, roles."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from cdrmix.data.shards import read_regular
from cdrmix.data.tokenizer_base import (
    CHAIN_ROLES,
    FIM_ROLES,
    MAX_SIDE_BYTES,
    ROLES_FILE,
    TOKENIZER_FILE,
    Role,
)
from cdrmix.errors import DataError

# Tokens that known vocabularies have for these roles, in the order in which they are looked for.
_KNOWN: tuple[tuple[tuple[Role, ...], tuple[tuple[str, ...], ...]], ...] = (
    (
        FIM_ROLES,
        (
            ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, this package
            ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
            ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
            ("<PRE>", "<SUF>", "<MID>"),
            ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),  # Code Llama
            ("[PREFIX]", "[SUFFIX]", "[MIDDLE]"),  # Codestral
            # DeepSeek: the hole is where the suffix begins.
            (
                "<\uff5cfim\u2581begin\uff5c>",
                "<\uff5cfim\u2581hole\uff5c>",
                "<\uff5cfim\u2581end\uff5c>",
            ),
        ),
    ),
    (
        CHAIN_ROLES,
        (
            ("<|thought|>", "<|answer|>"),
            ("<think>", "</think>"),  # Qwen 3, DeepSeek R1
            ("[THINK]", "[/THINK]"),  # Magistral
        ),
    ),
    (("memory",), (("<|memory|>",),)),
)


# Looked at in this order. The first two name tokens, the others their ids.
CONFIG_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "config.json",
    "generation_config.json",
)


@dataclass(frozen=True)
class Choices:
    """Special tokens that a user names.

    Attributes:
        eos_token: ends each document; None: as the files of the tokenizer say.
        add_bos: begin each document with BOS; None: as the tokenizer does.
        roles: tokens by role, in place of those that are known.
    """

    eos_token: str | None = None
    add_bos: bool | None = None
    roles: Mapping[Role, str] = field(default_factory=dict)


class SpecialTokens(BaseModel):
    """Names of the special tokens, as tokenizer_roles.json of a data set has them.

    Attributes:
        prefix: tokens that each document begins with; None: not decided yet, those that the
            tokenizer itself puts before a text.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    eos: str
    pad: str
    prefix: tuple[str, ...] | None
    roles: dict[Role, str]


def special_tokens(folder: Path, content: dict[str, Any], choices: Choices) -> SpecialTokens:
    """Finds the special tokens of a foreign tokenizer.

    Args:
        content: its parsed tokenizer.json.
        choices: come before what the files of the folder say.
    Raises:
        DataError: if nothing names EOS, a named token is not in the vocabulary, or two roles have
            the same one.
    """
    names = _Names(content)
    files = {name: _json_object(folder / name) for name in CONFIG_FILES}
    bos = _named_by_files("bos", files, names)
    found = _recorded(folder, names) or _by_files(folder, files, names, bos, choices.eos_token)
    prefix = found.prefix
    if choices.add_bos is not None:
        prefix = _chosen_prefix(folder, choices.add_bos, bos)
    eos = choices.eos_token or found.eos
    roles = {**found.roles, **choices.roles}
    _check_named(folder, names, eos, choices, roles)
    return SpecialTokens(eos=eos, pad=found.pad, prefix=prefix, roles=roles)


def unknown_token(model: Mapping[str, Any]) -> str | None:
    """Name of the token for unknown characters, of the model in a tokenizer.json."""
    unknown = model.get("unk_token")
    if model.get("unk_id") is not None:  # Unigram: a list of pairs of text and score, by id
        unknown = model["vocab"][model["unk_id"]][0]
    return str(unknown) if unknown is not None else None


def _by_files(
    folder: Path,
    files: Mapping[str, Mapping[str, Any]],
    names: _Names,
    bos: str | None,
    chosen_eos: str | None,
) -> SpecialTokens:
    eos = chosen_eos or _named_by_files("eos", files, names)
    if eos is None:
        raise DataError(
            f"{folder}: its tokenizer has no EOS: no eos_token in {' or '.join(CONFIG_FILES[:2])} "
            f"and no eos_token_id in {' or '.join(CONFIG_FILES[2:])}. Name a token of its "
            "vocabulary in the data recipe, tokenizer.eos_token."
        )
    pad = _named_by_files("pad", files, names)
    # Unknown characters give their token, so that it stands in texts.
    pad = eos if pad is None or pad == names.unknown else pad
    # Classes of transformers 4 put BOS there without the help of tokenizer.json.
    adds_bos = files[CONFIG_FILES[0]].get("add_bos_token") is True
    prefix = (bos,) if adds_bos and bos is not None else None
    return SpecialTokens(eos=eos, pad=pad, prefix=prefix, roles=_known_roles(names))


def _chosen_prefix(folder: Path, add_bos: bool, bos: str | None) -> tuple[str, ...]:
    if not add_bos:
        return ()
    if bos is None:
        raise DataError(
            f"{folder}: its tokenizer has no BOS, and tokenizer.add_bos asks for one. Leave it "
            f"out, or name bos_token in {CONFIG_FILES[0]} there."
        )
    return (bos,)


def _check_named(
    folder: Path, names: _Names, eos: str, choices: Choices, roles: Mapping[Role, str]
) -> None:
    """Refuses tokens of the user that the vocabulary lacks, and one token for two purposes."""
    named = {"tokenizer.eos_token": choices.eos_token}
    named |= {f"tokenizer.roles.{role}": token for role, token in choices.roles.items()}
    for key, token in named.items():
        if token is not None and token not in names:
            raise DataError(
                f"{folder}: {key} = {token!r} is not in the vocabulary. Its special tokens: "
                f"{', '.join(names.added[:40])}."
            )
    used: dict[str, str] = {eos: "EOS"}
    for role, token in roles.items():
        if token in used:
            raise DataError(
                f"{folder}: {token!r} is both {used[token]} and {role}. Documents could not be "
                "told apart; name another token in tokenizer.roles."
            )
        used[token] = role


class _Names:
    """Names in a parsed tokenizer.json."""

    def __init__(self, content: dict[str, Any]) -> None:
        model = content["model"]
        vocabulary = model["vocab"]
        added = content.get("added_tokens") or []
        self.added: list[str] = [token["content"] for token in added]
        self._by_id: dict[int, str] = {token["id"]: token["content"] for token in added}
        if isinstance(vocabulary, dict):
            self._own = set(vocabulary)
            self._own_by_id = {id: name for name, id in vocabulary.items()}
        else:
            pieces = [piece for piece, _ in vocabulary]
            self._own = set(pieces)
            self._own_by_id = dict(enumerate(pieces))
        self.unknown = unknown_token(model)

    def __contains__(self, name: object) -> bool:
        return name in self._own or name in self.added

    def of_id(self, id: Any) -> str | None:
        """Name of the token with an id; None if there is none."""
        if not isinstance(id, int):
            return None
        return self._by_id.get(id) or self._own_by_id.get(id)


def _named_by_files(
    purpose: str, files: Mapping[str, Mapping[str, Any]], names: _Names
) -> str | None:
    """Name of the token for eos, bos or pad; None if no file names one of the vocabulary."""
    for file in CONFIG_FILES[:2]:
        token = files[file].get(f"{purpose}_token")
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str) and token in names:
            return token
    for file in CONFIG_FILES[2:]:
        ids = files[file].get(f"{purpose}_token_id")
        first = (ids[0] if ids else None) if isinstance(ids, list) else ids
        if (name := names.of_id(first)) is not None:
            return name
    return None


def _known_roles(names: _Names) -> dict[Role, str]:
    roles: dict[Role, str] = {}
    for of_group, candidates in _KNOWN:
        tokens = next((each for each in candidates if all(token in names for token in each)), ())
        roles |= dict(zip(of_group, tokens, strict=False))
    return roles


def _recorded(folder: Path, names: _Names) -> SpecialTokens | None:
    """Special tokens that a data set was built with; None for a folder of others."""
    path = folder / ROLES_FILE
    try:
        tokens = SpecialTokens.model_validate_json(read_regular(path, MAX_SIDE_BYTES))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}.") from error
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"])) or "file"
        raise DataError(
            f"{path}: not of this version: {place}: {problem['msg']}. Copy it again from the data "
            "set or run."
        ) from None
    named = (tokens.eos, tokens.pad, *(tokens.prefix or ()), *tokens.roles.values())
    if lost := next((token for token in named if token not in names), None):
        raise DataError(
            f"{path}: names {lost!r}, which {TOKENIZER_FILE} beside it does not have. Copy both "
            "again from one data set or run."
        )
    return tokens


def _json_object(path: Path) -> dict[str, Any]:
    """Content of a file of transformers; empty if there is none."""
    try:
        content = json.loads(read_regular(path, MAX_SIDE_BYTES).decode())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path}: not JSON ({error}). Copy it again from where it is whole."
        ) from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: holds no JSON object. Copy it again from where it is whole.")
    return content
