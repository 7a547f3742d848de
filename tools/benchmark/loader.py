"""The loader, order included, against other readers of tokens: CPU seconds per epoch.

40,000 samples of 2,048 uint16 tokens from the page cache, in shuffled order, batches of 8 as int64
tensors; the same with documents apart, and as a mixture of four domains. What a cold disk gives is
another question.

Peers get what suits them: DeepSpeed's MMapIndexedDataset an order that is known beforehand, and one
cast per batch instead of one per sample as its data sets do it; WebDataset its stored order and raw
tokens; Hugging Face's arrow format rows of fixed length, taken as numpy arrays, eight at a time. A
peer that is not installed is left out and named.
"""

from __future__ import annotations

import contextlib
import io
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cdrmix import runtime
from cdrmix.config.schema import MixtureConfig
from cdrmix.data.loader import Loader
from cdrmix.data.mixture import MixedDataset
from cdrmix.data.shards import TokenizerInfo, new_manifest, write_manifest, write_shards
from cdrmix.data.token_dataset import TokenDataset
from tools.benchmark.timing import median_ratio, paired_cpu_seconds, report

NUM_SAMPLES = 40_000
SEQUENCE_LENGTH = 2048
BATCH_SIZE = 8
VOCAB_SIZE = 50_272
OURS = "loader"
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


def indexed_epoch(folder: Path) -> Callable[[], None]:
    """An epoch of the same shard through DeepSpeed's reader; its opening is not part of it."""
    runtime.import_deepspeed()
    from deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset import MMapIndexedDataset

    with contextlib.redirect_stdout(io.StringIO()):
        reader = MMapIndexedDataset(str(folder / "train-random-00000"), skip_warmup=True)
    order = np.random.default_rng(0).permutation(NUM_SAMPLES).tolist()

    def read() -> None:
        for start in range(0, NUM_SAMPLES, BATCH_SIZE):
            chosen = order[start : start + BATCH_SIZE]
            rows = [reader.get(i, 0, SEQUENCE_LENGTH + 1) for i in chosen]
            torch.from_numpy(np.stack(rows).astype(np.int64))

    return read


def webdataset_epoch(folder: Path) -> Callable[[], None]:
    """An epoch of the same samples through WebDataset, from a tar of raw tokens."""
    import webdataset

    path = folder / "samples.tar"
    with webdataset.TarWriter(str(path)) as tar:
        for number, row in enumerate(all_samples(folder)):
            tar.write({"__key__": f"{number:06d}", "bin": row.tobytes()})

    def batch(samples: list[dict[str, Any]]) -> torch.Tensor:
        rows = [np.frombuffer(sample["bin"], dtype=np.uint16) for sample in samples]
        return torch.from_numpy(np.stack(rows).astype(np.int64))

    def read() -> None:
        stream = webdataset.WebDataset(str(path), shardshuffle=False)
        for _ in stream.batched(BATCH_SIZE, collation_fn=batch):
            pass

    return read


def arrow_epoch(folder: Path) -> Callable[[], None]:
    """An epoch of the same samples through `datasets`, from rows of fixed length on disk."""
    import datasets

    datasets.disable_progress_bars()
    length = SEQUENCE_LENGTH + 1
    kind = datasets.List(datasets.Value("uint16"), length=length)
    built = datasets.Dataset.from_generator(
        lambda: ({"ids": row} for row in all_samples(folder)),
        features=datasets.Features({"ids": kind}),
        cache_dir=str(folder / "arrow"),
    ).with_format("numpy")
    order = np.random.default_rng(0).permutation(NUM_SAMPLES)

    def read() -> None:
        for start in range(0, NUM_SAMPLES, BATCH_SIZE):
            rows = built[order[start : start + BATCH_SIZE]]["ids"]
            torch.from_numpy(np.asarray(rows).astype(np.int64))

    return read


def all_samples(folder: Path) -> Iterator[NDArray[np.uint16]]:
    """Every sample, [T + 1] each."""
    dataset = TokenDataset(folder, "train", SEQUENCE_LENGTH)
    for number in range(NUM_SAMPLES):
        yield dataset.rows(np.array([number]))[0].astype(np.uint16)


# Name -> the package that it needs, and what opens it.
PEERS: dict[str, tuple[str, Callable[[Path], Callable[[], None]]]] = {
    "MMapIndexedDataset": ("deepspeed", indexed_epoch),
    "WebDataset": ("webdataset", webdataset_epoch),
    "arrow": ("datasets", arrow_epoch),
}


def measure(rounds: int) -> dict[str, Any]:
    """Median million tokens per CPU second of each, and the paired ratios to the peers."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory() as other:
        folder = Path(name)
        write_random_tokens(folder, ["random"])
        write_random_tokens(Path(other), list(MIXTURE))
        mixture = open_mixture(Path(other))
        dataset = TokenDataset(folder, "train", SEQUENCE_LENGTH)
        epochs: dict[str, Callable[[], object]] = {
            OURS: lambda: read_epoch(dataset),
            f"{OURS}, read ahead": lambda: read_epoch(dataset, prefetch=2),
            f"{OURS}, documents apart": lambda: read_epoch(dataset, segment_documents=True),
            f"{OURS}, four domains": lambda: read_epoch(mixture),
        }
        peers = {peer: make for peer, (package, make) in PEERS.items() if find_spec(package)}
        epochs |= {peer: make(folder) for peer, make in peers.items()}
        seconds = paired_cpu_seconds(epochs, rounds=rounds)
    million_tokens = NUM_SAMPLES * SEQUENCE_LENGTH / 1e6
    return {
        "rounds": rounds,
        "million_tokens_per_cpu_second": {
            name: million_tokens / statistics.median(times) for name, times in seconds.items()
        },
        "over_peer": {peer: median_ratio(seconds[peer], seconds[OURS]) for peer in peers},
        "not_installed": sorted(PEERS.keys() - peers.keys()),
    }


def show(result: dict[str, Any]) -> None:
    """Print a line per reader."""
    for name, rate in result["million_tokens_per_cpu_second"].items():
        print(f"{name:24} {rate:8.0f} million tokens per CPU second")
    for name, ratio in result["over_peer"].items():
        print(f"the loader is {ratio:.2f} times as fast as {name}")
    for name in result["not_installed"]:
        print(f"not compared, because it is not installed: {name}")


if __name__ == "__main__":
    report(measure, show, rounds=7, description=__doc__)
