"""Near-dedup end to end against datatrove's four stages and datasketch: CPU seconds and quality.

6,000 pieces of about 3,000 characters of the standard library's sources and 800 planted
near-duplicates with 1, 2, 5 or 10 % of the words replaced. Ours goes through files as a build
does: signatures, clusters, drops. A peer that is not installed is left out and named.
"""

from __future__ import annotations

import json
import random
import re
import statistics
import sysconfig
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cdrmix.corpus.steps.dedup import (
    DROPS,
    Deduplicate,
    MinHash,
    Sign,
    drops_path,
    find_duplicates,
)
from cdrmix.data.document import Document
from tools.benchmark.timing import median_ratio, paired_cpu_seconds, report

NUM_PIECES = 6000
PIECE_CHARACTERS = 3000
COPIES_PER_SHARE = 200
REPLACED_SHARES = (0.01, 0.02, 0.05, 0.10)
SHINGLE_WORDS = 5
OURS = "cdrmix"


def shingles(text: str) -> set[str]:
    """Runs of five words, in the plainest terms: what similarity is measured by."""
    words = re.findall(r"\w+", text.lower())
    runs = range(max(1, len(words) - SHINGLE_WORDS + 1))
    return {" ".join(words[start : start + SHINGLE_WORDS]) for start in runs}


def jaccard(a: str, b: str) -> float:
    """Shared share of the shingles of two texts."""
    first = shingles(a)
    second = shingles(b)
    return len(first & second) / max(1, len(first | second))


def corpus() -> tuple[list[Document], dict[str, str]]:
    """Documents in random order, and the original of each planted copy by id."""
    generator = random.Random(0)
    pieces: dict[str, None] = {}
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        starts = range(0, len(text) - PIECE_CHARACTERS, PIECE_CHARACTERS)
        pieces |= dict.fromkeys(text[start : start + PIECE_CHARACTERS] for start in starts)
    texts = generator.sample(list(pieces), min(NUM_PIECES, len(pieces)))
    documents = [Document(text, f"bench/{i}", "bench", "code") for i, text in enumerate(texts)]
    vocabulary = sorted({word for text in texts[:500] for word in re.findall(r"\w+", text)})
    originals = {}
    chosen = iter(generator.sample(documents, len(REPLACED_SHARES) * COPIES_PER_SHARE))
    for share in REPLACED_SHARES:
        for _ in range(COPIES_PER_SHARE):
            original = next(chosen)
            copy = "".join(
                generator.choice(vocabulary) if i % 2 and generator.random() < share else piece
                for i, piece in enumerate(re.split(r"(\w+)", original.text))  # words are odd
            )
            documents.append(Document(copy, f"bench/{len(documents)}", "bench", "code"))
            originals[documents[-1].id] = original.id
    generator.shuffle(documents)
    return documents, originals


def run_ours(documents: list[Document], folder: Path) -> set[str]:
    """The three phases over two tasks; ids of the documents that were dropped."""
    method = MinHash(shingle_words=SHINGLE_WORDS)
    tasks = [documents[::2], documents[1::2]]
    files = [folder / f"{number}.signatures" for number in range(len(tasks))]
    dropped: set[str] = set()
    for task, file in zip(tasks, files, strict=True):
        for _ in Sign(file, method)(task, lambda document, reason: None):
            pass
    find_duplicates(files, folder / "drops", method=method)
    for task, file in zip(tasks, files, strict=True):
        step = Deduplicate(drops_path(folder / "drops", file))
        for _ in step(task, lambda document, reason: dropped.add(document.id)):
            pass
    return dropped


def run_datasketch(documents: list[Document], _: Path) -> set[str]:
    """MinHash of the same shingles, asked and inserted one by one."""
    from datasketch import MinHash as PeerMinHash
    from datasketch import MinHashLSH

    index = MinHashLSH(num_perm=112, params=(14, 8))
    dropped = set()
    for document in documents:
        minhash = PeerMinHash(num_perm=112)
        minhash.update_batch([shingle.encode() for shingle in shingles(document.text)])
        if index.query(minhash):
            dropped.add(document.id)
        index.insert(document.id, minhash)
    return dropped


