"""Text of HTML pages against their sources: recall, precision, speed, beside trafilatura's.

Pages are those that Sphinx built and whose .rst lies beside them, as in Debian's documentation:
`apt-get download python3.11-doc sphinx-doc debian-policy developers-reference python-flask-doc
python-attr-doc python-requests-doc`, then `dpkg -x FILE FOLDER` of each, and `--pages FOLDER`. The
.rst without its markup is the text that should come out; the page outside of its `role="main"` is
what should not. lxml reads both parts, and is needed here: `pip install lxml`. The peer is left
out, and named, where it is not installed: `pip install trafilatura lxml_html_clean`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lxml import html as lxml_html

from cdrmix.corpus.steps import read_text
from cdrmix.corpus.steps.read_text import extract_text

WORD = re.compile(r"[^\W_]+")
MIN_PAGES = 200
MIN_WORDS = 100  # below it a page is an index of links
OURS = "cdrmix"
PEER = "trafilatura"

# What of reStructuredText is no text: comments and index entries with what is indented below them,
# the names of directives and roles, options, targets and substitutions.
_INDEX = re.compile(
    r"^( *)\.\. (?:index|only|toctree|image|figure|include|_)[^\n]*\n"
    r"(?:(?:\1 +[^\n]*)?\n)*",
    re.M,
)
_DIRECTIVE = re.compile(r"^ *\.\. [\w:-]+::|^ *:[\w-]+:", re.M)
_ROLE = re.compile(r":[\w:.-]+:(?=`)")
_TARGET = re.compile(r"<[^<>`]*>`")


def words(text: str) -> Counter[str]:
    """Counts the words of a text."""
    return Counter(WORD.findall(text.lower()))


def source_text(source: str) -> str:
    """A page's .rst without its markup."""
    text = _INDEX.sub("", source)
    return _TARGET.sub("`", _ROLE.sub("", _DIRECTIVE.sub("", text)))


def pages_of(folder: Path) -> Iterator[tuple[str, str]]:
    """HTML and .rst of each page."""
    for sources in sorted(folder.rglob("_sources")):
        for source in sorted(sources.rglob("*.rst*")):
            name = source.relative_to(sources).as_posix().split(".rst")[0]
            page = sources.parent / f"{name}.html"
            if page.is_file():
                yield page.read_text("utf-8"), source_text(source.read_text("utf-8"))


def outside_and_code(page: str) -> tuple[set[str], list[str]]:
    """Lines outside the main part, and lines of preformatted text in it."""
    tree = lxml_html.fromstring(page)
    (main,) = tree.xpath("//*[@role='main']")[:1] or [tree]
    code = [line for pre in main.iter("pre") for line in pre.text_content().split("\n")]
    inside = set(lines(main.text_content()))
    main.drop_tree()
    for element in tree.xpath("//script|//style|//head"):
        element.drop_tree()
    return set(lines(tree.text_content())) - inside, [line for line in code if line.strip()]


def lines(text: str) -> list[str]:
    """Lines that hold a word, without bullets and spaces at their edges."""
    stripped = (line.strip(" \t-•*¶|»") for line in text.split("\n"))
    return [line for line in stripped if WORD.search(line)]


def quality(texts: list[str], pages: list[tuple[str, str]]) -> dict[str, float]:
    """Shares over all pages of the words, lines of code and lines of navigation that came out."""
    total: Counter[str] = Counter()
    for text, (page, source) in zip(texts, pages, strict=True):
        of_source = words(source)
        of_text = words(text)
        outside, code = outside_and_code(page)
        verbatim = {line.strip() for line in text.split("\n")}
        total.update(
            source=of_source.total(),
            text=of_text.total(),
            common=(of_source & of_text).total(),
            code=len(code),
            code_kept=sum(line.strip() in verbatim for line in code),
            outside=len(outside),
            outside_kept=len(outside & set(lines(text))),
        )
    return {
        "recall": total["common"] / total["source"],
        "precision": total["common"] / total["text"],
        "code": total["code_kept"] / total["code"],
        "boilerplate": 1 - total["outside_kept"] / total["outside"],
    }


def cpu_seconds() -> float:
    """CPU time of this process and of the child that parses for it."""
    child = read_text._parser.process
    assert child is not None
    user, system = Path(f"/proc/{child.pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
    return time.process_time() + (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def measure(rounds: int, folder: Path) -> dict[str, Any]:
    """All of it, the extractors in turn."""
    pages = [page for page in pages_of(folder) if words(page[1]).total() >= MIN_WORDS]
    assert len(pages) >= MIN_PAGES, f"{folder}: {len(pages)} pages with their .rst"
    extractors: dict[str, Callable[[str], str]] = {OURS: lambda page: extract_text(page)[0]}
    if find_spec(PEER):
        import trafilatura

        extractors[PEER] = lambda page: trafilatura.extract(page, favor_recall=True) or ""
    extract_text("")  # starts the child
    megabytes = sum(len(page) for page, _ in pages) / 1e6
    texts: dict[str, list[str]] = {}
    speed: dict[str, list[float]] = {name: [] for name in extractors}
    for _ in range(rounds):
        for name, extract in extractors.items():
            began = cpu_seconds()
            texts[name] = [extract(page) for page, _ in pages]
            speed[name].append(megabytes / (cpu_seconds() - began))
    return {
        "rounds": rounds,
        "pages": len(pages),
        "megabytes": megabytes,
        "extractors": {
            name: quality(texts[name], pages) | {"speed": statistics.median(speed[name])}
            for name in extractors
        },
    }


def main() -> None:
    """Print a table, or JSON with --json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pages", type=Path, required=True, help="folder with _sources in it")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = measure(args.rounds, args.pages)
    if args.json:
        print(json.dumps(result))
        return
    print(f"{result['pages']} pages, {result['megabytes']:.1f} million characters")
    for name, row in result["extractors"].items():
        print(f"{name:12}", "  ".join(f"{key} {value:.4f}" for key, value in row.items()))


if __name__ == "__main__":
    main()
