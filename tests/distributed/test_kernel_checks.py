"""Outcomes of checks of kernels on several ranks."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from cdrmix import runtime
from cdrmix.models import checked_kernels
from tests.harness import run_ranks


def settle(folder: Path) -> list[Any]:
    """What a rank gets that finds a value of its own, with a cache folder of its own."""
    runtime.initialize_distributed()
    rank = runtime.rank()
    os.environ["XDG_CACHE_HOME"] = str(folder / f"host{rank}")
    outcomes = []
    for late in (0, 1):  # the rank that comes later follows
        key = checked_kernels.key_of("made", [Path(__file__)], torch.device("cpu"), {"late": late})
        if rank == late:
            runtime.barrier()
        outcomes.append(checked_kernels.settle(key, lambda: {"chunk_tokens": rank}))
        if rank != late:
            runtime.barrier()
    # one that no other rank asks for
    key = checked_kernels.key_of("alone", [Path(__file__)], torch.device("cpu"), {"rank": rank})
    outcomes.append(checked_kernels.settle(key, lambda: None if rank else {"chunk_tokens": 5}))
    runtime.destroy_distributed()
    return outcomes


def test_ranks_follow_the_first_to_find_and_wait_for_none(tmp_path: Path) -> None:
    begin = time.monotonic()
    found = run_ranks(settle, 2, tmp_path)
    common = [{"chunk_tokens": 1}, {"chunk_tokens": 0}]
    assert found == [[*common, {"chunk_tokens": 5}], [*common, None]]
    assert time.monotonic() - begin < 60
