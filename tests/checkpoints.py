"""What tests of checkpoints share: ranks that are threads of one process, simple fragments, and
copies that are made as late as may be."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from cdrmix import runtime
from cdrmix.checkpoint.fragments import Box, Fragment, Span
from cdrmix.checkpoint.host_memory import HostMemory
from cdrmix.checkpoint.saver import Saved, Saver


def whole(name: str, tensor: torch.Tensor, kind: str = "param") -> Fragment:
    """A tensor that one rank holds all of."""
    shape = tuple(tensor.shape)
    return Fragment(name, kind, shape, Span.whole(Box.whole(shape)), tensor.reshape(-1))


def save_checkpoint(
    root: Path,
    step: int,
    fragments: Iterable[Fragment],
    *,
    state: Mapping[str, Any],
    rank_state: Mapping[str, Any],
    keep: int,
) -> Saved:
    """Write a checkpoint into `root`, and wait until it is durable; every rank calls this."""
    saver = Saver([root], keep=keep, background=False)
    saver.start(step, fragments, state=state, rank_state=rank_state)
    saver.wait()
    saved = runtime.all_gather_object(saver.last)[0]
    assert saved is not None, "set on rank 0"
    return saved


def on_ranks(count: int, action: Callable[[int], Any]) -> list[Any]:
    """Call `action` with the rank on `count` threads, which take themselves for the ranks of a run
    and really wait in all_gather; its result, or what it raised, by rank."""
    this = threading.local()
    shared: list[Any] = [None] * count
    barrier = threading.Barrier(count)
    results: list[Any] = [None] * count

    def all_gather_object(value: Any) -> list[Any]:
        shared[this.rank] = value
        barrier.wait(timeout=5)
        gathered = list(shared)
        barrier.wait(timeout=5)
        return gathered

    def run(rank: int) -> None:
        this.rank = rank
        try:
            results[rank] = action(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "rank", lambda: this.rank)
        patch.setattr(runtime, "world_size", lambda: count)
        patch.setattr(runtime, "all_gather_object", all_gather_object)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return results


def copy_late() -> None:
    """Have each copy of the state, in this process, begin only when something waits for it, and
    then take its time: who does not wait has changed the state before."""
    is_waited_for = threading.Event()
    make = HostMemory.copier

    def copier(self: HostMemory, tensors: Sequence[torch.Tensor]) -> Callable[[], Any]:
        copy = make(self, tensors)
        is_waited_for.clear()

        def late() -> list[torch.Tensor]:
            assert is_waited_for.wait(60), "nothing waits for the copy"
            time.sleep(0.1)
            return copy()

        return late

    def telling(wait: Callable) -> Callable:
        def told(self: Saver, *args: Any, **kwargs: Any) -> None:
            is_waited_for.set()
            wait(self, *args, **kwargs)

        return told

    HostMemory.copier = copier  # type: ignore[method-assign]
    for name in ("start", "wait_for_copy", "wait"):
        setattr(Saver, name, telling(getattr(Saver, name)))
