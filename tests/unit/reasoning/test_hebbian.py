"""Plastic adapters on real backbones: exactness when off, state, guards, branches."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cdrmix.config.model import ModelConfig
from cdrmix.config.reasoning import AdapterConfig
from cdrmix.models.backbone import Backbone
from cdrmix.models.clamped_recurrence import clamped
from cdrmix.models.state_rows import branch, map_tensors, select
from cdrmix.planning.lesson_sizes import ADAPTER_KERNELS
from cdrmix.reasoning.fast_weights import (
    RULES,
    Chunks,
    FastWeights,
    Writes,
    chunks_of,
    correlation_loss,
)
from cdrmix.reasoning.hebbian import (
    LARGEST_RELATIVE_CHANGE,
    EpisodeState,
    PlasticAdapter,
    PlasticBackbone,
)

MOE = {"num_experts": 4, "top_k": 2, "expert_hidden_size": 32}
ADAPTERS = AdapterConfig(rank=8, alpha=0.2, decay=0.98)
LENGTH = 40


def make(*, rule: str = "hebb", moe: dict[str, int] | None = None, **changed: object):
    """A hybrid of two blocks whose output projections are not zero, with adapters."""
    settings = {"hidden_size": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 256}
    settings |= {"transformer_fraction": 0.5, "moe": moe, **changed}
    backbone = Backbone(ModelConfig.model_validate(settings))
    backbone.initialize(seed=0)
    with torch.no_grad():
        for name, parameter in backbone.named_parameters():
            if not parameter.any():
                torch.nn.init.normal_(parameter, std=0.1)
            assert parameter.isfinite().all(), name
    model = PlasticBackbone(backbone, ADAPTERS, rule=rule)
    model.initialize(seed=0)
    return model


def tokens(batch_size: int = 3, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(256, (batch_size, length))


def first_chunks(x: torch.Tensor) -> tuple[Chunks, ...]:
    """Chunks of x, [B, T, I], at the start of an episode."""
    return chunks_of(x.shape[1], start=0, device=x.device)


def same(a: object, b: object) -> bool:
    """Whether two states hold equal bits."""
    ours, theirs = tensors_of(a), tensors_of(b)
    assert len(ours) == len(theirs) > 0
    return all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))


def tensors_of(state: object) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(state, note)
    return found


@pytest.mark.parametrize("moe", [None, MOE], ids=["dense", "experts"])
def test_without_plasticity_logits_are_the_backbone_s_bit_by_bit(moe: dict[str, int]) -> None:
    model, ids = make(moe=moe), tokens()
    alone = model.backbone(ids).hidden
    unwritten = model(ids, state=model.start(3), writes=False)
    assert torch.equal(unwritten.output.hidden, alone)
    model(ids, state=model.start(3))  # leaves nothing behind in the backbone
    assert torch.equal(model.backbone(ids).hidden, alone)


def test_the_first_token_of_an_episode_is_read_as_the_backbone_reads_it() -> None:
    model, ids = make(), tokens()
    plastic = model(ids, state=model.start(3)).output.hidden
    alone = model.backbone(ids).hidden
    assert torch.equal(plastic[:, 0], alone[:, 0])
    assert not torch.allclose(plastic[:, -1], alone[:, -1])


def test_every_layer_of_the_table_is_adapted_and_no_expert() -> None:
    dense = {"blocks.0.mixer": ("receptance", "key", "value"), "blocks.0.ffn": ("up", "down")}
    dense |= {"blocks.1.mixer": ("query", "key", "value", "output"), "blocks.1.ffn": ("up", "down")}
    wanted = {f"{place}.{part}" for place, parts in dense.items() for part in parts}
    assert set(make().start(1).layers) == wanted
    with_experts = {name for name in wanted if "mixer" in name}
    assert set(make(moe=MOE).start(1).layers) == with_experts


def test_the_backbone_keeps_its_parameter_names() -> None:
    model = make()
    names = {name for name, _ in model.backbone.named_parameters()}
    assert names == {name for name, _ in Backbone(model.backbone.config).named_parameters()}


@pytest.mark.parametrize("rule", RULES)
def test_reading_in_pieces_equals_reading_at_once(rule: str) -> None:
    model, ids = make(rule=rule), tokens()
    with torch.no_grad():
        whole = model(ids, state=model.start(3), return_blocks=True)
        state, hidden, begin = model.start(3), [], 0
        for length in (7, 16, 1, 16):
            part = ids[:, begin : begin + length]
            out = model(part, state=state, return_blocks=True)
            state, begin = out.state, begin + length
            hidden.append(out.output.hidden)
    # float32 sums in another order, through two layers of feedback
    torch.testing.assert_close(torch.cat(hidden, 1), whole.output.hidden, rtol=1e-3, atol=1e-4)
    assert state.num_tokens == whole.state.num_tokens == LENGTH


def test_fast_weights_outlive_the_window_and_rows_do_not_mix() -> None:
    model, first, second = make(), tokens(), tokens(length=2)
    written = model(first, state=model.start(3)).state
    assert written.blocks is None  # the window begins anew
    recalled = model(second, state=written).output.hidden
    assert not torch.allclose(recalled, model.backbone(second).hidden)
    alone = model(second[1:2], state=select(written, torch.tensor([1]))).output.hidden
    torch.testing.assert_close(recalled[1:2], alone)


def test_every_slow_parameter_gets_a_gradient() -> None:
    model = make()
    out = model(tokens(), state=model.start(3), with_correlation=True)
    out.output.hidden.square().sum().backward()
    for name, parameter in model.adapters.named_parameters():
        assert parameter.grad is not None and parameter.grad.any(), name


def test_the_correlation_objective_alone_reaches_the_adapters() -> None:
    model = make()
    out = model(tokens(), state=model.start(3), with_correlation=True)
    out.correlation.backward()
    assert all(adapter.down.grad.any() for adapter in model.adapters.values())
    assert model(tokens(), state=model.start(3)).correlation is None


def test_fast_weights_are_within_the_clamp_at_every_border() -> None:
    model = make()
    repeated = tokens(3, 1).expand(3, 48)  # one pattern over and over: they grow between borders
    layers = model(repeated, state=model.start(3)).state.layers.values()
    assert 1 < max(layer.weights.abs().max() for layer in layers) <= ADAPTERS.clamp


def test_a_change_is_never_larger_than_its_share_of_the_layer_s_output() -> None:
    model = make()
    strong = replace(FastWeights.blank(3, 8), weights=torch.full((3, 8, 8), 2.0))
    layers = dict.fromkeys(model.start(3).layers, strong)
    state = EpisodeState(layers, 0)
    layer = model.backbone.blocks[1].mixer.query
    x = torch.randn(3, 5, 64)
    adapted = model.adapter("blocks.1.mixer.query")(
        x, layer(x), strong, chunks=first_chunks(x), with_correlation=False
    )
    share = (adapted.y - layer(x)).norm(dim=-1) / layer(x).norm(dim=-1)
    torch.testing.assert_close(share[:, 0], torch.full((3,), LARGEST_RELATIVE_CHANGE))
    assert share.max() <= LARGEST_RELATIVE_CHANGE + 1e-5
    assert model(tokens(), state=state).output.hidden.isfinite().all()


def test_a_token_that_is_not_finite_is_not_stored() -> None:
    model = make()
    adapter, layer = model.adapter("blocks.1.mixer.query"), model.backbone.blocks[1].mixer.query
    x = torch.randn(1, 12, 64)
    x[0, 4, 7] = torch.inf
    before = model.start(1).layers["blocks.1.mixer.query"]
    adapted = adapter(x, layer(x), before, chunks=first_chunks(x), with_correlation=False)
    assert adapted.after.weights.isfinite().all() and adapted.after.trace.isfinite().all()
    assert adapted.y[0, torch.arange(12) != 4].isfinite().all()


def test_reading_leaves_the_state_that_it_starts_from_as_it_was() -> None:
    model = make()
    before = model(tokens(), state=model.start(3)).state
    copy = branch(before, 1)
    assert not same(model(tokens(), state=before).state, before)
    assert same(before, copy)


def test_branches_in_one_batch_do_not_see_each_other() -> None:
    model = make()
    state = model(tokens(2), state=model.start(2)).state
    futures = tokens(6, 5)
    together = model(futures, state=branch(state, 3)).state
    for row in range(6):
        alone = model(futures[row : row + 1], state=select(state, torch.tensor([row // 3]))).state
        mine = select(together, torch.tensor([row]))
        for name, layer in mine.layers.items():
            torch.testing.assert_close(layer.weights, alone.layers[name].weights)


def test_a_backbone_that_recomputes_is_refused() -> None:
    config = make().backbone.config
    with pytest.raises(ValueError, match="without activation checkpointing"):
        PlasticBackbone(Backbone(config, activation_checkpointing="block"), ADAPTERS)


def test_half_precision_layers_keep_float32_fast_weights() -> None:
    model = make().to(torch.bfloat16)
    out = model(tokens(), state=model.start(3))
    assert out.output.hidden.dtype == torch.bfloat16
    assert {layer.weights.dtype for layer in out.state.layers.values()} == {torch.float32}


@torch.no_grad()
def test_fast_weights_and_traces_of_a_few_tokens_are_those_worked_out_by_hand() -> None:
    config = AdapterConfig(rank=2, alpha=0.2, decay=0.9, clamp=2.0)
    adapter = PlasticAdapter(2, 2, config, "hebb")
    adapter.initialize(seed=0, name="adapter")
    adapter.down.copy_(torch.eye(2))
    adapter.up.copy_(torch.eye(2))
    adapter.modulator_bias.fill_(100.0)  # m = 1
    adapter.trace_decay.fill_(100.0)  # at its bound, 1/2 per token
    # less the mean of those before, p is [1, 0], [0, 1], [1, 0] and q is [1, 0], [1, 0], [0, 1]
    x = torch.tensor([[[1.0, 0.0], [1.0, 2.0], [4.0, 1.0]]])
    y0 = torch.tensor([[[1.0, 0.0], [3.0, 0.0], [2.0, 5.0]]])
    found = adapter(x, y0, FastWeights.blank(1, 2), chunks=first_chunks(x), with_correlation=False)
    torch.testing.assert_close(found.after.mean[0], torch.tensor([2.0, 1.0, 2.0, 5 / 3]))
    assert found.after.count.item() == 3
    # nothing precedes token 0; the trace before token 1 is [1, 0], before token 2 [.5, 1], whose
    # squared length of 1.25 lowers the write to 1 / 1.25
    weights = torch.tensor([[0.9, 0.0], [0.4, 0.8]])
    torch.testing.assert_close(found.after.weights[0], weights)
    torch.testing.assert_close(found.after.trace[0], torch.tensor([1.25, 0.5]))
    # over filling H stays, and the trace, which is of the tokens just before, fades
    filling = torch.zeros(1, 4, dtype=torch.bool)
    four = torch.ones(1, 4, 2)
    chunks = chunks_of(4, start=3, passes=filling, device=four.device)
    kept = adapter(four, four, found.after, chunks=chunks, mask=filling, with_correlation=False)
    torch.testing.assert_close(kept.after.weights[0], weights)
    torch.testing.assert_close(kept.after.trace[0], torch.tensor([1.25, 0.5]) / 16)
    torch.testing.assert_close(kept.after.mean, found.after.mean)
    assert kept.after.count.item() == 3
    # the sixteenth token of an episode ends at the clamp, which leaves small weights alone
    one, large = four[:, :1], replace(found.after, weights=4 * weights[None])
    chunks = chunks_of(1, start=15, passes=filling[:, :1], device=one.device)
    ended = adapter(one, one, large, chunks=chunks, mask=filling[:, :1], with_correlation=False)
    expected = torch.tensor([[3.6, 0.0], [1.6, 3.2]])
    torch.testing.assert_close(
        ended.after.weights[0], torch.where(expected > 1, 1 + torch.tanh(expected - 1), expected)
    )


@torch.no_grad()
def test_what_all_tokens_have_in_common_is_not_stored() -> None:
    """Uncentred, it added up until the fast weights of all texts were the same."""
    adapter = PlasticAdapter(8, 8, ADAPTERS, "hebb")
    adapter.initialize(seed=0, name="adapter")
    x, common = torch.randn(2, 64, 8), 10 * torch.randn(8)
    plain, shifted = (
        adapter(each, each, FastWeights.blank(2, 8), chunks=first_chunks(x), with_correlation=False)
        for each in (x, x + common)
    )
    alike = torch.cosine_similarity(
        plain.after.weights.flatten(1), shifted.after.weights.flatten(1), dim=1
    )
    # but for the first token, of which nothing tells what it has in common with others
    assert alike.min() > 0.9


class Operations(TorchDispatchMode):
    """Counts operations that start a kernel on a GPU: all but views."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_view = any(
            each.alias_info is not None and not each.alias_info.is_write
            for each in func._schema.returns
        )
        self.number += not is_view and func.overloadpacket is not torch.ops.aten._unsafe_view
        return func(*args, **(kwargs or {}))


