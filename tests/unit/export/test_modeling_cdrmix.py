"""The exported model against that of training, and against itself with a cache and padding."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    dynamic_module_utils,
)

from cdrmix.export.modeling_cdrmix import wkv_chunked, wkv_loop
from cdrmix.models import block_cpu, rwkv7_cpu
from cdrmix.models.generate import generate
from tests.made_run import VOCABULARY, with_backend
from tests.unit.export.conftest import Both

PAD = 2
TOLERANCE = 1e-5  # of logits of order 1 in float32; the largest difference seen is 3e-6


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(10, VOCABULARY, (2, 50), generator=generator)


def our_logits(both: Both, tokens: Tensor, backend: str) -> Tensor:
    model = with_backend(both.ours, backend)
    with torch.no_grad():
        return model.logits(model(tokens).hidden)


@torch.no_grad()
def one_by_one(model: Any, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """Logits of each token, decoded with the cache."""
    past = None
    logits = []
    for t in range(tokens.shape[1]):
        here = None if mask is None else mask[:, : t + 1]
        out = model(tokens[:, t : t + 1], attention_mask=here, past_key_values=past, use_cache=True)
        past = out.past_key_values
        logits.append(out.logits)
    return torch.cat(logits, 1)


def close(actual: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0)


@torch.no_grad()
def test_logits_are_bitwise_those_of_training_in_the_same_form(
    both: Both, tokens: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    actual = both.load(recurrence="loop")(tokens).logits
    assert actual.std() > 0.1, "all logits alike would compare well"
    close(actual, our_logits(both, tokens, "reference"))
    for kernels in (rwkv7_cpu, block_cpu):
        monkeypatch.setattr(kernels, "can_run", lambda *_: False)
    assert torch.equal(actual, our_logits(both, tokens, "reference"))


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 15, 16, 17, 50])
def test_logits_in_chunks_are_those_of_training(both: Both, tokens: Tensor, length: int) -> None:
    part = tokens[:, :length]
    close(both.load(recurrence="chunked")(part).logits, our_logits(both, part, "reference"))
    close(both.load()(part).logits, our_logits(both, part, "auto"))


def test_every_parameter_is_loaded_and_the_head_is_tied(both: Both) -> None:
    model, report = AutoModelForCausalLM.from_pretrained(
        both.folder, trust_remote_code=True, output_loading_info=True
    )
    assert not any(report.values()), report
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert not dict(model.named_buffers()), "a buffer would come empty from the meta device"


def test_decoding_with_the_cache_is_one_pass(both: Both, tokens: Tensor) -> None:
    model = both.load()
    with torch.no_grad():
        expected = model(tokens, use_cache=False).logits
    close(one_by_one(model, tokens), expected)


@torch.no_grad()
@pytest.mark.parametrize("cut", [1, 20])
def test_going_on_after_a_prompt_is_one_pass(both: Both, tokens: Tensor, cut: int) -> None:
    model = both.load()
    first = model(tokens[:, :cut], use_cache=True)
    rest = model(tokens[:, cut:], past_key_values=first.past_key_values)
    close(torch.cat([first.logits, rest.logits], 1), model(tokens, use_cache=False).logits)
    assert rest.past_key_values.get_seq_length() == tokens.shape[1]


@pytest.mark.parametrize("state", ["time_shift", "wkv", "channel_shift"])
def test_the_cache_needs_each_state(hybrid: Both, tokens: Tensor, state: str) -> None:
    """A control: the comparison above notices a cache that lacks one."""
    model = hybrid.load()
    with torch.no_grad():
        first = model(tokens[:, :20], use_cache=True)
        for layer in first.past_key_values.layers:
            getattr(layer, "states", {}).pop(state, None)
        rest = model(tokens[:, 20:], past_key_values=first.past_key_values).logits
        expected = model(tokens, use_cache=False).logits[:, 20:]
    assert (rest - expected).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("padding", [1, 5])
def test_left_padding_changes_nothing(
    both: Both, tokens: Tensor, padding: int, use_cache: bool
) -> None:
    model = both.load()
    short = tokens[:1, padding:]
    padded = torch.cat([torch.full((1, padding), PAD), short], 1)
    rows = torch.cat([tokens[1:], padded])
    mask = torch.ones_like(rows)
    mask[1, :padding] = 0
    with torch.no_grad():
        if use_cache:
            logits = one_by_one(model, rows, mask)
        else:
            logits = model(rows, attention_mask=mask, use_cache=False).logits
        close(logits[1:, padding:], model(short, use_cache=False).logits)
        close(logits[:1], model(tokens[1:], use_cache=False).logits)
        assert torch.isfinite(logits).all()


@torch.no_grad()
def test_padding_between_two_calls_changes_nothing(both: Both, tokens: Tensor) -> None:
    """A row that was shorter is padded on its right, and goes on after that."""
    model = both.load()
    short = tokens[:1, :12]
    rows = torch.cat([torch.cat([short, torch.full((1, 8), PAD)], 1), tokens[1:, :20]])
    mask = torch.ones(2, 30, dtype=torch.int64)
    mask[0, 12:20] = 0
    first = model(rows, attention_mask=mask[:, :20], use_cache=True)
    rest = tokens[:, 20:30]
    logits = model(rest, attention_mask=mask, past_key_values=first.past_key_values).logits
    close(logits[:1], model(torch.cat([short, rest[:1]], 1)).logits[:, 12:])
    close(logits[1:], model(tokens[1:, :30]).logits[:, 20:])


def test_without_its_mask_padding_is_read_as_tokens(hybrid: Both, tokens: Tensor) -> None:
    """A control for the two tests above."""
    padded = torch.cat([torch.full((2, 5), PAD), tokens], 1)
    model = hybrid.load()
    with torch.no_grad():
        difference = model(padded).logits[:, 5:] - model(tokens).logits
    assert difference.abs().max() > 100 * TOLERANCE


def test_a_mask_of_another_length_is_refused(hybrid: Both, tokens: Tensor) -> None:
    model = hybrid.load()
    past = model(tokens, use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"attention_mask must be \[2, 51\], all tokens so far"):
        model(tokens[:, :1], attention_mask=torch.ones(2, 1), past_key_values=past)


def test_greedy_text_is_that_of_training(both: Both, tokens: Tensor) -> None:
    model = both.load()
    settings = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    cached = model.generate(tokens[:, :9], **settings)
    assert torch.equal(cached, model.generate(tokens[:, :9], use_cache=False, **settings))
    ours = with_backend(both.ours, "auto")
    expected = generate(ours, tokens[:, :9], max_new_tokens=24, temperature=0, seed=0)
    assert torch.equal(cached[:, 9:], expected)
    assert len(cached[:, 9:].unique()) > 4, "one token again and again says little"


def test_a_batch_of_padded_prompts_is_continued_as_each_alone(both: Both, tokens: Tensor) -> None:
    model = both.load()
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    short = tokens[:1, :5]
    rows = torch.cat([torch.cat([torch.full((1, 4), PAD), short], 1), tokens[1:, :9]])
    mask = (rows != PAD).long()
    both_rows = model.generate(rows, attention_mask=mask, **settings)
    for row, prompt in ((0, short), (1, tokens[1:, :9])):
        alone = model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
        assert torch.equal(both_rows[row, 9:], alone[0, prompt.shape[1] :])


def test_sampling_takes_the_same_tokens_with_and_without_the_cache(
    hybrid: Both, tokens: Tensor
) -> None:
    model = hybrid.load()
    texts = []
    for use_cache in (True, False):
        torch.manual_seed(5)
        texts.append(
            model.generate(
                tokens[:, :9],
                max_new_tokens=16,
                do_sample=True,
                top_p=0.9,
                use_cache=use_cache,
                eos_token_id=None,
            )
        )
    assert torch.equal(*texts)


def test_beams_are_those_without_a_cache(both: Both, tokens: Tensor) -> None:
    model = both.load()
    cached, plain = (beams(model, tokens, use_cache=use_cache) for use_cache in (True, False))
    assert torch.equal(cached, plain)


def test_beams_need_the_cache_reordered(
    hybrid: Both, tokens: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A control: the comparison above notices a cache whose rows stay where they were."""
    model = hybrid.load()
    layer = sys.modules[type(model).__module__].RWKVCacheLayer
    monkeypatch.setattr(layer, "reorder_cache", lambda *_: None)
    assert not torch.equal(
        beams(model, tokens, use_cache=True), beams(model, tokens, use_cache=False)
    )


