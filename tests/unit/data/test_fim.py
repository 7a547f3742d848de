"""Infilling: every document comes back character by character, at the rates that were asked for."""

from __future__ import annotations

import math
import random

import pytest

from cdrmix.data.document import Document, FimConfig, rearranged, restored
from cdrmix.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from cdrmix.data.tokenizer_base import FIM_ROLES

NUM_DOCUMENTS = 1000
ALPHABET = "abcdef  \n\t(){}=.äß日本語😀"


def texts() -> list[str]:
    """Texts of 0 to 80 characters, of one to four bytes each, and the name of a special token."""
    chance = random.Random(0)
    given = ["".join(chance.choices(ALPHABET, k=n % 81)) for n in range(NUM_DOCUMENTS - 1)]
    return [*given, "<|fim_middle|> is a name here"]


def document(text: str, number: int = 0, domain: str = "code") -> Document:
    return Document(text=text, id=f"s/file#{number}", source="s", domain=domain)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "tokenizer.json").write_text(train_tokenizer(texts(), 400).to_str())
    return load_tokenizer(folder)


@pytest.mark.parametrize("spm_rate", [0.0, 0.5, 1.0])
def test_every_document_comes_back_exactly(tokenizer: Tokenizer, spm_rate: float) -> None:
    config = FimConfig(rate=1.0, spm_rate=spm_rate)
    for number, text in enumerate(texts()):
        ids = rearranged(document(text, number), config, tokenizer)
        assert ids is not None
        assert tokenizer.decode(restored(ids, tokenizer)) == text
        assert tokenizer.eos_id not in ids


def test_prefix_or_suffix_comes_first_and_the_middle_last(tokenizer: Tokenizer) -> None:
    text = "abcdef" * 10
    psm = rearranged(document(text), FimConfig(rate=1, spm_rate=0), tokenizer)
    spm = rearranged(document(text), FimConfig(rate=1, spm_rate=1), tokenizer)
    shown = [tokenizer.decode(ids) for ids in (psm, spm)]
    prefix, rest = shown[0].removeprefix("<|fim_prefix|>").split("<|fim_suffix|>")
    suffix, middle = rest.split("<|fim_middle|>")
    assert prefix + middle + suffix == text
    assert prefix and middle and suffix
    assert shown[1] == f"<|fim_prefix|><|fim_suffix|>{suffix}<|fim_middle|>{prefix}{middle}"


def test_rates_are_those_asked_for(tokenizer: Tokenizer) -> None:
    config = FimConfig(rate=0.3, spm_rate=0.6)
    pre, suf = (tokenizer.role_id(role) for role in FIM_ROLES[:2])
    found = [rearranged(document("abc", n), config, tokenizer) for n in range(NUM_DOCUMENTS)]
    changed = [ids for ids in found if ids is not None]
    assert all(ids[0] == pre for ids in changed)
    within_3_sigma(len(changed), NUM_DOCUMENTS, 0.3)
    # PSM with an empty prefix looks the same: the smaller of two cuts of "abc" is 0.
    empty_prefix = 1 - (3 / 4) ** 2
    within_3_sigma(sum(ids[1] == suf for ids in changed), len(changed), 0.6 + 0.4 * empty_prefix)


def within_3_sigma(count: int, of: int, share: float) -> None:
    assert abs(count - of * share) < 3 * math.sqrt(of * share * (1 - share))


def test_cuts_are_spread_over_all_characters(tokenizer: Tokenizer) -> None:
    suf = tokenizer.role_id("fim_suffix")
    config = FimConfig(rate=1, spm_rate=0)
    lengths = []
    for number in range(NUM_DOCUMENTS):
        ids = rearranged(document("äöü😀", number), config, tokenizer)
        lengths.append(len(tokenizer.decode(ids[1 : ids.index(suf)])))
    # The smaller of two numbers from 0 to 4: 9, 7, 5, 3 and 1 of 25.
    for length, share in enumerate((9, 7, 5, 3, 1)):
        within_3_sigma(lengths.count(length), NUM_DOCUMENTS, share / 25)


def test_the_order_follows_from_the_id_alone(tokenizer: Tokenizer) -> None:
    config = FimConfig(rate=1)
    first, again, other = (
        rearranged(document("abcdef" * 5, n), config, tokenizer) for n in (3, 3, 4)
    )
    assert first == again != other


def test_long_documents_and_other_domains_stay_as_they_are(tokenizer: Tokenizer) -> None:
    config = FimConfig(rate=1, domains=("code",), max_characters=10)
    assert rearranged(document("a" * 10), config, tokenizer)
    assert rearranged(document("a" * 11), config, tokenizer) is None
    assert rearranged(document("a", domain="prose"), config, tokenizer) is None
    ids = tokenizer.encode("abc")
    assert restored(ids, tokenizer) == ids
