"""Nats of documents in windows: against their definition, carried and reset, and of files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from cdrmix.config.load import load_config
from cdrmix.errors import DataError
from cdrmix.evaluation.documents import (
    Reading,
    Window,
    carried_nats,
    carries_state,
    reset_nats,
    windows_of,
)
from cdrmix.evaluation.held_out import Text, held_out_documents, text_documents
from cdrmix.models.backbone import Backbone
from tests.small_run import CONFIG, SMALL
from tests.unit.data.token_folder import write_token_folder

WINDOW = 8
# One window in part, one whole, several with an end in and at a window's.
LENGTHS = (3, 8, 9, 16, 29)
RECURRENT = {
    "rwkv": ("model.transformer_fraction=0", "model.moe=null"),
    "hybrid": ("model.moe=null",),
    "mamba": ('model.mixers=["mamba","transformer"]', "model.transformer_fraction=0.25"),
}


def made_model(*settings: str) -> Backbone:
    config = load_config(CONFIG, (*SMALL, "model.vocab_size=300", *settings))
    model = Backbone(config.model)
    model.initialize(seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # much starts at zero, and would hide faults
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.train()


def reading(batch_size: int = 3, lengths: tuple[int, ...] = LENGTHS) -> Reading:
    draw = np.random.default_rng(0)
    documents = [
        np.concatenate([[0], draw.integers(1, 300, size=length)]).astype(np.int64)
        for length in lengths
    ]
    return Reading(documents, 0, WINDOW, batch_size)


@torch.no_grad()
def nats_of(model: Backbone, tokens: np.ndarray, window: Window) -> float:
    """Nats of the labels that count of one window by itself."""
    inputs = torch.from_numpy(tokens[window.begin : window.end])
    labels = torch.from_numpy(tokens[window.begin + 1 : window.end + 1])
    logits = model.logits(model.eval()(inputs.unsqueeze(0)).hidden)[0]
    each = F.cross_entropy(logits, labels, reduction="none").double()
    return float(each[-window.num_scored :].sum())


@pytest.mark.parametrize(("stride", "overlap"), [(8, True), (3, True), (8, False)])
def test_each_token_is_predicted_once_from_tokens_of_its_window(stride: int, overlap: bool) -> None:
    model, given = made_model("model.moe=null"), reading()
    found = reset_nats(model, given, stride=stride, overlap=overlap)
    assert model.training, "evaluation leaves the mode as it was"
    for tokens, nats in zip(given.documents, found, strict=True):
        windows = windows_of(len(tokens) - 1, WINDOW, stride, overlap=overlap)
        predicted = [
            place + 1 for each in windows for place in range(each.end - each.num_scored, each.end)
        ]
        assert predicted == list(range(1, len(tokens)))
        assert all(each.end - each.begin <= WINDOW for each in windows)
        expected = math.fsum(nats_of(model, tokens, each) for each in windows)
        assert nats == pytest.approx(expected, rel=1e-6)


def test_later_windows_see_as_much_as_fits_before_their_labels() -> None:
    windows = [Window(0, 8, 8), Window(3, 11, 3), Window(6, 14, 3), Window(7, 15, 1)]
    assert windows_of(15, 8, 3) == windows
    assert windows_of(15, 8, 8) == [Window(0, 8, 8), Window(7, 15, 7)]
    assert windows_of(15, 8, 8, overlap=False) == [Window(0, 8, 8), Window(8, 15, 7)]


@pytest.mark.parametrize("name", RECURRENT)
def test_the_state_is_carried_through_the_windows_of_a_document(name: str) -> None:
    model, given = made_model(*RECURRENT[name]), reading()
    assert carries_state(model.config)
    carried = carried_nats(model, given)
    assert model.training
    reset = reset_nats(model, given, stride=WINDOW, overlap=False)
    single = [len(tokens) <= WINDOW + 1 for tokens in given.documents]
    np.testing.assert_allclose(carried[single], reset[single], rtol=1e-6)
    several = np.logical_not(single)
    assert np.all(np.abs(carried[several] / reset[several] - 1) > 1e-4), "a state was carried"
    alone = carried_nats(model, reading(batch_size=1))
    np.testing.assert_allclose(carried, alone, rtol=1e-6)
    if name != "rwkv":
        return
    # Without attention a window is no border at all: the document is read as in one piece.
    whole = [
        nats_of(model, tokens, Window(0, len(tokens) - 1, len(tokens) - 1))
        for tokens in given.documents
    ]
    np.testing.assert_allclose(carried, whole, rtol=1e-6)


@torch.no_grad()
def test_keys_and_values_are_not_carried_and_positions_begin_anew() -> None:
    """Of a hybrid, the windows after the first against states with the attention's taken out."""
    model, given = made_model("model.moe=null"), reading(lengths=(2 * WINDOW,))
    tokens = torch.from_numpy(given.documents[0])
    model.eval()
    first = model(tokens[:WINDOW].unsqueeze(0), return_state=True)
    kinds = model.config.layer_kinds()
    assert set(kinds) == {"rwkv", "transformer"}
    state = [
        each._replace(mixer=None) if kind == "transformer" else each
        for kind, each in zip(kinds, first.state, strict=True)
    ]
    second = model(tokens[WINDOW:-1].unsqueeze(0), state=state)
    with_keys = model(tokens[WINDOW:-1].unsqueeze(0), state=first.state)
    nats = {
        name: sum(
            float(F.cross_entropy(model.logits(each.hidden)[0], labels, reduction="sum"))
            for each, labels in ((first, tokens[1 : WINDOW + 1]), (after, tokens[WINDOW + 1 :]))
        )
        for name, after in (("dropped", second), ("kept", with_keys))
    }
    (found,) = carried_nats(model, given)
    assert found == pytest.approx(nats["dropped"], rel=1e-6)
    assert found != pytest.approx(nats["kept"], rel=1e-4)


