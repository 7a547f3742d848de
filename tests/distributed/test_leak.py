"""Memory that steps leave behind, in a short form of `make bench ARGS=leak`: buffers still grow to
their sizes in so few steps, so that only what is as large as a step's tensors is noticed."""

from __future__ import annotations

import json
from pathlib import Path

from tests.harness import run_ranks
from tests.small_run import CONFIG, overrides, start
from tools.benchmark.leak import bytes_per_step, settings

STEPS = 160
MOST_BYTES, PLANTED_BYTES = 60_000, 200_000


def growth(data: Path, run_dir: Path, planted_bytes: int) -> float:
    """Bytes that a step of a run left behind."""
    words = overrides([*settings(STEPS, planted_bytes=planted_bytes), f"data.path={data}"])
    assert run_ranks(start, 1, ["--config", CONFIG, *words, "--run-dir", str(run_dir)]) == [0]
    return bytes_per_step(json.loads((run_dir / "resident.json").read_text()))


def test_steps_leave_nothing_behind_and_a_planted_leak_is_noticed(
    small_corpus: Path, tmp_path: Path
) -> None:
    assert growth(small_corpus, tmp_path / "plain", 0) < MOST_BYTES
    assert growth(small_corpus, tmp_path / "planted", PLANTED_BYTES) > 2 * MOST_BYTES
