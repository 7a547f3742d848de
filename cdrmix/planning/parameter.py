"""One tensor of a model, as planning lists them."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

Part = Literal[
    "embedding",
    "head",
    "time_mix",
    "low_rank",
    "attention",
    "mamba",
    "mamba_experts",
    "mixer",  # of a user's block type
    "feed_forward",
    "router",
    "depth_router",
    "experts",
    "norms",
    "adapters",
    "mtp",
]


class Parameter(NamedTuple):
    """One tensor of a model."""

    name: str  # name in checkpoints; the experts of a layer are stacked in one tensor
    shape: tuple[int, ...]  # logical, unsharded
    part: Part  # part of the model
    layer: int | None = None  # index of the block from the input; None outside the blocks
    is_trained: bool = True  # False: frozen, without gradient and optimizer states
    # axis along which tensor ranks share it, or expert ranks if it is of experts; None: each has it
    # whole
    cut: int | None = None
    # whole, but applied to a rank's heads or tokens: its gradients are summed over tensor ranks
    is_partial: bool = False

    @property
    def num_elements(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)
