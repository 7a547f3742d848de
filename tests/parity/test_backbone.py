"""The backbone against itself: decoding, documents, recomputation, layer schedule."""

import pytest
import torch

from cdrmix.config.model import ModelConfig
from cdrmix.models.backbone import Backbone, logical_name
from cdrmix.models.generate import generate


def small_model(**changes: object) -> Backbone:
    settings = {
        "hidden_size": 64,
        "num_layers": 4,
        "num_heads": 2,
        "vocab_size": 300,
        "moe": {"num_experts": 4, "expert_hidden_size": 48},
    }
    model = Backbone(ModelConfig(**{**settings, **changes}))
    model.initialize(seed=7)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if not parameter.any():  # zero-initialised projections would hide their paths
            parameter.data.normal_(std=0.05, generator=generator)
    return model


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, 300, (batch, length), generator=torch.Generator().manual_seed(2))


@torch.no_grad()
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"moe": None},
        {"num_heads": 2, "num_kv_heads": 1},
        {"schedule": "top-of-x", "transformer_fraction": 0.5},
        {"transformer_fraction": 0.0},
        {"transformer_fraction": 1.0},
    ],
)
def test_decoding_token_by_token_gives_the_logits_of_the_full_pass(changes: dict) -> None:
    model = small_model(**changes).eval()
    ids = tokens(2, 37)
    full = model.logits(model(ids).hidden)
    state, stepwise = None, []
    for piece in (ids[:, :11], *ids[:, 11:].split(1, dim=1)):
        output = model(piece, state=state, return_state=True)
        state = output.state
        stepwise.append(model.logits(output.hidden))
    torch.testing.assert_close(torch.cat(stepwise, 1), full, rtol=0, atol=1e-5)


@torch.no_grad()
def test_packed_documents_do_not_see_each_other() -> None:
    model = small_model().eval()
    ids = tokens(1, 40)
    segments = torch.tensor([[0] * 13 + [1] * 20 + [2] * 7])
    packed = model(ids, segment_ids=segments).hidden
    apart = [model(piece).hidden for piece in ids.split([13, 20, 7], dim=1)]
    # positions differ, which rotary attention may not notice beyond rounding
    torch.testing.assert_close(packed, torch.cat(apart, 1), rtol=0, atol=1e-5)
    assert (packed - model(ids).hidden).abs().max() > 1e-3, "documents must matter at all"


def test_recomputation_gives_the_same_gradients_bit_by_bit() -> None:
    model = small_model()
    ids = tokens(2, 19)
    found = []
    for recompute in ("none", "block"):
        model.activation_checkpointing = recompute
        model.zero_grad()
        output = model(ids)
        (output.hidden.square().sum() + output.router_statistics.sum()).backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def results(
    model: Backbone, ids: torch.Tensor, segment_ids: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Hidden states, router statistics and all gradients."""
    model.zero_grad()
    output = model(ids, segment_ids=segment_ids)
    weights = torch.randn(output.hidden.shape, generator=torch.Generator().manual_seed(3))
    loss = (output.hidden * weights).sum()
    found = [output.hidden.detach()]
    if output.router_statistics is not None:
        sums = output.router_statistics[:, :-2]  # not what is beyond a capacity: spans differ
        loss = loss + sums.square().sum()
        found.append(sums.detach())
    loss.backward()
    return found + [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("changes", [{}, {"moe": None}, {"num_kv_heads": 1}])
@pytest.mark.parametrize("packed", [False, True])
def test_sequence_checkpointing_changes_rounding_only(changes: dict, packed: bool) -> None:
    model, ids, segment_ids = small_model(**changes), tokens(2, 19), None
    if packed:  # borders of documents inside spans and at their ends
        segment_ids = torch.tensor([[0] * 8 + [1] * 11, [0] * 5 + [1] * 2 + [2] * 12])
    whole = results(model, ids, segment_ids)
    model.activation_checkpointing = "spans"
    for span in (5, 8, 18):
        model.sequence_checkpoint_tokens = span
        for found, expected in zip(results(model, ids, segment_ids), whole, strict=True):
            assert (found - expected).norm() <= 2e-6 * expected.norm().clamp(min=1e-3)


def test_sequence_checkpointing_computes_nothing_more_than_twice() -> None:
    model = small_model()
    model.activation_checkpointing, model.sequence_checkpoint_tokens = "spans", 8
    tokens_seen: dict[str, int] = {}

    def count(name: str) -> None:
        def counting(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            tokens_seen[name] = tokens_seen.get(name, 0) + inputs[0].numel() // 64

        model.get_submodule(name).register_forward_pre_hook(counting)

    names = [f"blocks.{i}.{half}" for i in range(4) for half in ("mixer", "ffn")]
    for name in names:
        count(name)
    results(model, tokens(2, 19))
    assert tokens_seen == dict.fromkeys(names, 2 * 2 * 19)


def test_every_parameter_gets_a_gradient() -> None:
    model = small_model()
    model(tokens(2, 9)).hidden.square().sum().backward()
    silent = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert silent == []


def test_first_rwkv_layer_makes_v_first_wherever_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = ("transformer", "rwkv", "transformer", "rwkv")
    monkeypatch.setattr(ModelConfig, "layer_kinds", lambda self: kinds)
    model = small_model()
    names = {name for name, _ in model.named_parameters()}
    assert "blocks.1.mixer.value_bias" not in names
    assert "blocks.3.mixer.value_bias" in names
    ids = tokens(1, 12)
    changed = ids.clone()
    changed[0, 11] = (changed[0, 11] + 1) % 300
    before, after = model(ids).hidden, model(changed).hidden
    torch.testing.assert_close(before[:, :11], after[:, :11])  # causal all the way
    v_first = model.blocks[1](torch.randn(1, 3, 64), None)[1]
    assert v_first is not None


def test_equal_seeds_give_equal_weights_and_others_do_not() -> None:
    config = small_model().config
    first, second, other = (Backbone(config) for _ in range(3))
    first.initialize(seed=1)
    second.initialize(seed=1)
    other.initialize(seed=2)
    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True)
    )
    assert not torch.equal(first.embedding.weight, other.embedding.weight)


def test_logical_names_hide_where_deepspeed_keeps_the_experts() -> None:
    names = {logical_name(name) for name, _ in small_model().named_parameters()}
    assert {"blocks.0.ffn.router.weight", "blocks.0.ffn.experts.up"} <= names
    assert not any("deepspeed" in name for name in names)


def test_generation_is_seeded_and_stops_at_the_stop_token() -> None:
    model = small_model()
    prompt = tokens(2, 5)
    first = generate(model, prompt, max_new_tokens=8, temperature=1.0, seed=3)
    assert torch.equal(first, generate(model, prompt, max_new_tokens=8, temperature=1.0, seed=3))
    assert first.shape == (2, 8)
    greedy = generate(model, prompt, max_new_tokens=8, temperature=0, seed=0)
    stop = int(greedy[0, 2])
    stopped = generate(model, prompt, max_new_tokens=8, temperature=0, seed=0, stop_id=stop)
    place = greedy[0].tolist().index(stop)
    assert set(stopped[0, place:].tolist()) == {stop}
    assert model.training, "generation leaves the mode as it was"
    with pytest.raises(ValueError, match="prompt"):
        generate(model, prompt[:, :0], max_new_tokens=1, temperature=0, seed=0)
