"""Encoding of documents against Hugging Face's encode_batch with the same tokenizer: CPU seconds.

A tokenizer of 50,272 tokens is trained on the standard library's sources. The ids of 10,000 pieces
of them and of its documentation strings are compared; speed is measured on every tenth piece.
"""

from __future__ import annotations

import random
import statistics
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import tokenizers

from cdrmix.data.sample import read_standard_library
from cdrmix.data.tokenizer import TOKENIZER_FILE, load_tokenizer, train_tokenizer
from tools.benchmark.timing import median_ratio, paired_cpu_seconds, report

VOCAB_SIZE = 50_272
NUM_DOCUMENTS = 10_000
PIECE_CHARACTERS = 1_200
OURS = "cdrmix"
PEER = "Hugging Face encode_batch"


def pieces() -> list[str]:
    """10,000 texts of at most 1,200 characters."""
    found: list[str] = []
    for document in read_standard_library(Path(sysconfig.get_path("stdlib"))):
        text = document.text
        found += [
            text[start : start + PIECE_CHARACTERS]
            for start in range(0, len(text), PIECE_CHARACTERS)
        ]
    return random.Random(0).sample(found, NUM_DOCUMENTS)


def measure(rounds: int) -> dict[str, Any]:
    """Million tokens per CPU second of each, their ratio, and documents whose ids are equal."""
    texts = pieces()
    trained = train_tokenizer(texts, VOCAB_SIZE)
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / TOKENIZER_FILE).write_text(trained.to_str(), encoding="utf-8")
        ours = load_tokenizer(Path(name))
        peer = tokenizers.Tokenizer.from_file(str(Path(name) / TOKENIZER_FILE))
    theirs = [encoding.ids for encoding in peer.encode_batch(texts)]
    num_equal = sum(ours.encode(text) == ids for text, ids in zip(texts, theirs, strict=True))
    some = texts[::10]
    million_tokens = sum(map(len, theirs[::10])) / 1e6
    seconds = paired_cpu_seconds(
        {
            OURS: lambda: [ours.encode(text) for text in some],
            PEER: lambda: [encoding.ids for encoding in peer.encode_batch(some)],
        },
        rounds=rounds,
    )
    return {
        "rounds": rounds,
        "documents": len(texts),
        "equal": num_equal,
        "million_tokens_per_cpu_second": {
            name: million_tokens / statistics.median(times) for name, times in seconds.items()
        },
        "over_peer": median_ratio(seconds[PEER], seconds[OURS]),
    }


def show(result: dict[str, Any]) -> None:
    """Print a line per side."""
    for name, rate in result["million_tokens_per_cpu_second"].items():
        print(f"{name:28} {rate:.2f} million tokens per CPU second")
    print(f"{OURS} is {result['over_peer']:.1f} times as fast")
    print(f"ids are equal in {result['equal']} of {result['documents']} documents")


if __name__ == "__main__":
    report(measure, show, rounds=5, description=__doc__)
