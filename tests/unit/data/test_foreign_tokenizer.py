"""Tokenizers of others: their ids, and no special token from text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from cdrmix.data.document import (
    Document,
    FimConfig,
    encoded,
    fields_of,
    joined,
    rearranged,
    restored,
)
from cdrmix.data.foreign_tokenizer import ForeignTokenizer
from cdrmix.data.special_tokens import Choices
from cdrmix.data.tokenizer import MAX_TOKENIZER_BYTES, Tokenizer, load_tokenizer
from cdrmix.errors import DataError
from tests.foreign_tokenizers import KINDS, TEXTS, make_folder

STRINGS = [
    "",
    "a",
    " ",
    "  two  blanks ",
    "def f(x):\r\n\treturn [x, 'é']  # don't\n",
    "Grüße, 世界! 😀 \u00a0 \x00",
    "x " * 50,
    *TEXTS,
]
LOSSLESS = ("byte_level", "sentencepiece")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("foreign")
    return {kind: make_folder(root / kind, kind) for kind in KINDS}


@pytest.fixture(scope="module")
def loaded(folders: dict[str, Path]) -> dict[str, Tokenizer]:
    return {kind: load_tokenizer(folder) for kind, folder in folders.items()}


def reference(folder: Path) -> tokenizers.Tokenizer:
    """The package's own tokenizer of a file, without what does not belong to a data set."""
    values = json.loads((folder / "tokenizer.json").read_text())
    if "dropout" in values["model"]:
        values["model"]["dropout"] = None
    engine = tokenizers.Tokenizer.from_str(json.dumps(values))
    engine.no_truncation()
    engine.no_padding()
    engine.encode_special_tokens = True
    return engine


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_the_package(
    loaded: dict[str, Tokenizer], folders: dict[str, Path], kind: str
) -> None:
    tokenizer, engine = loaded[kind], reference(folders[kind])
    expected = [engine.encode(text, add_special_tokens=False).ids for text in STRINGS]
    assert [tokenizer.encode(text) for text in STRINGS] == expected
    assert tokenizer.encode_batch(STRINGS) == expected
    assert tokenizer.kind == "foreign"
    assert tokenizer.vocab_size == max(engine.get_vocab().values()) + 1


@pytest.mark.parametrize("kind", LOSSLESS)
@pytest.mark.parametrize("continues", [False, True])
def test_text_comes_back_as_it_was(
    loaded: dict[str, Tokenizer], kind: str, continues: bool
) -> None:
    tokenizer = loaded[kind]
    for text in STRINGS:
        ids = tokenizer.encode(text, continues=continues)
        assert tokenizer.decode(ids, continues=continues) == text


def test_blanks_stand_where_the_text_has_them(loaded: dict[str, Tokenizer]) -> None:
    tokenizer = loaded["sentencepiece"]
    first, later = tokenizer.encode("def f"), tokenizer.encode(" x", continues=True)
    assert tokenizer.decode([*first, *later]) == "def f x"
    assert tokenizer.decode(later, continues=True) == " x"
    assert tokenizer.decode(later) == "x"
    assert tokenizer.encode("x") == later, "a first word has a blank that its text has not"
    unigram = loaded["unigram"]
    assert unigram.encode("self") == unigram.encode(" self", continues=True)
    assert unigram.encode("self") != unigram.encode("self", continues=True)
    assert unigram.decode(unigram.encode(" self", continues=True), continues=True) == " self"


