"""Routed blocks against plain ones on the same tokens, and the acceptance of both modes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from cdrmix.config.model import ModelConfig
from cdrmix.config.schema import Config
from cdrmix.models.backbone import Backbone
from cdrmix.models.block import Block
from cdrmix.models.generate import generate
from cdrmix.models.mixture_of_depths import (
    Decision,
    DepthRouter,
    RoutedBlock,
    num_chosen,
    routed_blocks,
)
from cdrmix.models.speculate import speculate
from cdrmix.objectives.depth import DepthMonitors, depth_monitors, predictor_loss
from cdrmix.parallel.thresholds import move_thresholds
from cdrmix.parallel.topology import ALONE
from cdrmix.planning.counts import forward_flops_by_layer
from cdrmix.planning.depth import DEPTH_STATISTICS

ROWS, LENGTH, WIDTH = 3, 24, 64
EXPERTS = {"num_experts": 4, "expert_hidden_size": 48}
MODES = ["threshold", "topk"]


def make_config(mode: str, *, capacity: float = 0.5, **changes: Any) -> ModelConfig:
    sizes = {"hidden_size": WIDTH, "num_layers": 4, "num_heads": 2, "vocab_size": 256}
    kinds = {"transformer_fraction": 0.5}  # blocks 1 and 3 are attention, 0 makes v_first
    mod = {"mode": mode, "capacity": capacity, "predictor_hidden": 16}
    return ModelConfig(**sizes | kinds | {"mod": mod} | changes)


def awake(module: nn.Module) -> Any:
    """The module with numbers everywhere, so that nothing is hidden behind a projection of zero."""
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.1)
    return module


def tokens() -> Tensor:
    return torch.randint(0, 256, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))


def decisions(block: RoutedBlock) -> list[Decision]:
    """Decisions of a block from now on."""
    found: list[Decision] = []
    block.depth_router.register_forward_hook(lambda _, __, decision: found.append(decision))
    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("moe", [None, EXPERTS], ids=["dense", "experts"])
def test_all_tokens_at_weight_one_are_the_plain_block(mode: str, moe: Any) -> None:
    config = make_config(mode, capacity=1.0, moe=moe)
    routed = awake(Backbone(config))
    plain = Backbone(config, block=Block)
    own = dict(routed.named_parameters())
    plain.load_state_dict({name: own[name].detach() for name in plain.state_dict()})
    for block in routed_blocks(routed):
        if mode == "threshold":  # the score counts from there on, and its sigmoid is 1
            block.depth_router.threshold.fill_(-1e4)
        else:
            block.depth_router.register_forward_hook(
                lambda _, __, made: made._replace(weights=torch.ones_like(made.weights))
            )
    expected, found = plain(tokens()), routed(tokens())
    assert torch.equal(found.hidden, expected.hidden)
    expected.hidden.square().sum().backward()
    found.hidden.square().sum().backward()
    for name, parameter in plain.named_parameters():
        assert torch.allclose(own[name].grad, parameter.grad, rtol=1e-4, atol=1e-5), name
    if moe:
        assert torch.equal(found.router_statistics, expected.router_statistics)


@pytest.mark.parametrize("layer", [1, 2], ids=["attention", "rwkv"])
@pytest.mark.parametrize("mode", MODES)
def test_chosen_tokens_of_a_row_are_a_sequence_of_their_own(mode: str, layer: int) -> None:
    block = awake(RoutedBlock(make_config(mode), layer))
    x, v_first = torch.randn(2, ROWS, LENGTH, WIDTH).unbind(0)
    found = decisions(block)
    out, statistics = block.choose(x, v_first, None)
    (made,) = found
    if layer == 1:
        # Attention by a mask over the whole row: positions are the original ones, and keys of
        # tokens that are not chosen do not exist.
        expected = x + masked_attention(block, x, made.is_chosen)
        expected = expected + block.ffn(block.ffn_norm(expected)) - x
        whole = torch.lerp(x, x + expected, made.weights.unsqueeze(-1))
    else:
        whole = x.clone()
        for row, chosen in enumerate(made.is_chosen):
            here = (slice(row, row + 1), chosen)
            alone = Block.forward(block, x[here], v_first[here])[0]
            whole[here] = torch.lerp(x[here], alone, made.weights[here].unsqueeze(-1))
    whole = torch.where(made.is_chosen.unsqueeze(-1), whole, x)
    torch.testing.assert_close(out, whole, rtol=1e-5, atol=1e-5)
    assert torch.equal(out[~made.is_chosen], x[~made.is_chosen])
    counts = made.is_chosen.sum(1)
    assert int(statistics.depth[1]) == int(counts.sum())
    if mode == "topk":
        assert counts.tolist() == [num_chosen(0.5, LENGTH)] * ROWS
    else:
        assert len(set(counts.tolist())) > 1, "rows of one length would not show the filling"


def masked_attention(block: RoutedBlock, x: Tensor, is_key: Tensor) -> Tensor:
    """Attention of a block over whole rows with keys at some tokens alone, [B, T, D]."""
    normed = block.mixer_norm(x)
    mixer = block.mixer
    query, key, value = (
        linear(normed).unflatten(-1, (-1, 32)).transpose(1, 2)
        for linear in (mixer.query, mixer.key, mixer.value)
    )
    angles = torch.arange(LENGTH)[:, None] * 10_000 ** (-torch.arange(0, 32, 2) / 32)

    def turned(heads: Tensor) -> Tensor:
        first, second = heads.chunk(2, -1)
        turn = torch.complex(first, second) * torch.exp(1j * angles)
        return torch.cat([turn.real, turn.imag], -1)

    scores = turned(query) @ turned(key).mT / 32**0.5
    sees = torch.ones(LENGTH, LENGTH).tril().bool() & is_key[:, None, None, :]
    scores = scores.masked_fill(~sees, -1e9)
    return mixer.output((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("capacity, length, chosen", [(0.75, 24, 18), (0.7, 10, 7), (0.5, 3, 2)])
def test_exactly_the_capacity_is_chosen(capacity: float, length: int, chosen: int) -> None:
    router = awake(DepthRouter(make_config("topk", capacity=capacity).mod, WIDTH))
    is_chosen = router(torch.randn(2, length, WIDTH)).is_chosen
    assert num_chosen(capacity, length) == chosen
    assert is_chosen.sum(1).tolist() == [chosen, chosen]


@torch.no_grad()
def hidden_before_a_change(model: Backbone) -> float:
    """Largest change of the first half's hidden states when tokens of the second half change."""
    first, other = tokens(), tokens()
    other[:, LENGTH // 2 :] = (other[:, LENGTH // 2 :] + 7) % 256
    apart = model(first).hidden - model(other).hidden
    return float(apart[:, : LENGTH // 2].abs().max())


@pytest.mark.parametrize("mode", MODES)
def test_a_token_does_not_depend_on_later_ones(mode: str) -> None:
    model = centred(awake(Backbone(make_config(mode, moe=EXPERTS))))
    model.eval()
    assert hidden_before_a_change(model) < 1e-6
    model.train()
    if mode == "threshold":
        assert hidden_before_a_change(model) < 1e-6
    else:  # what evaluating by the highest scores of a row would leak
        assert hidden_before_a_change(model) > 1e-2


def centred(model: Backbone) -> Backbone:
    """The model with predictors that expect about half the tokens."""
    seen: list[Tensor] = []
    for block in routed_blocks(model):
        router = block.depth_router
        if router.mode == "topk":
            hook = router.register_forward_pre_hook(lambda _, args: seen.append(*args))
            with torch.no_grad():
                model(tokens())
                logits = router._predict(seen[-1].float())
                router.predictor_out_bias -= logits.quantile(0.5)
            hook.remove()
    return model


@torch.no_grad()
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("moe", [None, EXPERTS], ids=["dense", "experts"])
def test_decoding_equals_the_full_forward_pass(mode: str, moe: Any) -> None:
    model = centred(awake(Backbone(make_config(mode, moe=moe)))).eval()
    whole = model(tokens())
    lengths = set()
    state, pieces = None, []
    for piece in tokens().split([7, *[1] * 9, 5, 1, 2], dim=1):
        output = model(piece, state=state, return_state=True)
        state = output.state
        lengths |= {tuple(state[3].block.mixer.lengths.tolist())} if state[3].block else set()
        pieces.append(output.hidden)
    torch.testing.assert_close(torch.cat(pieces, 1), whole.hidden, rtol=1e-5, atol=1e-5)
    assert any(len(set(rows)) > 1 for rows in lengths), "rows of one length show nothing"
    # keys and values of chosen tokens alone
    chosen = whole.depth_statistics[:, DEPTH_STATISTICS.index("chosen")]
    assert int(state[3].block.mixer.lengths.sum()) == int(chosen[-1]) < ROWS * LENGTH
    alone = torch.cat([model(row).hidden for row in tokens().split(1)])
    torch.testing.assert_close(alone, whole.hidden, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("mode", MODES)
def test_documents_of_a_row_are_kept_apart(mode: str) -> None:
    model = centred(awake(Backbone(make_config(mode)))).eval()
    ids = tokens()
    border = 11
    segments = (torch.arange(LENGTH) >= border).long().expand(ROWS, -1)
    packed = model(ids, segment_ids=segments).hidden
    first, second = model(ids[:, :border]).hidden, model(ids[:, border:]).hidden
    torch.testing.assert_close(packed[:, :border], first, rtol=1e-5, atol=1e-5)
    # angles between tokens are those of their distance, so that a start elsewhere is as good
    torch.testing.assert_close(packed[:, border:], second, rtol=1e-4, atol=1e-4)
    together = model(ids).hidden
    assert (together - packed)[:, border:].abs().max() > 1e-2


def test_what_fills_rows_meets_no_expert() -> None:
    model = awake(Backbone(make_config("threshold", moe=EXPERTS)))
    output = model(tokens())
    chosen = output.depth_statistics[:, DEPTH_STATISTICS.index("chosen")]
    routed = output.router_statistics[:, : EXPERTS["num_experts"]].sum(1)
    assert routed.tolist() == [2 * ROWS * LENGTH, *(2 * chosen).tolist()]
    # Nobody is chosen, of any row: nothing changes, and every parameter has a gradient all the
    # same, which DeepSpeed counts on.
    for block in routed_blocks(model):
        block.depth_router.threshold.fill_(1e4)
    output = model(tokens())
    before = model.blocks[0](model.embedding_norm(model.embedding(tokens())), None)[0]
    assert torch.equal(output.hidden, model.final_norm(before))
    output.hidden.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@torch.no_grad()
def test_flops_are_those_of_the_chosen_tokens() -> None:
    x = torch.randn(2, 512, 128)
    sizes = {"hidden_size": 128, "num_heads": 4, "transformer_fraction": 1.0}
    mod = {"mode": "topk", "capacity": 0.75, "predictor_hidden": 4}
    config = make_config("topk", **sizes | {"mod": mod})
    block = awake(RoutedBlock(config, 1))
    flops = []
    for run in (lambda: block(x, None), lambda: block.choose(x, None, None)):
        with FlopCounterMode(display=False) as counter:
            run()
        matrices = counter.get_flop_counts()["Global"]
        scores = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        flops.append(sum(n for op, n in matrices.items() if op != scores.default))
    assert flops[1] / flops[0] == pytest.approx(0.75, abs=0.01)
    # the plan's, without what attention does beside its matrices
    planned = forward_flops_by_layer(config, 512)[1] - 2 * (0.75 * 512) * 128 * 0.75
    assert planned * x.shape[0] * x.shape[1] == pytest.approx(flops[1], rel=1e-3)


def test_a_threshold_stays_float32() -> None:
    router = DepthRouter(make_config("threshold").mod, WIDTH)
    router.threshold += 0.123456789
    before = float(router.threshold)
    router.threshold.is_copy = True
    router = nn.Sequential(router).to(torch.bfloat16)[0]
    assert router.weight.dtype == torch.bfloat16
    assert router.threshold.dtype == torch.float32 and float(router.threshold) == before
    assert router.threshold.is_copy, "a checkpoint reads this mark"
    assert router.to("meta").threshold.is_meta
    with torch.device("meta"):
        unmade = DepthRouter(make_config("threshold").mod, WIDTH)
    made = unmade.to(torch.bfloat16).to_empty(device="cpu").threshold
    assert (made.device.type, made.dtype) == ("cpu", torch.float32)


def test_a_block_that_ranks_call_together_is_called_as_often_on_each() -> None:
    block = awake(RoutedBlock(make_config("threshold"), 1)).eval()
    x, v_first = torch.randn(2, ROWS, LENGTH, WIDTH).unbind(0)
    calls: list[Any] = []
    block.mixer.register_forward_hook(lambda *call: calls.append(call))
    block.advance(x, v_first, None)
    assert len(calls) > 1, "rows of different numbers"
    block.is_collective = True
    with pytest.raises(AssertionError, match="other numbers of them on each rank"):
        block.advance(x, v_first, None)
    calls.clear()
    block.advance(x[:1], v_first[:1], None)
    block.advance(x[:, :1], v_first[:, :1], None)
    assert len(calls) == 2


def text(seed: int) -> Iterator[Tensor]:
    """Endless batches [8, 65] of a text in which a letter tells what follows, mostly."""
    source = torch.Generator().manual_seed(seed)
    after = torch.randint(0, 64, (64, 4), generator=torch.Generator().manual_seed(0))
    while True:
        rows = [torch.randint(0, 64, (8,), generator=source)]
        for _ in range(64):
            draw = torch.randint(0, 4, (8,), generator=source)
            rows.append(after[rows[-1], draw * (rows[-1] % 2)])
        yield torch.stack(rows, 1)


def learned(mode: str) -> tuple[DepthMonitors, DepthMonitors]:
    """Monitors of the last training step, and of other text in evaluation."""
    steps, rate = 100, 3e-3
    sizes = {"transformer_fraction": 1.0, "num_layers": 3}
    mod = {"mode": mode, "capacity": 0.5, "layers": (1, 2), "predictor_hidden": 64}
    training = {"max_steps": steps, "global_batch_size": 8, "sequence_length": 64}
    config = Config(
        name="depth",
        model=make_config(mode, **sizes | {"mod": mod}),
        training=training | {"learning_rate": rate, "min_learning_rate": 0.0, "warmup_steps": 10},
        data={"path": "none"},
    )
    model = Backbone(config.model)
    model.initialize(seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95))
    batches = text(1)
    for step in range(steps):
        rows = next(batches)
        output = model(rows[:, :-1])
        scores = model.logits(output.hidden).flatten(0, 1)
        loss = F.cross_entropy(scores, rows[:, 1:].flatten())
        loss = loss + predictor_loss(output.depth_statistics)
        optimizer.param_groups[0]["lr"] = rate * min(1, (step + 1) / 10) * (1 - step / steps)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        move_thresholds(model, config, ALONE, step=step)
    model.eval()
    held_out = text(99)
    with torch.no_grad():
        sums = sum(model(next(held_out)[:, :-1]).depth_statistics for _ in range(20))
    return depth_monitors(output.depth_statistics), depth_monitors(sums)


def test_thresholds_keep_the_capacity() -> None:
    _, held_out = learned("threshold")
    assert (held_out.fraction - 0.5).abs().max() < 0.03, held_out.fraction
    assert held_out.position_correlation.abs().max() <= 1


def test_a_predictor_learns_who_is_among_the_highest() -> None:
    last, held_out = learned("topk")
    assert last.fraction.tolist() == [0.5, 0.5]
    assert last.predictor_accuracy.min() > 0.85, last.predictor_accuracy
    assert (held_out.fraction - 0.5).abs().max() < 0.1, held_out.fraction


@torch.no_grad()
@pytest.mark.parametrize("mode", MODES)
def test_guesses_are_verified_by_routed_blocks(mode: str) -> None:
    model = awake(Backbone(make_config(mode, mtp={"num_tokens": 3})))
    # One token that nearly always follows, so that guesses are right at times.
    model.embedding.weight[7] *= 8
    prompts = tokens()[:, :5]
    expected = generate(model, prompts, max_new_tokens=24, temperature=0, seed=0)
    found = speculate(model, prompts, max_new_tokens=24)
    assert torch.equal(found.tokens, expected)
    assert 0 < sum(found.accepted) < sum(found.guessed), (
        "a state that goes back, and one that stays"
    )
