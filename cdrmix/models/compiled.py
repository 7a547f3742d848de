"""Blocks through torch.compile: one graph for all layers of a kind, with their weights as inputs.

A block is compiled whole, so that its residual additions and norms join the kernels around them.
Where experts are on other ranks, its second half is not: how many rows an exchange brings is known
only when they arrive, and a graph has fixed shapes. Training alone goes this way; evaluation and
decoding, whose shapes vary, run as ever.
"""

# B batch, T time, D hidden, R routers, S statistics in a row

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cdrmix import runtime
from cdrmix.log import get_logger
from cdrmix.models.block import Block
from cdrmix.models.cpu_library import private_folder
from cdrmix.models.moe import MoEFeedForward

log = get_logger(__name__)

_BACKEND = "inductor"  # that of torch.compile; tests of layouts take one without kernels
# Graphs of one function in a process. A model has one for each kind of layer, and one more where
# v_first is made: far fewer, but torch's own limit is 8, and beyond it this is an error.
_MOST_GRAPHS = 64


def train_block(
    block: Block, x: Tensor, v_first: Tensor | None, segment_ids: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Runs a block on whole sequences, compiled: residual stream, v_first, statistics [R, S].

    Arguments and results are those of the block; there is no state, neither before nor after. The
    first call for a kind of layer compiles its forward pass, the first backward pass the other.
    """
    if isinstance(block.ffn, MoEFeedForward) and block.ffn.deepspeed_moe.ep_size > 1:
        x, made, of_mixer = _compiled(_mix)(block, x, v_first, segment_ids)
        x, of_ffn, _ = block.feed(x, None, segment_ids)
        statistics = block.rows(of_mixer, of_ffn)
    else:
        x, made, statistics = _compiled(_whole)(block, x, v_first, segment_ids)
    return x, v_first if made is None else made, statistics


def _whole(
    block: Block, x: Tensor, v_first: Tensor | None, segment_ids: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    # Without the state: as results of a graph its parts would be written, and have a gradient.
    # Without v_first where it came in: it would be an alias of an input.
    x, made, statistics, _ = block(x, v_first, None, segment_ids)
    return x, made if v_first is None else None, statistics


def _mix(
    block: Block, x: Tensor, v_first: Tensor | None, segment_ids: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    x, made, _, statistics = block.mix(x, v_first, None, segment_ids)
    return x, made if v_first is None else None, statistics


@functools.cache
def _compiled(run: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function once for the process; an operation that breaks its graph is an error."""
    _prepare()
    return torch.compile(run, backend=_BACKEND, fullgraph=True, dynamic=False)


@functools.cache
def _prepare() -> None:
    """Sets where compiled kernels are kept, and has each compilation told."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # takes seconds

    # Beside the kernels of ours: these too are executed, and a second start is quicker by them.
    folder = runtime.keep_graphs(private_folder() / "inductor", default_cache_dir())
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_GRAPHS)
    compilations = Compilations(folder)
    torch._dynamo.callback.on_compile_start(compilations.begin)
    torch._dynamo.callback.on_compile_end(compilations.end)


class Compilations:
    """Time that compilations of this process have taken (seconds), for the log."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder  # of kept kernels
        self.number = 0
        self.seconds = 0.0
        self._began = 0.0

    def begin(self, _: object) -> None:
        """Notes the time."""
        self._began = time.monotonic()

    def end(self, _: object) -> None:
        """Adds the time since it began, and tells of it."""
        seconds = time.monotonic() - self._began
        self.number += 1
        self.seconds += seconds
        log.info(
            "training.compile: graph %d compiled in %.1f s, %.1f s in all; kernels are kept in %s",
            self.number,
            seconds,
            self.seconds,
            self.folder,
        )
