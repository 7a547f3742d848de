"""Mamba mixers against transformers' MambaMixer, the scan's forms and documents against another."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cdrmix.config.model import ModelConfig
from cdrmix.models.backbone import Backbone
from cdrmix.models.mamba import Mamba, MambaState, RoutingMamba
from cdrmix.models.moe import rows_of
from cdrmix.models.selective_scan import (
    CHUNK_TOKENS,
    ScanInputs,
)
from cdrmix.objectives.router import router_losses
from cdrmix.planning.blocks.block_type import Setting, block_type
from cdrmix.planning.blocks.mamba import SCAN_CHUNK_TOKENS
from cdrmix.planning.blocks.routers import router_places
from cdrmix.planning.counts import block_parameters, forward_flops_by_layer

WIDTH, STATES = 32, 8


def make_config(**changes: Any) -> ModelConfig:
    sizes: dict[str, Any] = {
        "hidden_size": WIDTH,
        "num_layers": 2,
        "num_heads": 1,
        "vocab_size": 256,
        "mixers": ["mamba", "routing_mamba"],
        "mamba": {"state_size": STATES},
        "routing_mamba": {"num_experts": 4},
    }
    return ModelConfig(**(sizes | changes))


def filled(mixer: nn.Module, *, std: float = 0.3) -> Any:
    """Gives a mixer numbers that make everything in it matter; matrices normal, output too."""
    mixer.initialize(seed=3, name="blocks.0.mixer", std=std)  # type: ignore[operator]
    source = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in mixer.parameters():
            if not parameter.any():
                parameter.normal_(0, std, generator=source)
    return mixer


def random_inputs(batch: int, time: int, *, dtype: torch.dtype = torch.float32) -> ScanInputs:
    source = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source, dtype=torch.float64).to(dtype)

    wide, narrow = (batch, time, 24), (batch, time, STATES)
    rates = -normal(24, STATES).exp()
    return ScanInputs(
        normal(*wide),
        normal(*wide),
        normal(24) - 2,
        rates,
        normal(*narrow),
        normal(*narrow),
        normal(24),
        normal(*wide),
    )


def gradients(outputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
    source = torch.Generator().manual_seed(2)
    total = torch.zeros((), dtype=torch.float64)
    for out in outputs:
        total = total + (out * torch.randn(out.shape, generator=source).to(out)).sum()
    return list(torch.autograd.grad(total, list(leaves), materialize_grads=True))


def assert_all_close(found: Sequence[Tensor], expected: Sequence[Tensor], limit: float) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        scale = theirs.abs().max().clamp(min=1e-3)
        assert ((ours - theirs).abs().max() / scale) <= limit


def ids_of(*rows: Sequence[int]) -> Tensor:
    lengths = [torch.tensor(row) for row in rows]
    return torch.stack([torch.arange(len(row)).repeat_interleave(row) for row in lengths])


def transformers_mixer(mixer: Mamba) -> nn.Module:
    """transformers' mixer with the same weights."""
    from transformers import MambaConfig
    from transformers.models.mamba.modeling_mamba import MambaMixer

    theirs = MambaMixer(
        MambaConfig(
            hidden_size=WIDTH,
            state_size=STATES,
            time_step_rank=mixer.rank,
            num_hidden_layers=1,
            use_mambapy=False,
        ),
        layer_idx=0,
    )
    values = {
        "in_proj.weight": torch.cat([mixer.input.weight, mixer.gate.weight]),
        "conv1d.weight": mixer.conv_weight.view(-1, 1, 4),
        "conv1d.bias": mixer.conv_bias,
        "x_proj.weight": mixer.x_proj.weight,
        "dt_proj.weight": mixer.dt_proj.weight,
        "dt_proj.bias": mixer.dt_bias,
        "A_log": mixer.a_log.view(-1, STATES),
        "D": mixer.d,
        "out_proj.weight": mixer.output.weight,
    }
    theirs.load_state_dict({name: value.detach() for name, value in values.items()})
    return theirs


