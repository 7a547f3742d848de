"""Singular values after the Newton-Schulz iteration, by set of coefficients and spectrum."""

import pytest
import torch

from cdrmix.optimizers.newton_schulz import NewtonSchulz, coefficients

ROWS, COLUMNS = 64, 256


def spectrum(kind: str) -> torch.Tensor:
    """Matrix with singular values of a random one, of a power law, or over four decades."""
    torch.manual_seed(0)
    random = torch.randn(ROWS, COLUMNS)
    if kind == "random":
        return random
    left, _, right = torch.linalg.svd(random, full_matrices=False)
    values = {
        "power law": torch.arange(1, ROWS + 1) ** -1.0,
        "ill-conditioned": torch.logspace(0, -4, ROWS),
    }[kind]
    return left @ torch.diag(values) @ right


# Least and largest singular value; those of the long tail are not brought up in five steps.
RANGES = [
    ("simple", 5, "random", 0.65, 1.2),
    ("simple", 5, "power law", 0.65, 1.2),
    ("simple", 5, "ill-conditioned", 0.01, 1.25),
    ("quintic", 5, "random", 0.97, 1.05),
    ("quintic", 5, "power law", 0.97, 1.05),
    ("polar", 5, "random", 0.84, 1.16),
    ("polar", 8, "random", 0.99, 1.01),
    ("polar", 8, "ill-conditioned", 0.2, 1.01),
]


@pytest.mark.parametrize(("kind", "steps", "of", "least", "most"), RANGES)
def test_singular_values_come_close_to_one(
    kind: str, steps: int, of: str, least: float, most: float
) -> None:
    matrix = spectrum(of)
    found = NewtonSchulz(kind, steps)(matrix[None])[0]  # type: ignore[arg-type]
    values = torch.linalg.svdvals(found)
    assert least < values.min() <= values.max() < most
    # Singular vectors stay: of the polar factor this has the same left and right ones.
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    inner = left.T @ found @ right.T
    assert (inner - torch.diag(inner.diagonal())).abs().max() < 1e-4


def test_a_tall_matrix_is_the_transpose_of_a_wide_one_and_each_is_counted() -> None:
    ours = NewtonSchulz("simple", 5)
    wide = torch.randn(3, 8, 20)
    assert torch.allclose(ours(wide.mT), ours(wide).mT, atol=1e-6)
    assert ours.matrices == 6
    alone = torch.stack([ours(each[None])[0] for each in wide])
    assert torch.allclose(alone, ours(wide), atol=1e-6)


def test_a_short_table_goes_on_with_its_last_set() -> None:
    assert coefficients("quintic", 7)[-3:] == [coefficients("quintic", 5)[-1]] * 3
    assert len(set(coefficients("simple", 6))) == 1
    assert len(coefficients("polar", 3)) == 3


def test_a_matrix_of_zeros_stays_one() -> None:
    assert not NewtonSchulz("simple", 5)(torch.zeros(1, 4, 6)).any()
