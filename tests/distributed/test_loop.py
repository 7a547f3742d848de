"""What the training loop measures of itself."""

import time
from pathlib import Path

from cdrmix.monitoring.sinks import read_metrics
from tests.harness import run_ranks
from tests.small_run import arguments, start

WAIT_SECONDS = 0.3


def start_on_a_slow_disk(argv: list[str]) -> int:
    from cdrmix.data.loader import Loader

    read = Loader.next

    def read_slowly(loader: Loader) -> dict:
        time.sleep(WAIT_SECONDS)
        return read(loader)

    Loader.next = read_slowly
    return start(argv)


def test_throughput_counts_the_time_that_a_step_waits_for_its_data(
    small_corpus: Path, run_dir: Path
) -> None:
    argv = arguments(small_corpus, run_dir, "--max-steps", "2")
    assert run_ranks(start_on_a_slow_disk, 1, argv) == [0]
    for line in read_metrics(run_dir / "metrics.jsonl"):
        assert line["step_seconds"] > WAIT_SECONDS
        assert line["tokens_per_second"] < 8 * 64 / WAIT_SECONDS