def test_a_first_word_without_a_blank_takes_one_engine(loaded: dict[str, Tokenizer]) -> None:
    # A large vocabulary takes a second to read and some hundreds of MB.
    tokenizer = loaded["byte_level"]
    assert isinstance(tokenizer, ForeignTokenizer)
    assert tokenizer._later is tokenizer._first


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_never_come_from_text(loaded: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = loaded[kind]
    assert tokenizer.roles or kind not in LOSSLESS
    special = {tokenizer.eos_id, tokenizer.pad_id, *tokenizer.document_prefix}
    special |= set(tokenizer.roles.values())
    for id in special:
        name = tokenizer.decode([id])
        for text in (name, f"a {name} b", f"a{name}{name}b", f"x\n{name}\n"):
            ids = tokenizer.encode(text)
            assert special.isdisjoint(ids), (text, ids)
            if kind in LOSSLESS:
                assert tokenizer.decode(ids) == text


def test_the_fault_that_spelling_mends_is_there(folders: dict[str, Path]) -> None:
    # Without a repair, Unigram and a WordPiece without punctuation do give them.
    for kind, name in (("unigram", "</s>"), ("wordpiece", "[SEP]")):
        engine = reference(folders[kind])
        ids = engine.encode(f"a {name}", add_special_tokens=False).ids
        assert engine.token_to_id(name) in ids


def test_added_words_that_are_text_stay_tokens(loaded: dict[str, Tokenizer]) -> None:
    tokenizer = loaded["byte_level"]
    (id,) = tokenizer.encode("<tool_call>")
    assert tokenizer.decode([id]) == "<tool_call>"
    assert len(tokenizer.encode("<think>")) > 1, "a role is no text"


def test_unknown_characters_keep_their_token(loaded: dict[str, Tokenizer]) -> None:
    assert 1 in loaded["wordpiece"].encode("世")
    assert 2 in loaded["unigram"].encode("世")
    # PAD is the unknown token in this folder, which text may hold; EOS takes its place.
    assert loaded["sentencepiece"].pad_id == loaded["sentencepiece"].eos_id
    assert loaded["unigram"].pad_id == 0


def test_ids_without_a_token_and_half_characters_become_marks(loaded: dict[str, Tokenizer]) -> None:
    for kind in LOSSLESS:
        tokenizer = loaded[kind]
        ids = tokenizer.encode("ab c", continues=True)
        text = tokenizer.decode([*ids, 10**6, -1, *ids], continues=True)
        assert text == "ab c\ufffd\ufffdab c"
        assert tokenizer.decode(tokenizer.encode("x\ud800y")) == "x\ufffdy"
    tokenizer = loaded["byte_level"]
    assert tokenizer.decode(tokenizer.encode("é")[:1]) == "\ufffd"


@pytest.mark.parametrize(
    ("kind", "config", "choices", "expected"),
    [
        ("byte_level", {}, Choices(), []),
        ("byte_level", {"bos_token": "<|im_end|>"}, Choices(), []),
        ("byte_level", {"bos_token": "<|im_end|>", "add_bos_token": True}, Choices(), [501]),
        ("byte_level", {"bos_token": "<|im_end|>"}, Choices(add_bos=True), [501]),
        # A BOS that is the EOS of the document before adds nothing.
        ("byte_level", {"bos_token": "<|endoftext|>", "add_bos_token": True}, Choices(), []),
        ("sentencepiece", {}, Choices(), [1]),
        ("sentencepiece", {"add_bos_token": False}, Choices(), [1]),
        ("sentencepiece", {}, Choices(add_bos=False), []),
        ("unigram", {}, Choices(), []),
        ("wordpiece", {}, Choices(), [2]),
    ],
)
def test_documents_begin_as_the_tokenizer_begins_a_text(
    folders: dict[str, Path],
    tmp_path: Path,
    kind: str,
    config: dict[str, Any],
    choices: Choices,
    expected: list[int],
) -> None:
    given = json.loads((folders[kind] / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer.json").write_bytes((folders[kind] / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(given | config))
    tokenizer = load_tokenizer(tmp_path, choices)
    assert list(tokenizer.document_prefix) == expected
    assert list(tokenizer.prefix_ids) == (expected or [tokenizer.eos_id])
    assert tokenizer.eos_id not in tokenizer.encode("a")


@pytest.mark.parametrize(
    ("files", "choices", "expected"),
    [
        ({"tokenizer_config.json": {"eos_token": "<|im_end|>"}}, Choices(), 501),
        ({"tokenizer_config.json": {"eos_token": {"content": "<|im_end|>"}}}, Choices(), 501),
        ({"special_tokens_map.json": {"eos_token": "<|im_end|>"}}, Choices(), 501),
        ({"config.json": {"eos_token_id": 501}}, Choices(), 501),
        ({"generation_config.json": {"eos_token_id": [501, 500]}}, Choices(), 501),
        ({"config.json": {"eos_token_id": -1}, "generation_config.json": {"eos_token_id": 500}},
         Choices(), 500),
        ({"tokenizer_config.json": {"eos_token": "<|endoftext|>"}},
         Choices(eos_token="<|im_end|>"), 501),
        ({}, Choices(eos_token="<|endoftext|>"), 500),
    ],
)  # fmt: skip
def test_eos_is_found_where_a_folder_names_it(
    folders: dict[str, Path],
    tmp_path: Path,
    files: dict[str, dict[str, Any]],
    choices: Choices,
    expected: int,
) -> None:
    (tmp_path / "tokenizer.json").write_bytes(
        (folders["byte_level"] / "tokenizer.json").read_bytes()
    )
    for name, values in files.items():
        (tmp_path / name).write_text(json.dumps(values))
    tokenizer = load_tokenizer(tmp_path, choices)
    assert (tokenizer.eos_id, tokenizer.pad_id) == (expected, expected)


def test_roles_are_known_or_named(folders: dict[str, Path], loaded: dict[str, Tokenizer]) -> None:
    known = {role: loaded["byte_level"].decode([id]) for role, id in
             loaded["byte_level"].roles.items()}  # fmt: skip
    assert known == {
        "thought": "<think>",
        "answer": "</think>",
        "fim_prefix": "<|fim_prefix|>",
        "fim_suffix": "<|fim_suffix|>",
        "fim_middle": "<|fim_middle|>",
    }
    assert len(loaded["sentencepiece"].roles) == 5
    named = load_tokenizer(folders["byte_level"], Choices(roles={"memory": "<|im_end|>"}))
    assert named.role_id("memory") == 501
    assert named.roles["thought"] == loaded["byte_level"].roles["thought"]
    with pytest.raises(DataError, match=r"no token for thought.*roles: \{thought: TOKEN\}.*leave"):
        loaded["wordpiece"].role_id("thought")


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        (Choices(roles={"memory": "<nope>"}), r"roles\.memory = '<nope>' is not in the vocabulary"),
        (Choices(roles={"memory": "<think>"}), r"'<think>' is both thought and memory"),
        (Choices(roles={"memory": "<|endoftext|>"}), r"is both EOS and memory"),
        (Choices(eos_token="</s>"), r"eos_token = '</s>' is not in the vocabulary.*<\|im_end\|>"),
        (Choices(add_bos=True), r"has no BOS, and tokenizer\.add_bos asks for one"),
    ],
)
def test_wrong_choices_are_refused(
    folders: dict[str, Path], choices: Choices, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        load_tokenizer(folders["byte_level"], choices)


@pytest.mark.parametrize("kind", LOSSLESS)
def test_documents_in_parts_come_back(loaded: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = loaded[kind]
    prefix = list(tokenizer.document_prefix)
    for text in ("def f(x):\n    return x\n", " a", "word", "x  y  z"):
        for number in range(12):
            for spm_rate in (0, 1):
                document = Document(text, f"s/f#{number}", "s", "code")
                ids = rearranged(document, FimConfig(rate=1, spm_rate=spm_rate), tokenizer)
                assert ids is not None and ids[0] == tokenizer.role_id("fim_prefix")
                assert tokenizer.decode(restored([*prefix, *ids], tokenizer)) == text
    parts = {"prompt": "Why <think>?", "thought": " Let me see.\n", "answer": "42"}
    ids, roles = encoded(joined(**parts), tokenizer)
    assert fields_of([*prefix, *ids], tokenizer) == parts
    assert len(ids) == len(roles)
    assert ids.index(tokenizer.role_id("answer")) == roles.index(3)
    if kind == "sentencepiece":
        blank = tokenizer.encode(" ", continues=True)[0]
        assert ids[ids.index(tokenizer.role_id("answer")) + 1] != blank, "no blank before 42"


def damaged(change: Callable[[dict[str, Any]], object]) -> Callable[[str], str]:
    def apply(text: str) -> str:
        values = json.loads(text)
        change(values)
        return json.dumps(values)

    return apply


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[: len(text) // 2], "not a tokenizer.json .*JSONDecodeError"),
        (lambda text: "{}", "not a tokenizer.json of the package tokenizers"),
        (lambda text: "[1]", "not a tokenizer.json of the package tokenizers"),
        (damaged(lambda v: v["model"].update(type="Newer")), "a later version needs a later"),
        (damaged(lambda v: v["model"].pop("merges")), "not a tokenizer.json of the package"),
        (damaged(lambda v: v["model"].update(vocab=7)), "not a tokenizer.json of the package"),
        (damaged(lambda v: v.update(added_tokens=[{"id": 1}])), "not a tokenizer.json of the"),
        (damaged(lambda v: v.update(pre_tokenizer={"type": "Sequence"})), "not a tokenizer.json"),
    ],
)
def test_a_broken_file_says_what_to_do(
    folders: dict[str, Path], tmp_path: Path, damage: Callable[[str], str], message: str
) -> None:
    whole = (folders["byte_level"] / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(damage(whole))
    (tmp_path / "config.json").write_text('{"eos_token_id": 500}')
    with pytest.raises(DataError, match=message) as raised:
        load_tokenizer(tmp_path)
    assert "Copy it again" in str(raised.value)


@pytest.mark.parametrize(
    ("kind", "damage"),
    [
        # Faults of the package tokenizers 0.23: the end of the process, and an error of its own.
        ("sentencepiece", damaged(lambda v: v["model"].update(continuing_subword_prefix="x"))),
        ("sentencepiece", damaged(lambda v: v["post_processor"].update(special_tokens={}))),
        ("unigram", damaged(lambda v: v["model"].update(unk_id=None))),
        ("unigram", damaged(lambda v: v["model"].update(unk_id=9999))),
        ("wordpiece", damaged(lambda v: v["model"]["vocab"].pop("[UNK]"))),
    ],
)
def test_what_the_package_cannot_use_is_an_error_of_the_file(
    folders: dict[str, Path], tmp_path: Path, kind: str, damage: Callable[[str], str]
) -> None:
    (tmp_path / "tokenizer.json").write_text(damage((folders[kind] / "tokenizer.json").read_text()))
    config = folders[kind] / "tokenizer_config.json"
    (tmp_path / "tokenizer_config.json").write_bytes(config.read_bytes())
    with pytest.raises(DataError, match=r"tokenizer\.json: not a tokenizer\.json of the package"):
        load_tokenizer(tmp_path)


def test_a_folder_without_eos_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    source = folders["byte_level"] / "tokenizer.json"
    (tmp_path / "tokenizer.json").write_bytes(source.read_bytes())
    with pytest.raises(DataError, match=rf"{tmp_path}: its tokenizer has no EOS.*eos_token\.$"):
        load_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(DataError, match=r"config\.json: holds no JSON object"):
        load_tokenizer(tmp_path)


def test_other_files_than_tokenizer_json_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x05")
    with pytest.raises(DataError, match=r"tokenizer\.model alone is not read.*save_pretrained"):
        load_tokenizer(tmp_path)
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(MAX_TOKENIZER_BYTES + 1)
    with pytest.raises(DataError, match=rf"at most {MAX_TOKENIZER_BYTES} are read"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.json").mkdir()
    with pytest.raises(DataError, match="is not a regular file"):
        load_tokenizer(tmp_path)
