"""The loader, order included, against DeepSpeed's MMapIndexedDataset: CPU seconds per epoch.

40,000 samples of 2,048 uint16 tokens from the page cache, in shuffled order, batches of 8 as
int64; the same with documents apart, and as a mixture of four domains. What a cold disk gives is
another question.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cdrmix import runtime
from cdrmix.config.schema import MixtureConfig
from cdrmix.data.loader import Loader
from cdrmix.data.mixed import MixedDataset
from cdrmix.data.shards import (
    TokenDataset,
    TokenizerInfo,
    new_manifest,
    write_manifest,
    write_shards,
)
from tools.benchmark.timing import median_ratio, paired_cpu_seconds

NUM_SAMPLES, SEQUENCE_LENGTH, BATCH_SIZE, VOCAB_SIZE = 40_000, 2048, 8, 50_272
OURS, PEER = "loader", "MMapIndexedDataset"
MIXTURE = {"random0": 0.4, "random1": 0.3, "random2": 0.2, "random3": 0.1}


def write_random_tokens(folder: Path, domains: Sequence[str]) -> None:
    """A built folder with a training shard per domain; no tokenizer, which nothing here reads."""
    rng = np.random.default_rng(0)
    lengths = [SEQUENCE_LENGTH] * (NUM_SAMPLES // len(domains)) + [1]
    shards = []
    for domain in domains:
        documents = ((rng.integers(VOCAB_SIZE, size=length), length) for length in lengths)
        shards += write_shards(folder, documents, split="train", domain=domain, dtype="uint16")
    tokenizer = TokenizerInfo(file="tokenizer.json", sha256="", num_tokens=VOCAB_SIZE)
    manifest = new_manifest(shards, vocab_size=VOCAB_SIZE, tokenizer=tokenizer, eos_id=0, source={})
    write_manifest(folder, manifest)


def open_mixture(folder: Path) -> MixedDataset:
    """A mixture of constant shares over a folder of four domains."""
    config = MixtureConfig.model_validate({"phases": ({"weights": MIXTURE},)})
    return MixedDataset(folder, "train", SEQUENCE_LENGTH, config)


def read_epoch(
    dataset: TokenDataset | MixedDataset, *, prefetch: int = 0, segment_documents: bool = False
) -> None:
    """One epoch through a loader, thread and permutation included."""
    loader = Loader(
        dataset,
        global_batch_size=BATCH_SIZE,
        micro_batch_size=BATCH_SIZE,
        data_rank=0,
        data_size=1,
        seed=0,
        shuffle=True,
        segment_documents=segment_documents,
        prefetch=prefetch,
    )
    for _ in range(dataset.num_samples // BATCH_SIZE):
        loader.next()
    loader.close()


def open_peer(folder: Path) -> Any:
    """DeepSpeed's reader on the same shard; what it prints while opening is dropped."""
    runtime.import_deepspeed()
    from deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset import MMapIndexedDataset

    with contextlib.redirect_stdout(io.StringIO()):
        return MMapIndexedDataset(str(folder / "train-random-00000"), skip_warmup=True)


def read_epoch_with_peer(peer: Any, order: list[int]) -> None:
    """The same rows through DeepSpeed's reader, in an order that is known beforehand."""
    for start in range(0, len(order), BATCH_SIZE):
        rows = [peer.get(i, 0, SEQUENCE_LENGTH + 1) for i in order[start : start + BATCH_SIZE]]
        torch.from_numpy(np.stack(rows).astype(np.int64))


def measure(rounds: int) -> dict[str, Any]:
    """Median million tokens per CPU second of each, and the paired ratio to the peer."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory() as other:
        folder = Path(name)
        write_random_tokens(folder, ["random"])
        write_random_tokens(Path(other), list(MIXTURE))
        mixture = open_mixture(Path(other))
        dataset = TokenDataset(folder, "train", SEQUENCE_LENGTH)
        peer = open_peer(folder)
        order = np.random.default_rng(0).permutation(NUM_SAMPLES).tolist()
        seconds = paired_cpu_seconds(
            {
                OURS: lambda: read_epoch(dataset),
                f"{OURS}, read ahead": lambda: read_epoch(dataset, prefetch=2),
                f"{OURS}, documents apart": lambda: read_epoch(dataset, segment_documents=True),
                f"{OURS}, four domains": lambda: read_epoch(mixture),
                PEER: lambda: read_epoch_with_peer(peer, order),
            },
            rounds=rounds,
        )
    million_tokens = NUM_SAMPLES * SEQUENCE_LENGTH / 1e6
    rates = {name: million_tokens / statistics.median(times) for name, times in seconds.items()}
    ratio = median_ratio(seconds[PEER], seconds[OURS])
    return {"rounds": rounds, "million_tokens_per_cpu_second": rates, "over_peer": ratio}


def main() -> None:
    """Print a line per reader, or JSON with --json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = measure(args.rounds)
    if args.json:
        print(json.dumps(result))
        return
    for name, rate in result["million_tokens_per_cpu_second"].items():
        print(f"{name:24} {rate:8.0f} million tokens per CPU second")
    print(f"the loader is {result['over_peer']:.2f} times as fast as {PEER}")


if __name__ == "__main__":
    main()