def test_equals_transformers_mixer() -> None:
    mixer = filled(Mamba(make_config()))
    theirs = transformers_mixer(mixer)
    x = torch.randn(2, 21, WIDTH, requires_grad=True)
    out, _ = mixer(x)
    expected = theirs(x)
    ours = gradients([out], [x, *mixer.parameters()])
    found = dict(zip(["x", *(name for name, _ in mixer.named_parameters())], ours, strict=True))
    wanted = gradients([expected], [x, *theirs.parameters()])
    known = dict(zip(["x", *(name for name, _ in theirs.named_parameters())], wanted, strict=True))
    assert_all_close([out], [expected], 1e-5)
    pairs = {
        "x": "x",
        "conv_bias": "conv1d.bias",
        "x_proj.weight": "x_proj.weight",
        "dt_proj.weight": "dt_proj.weight",
        "dt_bias": "dt_proj.bias",
        "d": "D",
        "output.weight": "out_proj.weight",
    }
    both = torch.cat([found["input.weight"], found["gate.weight"]])
    assert_all_close(
        [
            *(found[name] for name in pairs),
            both,
            found["conv_weight"].view(-1, 1, 4),
            found["a_log"].view(-1, STATES),
        ],
        [
            *(known[name] for name in pairs.values()),
            known["in_proj.weight"],
            known["conv1d.weight"],
            known["A_log"],
        ],
        1e-5,
    )


def run(
    mixer: Mamba, x: Tensor, state: MambaState | None = None, ids: Tensor | None = None
) -> tuple[Tensor, MambaState]:
    out, after, *_ = mixer(x, state, ids)
    return out, after


KINDS = pytest.mark.parametrize("kind", [Mamba, RoutingMamba])


@KINDS
def test_packed_documents_equal_separate_ones(kind: type[Mamba]) -> None:
    mixer = filled(kind(make_config()))
    lengths = [7, 1, 2, 14]
    x = torch.randn(1, sum(lengths), WIDTH, requires_grad=True)
    out, _ = run(mixer, x, ids=ids_of(lengths))
    apart = torch.cat([run(mixer, part)[0] for part in x.split(lengths, 1)], 1)
    leaves = [x, *mixer.parameters()]
    assert_all_close([out], [apart], 1e-5)
    assert_all_close(gradients([out], leaves), gradients([apart], leaves), 1e-5)
    leaking, _ = run(mixer, x)
    assert (leaking - apart).abs().max() > 1e-2, "without ids documents must leak"


@KINDS
@pytest.mark.parametrize("steps", [(1,) * 12, (5, 7), (2, 1, 9)])
def test_pieces_with_a_state_equal_the_whole(kind: type[Mamba], steps: tuple[int, ...]) -> None:
    mixer = filled(kind(make_config()))
    x = torch.randn(2, 12, WIDTH, requires_grad=True)
    whole, last = run(mixer, x)
    pieces, state = [], None
    for part in x.split(steps, 1):
        out, state = run(mixer, part, state)
        pieces.append(out)
    assert state is not None
    found = [torch.cat(pieces, 1), state.window, state.states]
    expected = [whole, last.window, last.states]
    leaves = [x, *mixer.parameters()]
    assert_all_close(found, expected, 1e-5)
    assert_all_close(gradients(found, leaves), gradients(expected, leaves), 1e-5)


def test_the_state_is_that_of_the_last_document() -> None:
    mixer = filled(Mamba(make_config()))
    x = torch.randn(1, 9, WIDTH)
    _, after = run(mixer, x, ids=ids_of([7, 2]))
    _, alone = run(mixer, x[:, 7:])
    assert_all_close([after.window, after.states], [alone.window, alone.states], 1e-6)


def small_backbone() -> Backbone:
    """Mamba among the other block types, whose routers have other numbers of experts."""
    experts = {"num_experts": 5, "expert_hidden_size": 16}
    mixers = ["mamba", "rwkv", "routing_mamba", "transformer"]
    model = Backbone(make_config(num_layers=4, mixers=mixers, moe=experts))
    model.initialize(seed=1)
    source = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(0, 0.1, generator=source)
    return model


def backbone_results(model: Backbone, ids: Tensor, segment_ids: Tensor) -> list[Tensor]:
    output = model(ids, segment_ids=segment_ids)
    assert output.router_statistics is not None
    assert output.router_statistics.shape == (5, 2 * 5 + 3)
    sums = output.router_statistics[:, :-2]  # not what is beyond a capacity: spans differ
    return [output.hidden, sums, *gradients([output.hidden, sums], list(model.parameters()))]


def test_a_model_with_mamba_layers_is_recomputed_in_spans() -> None:
    model = small_backbone()
    ids = torch.randint(0, 256, (2, 19), generator=torch.Generator().manual_seed(4))
    # documents begin inside of spans and at their ends, and within the reach of the convolution
    segment_ids = torch.stack([ids_of([8, 11])[0], ids_of([5, 2, 12])[0]])
    whole = backbone_results(model, ids, segment_ids)
    model.activation_checkpointing = "block"
    for span in (None, 5, 8):
        model.activation_checkpointing, model.sequence_checkpoint_tokens = "spans", span
        assert_all_close(backbone_results(model, ids, segment_ids), whole, 1e-5)


