"""Hugging Face models behind our interface: packed documents, routing, decoding, unknown families.

What transformers computes for each document alone is the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from cdrmix.config.hugging_face import TESTED_FAMILIES
from cdrmix.errors import ConfigError
from cdrmix.hf.build import build_model
from cdrmix.hf.family_check import check_family
from cdrmix.hf.model import HuggingFaceModel
from cdrmix.hf.names import logical_name
from cdrmix.hf.packing import document_positions, document_spans, stateful_mixers
from cdrmix.models.generate import generate
from tests.hf_models import VOCAB_SIZE, make_folder
from tests.hf_runs import Case, loaded, make_config, make_plan

TOLERANCE = 1e-5
NOTICED = 1e-2
# One of each kind of layer: attention, that with norms of its own, experts, Mamba.
KINDS = ("llama", "qwen3", "mixtral", "nemotron_h")
# All tested families are packed; the others have the layers of one of these.
PACKED = (*KINDS, "llama-tied", "mistral", "qwen2", "qwen3_moe")
# Rows with different numbers of documents, some of one token.
LENGTHS = ((7, 12, 5), (1, 9, 1, 13), (24,))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives the folder of a family, made once."""
    root, made = tmp_path_factory.mktemp("models"), {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = make_folder(root / family, family)
        return made[family]

    return folder


@pytest.fixture(scope="module")
def segments() -> Tensor:
    """Document of each token, [3, 24]."""
    rows = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in LENGTHS]
    return torch.stack(rows)


@pytest.fixture(scope="module")
def ids(segments: Tensor) -> Tensor:
    source = torch.Generator().manual_seed(1)
    return torch.randint(3, VOCAB_SIZE, segments.shape, generator=source)


def wrapped(folder: Path, causal: nn.Module | None = None) -> HuggingFaceModel:
    """The model of a folder, with its weights."""
    causal = loaded(folder) if causal is None else causal
    sizes = make_config(Case(""), folder).model
    return HuggingFaceModel(causal, sizes)


@torch.no_grad()
def one_by_one(causal: Any, ids: Tensor, segments: Tensor) -> Tensor:
    """Scores of the documents, each alone, [B, T, V]."""
    rows = [
        torch.cat([causal(row[here == n][None], use_cache=False).logits[0] for n in here.unique()])
        for row, here in zip(ids, segments, strict=True)
    ]
    return torch.stack(rows)


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).detach().abs().max())


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("family", PACKED)
def test_packed_documents_are_apart(
    family: str, recompute: bool, folders: Any, ids: Tensor, segments: Tensor
) -> None:
    causal = loaded(folders(family))
    expected = one_by_one(causal, ids, segments)
    whole = one_by_one(causal, ids, torch.zeros_like(segments))
    model = wrapped(folders(family), causal)
    if recompute:
        causal.activation_checkpointing_enable()
    output = model(ids, segment_ids=segments)
    assert distance(model.logits(output.hidden), expected) < TOLERANCE
    # Without documents, a row is one.
    assert distance(model.logits(model(ids).hidden), whole) < TOLERANCE
    assert distance(whole, expected) > NOTICED
    # the documents of another batch are forgotten
    assert distance(model.logits(model(ids[:1]).hidden), whole[:1]) < TOLERANCE


@pytest.mark.parametrize("family", KINDS)
def test_gradients_are_those_of_documents_alone(
    family: str, folders: Any, ids: Tensor, segments: Tensor
) -> None:
    causal = loaded(folders(family))
    for row, here in zip(ids, segments, strict=True):
        for number in here.unique():
            causal(row[here == number][None], use_cache=False).logits.square().sum().backward()
    expected = {name: p.grad.clone() for name, p in causal.named_parameters()}
    causal.zero_grad()
    causal.activation_checkpointing_enable()
    model = wrapped(folders(family), causal)
    model.logits(model(ids, segment_ids=segments).hidden).square().sum().backward()
    for name, parameter in causal.named_parameters():
        off = distance(parameter.grad, expected[name]) / float(expected[name].abs().max())
        assert off < 1e-4, name