@pytest.mark.compiler
@pytest.mark.parametrize("length", [32, 192])
def test_an_adapter_starts_as_many_kernels_as_the_plan_counts(length: int) -> None:
    config = AdapterConfig(rank=4, alpha=0.2, half_life_tokens=(16, 512))
    adapter = PlasticAdapter(8, 8, config, "hebb")
    adapter.initialize(seed=0, name="adapter")
    x = torch.randn(2, length, 8)
    before = FastWeights.blank(2, 4)
    before = replace(before, weights=torch.randn(2, 4, 4, requires_grad=True))

    def count(*, writes: bool, learns: bool) -> int:
        y0 = torch.randn(2, length, 8, requires_grad=True)
        chunks = first_chunks(x) if writes else None
        with torch.set_grad_enabled(learns), Operations() as seen:
            found = adapter(x, y0, before, chunks=chunks, with_correlation=writes and learns)
            if learns:
                loss = found.y.sum()
                (loss + found.correlation if writes else loss).backward()
        return seen.number

    counted = ADAPTER_KERNELS._replace(
        writing=count(writes=True, learns=True),
        looking=count(writes=False, learns=True),
        writing_alone=count(writes=True, learns=False),
        looking_alone=count(writes=False, learns=False),
    )
    assert counted == pytest.approx(ADAPTER_KERNELS, rel=0.05)


