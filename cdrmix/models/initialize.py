"""Initial values that depend on the seed and the parameter's name alone.

A layout that holds a part of the experts, or builds the layers in another order, starts from the
same numbers: every tensor, and every expert of a stacked one, has a generator of its own.
"""

import hashlib
import math

import torch
from torch import Tensor


def generator(seed: int, name: str, *, device: torch.device) -> torch.Generator:
    """Makes a generator seeded by (seed, name)."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)


@torch.no_grad()
def normal_(tensor: Tensor, std: float, *, seed: int, name: str) -> None:
    """Fills with a normal distribution of mean 0; nothing happens on the meta device."""
    if not tensor.is_meta:
        tensor.normal_(0.0, std, generator=generator(seed, name, device=tensor.device))


@torch.no_grad()
def uniform_(tensor: Tensor, bound: float, *, seed: int, name: str) -> None:
    """Fills uniformly between -bound and bound."""
    if not tensor.is_meta:
        source = generator(seed, name, device=tensor.device)
        tensor.uniform_(-bound, bound, generator=source)


@torch.no_grad()
def orthogonal_(tensor: Tensor, gain: float, *, seed: int, name: str) -> None:
    """Fills a matrix with orthonormal rows or columns times gain * max(1, sqrt(rows / columns)).

    Source: RWKV-LM's initialisation of its low-rank matrices, which are applied from the right.
    """
    if tensor.is_meta:
        return
    rows, columns = tensor.shape
    scale = gain * max(1.0, math.sqrt(rows / columns))
    source = generator(seed, name, device=tensor.device)
    torch.nn.init.orthogonal_(tensor, gain=scale, generator=source)
