"""Counts what a GPU's host would wait for in a micro-step, on CPUs, where nothing waits.

A wait is an operator that gives the host a number, or a tensor whose size depends on data. Copies
from the device to the host are seen by the methods that make them: on CPUs they copy nothing.
"""

from __future__ import annotations

import collections
import contextlib
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cdrmix import runtime
from cdrmix.config.model import ModelConfig
from cdrmix.config.schema import Recomputation
from cdrmix.models.backbone import Backbone
from cdrmix.models.mixture_of_depths import make_block
from cdrmix.models.moe import ExpertLayer
from cdrmix.objectives.language_model import linear_cross_entropy

_OPERATORS = {
    "aten._local_scalar_dense.default",
    "aten.bincount.default",
    "aten.nonzero.default",
    "aten.masked_select.default",
    "aten.repeat_interleave.Tensor",
    "aten.equal.default",
    "aten.unique_dim.default",
    "aten._unique2.default",
}
_INDEXED = {  # by a mask they look for its places first
    "aten.index.Tensor",
    "aten.index_put.default",
    "aten.index_put_.default",
    "aten._index_put_impl_.default",
}
_METHODS = ("tolist", "cpu", "numpy")  # which no dispatch mode sees of tensors on CPUs
# They look at values on CPUs only; of ids on a device a run has `packing.remember` take the host's.
_ONLY_ON_CPUS = ("packing.py", "wkv7.py", "wkv7_cpu.py")


class Waits(TorchDispatchMode):
    """Counts waits, by operator or method and line of the package."""

    def __init__(self) -> None:
        super().__init__()
        self.found: collections.Counter[tuple[str, str]] = collections.Counter()
        self._patches = contextlib.ExitStack()

    def __enter__(self) -> Waits:
        for name in _METHODS:
            patch = mock.patch.object(torch.Tensor, name, self._counting(name))
            self._patches.enter_context(patch)
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._patches.close()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        waits = str(func) in _OPERATORS and kwargs.get("output_size") is None
        if str(func) in _INDEXED:
            waits = any(x is not None and x.dtype == torch.bool for x in args[1])
        if waits:
            self._note(str(func))
        return func(*args, **kwargs)

    def _counting(self, name: str) -> Callable[..., Any]:
        original = getattr(torch.Tensor, name)

        def method(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self._note(name)
            return original(tensor, *args, **kwargs)

        return method

    def _note(self, what: str) -> None:
        ours = [f for f in traceback.extract_stack() if "/cdrmix/" in f.filename]
        where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "elsewhere"
        if not where.startswith(_ONLY_ON_CPUS):
            self.found[what, where] += 1


NUM_BLOCKS = 4  # each with experts


def model_with_experts(*, drop_tokens: bool, mod: dict[str, Any] | None = None) -> ModelConfig:
    """Small model whose blocks have experts, one of them with attention."""
    moe = {"num_experts": 4, "top_k": 2, "expert_hidden_size": 64, "drop_tokens": drop_tokens}
    sizes = {"hidden_size": 64, "num_layers": NUM_BLOCKS, "num_heads": 2, "vocab_size": 256}
    return ModelConfig(**sizes, moe=moe | {"capacity_factor": 1}, mod=mod)


def waits_of_micro_step(
    *,
    drop_tokens: bool,
    is_packed: bool,
    recompute: Recomputation,
    expert_ranks: int = 1,
    mod: dict[str, Any] | None = None,
) -> Waits:
    """Counts the waits of a forward pass, the loss and the backward pass.

    Args:
        drop_tokens: experts have a capacity.
        is_packed: rows hold two documents.
        recompute: what is computed again in the backward pass.
        expert_ranks: ranks, all of the process group, that the experts are spread over.
        mod: section of the configuration; all blocks but the first are routed.
    """
    model = Backbone(
        model_with_experts(drop_tokens=drop_tokens, mod=mod),
        activation_checkpointing=recompute,
        block=partial(make_block, expert_parallel_size=expert_ranks),
    )
    if expert_ranks > 1:
        for module in model.modules():
            if isinstance(module, ExpertLayer):
                module.join(torch.distributed.group.WORLD)
    model.initialize(seed=0)
    ids = torch.randint(0, 256, (2, 33))
    segments = None
    if is_packed:
        segments = torch.arange(32).div(20, rounding_mode="floor").expand(2, -1)
    with Waits() as waits:
        out = model(ids[:, :-1], segment_ids=segments)
        nats = linear_cross_entropy(out.hidden, model.embedding.weight, ids[:, 1:])
        (nats + out.router_statistics.sum()).backward()
    return waits


def waits_of_expert_ranks(
    cases: list[dict[str, Any]],
) -> list[dict[tuple[str, str], int]]:
    """On each rank: `found` of every case, with the experts spread over all ranks."""
    runtime.initialize_distributed()
    torch.manual_seed(runtime.rank())  # so that ranks send each other unequal numbers of rows
    size = runtime.world_size()
    found = [dict(waits_of_micro_step(**case, expert_ranks=size).found) for case in cases]
    runtime.destroy_distributed()
    return found
