"""Process groups of a layout."""

from __future__ import annotations

import torch

from cdrmix import runtime
from cdrmix.parallel.topology import ModelParallelUnit, make_topology
from cdrmix.planning.layout import Degrees
from tests.harness import run_ranks


def timeouts(minutes: float) -> list[float]:
    """Timeouts of a layout's groups, in minutes."""
    runtime.initialize_distributed(timeout_minutes=minutes)
    topology = make_topology(Degrees(data=1, tensor=2, pipeline=1, sequence=1, expert=1))
    groups = [topology.tensor_group, topology.stage_group, ModelParallelUnit(topology).data_group]
    backends = [group._get_backend(torch.device("cpu")) for group in groups if group]
    found = [backend.options._timeout.total_seconds() / 60 for backend in backends]
    runtime.destroy_distributed()
    return found


def test_all_groups_wait_as_long_as_the_run_was_told_to() -> None:
    assert run_ranks(timeouts, 2, 7.0) == [[7.0] * 3] * 2
