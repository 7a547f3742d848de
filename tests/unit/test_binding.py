"""Plastic adapters learn; the long form is tools/benchmark/learn_binding.py."""

import pytest

from tools.benchmark.learn_binding import ROWS, adapter_config, learn


@pytest.mark.parametrize("rank", ROWS)
def test_adapters_bind_what_has_left_the_window(rank: int) -> None:
    found = learn(rank, seed=0)
    assert found["trained"] >= 0.90
    assert found["gap x4"] >= 0.75
    assert found["plastic off"] <= 0.15
    assert found["largest weight"] <= adapter_config(rank).clamp
