"""TimeMix against the published equations, written a second time as plain loops in float64."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from cdrmix.config.model import ModelConfig
from cdrmix.models.rwkv7 import ChannelShift, TimeMix, TimeMixState
from cdrmix.models.rwkv7_pointwise import shift_tokens, token_shift_mix


def small_config(head_dim: int = 32) -> ModelConfig:
    return ModelConfig(hidden_size=2 * head_dim, num_layers=4, num_heads=2, vocab_size=256)


def random_mix(config: ModelConfig, *, creates_v_first: bool) -> TimeMix:
    torch.manual_seed(3)
    mix = TimeMix(config, layer=1, creates_v_first=creates_v_first).double()
    mix.initialize(seed=1, name="mixer")
    for parameter in mix.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)  # no path may rest on a zero
    return mix


def published_time_mix(
    mix: TimeMix,
    x: Tensor,
    v_first: Tensor | None,
    last: Tensor | None = None,
    wkv: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One sequence, [T, D], token by token and head by head; any autograd is torch's own.

    Args:
        last: token before the first, [D].
        wkv: state before the first token, [H, V, K].
    Returns:
        Output [T, D], values [T, D] before they meet v_first, state after the last token.
    """
    length, hidden = x.shape
    width = mix.head_dim
    heads = [slice(h * width, (h + 1) * width) for h in range(hidden // width)]
    # value rows, key columns
    states = [x.new_zeros(width, width) for _ in heads] if wkv is None else list(wkv)
    before = torch.zeros_like(x[0]) if last is None else last
    rows, values = [], []
    for t in range(length):
        dx = before - x[t]
        before = x[t]
        x_r, x_w, x_k, x_v, x_a, x_g = (
            x[t] + dx * getattr(mix, f"mu_{letter}") for letter in "rwkvag"
        )
        r, k, v = mix.receptance.weight @ x_r, mix.key.weight @ x_k, mix.value.weight @ x_v
        u = mix.decay_bias + torch.tanh(x_w @ mix.decay_down) @ mix.decay_up
        w = torch.exp(-torch.exp(-F.softplus(-u) - 0.5))  # the older form of the same decay
        a = torch.sigmoid(mix.iclr_bias + (x_a @ mix.iclr_down) @ mix.iclr_up)
        g = torch.sigmoid(x_g @ mix.gate_down) @ mix.gate_up
        values.append(v)
        if v_first is not None:
            nu = torch.sigmoid(mix.value_bias + (x_v @ mix.value_down) @ mix.value_up)
            v = v + (v_first[t] - v) * nu
        removal, k = k * mix.k_k, k * (1 + (a - 1) * mix.k_a)
        out = []
        for h, s in enumerate(heads):
            kk = removal[s] / removal[s].norm()
            removed = torch.outer(states[h] @ kk, kk * a[s])
            states[h] = states[h] * w[s] - removed + torch.outer(v[s], k[s])
            y = states[h] @ r[s]
            y = (y - y.mean()) / torch.sqrt(y.var(unbiased=False) + width * 1e-5)
            y = y * mix.group_norm.weight[s] + mix.group_norm.bias[s]
            out.append(y + (r[s] * k[s] * mix.r_k[s]).sum() * v[s])
        rows.append(mix.output.weight @ (torch.cat(out) * g))
    return torch.stack(rows), torch.stack(values), torch.stack(states)


@torch.no_grad()
@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("creates_v_first", [True, False])
def test_time_mix_equals_the_published_equations(head_dim: int, creates_v_first: bool) -> None:
    mix = random_mix(small_config(head_dim), creates_v_first=creates_v_first)
    x = torch.randn(2, 21, 2 * head_dim, dtype=torch.float64)
    v_first = None if creates_v_first else torch.randn_like(x)
    out, carried, _ = mix(x, v_first)
    for row in range(len(x)):
        given = None if v_first is None else v_first[row]
        expected, values, _ = published_time_mix(mix, x[row], given)
        # the decay alone is computed in float32, in both precisions
        torch.testing.assert_close(out[row], expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(carried[row], values if v_first is None else v_first[row])


@pytest.mark.parametrize("length", [1, 15, 33])  # below, and beyond, whole chunks of the recurrence
@pytest.mark.parametrize("creates_v_first", [True, False])
@pytest.mark.parametrize("carried", [True, False])
def test_all_gradients_of_a_time_mix_equal_those_of_the_published_equations(
    length: int, creates_v_first: bool, carried: bool
) -> None:
    config = small_config()
    mix = random_mix(config, creates_v_first=creates_v_first)
    generator = torch.Generator().manual_seed(length)

    def random(*shape: int) -> Tensor:
        values = torch.randn(*shape, dtype=torch.float64, generator=generator)
        return values.requires_grad_()

    batch, hidden, width = 2, config.hidden_size, config.head_dim
    inputs = {"x": random(batch, length, hidden)}
    if not creates_v_first:
        inputs["v_first"] = random(batch, length, hidden)
    state = None
    if carried:
        inputs["last"], inputs["wkv"] = random(batch, hidden), random(batch, 2, width, width)
        state = TimeMixState(last=inputs["last"], wkv=inputs["wkv"])
    leaves = {**inputs, **dict(mix.named_parameters())}

    out, v_first, after = mix(inputs["x"], inputs.get("v_first"), state)
    ours = [out, v_first, after.wkv, after.last]
    rows = [
        published_time_mix(mix, **{name: values[row] for name, values in rowwise(inputs).items()})
        for row in range(batch)
    ]
    plain = [torch.stack(parts) for parts in zip(*rows, strict=True)]
    if not creates_v_first:
        plain[1] = inputs["v_first"]
    plain.append(inputs["x"][:, -1])

    probes = [torch.randn(part.shape, dtype=torch.float64, generator=generator) for part in ours]
    gradients = []
    for results in (ours, plain):
        loss = sum((part * probe).sum() for part, probe in zip(results, probes, strict=True))
        gradients.append(torch.autograd.grad(loss, list(leaves.values()), allow_unused=True))
    for part, expected in zip(ours, plain, strict=True):
        torch.testing.assert_close(part, expected, rtol=1e-5, atol=1e-6)
    for name, gradient, expected in zip(leaves, *gradients, strict=True):
        assert gradient is not None and expected is not None, name
        # a single token at the start of a sequence finds no state to fade or remove
        assert expected.any() or (length == 1 and not carried), f"{name}: nothing depends on it"
        # the decay alone is computed in float32, in both precisions
        error = (gradient - expected).abs().max()
        assert error <= 1e-5 * expected.abs().max(), f"{name}: off by {error:.1e}"


def rowwise(inputs: dict[str, Tensor]) -> dict[str, Tensor | list[None]]:
    """Arguments of `published_time_mix` that can be taken row by row; v_first may be missing."""
    return {"v_first": [None] * len(inputs["x"]), **inputs}


def test_v_first_is_demanded_after_the_first_rwkv_layer() -> None:
    mix = random_mix(small_config(), creates_v_first=False)
    with pytest.raises(ValueError, match="v_first"):
        mix(torch.randn(1, 3, 64, dtype=torch.float64), None)


def test_token_shift_starts_anew_at_each_document() -> None:
    x = torch.arange(1.0, 7.0).view(1, 6, 1)
    segments = torch.tensor([[0, 0, 1, 1, 1, 2]])
    shifted = shift_tokens(x, None, segments)
    assert shifted.flatten().tolist() == [0, 1, 0, 3, 4, 0]
    carried = shift_tokens(x, torch.tensor([[9.0]]), segments)
    assert carried.flatten().tolist() == [9, 1, 0, 3, 4, 0]


def test_token_shift_mix_gradients_equal_autograd() -> None:
    torch.manual_seed(0)
    x, previous = (torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True) for _ in "xp")
    mu = torch.rand(6, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(token_shift_mix, (x, previous, mu))
    plain = x + (previous - x) * mu.view(6, 1, 1, 8)
    torch.testing.assert_close(token_shift_mix(x, previous, mu), plain)


def test_initial_values_are_those_of_the_reference() -> None:
    config = small_config()
    mix = TimeMix(config, layer=3, creates_v_first=False)
    mix.initialize(seed=1, name="mixer")
    hidden = config.hidden_size
    i, n = 5, config.head_dim
    linear = i / (hidden - 1) - 0.5
    z = ((i % n) - (n - 1) / 2) / ((n - 1) / 2)
    top = 1.0  # layer / (layers - 1)
    decay = -6 + 6 * (i / (hidden - 1)) ** (1 + top**0.3) + 0.5 + 2.5 * z * abs(z)
    assert mix.decay_bias[i].item() == pytest.approx(decay, abs=1e-5)
    assert mix.iclr_bias[i].item() == pytest.approx(
        -0.19 + 0.3 * z * abs(z) + 0.4 * linear, abs=1e-6
    )
    assert mix.value_bias[i].item() == pytest.approx(0.73 - 0.4 * linear, abs=1e-6)
    assert mix.k_k[i].item() == pytest.approx(0.71 - 0.1 * linear, abs=1e-6)
    assert mix.k_a[i].item() == pytest.approx(1.02)
    assert mix.r_k[i].item() == pytest.approx(-0.04)
    above = 1 - 3 / config.num_layers  # not 0 at the top, where no token would be shifted then
    for letter, power in zip("rwkvag", (0.2, 0.9, 0.7, 0.7, 0.9, 0.2), strict=True):
        mu = getattr(mix, f"mu_{letter}")[i].item()
        assert mu == pytest.approx(1 - (i / hidden) ** (power * above), abs=1e-6)
    assert not mix.output.weight.any()
    assert not mix.decay_down.any()
    gram = mix.decay_up @ mix.decay_up.T
    torch.testing.assert_close(gram, 0.01 * torch.eye(len(gram)), rtol=0, atol=1e-6)
    assert mix.receptance.weight.abs().max() <= 0.5 / math.sqrt(hidden)
    shift = ChannelShift(config, layer=0)
    shift.initialize()
    assert shift.mu[i].item() == pytest.approx(1 - i / hidden, abs=1e-6)


@torch.no_grad()
@pytest.mark.parametrize(
    ("bias", "kept"),
    [(1e4, math.exp(-math.exp(-0.5))), (0.0, math.exp(-0.5 * math.exp(-0.5))), (-1e4, 1.0)],
)
def test_a_token_keeps_between_55_and_100_percent_of_the_state(bias: float, kept: float) -> None:
    config = small_config()
    mix = random_mix(config, creates_v_first=True)
    mix.decay_up.zero_()
    mix.decay_bias.fill_(bias)
    mix.key.weight.zero_()  # nothing is removed and nothing is added
    state = TimeMixState(
        last=torch.zeros(1, config.hidden_size, dtype=torch.float64),
        wkv=torch.randn(1, 2, 32, 32, dtype=torch.float64),
    )
    after = mix(torch.randn(1, 1, config.hidden_size, dtype=torch.float64), None, state)[2].wkv
    torch.testing.assert_close(after, kept * state.wkv, rtol=1e-6, atol=0)  # decay in float32
