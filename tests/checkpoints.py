"""What tests of checkpoints share: ranks that are threads of one process, simple fragments, and
copies that are made as late as may be."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from cdrmix.checkpoint.fragments import Box, Fragment, Span
from cdrmix.checkpoint.host_memory import HostMemory
from cdrmix.checkpoint.saver import THIS_RUN, Ranks, Saved, Saver


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
    ranks: Ranks = THIS_RUN,
) -> Saved:
    """Write a checkpoint into `root`, and wait until it is durable; every rank calls this."""
    saver = Saver([root], keep=keep, background=False, ranks=ranks)
    saver.start(step, fragments, state=state, rank_state=rank_state)
    saver.wait()
    saved = ranks.all_gather_object(saver.last)[0]
    assert saved is not None, "set on rank 0"
    return saved


class ThreadRanks:
    """One of several ranks that are threads of this process; all_gather really waits."""

    def __init__(self, rank: int, shared: list[Any], barrier: threading.Barrier) -> None:
        self._rank, self._shared, self._barrier = rank, shared, barrier

    def rank(self) -> int:
        return self._rank

    def world_size(self) -> int:
        return len(self._shared)

    def all_gather_object(self, value: Any) -> list[Any]:
        self._shared[self._rank] = value
        self._barrier.wait(timeout=5)
        gathered = list(self._shared)
        self._barrier.wait(timeout=5)
        return gathered


def on_ranks(count: int, action: Callable[[ThreadRanks], Any]) -> list[Any]:
    """Run `action` on `count` thread ranks; its result, or what it raised, by rank."""
    shared: list[Any] = [None] * count
    barrier = threading.Barrier(count)
    results: list[Any] = [None] * count

    def run(rank: int) -> None:
        try:
            results[rank] = action(ThreadRanks(rank, shared, barrier))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
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