def test_tokens_that_are_routed_in_depth_carry_states_too() -> None:
    settings = ("model.moe=null", "model.transformer_fraction=0", "model.num_layers=3")
    model = made_model(*settings, "model.mod={}")
    found = carried_nats(model, reading())
    np.testing.assert_allclose(found, carried_nats(model, reading(batch_size=1)), rtol=1e-5)
    reset = reset_nats(model, reading(), stride=WINDOW, overlap=False)
    assert np.abs(found[-1] / reset[-1] - 1) > 1e-4


def test_models_without_a_recurrence_carry_nothing() -> None:
    config = load_config(CONFIG, (*SMALL, "model.transformer_fraction=1")).model
    assert not carries_state(config)


def test_held_out_documents_are_read_from_every_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    splits = {"train": [[9, 0]], "validation": [[1, 2, 0], [3, 0]], "validation/prose": [[4, 5, 0]]}
    folder = write_token_folder(tmp_path / "some", splits)
    found = [(list(each.tokens), each.domain) for each in held_out_documents(folder)]
    assert found == [([1, 2], "code"), ([3], "code"), ([4, 5], "prose")]
    # Of a large split, whole documents at the beginning of each shard.
    monkeypatch.setattr("cdrmix.evaluation.held_out._MOST_TOKENS", 8)
    assert [list(each.tokens) for each in held_out_documents(folder)] == [[1, 2], [4, 5]]
    none = write_token_folder(tmp_path / "none", {"train": [[9, 0]]})
    with pytest.raises(DataError, match="holds no held-out documents"):
        held_out_documents(none)


def test_texts_of_files_are_documents_by_domain(tmp_path: Path) -> None:
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "b.txt").write_bytes(b"two\r\nlines")
    (tmp_path / "books" / "a.txt").write_text("Ödön")
    (tmp_path / "web.jsonl").write_text('{"text": "x\u2028y"}\n\n{"text": ""}\n{"text": "z"}\n')
    (tmp_path / "notes.md").write_text("not read")
    found = text_documents(tmp_path)
    assert found.documents == [
        Text("Ödön", "books"),
        Text("two\r\nlines", "books"),
        Text("x\u2028y", "web"),
        Text("z", "web"),
    ]
    assert sorted(found.digests) == ["books/a.txt", "books/b.txt", "web.jsonl"]
    assert text_documents(tmp_path / "web.jsonl").documents == found.documents[2:]
    (single,) = text_documents(tmp_path / "books" / "a.txt").documents
    assert single == Text("Ödön", "a")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a.jsonl": '{"text": "x"}\n{"txt": 1}'}, r"a.jsonl:2: is no JSON object with the text"),
        ({"a.jsonl": "[1]"}, r"a.jsonl:1: is no JSON object"),
        ({"a.jsonl": '{"text": 3}'}, r"a.jsonl:1: is no JSON object"),
        ({"a.txt": ""}, "its files have no text"),
        ({"a.md": "x"}, "is no text. Give a .txt file"),
        ({"a.txt": b"\xff\xfe"}, "cannot be read as UTF-8 text"),
        ({"x/web.jsonl": '{"text": "x"}', "web.jsonl": '{"text": "x"}'}, "both be the domain"),
    ],
)
def test_files_that_cannot_be_used_are_told(
    files: dict[str, Any], message: str, tmp_path: Path
) -> None:
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message):
        text_documents(tmp_path)
    with pytest.raises(DataError, match="is no text"):
        text_documents(tmp_path / "missing.jsonl")
