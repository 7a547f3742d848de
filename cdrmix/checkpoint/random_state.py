"""Random states of this process as plain JSON: no pickle, so that reading one runs no code."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """States of the generators of python, numpy and torch, and of this rank's CUDA device, as JSON.

    `cuda` is there only when CUDA is in use.
    """
    version, words, gauss = random.getstate()
    # The global generator of numpy's old interface is the one that libraries draw from.
    generator: dict[str, Any] = np.random.get_state(legacy=False)
    state: dict[str, Any] = {
        "python": {"version": version, "words": list(words), "gauss": gauss},
        "numpy": {
            "words": generator["state"]["key"].tolist(),
            "position": int(generator["state"]["pos"]),
            "has_gauss": int(generator["has_gauss"]),
            "gauss": float(generator["gauss"]),
        },
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state().numpy().tobytes().hex()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Restores a result of `random_state`; its `cuda` only where CUDA is available."""
    python = state["python"]
    numpy = state["numpy"]
    random.setstate((python["version"], tuple(python["words"]), python["gauss"]))
    words = np.array(numpy["words"], dtype=np.uint32)
    np.random.set_state(("MT19937", words, numpy["position"], numpy["has_gauss"], numpy["gauss"]))
    torch.set_rng_state(_from_hex(state["torch"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_from_hex(state["cuda"]))


def _from_hex(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
