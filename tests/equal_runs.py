"""Whether two runs are the same one, bit by bit: every step's metrics, every tensor of the end."""

from __future__ import annotations

from pathlib import Path

import torch

from cdrmix.checkpoint.checkpoint_file import CheckpointFile
from cdrmix.monitoring.metrics import deterministic_part
from cdrmix.monitoring.sinks import read_metrics


def result_of(run_dir: Path, steps: int) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Deterministic metrics of every step, and every tensor of the checkpoint of the last one."""
    lines = [deterministic_part(line) for line in read_metrics(run_dir / "metrics.jsonl")]
    with CheckpointFile(run_dir / "checkpoints" / str(steps)) as reader:
        tensors = {
            f"{kind} {name}": reader.full(name, kind)
            for name in reader.names()
            for kind in reader.kinds(name)
        }
    return lines, tensors


def assert_equal_runs(found: Path, expected: Path, *, steps: int) -> None:
    """Both have done each of `steps` steps once, on the same samples, and hold the same state."""
    lines, tensors = result_of(found, steps)
    expected_lines, expected_tensors = result_of(expected, steps)
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    assert lines == expected_lines
    assert tensors.keys() == expected_tensors.keys()
    different = [name for name in tensors if not torch.equal(tensors[name], expected_tensors[name])]
    assert different == []
