"""The tokenizer: text comes back, ids are Hugging Face's, special tokens are never made of text."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from cdrmix.data.tokenizer import SPECIAL_TOKENS, Tokenizer, load_tokenizer, train_tokenizer
from cdrmix.errors import DataError

SOURCES = [Path(json.__file__).with_name(name) for name in ("decoder.py", "encoder.py")]
TEXTS = [path.read_text() for path in SOURCES] + [Path(random.__file__).read_text()]

STRINGS = [
    "",
    "a",
    " ",
    "\n",
    "\r\n",
    "def f(x):\r\n\treturn x\r\n",
    "    if self.items['set'] != \"don't\":\n        pass\n\n\n",
    "snake_case CamelCase SCREAMING kebab-case x1y22z333 1234567",
    "Grüße, 世界! Привет мир. \u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627 नमस्ते",
    "😀👩‍👩‍👧‍👦🇨🇦 e\u0301 \u00a0\u2003\u3000 \u200b\ufeff \x00\x7f\x85",
    "ſ K İ ı ß Σς \u2167 ½ ٣ 𝟘",
    "   \t  \t\t x \n \n  y ",
    "<|eos|> <|fim_prefix|>x<|memory|>",
    "a" * 1000 + " " * 1000 + "=" * 1000 + "\n" * 1000 + "0" * 1000,
]


@pytest.fixture(scope="module")
def trained() -> tokenizers.Tokenizer:
    return train_tokenizer(TEXTS, 600)


@pytest.fixture(scope="module")
def tokenizer(trained: tokenizers.Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    trained.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def reference(trained: tokenizers.Tokenizer) -> Callable[[list[str]], list[list[int]]]:
    """Ids by Hugging Face tokenizers, with the names of special tokens taken as text."""
    plain = tokenizers.Tokenizer.from_str(trained.to_str())
    plain.encode_special_tokens = True
    return lambda texts: [encoding.ids for encoding in plain.encode_batch(texts)]


def random_strings(count: int) -> list[str]:
    """Strings that tempt the pattern: runs, blanks of all kinds, any code point, real text."""
    rng = random.Random(0)
    alphabets = ["ab", " \n", "=-", "\t ", "x0 ", "\r\n", "'s'", "<|eos|>", "é世😀 ", "aA_.1 \n"]

    def code_point() -> str:
        point = rng.randrange(rng.choice([0x100, 0x3100, 0x20000, 0x110000]))
        return "" if 0xD800 <= point < 0xE000 else chr(point)

    def one() -> str:
        kind = rng.randrange(3)
        if kind == 0:
            return "".join(rng.choices(rng.choice(alphabets), k=rng.randrange(60)))
        if kind == 1:
            return "".join(code_point() for _ in range(20))
        start = rng.randrange(len(TEXTS[0]) - 100)
        return TEXTS[0][start : start + rng.randrange(100)]

    return [one() for _ in range(count)]


def test_special_tokens_have_the_lowest_ids_in_their_order(
    trained: tokenizers.Tokenizer, tokenizer: Tokenizer
) -> None:
    assert [trained.token_to_id(token) for token in SPECIAL_TOKENS] == list(range(10))
    assert (tokenizer.eos_id, tokenizer.pad_id) == (0, 2)
    assert tokenizer.decode(range(10)) == "".join(SPECIAL_TOKENS)


@pytest.mark.parametrize("text", STRINGS)
def test_text_comes_back_as_it_was(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(len(SPECIAL_TOKENS) <= i < tokenizer.vocab_size for i in ids)


def test_ids_are_those_of_hugging_face(
    tokenizer: Tokenizer, reference: Callable[[list[str]], list[list[int]]]
) -> None:
    texts = STRINGS + TEXTS + random_strings(3000)
    for text, expected in zip(texts, reference(texts), strict=True):
        assert tokenizer.encode(text) == expected, repr(text)


def test_code_points_are_cut_as_hugging_face_cuts_them(
    tokenizer: Tokenizer, reference: Callable[[list[str]], list[list[int]]]
) -> None:
    # Two engines with tables of their own decide what is a letter, a digit or a blank.
    points = [*range(0x600), *range(0x600, 0x30000, 61)]
    characters = [chr(point) for point in points if not 0xD800 <= point < 0xE000]
    texts = [f"a{c}b1{c} {c}\n{c}!" for c in characters]
    assert tokenizer.encode_batch(texts) == reference(texts)


def test_a_batch_is_encoded_as_its_texts_are(tokenizer: Tokenizer) -> None:
    texts = ["", *STRINGS, " " * 200_000 + "x"]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]


@pytest.mark.parametrize("unit", [" ", " \t", "\n", "a", "!", "7", "a!", "é"])
def test_a_run_of_over_a_million_is_encoded_in_a_moment(tokenizer: Tokenizer, unit: str) -> None:
    # Blanks in such numbers overflow the stack of tiktoken's pattern engine when not cut.
    text = "x" + unit * (1_200_000 // len(unit)) + "y"
    began = time.process_time()
    ids = tokenizer.encode(text)
    assert time.process_time() - began < 10
    assert tokenizer.decode(ids) == text


def test_ids_without_a_token_and_broken_bytes_decode_to_a_mark(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ab")
    assert tokenizer.decode([*ids, 50_000, *ids]) == "ab\ufffdab"
    assert tokenizer.decode(tokenizer.encode("é")[:1]) == "\ufffd"


def test_the_same_texts_give_the_same_tokenizer(trained: tokenizers.Tokenizer) -> None:
    assert train_tokenizer(iter(TEXTS), 600).to_str() == trained.to_str()


def test_a_small_corpus_gives_fewer_tokens(tmp_path: Path) -> None:
    train_tokenizer(["aaaa"], 50_272).save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.vocab_size < 300
    assert tokenizer.decode(tokenizer.encode("büro")) == "büro"


def test_a_vocabulary_without_room_for_the_bytes_is_refused() -> None:
    with pytest.raises(DataError, match="vocab_size = 265: at least 266"):
        train_tokenizer(TEXTS, 265)


def broken(change: Callable[[dict[str, Any]], object]) -> Callable[[str], str]:
    def apply(text: str) -> str:
        content = json.loads(text)
        change(content)
        return json.dumps(content)

    return apply


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        broken(lambda content: content.pop("pre_tokenizer")),
        broken(lambda content: content["added_tokens"].pop()),
        broken(lambda content: content["model"]["merges"].reverse()),
        broken(lambda content: content["model"]["vocab"].pop("a")),
        broken(lambda content: content["pre_tokenizer"]["pretokenizers"][0]["pattern"].clear()),
        broken(
            lambda content: content["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(
                Regex="(unclosed"
            )
        ),
    ],
)
def test_a_broken_tokenizer_file_says_what_to_do(
    trained: tokenizers.Tokenizer, tmp_path: Path, damage: Callable[[str], str]
) -> None:
    (tmp_path / "tokenizer.json").write_text(damage(trained.to_str()))
    with pytest.raises(DataError, match=r"tokenizer\.json: not a .*Copy it again"):
        load_tokenizer(tmp_path)


def test_a_missing_tokenizer_file_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"tokenizer\.json: cannot be read: No such file"):
        load_tokenizer(tmp_path)
