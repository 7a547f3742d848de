"""Who may import whom: the rules of docs/architecture.md against the imports in the sources."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import ROOT
from tools.architecture import (
    PICTURE,
    ROW_OF,
    docstring_problems,
    imported_names,
    part_of,
    picture,
    sources,
)

WITHOUT_TORCH = ("planning", "cluster", "config", "log", "errors")
SLOW_PACKAGES = ("torch", "deepspeed", "transformers")
USERS_OF_DEEPSPEED = (
    *("runtime", "models/moe", "hf/build", "parallel", "engines/loop", "checkpoint"),
    "tools/benchmark",  # to compare with what DeepSpeed brings
)
# log: what a terminal shows, below every other reader; trackers: variables of their packages
READERS_OF_ENVIRONMENT = (
    *("runtime", "launch", "cluster", "log", "tools/mutate"),
    "tracking/environment",
)

SOURCES = sources()


def stands_in(path: Path, places: tuple[str, ...]) -> bool:
    """Whether a file is one of `places` or lies below one; they are named without cdrmix/."""
    name = path.with_suffix("").as_posix().removeprefix("cdrmix/")
    return any(name == place or name.startswith(f"{place}/") for place in places)


def environment_uses(tree: ast.AST) -> Iterator[int]:
    """Lines that read the environment through the os module."""
    names = ("environ", "getenv", "environb", "getenvb")
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="os"), attr=name) if name in names:
                yield node.lineno
            case ast.ImportFrom(module="os", names=aliases):
                yield from (node.lineno for alias in aliases if alias.name in names)


def why_not_part(importer: str, imported: str) -> str | None:
    """Why part `importer` may not import part `imported`; None when it may."""
    if unknown := {importer, imported} - ROW_OF.keys():
        return f"{', '.join(unknown)} has no row in the import rules"
    if importer == imported:
        return None
    if ROW_OF[imported] < ROW_OF[importer]:
        return f"{importer} imports upwards from {imported}"
    if ROW_OF[imported] == ROW_OF[importer]:
        return f"{importer} imports sideways from {imported}"
    if (importer, imported) == ("planning", "runtime"):
        return "planning imports runtime"
    if importer == "objectives":
        return f"objectives, which are pure functions of tensors, import {imported}"
    return None


def why_not(path: Path, name: str) -> str | None:
    """Why the file at `path` may not import `name`; None when it may."""
    package, _, rest = name.partition(".")
    if package == "deepspeed" and not stands_in(path, USERS_OF_DEEPSPEED):
        return f"deepspeed is imported outside {', '.join(USERS_OF_DEEPSPEED)}"
    if package in SLOW_PACKAGES and part_of(path) in WITHOUT_TORCH:
        return f"{part_of(path)} must work without {package}"
    if package not in ("cdrmix", "launch", "tools") or rest in ("", "__version__"):
        return None
    if path == Path("cdrmix/__init__.py"):
        return "the package itself, which every import runs first, imports a part of it"
    return why_not_part(part_of(path), rest.partition(".")[0] if package == "cdrmix" else package)


def problems(path: Path, source: str) -> list[str]:
    """Broken import rules of one file, each with its line."""
    tree = ast.parse(source)
    found = [(line, why_not(path, name)) for line, name in imported_names(path, tree)]
    if not stands_in(path, READERS_OF_ENVIRONMENT):
        found += [(line, "os.environ is read outside runtime") for line in environment_uses(tree)]
    return [f"{path}:{line}: {reason}" for line, reason in found if reason]


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_imports_go_downwards_only(path: Path) -> None:
    assert problems(path, (ROOT / path).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("path", "source", "reason"),
    [
        ("cdrmix/models/moe.py", "from cdrmix.engines.loop import train", "upwards from engines"),
        ("cdrmix/data/loader.py", "def f():\n    import cdrmix.engines", "upwards from engines"),
        ("cdrmix/models/rwkv7.py", "from ..parallel import tensor", "upwards from parallel"),
        ("cdrmix/config/load.py", "from cdrmix import runtime", "upwards from runtime"),
        ("cdrmix/data/loader.py", "import cdrmix.monitoring.sinks", "sideways from monitoring"),
        ("cdrmix/planning/plan.py", "from cdrmix import runtime", "planning imports runtime"),
        ("cdrmix/planning/plan.py", "import torch.nn", "must work without torch"),
        ("cdrmix/objectives/grpo.py", "import cdrmix.runtime", "objectives, which are pure"),
        ("cdrmix/models/attention.py", "import deepspeed.comm", "deepspeed is imported outside"),
        ("cdrmix/models/attention.py", "import os\nos.environ['A']", "os.environ is read outside"),
        ("cdrmix/errors.py", "from os import getenv", "os.environ is read outside"),
        ("cdrmix/utils/text.py", "import cdrmix.log", "utils has no row"),
        ("cdrmix/cli.py", "from cdrmix.utils import text", "utils has no row"),
        ("cdrmix/__init__.py", "from cdrmix.models import moe", "the package itself"),
    ],
)
def test_a_broken_rule_is_reported(path: str, source: str, reason: str) -> None:
    assert [problem for problem in problems(Path(path), source) if reason in problem]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("cdrmix/models/rwkv7.py", "from .wkv7 import wkv7\nfrom cdrmix import __version__"),
        ("cdrmix/models/moe.py", "import deepspeed.moe.layer\nimport cdrmix.runtime"),
        ("cdrmix/config/load.py", "from cdrmix.errors import ConfigError"),
        ("launch/train.py", "import os\nos.environ['A']\nfrom cdrmix.engines import loop"),
    ],
)
def test_what_the_rules_allow_is_not_reported(path: str, source: str) -> None:
    assert problems(Path(path), source) == []


def test_planning_and_config_work_without_torch() -> None:
    modules = [
        path.with_suffix("").as_posix().removesuffix("/__init__").replace("/", ".")
        for path in SOURCES
        if path.parts[0] == "cdrmix" and part_of(path) in WITHOUT_TORCH
    ]
    assert "cdrmix.config.schema" in modules
    check = f"import sys, {', '.join(modules)}; print(*{{*{SLOW_PACKAGES}}} & {{*sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_the_picture_of_the_rows_is_that_of_the_sources() -> None:
    assert PICTURE.read_text(encoding="utf-8") == picture(), (
        "run python -m tools.architecture --draw"
    )


def test_a_docstring_that_opens_with_a_relative_word_is_reported() -> None:
    source = 'def f():\n    """How many they are."""\n\n\ndef g():\n    """Number of ranks."""\n'
    assert [
        problem.split(":")[1] for problem in docstring_problems(Path("a.py"), ast.parse(source))
    ] == ["1"]


def test_every_file_that_the_tour_names_is_there() -> None:
    tour = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    names = re.findall(r"`((?:[a-z_]+/)+[a-z0-9_]+\.(?:py|cpp))`", tour)
    assert len(names) > 40
    assert [n for n in names if not any((ROOT / top / n).exists() for top in ("", "cdrmix"))] == []