def beams(model: Any, tokens: Tensor, *, use_cache: bool) -> Tensor:
    return model.generate(
        tokens[:, :9],
        max_new_tokens=24,
        num_beams=4,
        num_return_sequences=4,
        do_sample=False,
        use_cache=use_cache,
        eos_token_id=None,
    )


def test_a_cache_that_a_user_made_is_filled(both: Both, tokens: Tensor) -> None:
    model = both.load()
    with torch.no_grad():
        expected = model(tokens, use_cache=False).logits
        for cache in (DynamicCache(), DynamicCache(config=model.config)):
            model(tokens[:, :20], past_key_values=cache)
            close(model(tokens[:, 20:], past_key_values=cache).logits, expected[:, 20:])


def test_a_cache_of_another_model_is_refused(hybrid: Both, tokens: Tensor) -> None:
    cache = DynamicCache()
    cache.update(torch.zeros(2, 2, 3, 32), torch.zeros(2, 2, 3, 32), 0)
    with pytest.raises(ValueError, match=r"give an empty DynamicCache"):
        hybrid.load()(tokens, past_key_values=cache)


def test_a_cache_of_fixed_length_is_refused(both: Both, tokens: Tensor) -> None:
    with pytest.raises(ValueError, match="this StaticCache has no place"):
        both.load().generate(tokens, max_new_tokens=2, cache_implementation="static")