def test_a_model_with_mamba_layers_decodes_what_it_computes_at_once() -> None:
    model = small_backbone().eval()
    ids = torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        whole = model(ids, return_state=True)
        state, pieces = None, []
        for part in ids.split([5, *[1] * 7], 1):
            output = model(part, state=state, return_state=True)
            state = output.state
            pieces.append(output.hidden)
    assert_all_close([torch.cat(pieces, 1)], [whole.hidden], 1e-5)
    size = block_type("mamba").span_state(Setting(model.config, 12, 4, "cpu", "cpp", False)).whole
    held = [state[0].mixer.window, state[0].mixer.states]
    assert 2 * size == sum(each.numel() * each.element_size() for each in held), "of two rows"


def test_rows_of_statistics_are_those_of_each_half() -> None:
    model = small_backbone()
    ids = torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(4))
    rows = model(ids).router_statistics
    assert [place[:2] for place in router_places(model.config)] == [
        (0, "ffn"), (1, "ffn"), (2, "mixer"), (2, "ffn"), (3, "ffn"),
    ]  # fmt: skip
    of_mixers, of_ffn = (rows_of(rows, model.config, part) for part in ("mixer", "ffn"))
    assert (of_mixers.shape, of_ffn.shape) == ((1, 11), (4, 13))
    torch.testing.assert_close(of_mixers[:, :4].sum(1), torch.tensor([24.0]))
    torch.testing.assert_close(of_mixers[:, 4:8].sum(1), torch.tensor([24.0]))
    torch.testing.assert_close(of_ffn[:, 5:10].sum(1), torch.full((4,), 24.0))


def routed_and_plain(experts: int) -> tuple[RoutingMamba, Mamba]:
    """A routed mixer, all of whose experts are those of a plain one."""
    plain = filled(Mamba(make_config()))
    routed = filled(RoutingMamba(make_config(routing_mamba={"num_experts": experts})))
    with torch.no_grad():
        own = dict(routed.named_parameters())
        for name, value in plain.named_parameters():
            part = name.removesuffix(".weight")
            target = own[f"{part}s"] if part in ("input", "gate", "output") else own[name]
            target.copy_(value.expand_as(target))
    return routed, plain


def test_one_expert_is_plain_mamba_to_the_bit() -> None:
    routed, plain = routed_and_plain(1)
    x = torch.randn(2, 13, WIDTH)
    assert torch.equal(run(routed, x)[0], run(plain, x)[0])


