"""Peak memory of a data build, worker by worker, on a corpus of several GB.

The corpus is made for it: the standard library's sources again and again, each time with every
tenth word replaced, so that the copies are documents of their own and not near-duplicates. It and
the result are deleted afterwards; free space of four times the corpus is needed.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import resource
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
REPLACED_SHARE = 0.1
FILE_BYTES = 2**26
RECIPE = """
sources:
- {{name: copies, type: local, path: {corpus}, domain: code}}
"""


def library() -> list[list[str]]:
    """The standard library's sources, each as words (at odd places) and what is between them."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    texts = (path.read_text(encoding="utf-8", errors="replace") for path in paths)
    return [re.split(r"(\w+)", text) for text in texts if 200 < len(text) < 100_000]


def documents() -> Iterator[str]:
    """Copies of the library without end, no two alike."""
    generator = random.Random(0)
    sources = library()
    words = sorted({word for pieces in sources for word in pieces[1::2]})
    while True:
        for pieces in sources:
            changed = list(pieces)
            num_words = len(pieces) // 2
            for place in generator.sample(range(num_words), int(REPLACED_SHARE * num_words)):
                changed[2 * place + 1] = generator.choice(words)
            yield "".join(changed)


def write_corpus(folder: Path, num_bytes: int) -> None:
    """Files of JSON lines of that many bytes of text in all."""
    made = 0
    texts = documents()
    while made < num_bytes:
        begun = made
        path = folder / f"{len(list(folder.iterdir())):05d}.jsonl"
        with path.open("w", encoding="utf-8") as file:
            while made - begun < FILE_BYTES and made < num_bytes:
                text = next(texts)
                file.write(json.dumps({"text": text}) + "\n")
                made += len(text.encode())


def build(recipe: Path, out: Path, workers: int) -> None:
    """Build, and print the largest resident size of this process and of a worker (bytes)."""
    from cdrmix.corpus.build import build_dataset

    began = time.monotonic()
    manifest = build_dataset(recipe, out, workers=workers)
    result = {
        "seconds": time.monotonic() - began,
        "tokens": sum(split.tokens for split in manifest.splits.values()),
        "documents_kept": sum(split.documents for split in manifest.splits.values()),
    }
    for name, whose in (("build", resource.RUSAGE_SELF), ("worker", resource.RUSAGE_CHILDREN)):
        result[f"{name}_bytes"] = resource.getrusage(whose).ru_maxrss * 1024
    print(json.dumps(result))


def measure(gigabytes: float, workers: int, folder: Path | None) -> dict[str, Any]:
    """Make the corpus, build it, and delete both."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        place = Path(name)
        (place / "corpus").mkdir()
        num_bytes = int(gigabytes * 1e9)
        # In processes of their own, as a new process counts the size of the one that began it.
        _run("--make", name, "--gigabytes", str(gigabytes))
        (place / "recipe.yaml").write_text(RECIPE.format(corpus=place / "corpus"))
        found: dict[str, Any] = json.loads(_run("--build", name, "--workers", str(workers)))
    return {"rounds": 1, "corpus_bytes": num_bytes, "workers": workers} | found


def _run(*flags: str) -> str:
    """Runs this module in a process of its own and returns its last line."""
    command = [sys.executable, "-m", "tools.benchmark.data_memory", *flags]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.rpartition("\n")[0].rpartition("\n")[2]


def main() -> None:
    """Print the result in lines, or JSON with --json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=3.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where there is room; default: as tempfile")
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--build", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.make:
        write_corpus(args.make / "corpus", int(args.gigabytes * 1e9))
        return
    if args.build:
        build(args.build / "recipe.yaml", args.build / "out", args.workers)
        return
    result = measure(args.gigabytes, args.workers, args.folder)
    if args.json:
        print(json.dumps(result))
        return
    for name in ("worker", "build"):
        print(f"largest {name} process: {result[f'{name}_bytes'] / 1e6:.0f} MB")
    print(f"{result['corpus_bytes'] / 1e9:.1f} GB of text in {result['seconds']:.0f} s")


if __name__ == "__main__":
    main()
