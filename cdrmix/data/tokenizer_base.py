"""The interface of all tokenizers, the roles of their special tokens, and the names of their files.

A folder with a tokenizer holds tokenizer.json. One that this package has not trained may have files
of transformers beside it, and in data sets and run directories `tokenizer_roles.json`, which says
what was decided about its special tokens when the data set was built.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Literal, get_args

from cdrmix.errors import DataError

TOKENIZER_FILE = "tokenizer.json"
SideFile = Literal["tokenizer_config.json", "special_tokens_map.json", "tokenizer_roles.json"]
ROLES_FILE: SideFile = "tokenizer_roles.json"
SIDE_FILES: tuple[SideFile, ...] = get_args(SideFile)
# A vocabulary of 50,272 tokens takes 3 MB, one of 262,144 some 33 MB, one of 2**20 some 80 MB.
MAX_TOKENIZER_BYTES = 2**27
MAX_SIDE_BYTES = 2**24

Role = Literal["thought", "answer", "fim_prefix", "fim_suffix", "fim_middle", "memory"]
ROLES_OF_TOKENS: tuple[Role, ...] = get_args(Role)
CHAIN_ROLES: tuple[Role, ...] = ("thought", "answer")
FIM_ROLES: tuple[Role, ...] = ("fim_prefix", "fim_suffix", "fim_middle")
_NEEDED_BY: dict[Role, str] = {
    **dict.fromkeys(CHAIN_ROLES, "sources with chain_of_thought"),
    **dict.fromkeys(FIM_ROLES, "fim"),
    "memory": "Stage B",
}


class Tokenizer(ABC):
    """Conversion of text to ids and back.

    Attributes:
        kind: cdrmix, trained by this package, or foreign.
        vocab_size: largest id in use plus 1; a model may have more rows than that.
        eos_id: token that ends each document.
        pad_id: token that fills rows.
        document_prefix: ids that each document begins with; empty where it begins with its text.
        roles: ids of the special tokens that documents are made with, as far as there are any.
        special_ids: tokens that no text gives.
    """

    kind: Literal["cdrmix", "foreign"]
    vocab_size: int
    eos_id: int
    pad_id: int
    document_prefix: tuple[int, ...]
    roles: Mapping[Role, int]
    special_ids: frozenset[int]

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """Ids that a new text begins with, as documents in training do.

        Each of them follows the EOS of another one, and that alone if there is no other prefix.
        """
        return self.document_prefix or (self.eos_id,)

    def role_id(self, role: Role) -> int:
        """Id of the token with a role; DataError if the vocabulary has none."""
        if role not in self.roles:
            raise DataError(missing_roles([role]))
        return self.roles[role]

    @abstractmethod
    def encode(self, text: str, *, continues: bool = False) -> list[int]:
        """Ids of `text`; the name of a special token inside it is text like any other.

        `continues`: other tokens of the same document come before it. A vocabulary whose words
        begin with their blank puts none in front of such a text.
        """

    @abstractmethod
    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text, encoded on all cores that this process may use."""

    @abstractmethod
    def decode(self, ids: Iterable[int], *, continues: bool = False) -> str:
        """Text of `ids`, with special tokens by name; `continues` as in `encode`.

        U+FFFD for an id without a token (a model may have more rows than tokens) and for bytes that
        are not UTF-8.
        """


def missing_roles(roles: Iterable[Role]) -> str:
    """Says that a tokenizer has no token for these roles, and what to do."""
    roles = list(roles)
    named = ", ".join(f"{role}: TOKEN" for role in roles)
    users = " and ".join(dict.fromkeys(_NEEDED_BY[role] for role in roles))
    return (
        f"the tokenizer has no token for {', '.join(roles)}. Name special tokens of its "
        f"vocabulary in the data recipe, tokenizer.roles: {{{named}}}, or leave out {users}."
    )
