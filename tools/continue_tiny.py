"""Trains a tiny model on, with and without replay, and prints what it forgets and learns.

    python -m tools.continue_tiny                    # minutes on a CPU
    python -m tools.continue_tiny --out DIR --steps 60 --replay 0 0.01 0.1

The old data are sources of Python's standard library, byte by byte; the new data the same text
backwards, with its letters exchanged, which nothing learned of the old helps with. The base is
trained on the old data, and then on the new with each share of replay.
"""

from __future__ import annotations

import argparse
import json
import random
import string
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cdrmix.config.load import shipped
from cdrmix.data.sample import read_standard_library
from cdrmix.data.shards import (
    Document,
    ShardInfo,
    TokenizerInfo,
    new_manifest,
    smallest_dtype,
    write_file,
    write_manifest,
    write_shards,
)
from cdrmix.data.tokenizer import (
    SPECIAL_TOKENS,
    TOKENIZER_FILE,
    Tokenizer,
    load_tokenizer,
    train_tokenizer,
)

ROOT = Path(__file__).resolve().parent.parent
VOCAB_SIZE = len(SPECIAL_TOKENS) + 256  # one token for each byte
CONFIG = shipped("model_configs") / "continue" / "cpt-tiny.yaml"
# Largest text of either data set; the model sees some of it once.
_MAX_BYTES = 4_000_000


class Outcome(NamedTuple):
    """Losses of one continuation (nats per token, which is a byte)."""

    replay: float  # share of the samples
    old_before: float
    old_after: float
    new_before: float
    new_after: float

    @property
    def forgetting(self) -> float:
        """Rise of the loss on old data."""
        return self.old_after - self.old_before

    @property
    def gain(self) -> float:
        """Fall of the loss on new data."""
        return self.new_before - self.new_after


def foreign(text: str) -> str:
    """Reads a text backwards and exchanges its small letters by a fixed permutation."""
    letters = string.ascii_lowercase
    exchanged = "".join(random.Random(5).sample(letters, len(letters)))
    return text[::-1].translate(str.maketrans(letters, exchanged))


def write_texts(folder: Path, texts: Sequence[str]) -> None:
    """Writes texts as token shards of bytes, the last tenth of them held out."""
    folder.mkdir(parents=True)
    trained = train_tokenizer([], VOCAB_SIZE)
    file = write_file(folder / TOKENIZER_FILE, trained.to_str(pretty=True).encode())
    tokenizer = load_tokenizer(folder)
    begin_held_out = len(texts) * 9 // 10
    shards: list[ShardInfo] = []
    parts = {"train": texts[:begin_held_out], "validation": texts[begin_held_out:]}
    for split, documents in parts.items():
        shards += write_shards(
            folder,
            _encoded(documents, tokenizer),
            split=split,
            domain="text",
            dtype=smallest_dtype(VOCAB_SIZE),
        )
    info = TokenizerInfo(file=TOKENIZER_FILE, sha256=file.sha256, num_tokens=tokenizer.vocab_size)
    manifest = new_manifest(
        shards, vocab_size=VOCAB_SIZE, tokenizer=info, eos_id=tokenizer.eos_id, source={}
    )
    write_manifest(folder, manifest)


def _encoded(texts: Sequence[str], tokenizer: Tokenizer) -> Iterator[Document]:
    for text in texts:
        yield np.array([*tokenizer.encode(text), tokenizer.eos_id]), len(text.encode())


def write_data(folder: Path, *, max_bytes: int = _MAX_BYTES) -> tuple[Path, Path]:
    """Writes the old and the new data below a folder; returns theirs."""
    texts = []
    size = 0
    for document in read_standard_library(Path(sysconfig.get_path("stdlib"))):
        if document.domain == "code" and document.text and size < max_bytes:
            texts.append(document.text)
            size += len(document.text)
    # Neighbouring files are of one package, and held-out text is to be like the other.
    random.Random(0).shuffle(texts)
    write_texts(folder / "old", texts)
    write_texts(folder / "new", [foreign(text) for text in texts])
    return folder / "old", folder / "new"


def launched(arguments: Sequence[str]) -> None:
    """Runs launch/train.py on one rank; a CalledProcessError if it fails."""
    command = [sys.executable, str(shipped("launch") / "train.py"), *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def settings(values: dict[str, Any]) -> list[str]:
    """Writes configuration values as flags."""
    return [word for key, value in values.items() for word in ("--set", f"{key}={value}")]


def train_base(
    out: Path, old: Path, steps: int, run: Callable[[Sequence[str]], None], more: dict[str, Any]
) -> Path:
    """Trains the base on the old data; returns its run directory."""
    base = out / "base"
    values = {"data.path": old, "training.max_steps": steps, "training.start_from": "null"}
    values |= {"cpt": "null", "training.learning_rate": 4e-3, "training.warmup_steps": 20, **more}
    run(["--config", str(CONFIG), "--run-dir", str(base), *settings(values)])
    return base


def continue_from(
    base: Path,
    out: Path,
    data: tuple[Path, Path],
    replay: float,
    steps: int,
    run: Callable[[Sequence[str]], None],
    more: dict[str, Any],
) -> Outcome:
    """Trains the base on the new data with a share of replay; returns what became of both."""
    old, new = data
    folder = out / f"replay-{replay:g}"
    values = {
        "data.path": new,
        "training.start_from": base,
        "training.max_steps": steps,
        "cpt.replay.source": old,
        "cpt.replay.fraction": replay,
        **more,
    }
    run(["--config", str(CONFIG), "--run-dir", str(folder), *settings(values)])
    sets = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))["cpt"]["sets"]
    before_old, before_new = (each["base_loss"] for each in sets)
    after_old, after_new = (each["loss"] for each in sets)
    return Outcome(replay, before_old, after_old, before_new, after_new)


def table(outcomes: Sequence[Outcome]) -> str:
    """Writes outcomes as lines for people."""
    lines = ["replay   old: before   after  forgetting   new: before   after   gain"]
    for each in outcomes:
        lines.append(
            f"{each.replay:6.0%}   {each.old_before:11.3f} {each.old_after:7.3f} "
            f"{each.forgetting:+11.3f}   {each.new_before:11.3f} {each.new_after:7.3f} "
            f"{each.gain:6.3f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Trains the base and its continuations, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("experiments/continue-tiny"))
    parser.add_argument("--base-steps", type=int, default=160)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--replay", type=float, nargs="+", default=[0.0, 0.25])
    given = parser.parse_args()
    if given.out.exists():
        parser.error(f"{given.out} exists. Remove it, or give another --out")
    began = time.monotonic()
    data = write_data(given.out / "data")
    base = train_base(given.out, data[0], given.base_steps, launched, {})
    outcomes = [
        continue_from(base, given.out, data, replay, given.steps, launched, {})
        for replay in given.replay
    ]
    print(table(outcomes))
    print(f"nats per byte of held-out text; {time.monotonic() - began:.0f} s; runs: {given.out}")


if __name__ == "__main__":
    main()
