"""Newton-Schulz iteration: the orthogonal matrix nearest to a matrix, by products alone.

A step is X <- a X + (b A + c A A) X with A = X X^T, which moves each singular value s to
a s + b s^3 + c s^5 and leaves the singular vectors as they are (Jordan et al., Muon, 2024).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Coefficients = tuple[float, float, float]
Kind = Literal["simple", "quintic", "polar"]

# One set for every step; singular values end between .68 and 1.13.
_SIMPLE: Coefficients = (3.4445, -4.7750, 2.0315)
# A set for each of five steps; they end between .98 and 1.04 (NVIDIA Emerging-Optimizers' default).
_QUINTIC: tuple[Coefficients, ...] = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
# Polar Express (Amsel et al., arXiv 2505.16932), the sets for five steps and for eight.
_POLAR_5: tuple[Coefficients, ...] = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
_POLAR_8: tuple[Coefficients, ...] = (
    (8.2051, -22.9019, 16.4607),
    (4.0664, -2.8612, 0.5184),
    (3.9096, -2.8234, 0.5250),
    (3.2856, -2.4153, 0.4853),
    (2.2779, -1.6198, 0.3985),
    (1.8726, -1.2307, 0.3585),
    (1.8564, -1.2132, 0.3568),
    (1.8750, -1.2500, 0.3750),
)
_POLAR_SAFETY = 1.01  # the five-step sets must not meet a singular value above 1
_EPSILON = 1e-7


def coefficients(kind: Kind, steps: int) -> list[Coefficients]:
    """Coefficients of each step; where a table is shorter, its last set is repeated."""
    tables = {
        "simple": (_SIMPLE,),
        "quintic": _QUINTIC,
        "polar": _POLAR_5 if steps <= len(_POLAR_5) else _POLAR_8,
    }
    table = tables[kind]
    return [table[min(step, len(table) - 1)] for step in range(steps)]


def product_type(device: torch.device) -> torch.dtype:
    """Type of the products on a device: float32 on CPUs, most of which emulate bfloat16."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


class NewtonSchulz:
    """Orthogonalises batches of matrices, and counts them.

    `Muon.newton_schulz` holds one: the only place where Muon orthogonalises, and so the one to
    replace for another method. A replacement takes and gives [N, rows, columns], counts `matrices`,
    and keeps singular vectors and the sign of a matrix.
    """

    def __init__(self, kind: Kind, steps: int) -> None:
        self.sets = coefficients(kind, steps)
        self.safety = _POLAR_SAFETY if kind == "polar" and steps <= len(_POLAR_5) else 1.0
        self.matrices = 0  # orthogonalised so far

    def __call__(self, matrices: Tensor) -> Tensor:
        """Returns the orthogonalised matrices, [N, rows, columns], float32.

        The products are in `product_type`, after a matrix is divided by its norm in float32. In
        bfloat16 singular values below about 2^-9 of that norm are lost in rounding, whose noise is
        orthogonalised in their place.
        """
        self.matrices += len(matrices)
        is_tall = matrices.shape[-2] > matrices.shape[-1]
        x = matrices.mT if is_tall else matrices
        norm = torch.linalg.matrix_norm(x, keepdim=True)  # [N, 1, 1], Frobenius
        x = x / (norm * self.safety + _EPSILON)
        x = x.to(product_type(x.device))
        for a, b, c in self.sets:
            gram = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return (x.mT if is_tall else x).float()