@pytest.mark.parametrize("top_k", [1, 3])
def test_equal_experts_of_weight_one_are_plain_mamba(
    top_k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    routed, plain = routed_and_plain(4)
    routed.router.top_k = top_k
    route = routed.router.forward

    def weigh_as_one(x: Tensor) -> tuple[Tensor, ...]:
        experts, weights, *sums = route(x)
        return (experts, torch.ones_like(weights) / top_k, *sums)

    monkeypatch.setattr(routed.router, "forward", weigh_as_one)
    x = torch.randn(2, 13, WIDTH)
    with torch.no_grad():  # what enters and the gate are sums over the choices
        routed.inputs.div_(top_k)
        routed.gates.div_(top_k)
    assert_all_close([run(routed, x)[0]], [run(plain, x)[0]], 1e-6)


@pytest.mark.parametrize("top_k", [1, 2])
def test_routing_equals_a_loop_over_tokens(top_k: int) -> None:
    sizes = {"num_experts": 4, "top_k": top_k}
    mixer = filled(RoutingMamba(make_config(routing_mamba=sizes)))
    x = torch.randn(1, 9, WIDTH, requires_grad=True)
    out, _, statistics = mixer(x)
    probabilities = torch.softmax(x[0] @ mixer.router.weight.T, -1)
    weights, chosen = probabilities.topk(top_k, -1)
    entering = [sum(mixer.inputs[e] @ x[0, t] for e in chosen[t]) for t in range(9)]
    gates = [sum(mixer.gates[e] @ x[0, t] for e in chosen[t]) for t in range(9)]
    y, _ = mixer.scan(torch.stack(entering)[None], torch.stack(gates)[None], None, None)
    expected = torch.stack(
        [
            sum(weights[t, i] * (mixer.outputs[e] @ y[0, t]) for i, e in enumerate(chosen[t]))
            for t in range(9)
        ]
    )[None]
    leaves = [x, *mixer.parameters()]
    assert_all_close([out], [expected], 1e-5)
    assert_all_close(gradients([out], leaves), gradients([expected], leaves), 1e-5)
    counts = [float((chosen == e).sum()) for e in range(4)]
    assert statistics[:4].tolist() == counts
    torch.testing.assert_close(statistics[4:8], probabilities.sum(0))
    logits = x[0] @ mixer.router.weight.T
    torch.testing.assert_close(statistics[8], torch.logsumexp(logits, -1).square().sum())
    assert statistics[9:].tolist() == [0, 0]


def test_the_gradient_of_the_router_is_that_of_finite_differences() -> None:
    mixer = filled(RoutingMamba(make_config()))
    x = torch.randn(2, 9, WIDTH)
    direction = torch.randn(4, WIDTH)

    def value(shift: float) -> float:
        with torch.no_grad():
            moved = mixer.router.weight + shift * direction
            out, *_ = torch.func.functional_call(mixer, {"router.weight": moved}, (x,))
        return float(out.double().square().sum())

    out, *_ = mixer(x)
    (gradient,) = torch.autograd.grad(out.square().sum(), [mixer.router.weight])
    slope = float((gradient * direction).sum())
    # choices do not change on the way, and the values are rounded to float32
    measured = (value(3e-3) - value(-3e-3)) / 6e-3
    assert abs(slope) > 1e-2, "this input must move the router or the test shows nothing"
    assert measured == pytest.approx(slope, rel=1e-3)


def mean_entropy(*, weight: float, bias: float, steps: int) -> float:
    """Entropy of the use of four experts after training on made tokens, over its largest value."""
    torch.manual_seed(0)
    mixer = filled(RoutingMamba(make_config()), std=0.1)
    embedding = nn.Embedding(16, WIDTH)
    head = nn.Linear(WIDTH, 16)
    with torch.no_grad():
        embedding.weight[:, 0] = 1
        mixer.router.weight[0, 0] = bias
    parameters = [*mixer.parameters(), *embedding.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=3e-3)
    counts = torch.zeros(4)
    for step in range(steps):
        ids = torch.randint(0, 16, (4, 17))
        ids[:, 1::2] = ids[:, :-1:2].flip(1)[:, :8]
        out, _, statistics = mixer(embedding(ids[:, :-1]))
        per_token = statistics[None] / out.shape[:2].numel()
        losses = router_losses(per_token, num_experts=4, top_k=1)
        loss = nn.functional.cross_entropy(head(out).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        (loss + weight * (losses.load_balance + 0.1 * losses.z)).backward()
        optimizer.step()
        counts += statistics[:4].detach() * (step >= steps - 20)
    return float(torch.special.entr(counts / counts.sum()).sum()) / math.log(4)


def test_router_losses_keep_the_experts_in_use() -> None:
    assert mean_entropy(weight=0.01, bias=0, steps=150) >= 0.8
    alone = mean_entropy(weight=0, bias=4, steps=50)
    assert alone < 0.8, "a router that prefers one expert and has no losses must not keep them"


def test_initial_values_are_mambas_and_depend_on_seed_and_name_alone() -> None:
    made = [Mamba(make_config()) for _ in range(3)]
    for mixer, seed in zip(made, (1, 1, 2), strict=True):
        mixer.initialize(seed=seed, name="blocks.0.mixer", std=0.02)
    first, again, other = (dict(mixer.state_dict()) for mixer in made)
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    changed = {name for name, value in first.items() if not torch.equal(value, other[name])}
    assert changed == set(first) - {"a_log", "d", "output.weight"}
    steps = nn.functional.softplus(first["dt_bias"])
    assert 9e-4 < float(steps.min()) < float(steps.max()) < 0.101
    rates = first["a_log"].view(-1, STATES).exp()
    torch.testing.assert_close(rates[5], torch.arange(1.0, STATES + 1))
    assert not first["output.weight"].any()
    assert float(first["d"].min()) == 1


def test_planning_counts_a_mixer_of_the_published_size() -> None:
    sizes = {"hidden_size": 2048, "num_heads": 16, "mixers": ["mamba", "routing_mamba"]}
    model = make_config(**sizes, mamba={}, routing_mamba={}, ffn_hidden_size=8)
    counts = [
        sum(each.num_elements for each in block_parameters(model, layer) if "mixer." in each.name)
        for layer in range(2)
    ]
    projections = 3 * 4096 * 2048
    assert counts[0] == 26_439_680
    assert counts[1] == counts[0] + 7 * projections + 8 * 2048
    flops = forward_flops_by_layer(model, 64)
    assert flops[1] - flops[0] == 2 * 8 * 2048, "one expert and the router of eight"
    scan = (2 * 4 + 6 * 16) * 4096
    matrices = 2 * (projections + 4096 * (128 + 32) + 128 * 4096 + 2 * 2048 * 8)
    assert flops[0] == scan + matrices
    assert SCAN_CHUNK_TOKENS == CHUNK_TOKENS
