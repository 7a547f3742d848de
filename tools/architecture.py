"""Holds the sources to the rules of docs/architecture.md and draws the picture in it.

`python -m tools.architecture --check` is a part of `make lint`; `--draw` writes the picture anew.
"""

from __future__ import annotations

import argparse
import ast
import html
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "images" / "rows.svg"

# Each row may import the rows below it; within a row, no package imports its neighbour.
ROWS = (
    ("launch", "cli", "tools"),
    ("verbs",),
    ("sessions",),
    ("stage_b",),
    ("engines",),
    ("evaluation", "export", "corpus"),
    ("checkpoint", "reasoning"),
    ("parallel",),
    ("hf",),
    ("models", "objectives", "optimizers", "tracking", "profiling", "live"),
    ("data", "monitoring", "cluster"),
    ("planning",),
    ("hooks",),
    ("runtime",),
    ("config",),
    ("log", "errors", "network"),
)
ROW_OF = {name: row for row, names in enumerate(ROWS) for name in names}

# A docstring names the thing or says what the function does: "Size of the group", "Reads a shard".
# "How many they are" makes the reader look elsewhere for what "they" are.
_RELATIVE_OPENING = re.compile(r"(What|Where|Which|How|Whether|Who|Whose|Why)\b")
_PURPOSES = {
    "launch": "what the launchers start",
    "cli": "the command `cdrmix`",
    "tools": "benchmarks and checks",
    "log": "log lines",
    "errors": "errors and exit codes",
    "network": "addresses and ports",
}


def part_of(path: Path) -> str:
    """Package, or top-level module, that a file belongs to: models for cdrmix/models/moe.py.

    Args:
        path: relative to the root of the repository.
    """
    within = path.parts[1:] if path.parts[0] == "cdrmix" else path.parts
    return within[0].removesuffix(".py")


def imported_names(path: Path, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of everything imported, inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            origin = list(path.parent.parts[: len(path.parent.parts) - node.level + 1])
            prefix = [*(origin if node.level else []), *([node.module] if node.module else [])]
            for alias in node.names:
                yield node.lineno, ".".join([*prefix, alias.name])


def sources() -> list[Path]:
    """All product files, relative to the root."""
    tops = ("cdrmix", "launch", "tools")
    return sorted(p.relative_to(ROOT) for top in tops for p in ROOT.glob(f"{top}/**/*.py"))


def docstring_problems(path: Path, tree: ast.AST) -> list[str]:
    """Docstrings of a file that open with a relative word, each with its line."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)
    problems = []
    for node in ast.walk(tree):
        docstring = ast.get_docstring(node) if isinstance(node, kinds) else None
        if docstring and (opening := _RELATIVE_OPENING.match(docstring)):
            problems.append(
                f"{path}:{getattr(node, 'lineno', 1)}: the docstring opens with '{opening[0]}'. "
                "Begin with a verb or with the name of the thing"
            )
    return problems


def picture() -> str:
    """The rows as SVG: each package with its purpose and the packages that it imports."""
    uses: dict[str, set[str]] = defaultdict(set)
    purposes = dict(_PURPOSES)
    for path in sources():
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        part = part_of(path)
        docstring = ast.get_docstring(tree)
        is_face = path.name == "__init__.py" and len(path.parts) == 3
        if is_face and path.parts[0] == "cdrmix" and docstring:
            purposes[part] = docstring.splitlines()[0].rstrip(".")
        for _, name in imported_names(path, tree):
            package, _, rest = name.partition(".")
            other = rest.partition(".")[0]
            if package == "cdrmix" and other in ROW_OF and other != part:
                uses[part].add(other)
    width, height, gap = 960, 58, 8
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} '
        f'{len(ROWS) * (height + gap) + gap}" font-family="sans-serif">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    for row, names in enumerate(ROWS):
        box = (width - gap) / len(names)
        top = gap + row * (height + gap)
        for column, name in enumerate(names):
            left = gap + column * box
            below = " ".join(sorted(uses[name], key=lambda other: (ROW_OF[other], other)))
            texts = (
                (18, 14, "bold", "#111827", name),
                (35, 11, "normal", "#374151", purposes.get(name, "")),
                (50, 9, "normal", "#6b7280", f"imports {below}" if below else ""),
            )
            lines.append(
                f'<rect x="{left:g}" y="{top}" width="{box - gap:g}" height="{height}" rx="4" '
                'fill="#f3f4f6" stroke="#9ca3af"/>'
            )
            lines += [
                f'<text x="{left + 8:g}" y="{top + down}" font-size="{size}" '
                f'font-weight="{weight}" fill="{colour}">{html.escape(text)}</text>'
                for down, size, weight, colour, text in texts
                if text
            ]
    return "\n".join([*lines, "</svg>", ""])


def main(arguments: list[str]) -> int:
    """Checks or draws; returns 1 where a rule is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", action="store_true", help="report docstrings against the rule")
    action.add_argument("--draw", action="store_true", help=f"write {PICTURE.relative_to(ROOT)}")
    if parser.parse_args(arguments).draw:
        PICTURE.write_text(picture(), encoding="utf-8")
        return 0
    problems = [
        problem
        for path in sources()
        for problem in docstring_problems(path, ast.parse((ROOT / path).read_text("utf-8")))
    ]
    print("\n".join(problems), file=sys.stderr, end="\n" if problems else "")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
