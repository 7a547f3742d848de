"""Snapshots of CUDA's allocator: what it holds, and what asked for it.

They are pickles for https://docs.pytorch.org/memory_viz, written and never loaded here. torch marks
the functions as private, and documents them as the way to get snapshots (2.13, "Understanding CUDA
Memory Usage").
"""

from __future__ import annotations

from pathlib import Path

import torch

_MOST_ENTRIES = 100_000  # of the history, with a stack each


def begin_history() -> bool:
    """Begins to record what allocates and frees; False where CUDA is not in use."""
    if not torch.cuda.is_initialized():
        return False
    torch.cuda.memory._record_memory_history(max_entries=_MOST_ENTRIES)
    return True


def dump_snapshot(path: Path) -> None:
    """Writes what the allocator holds, and the history where one is recorded."""
    torch.cuda.memory._dump_snapshot(str(path))


def end_history() -> None:
    """Ends the record."""
    torch.cuda.memory._record_memory_history(enabled=None)
