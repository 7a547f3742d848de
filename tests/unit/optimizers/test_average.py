"""The average of the weights on one flat master, by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from cdrmix.optimizers.average import (
    AVERAGE,
    AVERAGED,
    decay,
    has_average,
    keep_average,
    swap_average,
)


def test_the_decay_rises_to_the_most() -> None:
    assert [decay(n, 0.999) for n in (1, 2, 90)] == [2 / 11, 3 / 12, 91 / 100]
    assert decay(10**6, 0.999) == 0.999
    assert decay(1, 0.1) == 0.1


def engine_of(master: torch.nn.Parameter) -> SimpleNamespace:
    inner = torch.optim.AdamW([master], lr=0.1, fused=True)
    return SimpleNamespace(optimizer=SimpleNamespace(optimizer=inner))


def step(engine: SimpleNamespace, master: torch.nn.Parameter) -> None:
    master.grad = torch.randn_like(master)
    engine.optimizer.optimizer.step()


def test_an_average_is_added_behind_the_first_step_and_follows_each() -> None:
    torch.manual_seed(0)
    master = torch.nn.Parameter(torch.randn(7))
    engine = engine_of(master)
    keep_average(engine, 0.3)
    assert not has_average(engine)
    step(engine, master)
    state = engine.optimizer.optimizer.state[master]
    assert set(state) == {"step", "exp_avg", "exp_avg_sq", AVERAGE, AVERAGED}
    expected = master.detach().clone()
    assert has_average(engine) and torch.equal(state[AVERAGE], expected)
    for averaged in range(1, 6):
        step(engine, master)
        expected = expected.lerp(master.detach(), 1 - min(0.3, (1 + averaged) / (10 + averaged)))
        assert torch.equal(state[AVERAGE], expected)
        assert state[AVERAGED] == averaged + 1


def test_a_swap_is_undone_by_another_and_cuts_nothing_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cdrmix.optimizers.average._SWAPPED", 3)
    master = torch.nn.Parameter(torch.arange(8.0))
    engine = engine_of(master)
    keep_average(engine, 0.3)
    step(engine, master)
    step(engine, master)
    average = engine.optimizer.optimizer.state[master][AVERAGE]
    before = master.detach().clone(), average.clone()
    assert not torch.equal(*before)
    view = master.detach().narrow(0, 2, 4)  # as DeepSpeed holds of a master
    swap_average(engine)
    assert torch.equal(master, before[1]) and torch.equal(average, before[0])
    assert torch.equal(view, before[1][2:6])
    swap_average(engine)
    assert torch.equal(master, before[0]) and torch.equal(average, before[1])


def test_in_bf16_an_average_would_not_move() -> None:
    torch.manual_seed(0)
    weights = torch.randn(1000)
    float32, bfloat16 = weights.clone(), weights.bfloat16()
    began = bfloat16.clone()
    for _ in range(50):
        weights += 0.02 * torch.randn(1000)
        float32.lerp_(weights, 1 - 0.9999)
        bfloat16.lerp_(weights.bfloat16(), 1 - 0.9999)
    # all but a few of the smallest stay where they were
    assert (bfloat16 != began).sum() < 20
    assert (float32 != began.float()).sum() > 990