@pytest.mark.parametrize("family", KINDS)
def test_what_would_let_documents_see_each_other(
    family: str, folders: Any, ids: Tensor, segments: Tensor
) -> None:
    """The traps of transformers: each must be seen by the comparison above."""
    causal = loaded(folders(family)).eval()
    expected = one_by_one(causal, ids, segments)
    positions = document_positions(segments)
    with torch.no_grad():
        with_cache = causal(ids, position_ids=positions).logits
        ones = torch.ones_like(ids)
        with_mask = causal(ids, position_ids=positions, attention_mask=ones, use_cache=False).logits
        positions_alone = causal(ids, position_ids=positions, use_cache=False).logits
    assert distance(with_cache, expected) > NOTICED
    assert distance(with_mask, expected) > NOTICED
    # Mamba does not look at positions: without the wrapper around its mixers it leaks.
    is_apart = distance(positions_alone, expected) < TOLERANCE
    assert is_apart == (not stateful_mixers(causal))


def varlen_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, _mask: None, **options: Any
) -> tuple[Tensor, None]:
    """FlashAttention's convention on CPUs: no mask, and documents by `cu_seq_lens_q` alone."""
    ends = options.get("cu_seq_lens_q")
    borders = [0, query.shape[2]] if ends is None else ends.tolist()
    groups = module.num_key_value_groups
    outs = []
    for start, stop in zip(borders, borders[1:], strict=False):
        q, k, v = (each[:, :, start:stop] for each in (query, key, value))
        k, v = (each.repeat_interleave(groups, 1) for each in (k, v))
        outs.append(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
    return torch.cat(outs, 2).transpose(1, 2), None


@pytest.mark.parametrize("family", ["llama", "nemotron_h"])
def test_flash_attention_is_told_of_the_documents(
    family: str, folders: Any, ids: Tensor, segments: Tensor
) -> None:
    causal = loaded(folders(family)).eval()
    expected = one_by_one(causal, ids, segments)
    AttentionInterface.register("flash_on_cpu", varlen_attention)
    AttentionMaskInterface.register("flash_on_cpu", lambda *_, **__: None)
    # not by set_attn_implementation, which would look for the package of such a name
    causal.config._attn_implementation = "flash_on_cpu"
    with torch.no_grad():
        leaking = causal(ids, position_ids=document_positions(segments), use_cache=False).logits
        model = wrapped(folders(family), causal)
        found = model.logits(model(ids, segment_ids=segments).hidden)
    assert distance(leaking, expected) > NOTICED
    assert distance(found, expected) < TOLERANCE


def test_every_tested_family_is_packed() -> None:
    assert {family.removesuffix("-tied") for family in PACKED} == set(TESTED_FAMILIES)


def test_documents_are_found_by_their_positions(segments: Tensor) -> None:
    positions = document_positions(segments)
    counted = [torch.cat([torch.arange(n) for n in row]) for row in LENGTHS]
    assert torch.equal(positions, torch.stack(counted))
    lengths = [
        [span.stop - span.start for span in document_spans(positions) if span.row == row]
        for row in range(len(LENGTHS))
    ]
    assert lengths == [list(row) for row in LENGTHS]


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(
    ("family", "layers"), [("mixtral", 2), ("qwen3_moe", 2), ("nemotron_h", 1)]
)
def test_router_statistics_are_counts(
    family: str, layers: int, recompute: bool, folders: Any, ids: Tensor, segments: Tensor
) -> None:
    causal = loaded(folders(family))
    if recompute:
        causal.activation_checkpointing_enable()
    model = wrapped(folders(family), causal)
    moe = model.config.moe
    assert moe is not None
    seen: list[Any] = []
    for router in model.routing.routers:
        router.register_forward_hook(lambda _, __, output: seen.append(output))
    output = model(ids, segment_ids=segments)
    assert model.num_routers == layers
    assert output.router_statistics is not None
    assert output.router_statistics.shape == (layers, 2 * moe.num_experts + 3)
    capacity = -(-ids.numel() * moe.top_k * 5 // (moe.num_experts * 4))  # at a factor of 1.25
    for row, (logits, _, chosen) in zip(output.router_statistics, seen, strict=True):
        counts = [sum(expert == int(c) for c in chosen.flatten()) for expert in range(4)]
        assert row[:4].tolist() == counts
        scores = logits.softmax(-1)
        if family == "nemotron_h":
            scores = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
        torch.testing.assert_close(row[4:8], scores.sum(0))
        torch.testing.assert_close(row[8], logits.logsumexp(-1).square().sum())
        assert row[9].item() == sum(max(0, count - capacity) for count in counts)
        assert row[10].item() == 0
    # Layers that run again in the backward pass are not counted again, and give gradients.
    output.router_statistics[:, 4:8].square().sum().backward()
    assert all(router.weight.grad.abs().sum() > 0 for router in model.routing.routers)
    again = model(ids, segment_ids=segments).router_statistics
    assert torch.equal(again, output.router_statistics)


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("has_cache", [True, False], ids=["cache", "no cache"])
def test_text_is_that_of_whole_passes(
    family: str, has_cache: bool, folders: Any, ids: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = wrapped(folders(family))
    if not has_cache:  # as of a family that gives none
        decoder = type(model.causal.get_decoder())
        forward = decoder.forward

        def without(self: Any, *args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
            assert past_key_values is None
            return forward(self, *args, **{**kwargs, "use_cache": False})

        monkeypatch.setattr(decoder, "forward", without)
    new = generate(model, ids[:2, :9], max_new_tokens=8, temperature=0.0, seed=0)
    assert model.training
    seen = ids[:2, :9]
    with torch.no_grad():
        for _ in range(8):
            scores = model.eval().logits(model(seen).hidden[:, -1])
            seen = torch.cat([seen, scores.argmax(-1, keepdim=True)], 1)
    assert torch.equal(new, seen[:, 9:])


@pytest.mark.parametrize("family", ["llama-tied", "nemotron_h"])
def test_model_is_made_without_values_and_then_is_that_of_transformers(
    family: str, folders: Any, ids: Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    case = Case(family, recompute=True)
    config = make_config(case, folders(family))
    long = config.training.model_copy(update={"sequence_length": 129})
    with caplog.at_level("INFO", logger="cdrmix"):
        model = build_model(
            config.model_copy(update={"training": long}), make_plan(case, config, 1)
        )
    assert "sequence_length = 129 is more than max_position_embeddings = 128" in caplog.text
    assert "attention: sdpa: on CPUs" in caplog.text
    whole = loaded(folders(family))
    tied = family == "llama-tied"
    assert (model.causal.lm_head.weight is model.causal.get_input_embeddings().weight) == tied
    model.causal.load_state_dict(whole.state_dict())
    assert any(getattr(layer, "gradient_checkpointing", False) for layer in model.modules())
    expected = whole(ids, use_cache=False).logits
    assert distance(model.logits(model(ids).hidden), expected) < TOLERANCE
    names = {logical_name(name) for name, _ in model.named_parameters()}
    assert names == {name for name, _ in whole.named_parameters()}


def test_family_without_tests_here(folders: Any, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match=r"'granite'.*cannot be trained.*scales or caps"):
        check_family(wrapped(folders("granite")))
    with caplog.at_level("WARNING", logger="cdrmix"):
        check_family(wrapped(folders("olmo2")))
    assert "'olmo2' is not tested here" in caplog.text


def test_tested_family_needs_no_check(folders: Any, caplog: pytest.LogCaptureFixture) -> None:
    check_family(wrapped(folders("llama")))
    assert not caplog.text


def test_family_whose_documents_see_each_other(
    folders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cdrmix.hf import family_check, model

    monkeypatch.setattr(family_check, "TESTED_FAMILIES", ("llama",))
    monkeypatch.setattr(model, "stateful_mixers", lambda _: [])
    with pytest.raises(ConfigError, match=r"'nemotron_h'.*see each other \(.*Tested are llama"):
        check_family(wrapped(folders("nemotron_h")))
    broken = wrapped(folders("olmo2"))
    with torch.no_grad():
        broken.causal.get_output_embeddings().weight[5] = float("inf")
    with pytest.raises(ConfigError, match="loss or gradients are not finite"):
        check_family(broken)
