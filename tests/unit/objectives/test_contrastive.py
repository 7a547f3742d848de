"""InfoNCE against its definition."""

import math

import pytest
import torch
from torch.nn import functional as F

from cdrmix.objectives.representation import info_nce

TEMPERATURE = 0.05


def test_it_is_zero_for_perfect_pairs_and_log_n_for_vectors_that_say_nothing() -> None:
    apart = torch.eye(8)
    assert info_nce(apart, apart, temperature=TEMPERATURE).item() < 8 * 8 * math.exp(
        -1 / TEMPERATURE
    )
    same = torch.ones(8, 4) / 2
    assert info_nce(same, same, temperature=TEMPERATURE).item() == pytest.approx(8 * math.log(8))


def test_it_is_the_mean_of_both_directions() -> None:
    queries, keys = (F.normalize(torch.randn(5, 3), dim=-1) for _ in range(2))
    loss = info_nce(queries, keys, temperature=TEMPERATURE).item()
    assert loss == pytest.approx(info_nce(keys, queries, temperature=TEMPERATURE).item())
    scores = (queries @ keys.T / TEMPERATURE).double()
    there, back = (torch.log_softmax(scores, dim).diagonal().sum() for dim in (0, 1))
    assert loss == pytest.approx(-(there + back).item() / 2, rel=1e-5)
