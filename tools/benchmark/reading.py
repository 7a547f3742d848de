"""Steps that read from a slow disk, with reading ahead adapted and without: wall time of a step.

A step computes for 20 ms. Each read of its batch waits for 90 ms, as a disk or file server under
load makes it wait: the wrapper of the data set sleeps. Unthrottled reads wait for nothing. What is
not adapted reads two batches ahead by one thread. Times are of all steps, those before an
adaptation included.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cdrmix.config.resources import ResourcesConfig
from cdrmix.data.loader import Loader
from cdrmix.data.read_pace import first_limits
from cdrmix.data.shards import TokenizerInfo, new_manifest, write_manifest, write_shards
from cdrmix.data.token_dataset import TokenDataset
from cdrmix.engines.reading import Reading
from tools.benchmark.timing import report

STEPS = 300
STEP_SECONDS = 0.02
READ_SECONDS = 0.09
SEQUENCE_LENGTH = 512
BATCH_SIZE = 8
GIVEN = {"prefetch_batches": 2, "reader_threads": 1}


class SlowDataset(TokenDataset):
    """Data set whose every read waits for so many seconds first."""

    read_seconds = 0.0

    def rows(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Waits, then reads."""
        time.sleep(self.read_seconds)
        return super().rows(indices)


def write_tokens(folder: Path) -> None:
    """A built folder with one shard of training data; no tokenizer, which nothing here reads."""
    rng = np.random.default_rng(0)
    lengths = [SEQUENCE_LENGTH] * 2_000 + [1]
    documents = ((rng.integers(4_096, size=length), length) for length in lengths)
    shards = write_shards(folder, documents, split="train", domain="random", dtype="uint16")
    tokenizer = TokenizerInfo(file="tokenizer.json", sha256="", num_tokens=4_096)
    write_manifest(
        folder, new_manifest(shards, vocab_size=4_096, tokenizer=tokenizer, eos_id=0, source={})
    )


def seconds_a_step(
    folder: Path, resources: dict[str, Any], *, read_seconds: float, steps: int = STEPS
) -> tuple[float, str]:
    """Mean wall time of a step, and how its data were read at the end."""
    dataset = SlowDataset(folder, "train", SEQUENCE_LENGTH)
    dataset.read_seconds = read_seconds
    config = ResourcesConfig.model_validate(resources)
    limits = first_limits(config)
    loader = Loader(
        dataset,
        global_batch_size=BATCH_SIZE,
        micro_batch_size=BATCH_SIZE,
        data_rank=0,
        data_size=1,
        seed=0,
        shuffle=True,
        prefetch=limits.batches,
        readers=limits.threads,
    )
    # Of the memory a machine under benchmarks may have little left, which is another question.
    reading = Reading(loader, config, memory_left=lambda: 2.0**33)
    began = time.perf_counter()
    for step in range(steps):
        reading.next_batch(step=step, folder=folder)
        time.sleep(STEP_SECONDS)
    seconds = (time.perf_counter() - began) / steps
    limits = loader.limits
    loader.close()
    return seconds, f"{limits.batches} batches, {limits.threads} threads"


def measure(rounds: int) -> dict[str, Any]:
    """Median milliseconds of a step for each way of reading, and the ways at the end."""
    variants = {
        "not throttled": ({}, 0.0),
        "throttled, adapted": ({}, READ_SECONDS),
        "throttled, not adapted": (GIVEN, READ_SECONDS),
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    at_end = {}
    with tempfile.TemporaryDirectory() as name:
        write_tokens(Path(name))
        for _ in range(rounds):
            for variant, (resources, wait) in variants.items():
                seconds, at_end[variant] = seconds_a_step(Path(name), resources, read_seconds=wait)
                times[variant].append(seconds)
    plain = times["not throttled"]
    return {
        "rounds": rounds,
        "steps": STEPS,
        "milliseconds": {name: 1e3 * statistics.median(each) for name, each in times.items()},
        "over_unthrottled": {
            name: statistics.median(a / b for a, b in zip(each, plain, strict=True))
            for name, each in times.items()
        },
        "at_end": at_end,
    }


def show(result: dict[str, Any]) -> None:
    """Print a line per way of reading."""
    for name, time_of_step in result["milliseconds"].items():
        print(
            f"{name:24} {time_of_step:6.1f} ms a step, "
            f"{result['over_unthrottled'][name]:.2f} times not throttled; at the end "
            f"{result['at_end'][name]}"
        )


if __name__ == "__main__":
    report(measure, show, rounds=3, description=__doc__)