def run_datatrove(documents: list[Document], folder: Path) -> set[str]:
    """The four stages as in its example, one worker, with its defaults of 14 x 8 and 5 words."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.dedup import (
        MinhashDedupBuckets,
        MinhashDedupCluster,
        MinhashDedupFilter,
        MinhashDedupSignature,
    )
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.writers import JsonlWriter
    from loguru import logger

    (folder / "in").mkdir()
    lines = [json.dumps({"text": d.text, "id": d.id}) for d in documents]
    (folder / "in" / "0.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    at = {name: str(folder / name) for name in ("in", "signatures", "buckets", "drops", "dropped")}
    reader = JsonlReader(at["in"])
    stages: list[tuple[list[Any], int]] = [
        ([reader, MinhashDedupSignature(at["signatures"])], 1),
        ([MinhashDedupBuckets(at["signatures"], at["buckets"])], 14),
        ([MinhashDedupCluster(at["buckets"], at["drops"])], 1),
        (
            [
                reader,
                MinhashDedupFilter(
                    at["drops"], exclusion_writer=JsonlWriter(at["dropped"], compression=None)
                ),
            ],
            1,
        ),
    ]
    logger.disable("datatrove")
    for number, (pipeline, tasks) in enumerate(stages):
        LocalPipelineExecutor(
            pipeline, tasks=tasks, workers=1, logging_dir=str(folder / f"log-{number}")
        ).run()
    files = Path(at["dropped"]).rglob("*.jsonl")
    return {json.loads(line)["id"] for file in files for line in file.open(encoding="utf-8")}


PEERS: dict[str, Callable[[list[Document], Path], set[str]]] = {
    "datasketch": run_datasketch,
    "datatrove": run_datatrove,
}


def recall(dropped: set[str], originals: dict[str, str], similarity: dict[str, float]) -> float:
    """Share of the planted pairs of similarity .8 and more of which one document is dropped."""
    pairs = [(copy, originals[copy]) for copy in originals if similarity[copy] >= 0.8]
    return sum(not dropped.isdisjoint(pair) for pair in pairs) / len(pairs)


def precision(documents: list[Document]) -> float:
    """Share of our dropped documents with similarity .5 and more to the one that stays."""
    import numpy as np

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_ours(documents, folder)
        similar = []
        for number, task in enumerate((documents[::2], documents[1::2])):
            by_id = {document.id: document.text for document in task}
            listed = np.load(drops_path(folder / "drops", folder / f"{number}.signatures"))
            assert listed.dtype == DROPS
            similar += _similarities(documents, by_id, listed)
    return sum(value >= 0.5 for value in similar) / len(similar)


def _similarities(documents: list[Document], task: dict[str, str], listed: Any) -> list[float]:
    """Similarity of each listed document of a task to the first one of its cluster."""
    from cdrmix.corpus.steps.signatures import hash_id, split_places

    text_of = {hash_id(document_id): text for document_id, text in task.items()}
    files, rows = split_places(listed["cluster"])
    kept = [documents[2 * row + file].text for file, row in zip(files, rows, strict=True)]
    return [
        jaccard(text_of[int(i)], text) for i, text in zip(listed["id"].tolist(), kept, strict=True)
    ]


def measure(rounds: int) -> dict[str, Any]:
    """Median CPU seconds and documents per CPU second of each, ratios, recall and precision."""
    documents, originals = corpus()
    by_id = {document.id: document.text for document in documents}
    similarity = {copy: jaccard(by_id[copy], by_id[first]) for copy, first in originals.items()}
    runs = {OURS: run_ours} | {name: run for name, run in PEERS.items() if find_spec(name)}
    dropped: dict[str, set[str]] = {}

    def once(name: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            dropped[name] = runs[name](documents, Path(folder))

    seconds = paired_cpu_seconds({name: partial(once, name) for name in runs}, rounds=rounds)
    return {
        "rounds": rounds,
        "documents": len(documents),
        "megabytes": sum(len(text.encode()) for text in by_id.values()) / 1e6,
        "not_installed": sorted(PEERS.keys() - runs.keys()),
        "cpu_seconds": {name: statistics.median(times) for name, times in seconds.items()},
        "over_peer": {
            name: median_ratio(seconds[name], seconds[OURS]) for name in runs if name != OURS
        },
        "recall_at_0.8": {
            name: recall(ids, originals, similarity) for name, ids in dropped.items()
        },
        "precision_at_0.5": precision(documents),
    }


def show(result: dict[str, Any]) -> None:
    """Print a line per side."""
    for name, seconds in result["cpu_seconds"].items():
        print(
            f"{name:12} {result['documents'] / seconds:8.0f} documents per CPU second, "
            f"recall at .8 {result['recall_at_0.8'][name]:.3f}"
        )
    for name, ratio in result["over_peer"].items():
        print(f"{OURS} is {ratio:.1f} times as fast as {name}")
    print(f"precision at .5: {result['precision_at_0.5']:.3f}")
    for name in result["not_installed"]:
        print(f"not compared, because it is not installed: {name}")


if __name__ == "__main__":
    report(measure, show, rounds=5, description=__doc__)
