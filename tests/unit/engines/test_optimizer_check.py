"""Newton-Schulz's results in the check of Muon's first steps, whatever the spectrum."""

import pytest
import torch

from cdrmix.engines.optimizer_check import orthogonal_fault
from cdrmix.optimizers import newton_schulz
from cdrmix.optimizers.newton_schulz import Kind, NewtonSchulz

SIZE = 96
SPECTRA = {
    "rank one": torch.arange(SIZE) < 1,
    "rank four": torch.arange(SIZE) < 4,
    "fast": torch.exp(-torch.arange(SIZE) / 3),
    "four decades": torch.logspace(0, -4, SIZE),
    "flat": torch.ones(SIZE),
}


def gradient(spectrum: str, rows: int, columns: int) -> torch.Tensor:
    torch.manual_seed(0)
    left, _ = torch.linalg.qr(torch.randn(rows, SIZE))
    right, _ = torch.linalg.qr(torch.randn(columns, SIZE))
    return left * SPECTRA[spectrum] @ right.T


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("kind", ["simple", "quintic", "polar"])
@pytest.mark.parametrize(("rows", "columns"), [(SIZE, 256), (256, SIZE), (SIZE, SIZE)])
def test_products_in_bfloat16_are_right_and_other_results_are_not(
    spectrum: str, kind: Kind, rows: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(newton_schulz, "product_type", lambda _: torch.bfloat16)
    given = gradient(spectrum, rows, columns)
    found = NewtonSchulz(kind, 5)(given[None])[0]
    assert orthogonal_fault(given, found, kind, 5) == ""
    assert "is off by" in orthogonal_fault(given, 0.8 * found, kind, 5)
    assert "is off by" in orthogonal_fault(given, -found, kind, 5)
    plain = given / given.norm() * SIZE**0.5
    if spectrum != "flat":  # of which plain momentum is the orthogonal matrix
        assert "is off by" in orthogonal_fault(given, plain, kind, 5)


def test_a_matrix_of_zeros_is_right_and_what_is_not_a_number_is_not() -> None:
    zeros = torch.zeros(4, 6)
    assert orthogonal_fault(zeros, zeros, "simple", 5) == ""
    assert "is off by" in orthogonal_fault(zeros, zeros / 0, "simple", 5)


def test_what_is_large_beside_the_gradient_is_noticed() -> None:
    given = gradient("rank one", SIZE, SIZE)
    noise = torch.randn(SIZE, SIZE)
    left, _, right = torch.linalg.svd(given)
    noise -= left[:, :1] @ (left[:, :1].T @ noise)
    noise -= (noise @ right[:1].T) @ right[:1]
    found = NewtonSchulz("simple", 5)(given[None])[0]
    assert orthogonal_fault(given, found + 0.5 * noise / SIZE**0.5, "simple", 5) == ""
    assert "has a norm of" in orthogonal_fault(given, found + noise, "simple", 5)
