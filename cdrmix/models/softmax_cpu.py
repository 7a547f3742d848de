"""Softmax, cross-entropy and gradient of logits on CPUs: softmax_cpu.cpp, compiled at first use.

One pass over the logits in memory instead of five; float32 over the whole vocabulary alone.
"""

# n positions, V vocabulary

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from cdrmix.models.cpu_library import can_take, load_library

_SOURCE = Path(__file__).with_suffix(".cpp")
_COST = "The softmax of the loss runs in PyTorch: a step takes a few percent longer."

_Int = ctypes.c_int64
_Address = ctypes.c_void_p


class _Scores(ctypes.Structure):
    _fields_ = [
        *((name, _Int) for name in ("N", "V")),
        *((name, _Address) for name in ("logits", "labels", "worth", "strength")),
        *((name, _Address) for name in ("nats", "log_total")),
    ]


@functools.cache
def load_kernel() -> Callable[..., None] | str:
    """Returns the kernel, built on first use, or the reason why there is none, logged once."""
    library = load_library(_SOURCE, name="softmax kernel", cost=_COST)
    if isinstance(library, str):
        return library
    kernel = library.score_labels
    kernel.argtypes = [_Address, ctypes.c_int]
    kernel.restype = None
    return kernel


def score_labels(
    logits: Tensor,
    labels: Tensor,
    worth: Tensor | None,
    squares: Tensor | None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Scores labels as `objectives.language_model.score_labels` does, over the logits.

    Args:
        logits: [n, V], float32, contiguous; with `worth` they become the gradient.
        labels: token ids, [n], int64; those below 0 are scored as 0.
        worth: factor on the nats of each label, [n], float32; None: no gradient.
        squares: factor on the square of the denominator's logarithm, [n], float32; None: none.
        dtype: of the gradient; float32 alone.
    Returns:
        Nats [n], logarithm of the denominator [n], and the gradient of the logits [n, V] or None.
    """
    kernel = load_kernel()
    assert not isinstance(kernel, str), f"the softmax kernel was not built: {kernel}"
    assert dtype == logits.dtype == torch.float32, "it writes over float32 logits"
    num_positions, vocab_size = logits.shape
    nats, log_total = logits.new_empty(2, num_positions)
    factors = [x if x is None else x.float().contiguous() for x in (worth, squares)]
    tensors = (logits, labels.contiguous(), *factors, nats, log_total)  # alive during the call
    addresses = [x if x is None else x.data_ptr() for x in tensors]
    scores = _Scores(num_positions, vocab_size, *addresses)
    kernel(ctypes.addressof(scores), torch.get_num_threads())
    return nats, log_total, None if worth is None else logits


def label_scorer(hidden: Tensor, weight: Tensor) -> Callable[..., tuple] | None:
    """Returns `score_labels` where it can score these hidden states under this head, else None."""
    can_score = can_take(hidden, weight) and not isinstance(load_kernel(), str)
    return score_labels if can_score else None