def test_saved_again_it_is_the_same_model(
    both: Both, tokens: Tensor, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Other tests load code of folders too, and modules stay where they were first looked for.
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    for name in [each for each in sys.modules if each.split(".")[0] == "transformers_modules"]:
        monkeypatch.delitem(sys.modules, name)
    model = both.load()
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", trust_remote_code=True)
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model(tokens).logits)


@torch.no_grad()
def test_a_run_in_bf16_is_exported_in_it(hybrid: Both, tokens: Tensor, tmp_path) -> None:
    from cdrmix.export.exported_run import export_run
    from tests.made_run import made_run

    ours = made_run(tmp_path / "run", "training.precision=bf16")
    export_run(tmp_path / "run", tmp_path / "folder")
    model = Both(ours, tmp_path / "folder", tmp_path / "run").load(recurrence="loop")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    with_backend(ours, "reference").bfloat16()
    assert torch.equal(model(tokens).logits, ours.logits(ours(tokens).hidden))
    state = model(tokens, use_cache=True).past_key_values.layers[0].states["wkv"]
    assert state.dtype == torch.float32


def test_the_loss_of_labels_is_the_cross_entropy(hybrid: Both, tokens: Tensor) -> None:
    model = hybrid.load().train()
    out = model(tokens, labels=tokens)
    expected = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    close(out.loss, expected)
    assert out.past_key_values is None, "training keeps no cache"
    out.loss.backward()
    missing = [name for name, p in model.named_parameters() if p.grad is None]
    assert not missing
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_trains_and_writes(both: Both, tokens: Tensor, dtype: torch.dtype) -> None:
    """As transformers' Trainer does with bf16=True or fp16=True."""
    model = both.load()
    expected = model(tokens, labels=tokens).loss
    with torch.autocast("cpu", dtype=dtype):
        loss = model.train()(tokens, labels=tokens).loss
        model.eval().generate(tokens[:, :20], max_new_tokens=3, num_beams=2)
    close(loss, expected, 0.02)
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@torch.no_grad()
def test_outputs_may_be_asked_for_in_the_configuration(hybrid: Both, tokens: Tensor) -> None:
    out = hybrid.load(output_hidden_states=True)(tokens)
    assert len(out.hidden_states) == 5, "the embedding and four blocks"
    as_tuple = hybrid.load(return_dict=False)
    assert torch.equal(as_tuple(tokens)[0], out.logits)
    assert torch.equal(as_tuple.model(tokens)[0], out.hidden_states[-1])
    assert isinstance(hybrid.load().model(tokens, return_dict=False), tuple)


def test_gradients_in_chunks_are_those_of_the_loop() -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    r, lw, k, v, kk, iclr = (draw(2, 37, 3, 32) for _ in range(6))
    kk = F.normalize(kk, dim=-1)
    lw = -torch.sigmoid(lw) * 0.6065
    inputs = [r, lw, k, v, -kk, kk * torch.sigmoid(iclr), draw(2, 3, 32, 32)]
    results = []
    for form in (wkv_loop, wkv_chunked):
        leaves = [x.clone().requires_grad_() for x in inputs]
        y, state = form(tuple(leaves[:6]), leaves[6])
        (y.square().sum() + state.square().sum()).backward()
        results.append([y, state, *(x.grad for x in leaves)])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-8, rtol=1e-8)


def test_a_model_made_from_the_configuration_has_finite_values(both: Both, tokens: Tensor) -> None:
    config = AutoConfig.from_pretrained(both.folder, trust_remote_code=True)
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    assert torch.isfinite(model(tokens).logits).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"recurrence": "fast"}, "recurrence must be one of auto, loop, chunked; given 'fast'"),
        ({"layer_kinds": ["rwkv"]}, "layer_kinds must name 4 blocks"),
        ({"head_dim": 64}, "num_attention_heads \\* head_dim = 128 is not hidden_size = 64"),
    ],
)
def test_a_wrong_configuration_is_refused(
    hybrid: Both, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        hybrid.load(**settings)


def test_the_tokenizer_begins_a_text_as_training_does(hybrid: Both) -> None:
    from cdrmix.data.tokenizer import load_tokenizer

    ours = load_tokenizer(hybrid.run_dir)
    theirs = AutoTokenizer.from_pretrained(hybrid.folder, trust_remote_code=True)
    text = "def f(x):\n    return [x, '\u00e4']  # don't\n"
    assert theirs(text).input_ids == [ours.eos_id, *ours.encode(text)]
    assert theirs.decode(ours.encode(text)) == text
    assert (theirs.bos_token, theirs.eos_token, theirs.pad_token) == (
        "<|eos|>",
        "<|eos|>",
        "<|pad|>",
    )
    assert theirs.convert_tokens_to_ids("<|thought|>") == ours.role_id("thought")
    assert {"<|fim_prefix|>", "<|memory|>"} <= set(theirs.all_special_tokens)
    batch = theirs(["def", "def f(x): return"], padding=True)
    assert batch["attention_mask"][0][0] == 0, "padded on the left"