def test_each_adapter_learns_a_half_life_within_its_bounds() -> None:
    config = AdapterConfig(rank=2, alpha=0.2, half_life_tokens=(16, 512))
    adapters = [PlasticAdapter(2, 2, config, "hebb") for _ in range(12)]
    half_lives = []
    for number, adapter in enumerate(adapters):
        adapter.initialize(seed=0, name=f"{number}")
        half_lives.append(-1 / float(torch.log2(adapter.decay.detach())))
    assert 16 < min(half_lives) < 50 and 160 < max(half_lives) < 512
    adapter = adapters[0]
    with torch.no_grad():
        adapter.half_life.zero_()
    # the middle of the bounds in the logarithm
    assert -1 / float(torch.log2(adapter.decay.detach())) == pytest.approx(
        (16 * 512) ** 0.5, rel=1e-4
    )
    x = torch.randn(1, 40, 2)
    adapter(
        x, x, FastWeights.blank(1, 2), chunks=first_chunks(x), with_correlation=False
    ).y.sum().backward()
    assert adapter.half_life.grad is not None and adapter.half_life.grad.any()


def test_a_memory_of_one_stays_one_over_a_thousand_tokens_of_filling_and_clamps() -> None:
    """The clamp before, c tanh(H / c), left .3 of it; a decay of .98 nothing."""
    weights = torch.eye(2).unsqueeze(0)
    for _ in range(1024 // 16):
        weights = clamped(weights, largest=2.0)
    torch.testing.assert_close(weights, torch.eye(2).unsqueeze(0))
    assert clamped(torch.tensor(100.0), largest=2.0) <= 2


RATES = {"decay": 0.9, "decorrelation_weight": 1e-2}


def unit(*shape: int) -> torch.Tensor:
    return torch.nn.functional.normalize(torch.randn(*shape), dim=-1)


def test_its_gradient_step_in_the_fast_weights_is_the_hebb_rule() -> None:
    post, trace, modulator = unit(3, 1, 4), unit(3, 1, 4), torch.rand(3, 1)
    weights = torch.randn(3, 4, 4, requires_grad=True)
    recalled = torch.einsum("bij,btj->bti", weights, trace)
    loss = correlation_loss(Writes(post, trace, modulator), recalled, weights, **RATES)
    (gradient,) = torch.autograd.grad(loss, weights)
    written = modulator[:, :, None] * post.transpose(1, 2) @ trace  # m q e^T
    torch.testing.assert_close(weights - gradient, 0.9 * weights + written)


def test_features_that_are_copies_of_each_other_cost_more() -> None:
    apart = torch.eye(4).repeat(8, 1).unsqueeze(0)  # one feature at a time, [1, 32, 4]
    alike = torch.tensor([[1.0], [-1.0]]).repeat(16, 4).unsqueeze(0) / 2
    zero, modulator = torch.zeros(1, 4, 4), torch.ones(1, 32)
    cost_apart, cost_alike = (
        correlation_loss(Writes(post, post, modulator), torch.zeros_like(post), zero, **RATES)
        for post in (apart, alike)
    )
    # every pair of the copies has covariance 1/4, and there are 12 pairs of 4 features
    assert cost_alike.item() == pytest.approx(1e-2 / 4 * 12 / 16)
    assert cost_apart.item() < cost_alike.item() / 5


def test_it_is_a_sum_over_sequences() -> None:
    writes = Writes(unit(5, 9, 4), unit(5, 9, 4), torch.rand(5, 9))
    inputs = (writes, torch.randn(5, 9, 4), torch.randn(5, 4, 4))
    whole = correlation_loss(*inputs, **RATES)
    first, second = (
        correlation_loss(*select(inputs, torch.tensor(rows)), **RATES)
        for rows in ([0, 1], [2, 3, 4])
    )
    torch.testing.assert_close(whole, first + second)
