"""Breaks the product in known ways, one at a time, and tells which faults the tests notice.

    python tools/mutate.py                    # all faults; takes minutes
    python tools/mutate.py --only checkpoint  # those of an area, or with a word in their name
    python tools/mutate.py --check            # only whether the table fits this tree

The faults stand in tools/mutations.toml. Everything happens in a temporary copy of the tree. The
exit code is 0 when every fault was noticed, 1 when one was not, 2 when the table is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tools" / "mutations.toml"
_MUTATED = ("cdrmix", "launch", "tools")
_SUFFIXES = (".py", ".cpp", ".h", ".sbatch", ".yaml", ".json")
# Far above what the tests of a fault take on a busy machine; a fault may make them hang.
_TIMEOUT_SECONDS = 300.0
_LOG = "mutate.log"
_TEST = re.compile(r"^def (test_\w+)\(", re.MULTILINE)


class TableError(Exception):
    """A fault that does not fit the tree, or tests that say nothing about it."""


@dataclass(frozen=True)
class Fault:
    """One way of breaking the product.

    Attributes:
        area: package that it belongs to.
        name: the fault in words.
        text: source text, which stands exactly once in the product.
        replacement: of the text.
        tests: parts of names of test functions, each in one or more files, or file names of tests.
        select: pytest's -k among the cases of these tests; empty for all.
    """

    area: str
    name: str
    text: str
    replacement: str
    tests: tuple[str, ...]
    select: str = ""


@dataclass(frozen=True)
class Located:
    """A fault and its place in the tree.

    Attributes:
        fault: the fault.
        path: of the file with its text, relative to the root.
        tests: arguments of pytest.
    """

    fault: Fault
    path: Path
    tests: tuple[str, ...]


def read_faults(table: Path) -> list[Fault]:
    """The faults of a table, in its order."""
    rows = tomllib.loads(table.read_text(encoding="utf-8"))["fault"]
    return [Fault(**{**row, "tests": tuple(row["tests"])}) for row in rows]


def locate(faults: Sequence[Fault], root: Path) -> list[Located]:
    """Find the file of each fault and its tests.

    Raises:
        TableError: naming every fault whose text does not stand exactly once, changes nothing, or
            whose tests do not exist.
    """
    sources = {
        path.relative_to(root): path.read_text(encoding="utf-8")
        for folder in _MUTATED
        for path in sorted((root / folder).rglob("*"))
        if path.suffix in _SUFFIXES and "__pycache__" not in path.parts
    }
    tests = {
        path.relative_to(root): _TEST.findall(path.read_text(encoding="utf-8"))
        for path in sorted((root / "tests").rglob("test_*.py"))
    }
    located = []
    problems = []
    for fault in faults:
        places = [path for path, source in sources.items() for _ in range(source.count(fault.text))]
        chosen = [_named(name, tests) for name in fault.tests]
        if len(places) != 1:
            listed = ", ".join(map(str, places)) or "nowhere"
            problems.append(f"{fault.area}: {fault.name}: its text stands in {listed}")
        if fault.text == fault.replacement:
            problems.append(f"{fault.area}: {fault.name}: its replacement changes nothing")
        for name, there in zip(fault.tests, chosen, strict=True):
            if not there:
                problems.append(f"{fault.area}: {fault.name}: no test is called {name}")
        if not problems:
            flat = tuple(dict.fromkeys(test for there in chosen for test in there))
            select = ("-k", fault.select) if fault.select else ()
            located.append(Located(fault, places[0], (*flat, *select)))
    if problems:
        raise TableError("\n".join(problems))
    return located


def _named(name: str, tests: dict[Path, list[str]]) -> list[str]:
    """Test files of a name, or test functions whose name contains it, as pytest takes them."""
    files = [str(path) for path in tests if path.name == name]
    return files or [
        f"{path}::{test}" for path, there in tests.items() for test in there if name in test
    ]


def copy_tree(root: Path, target: Path) -> None:
    """Copy what the tests need; whatever was built, recorded or installed stays behind."""
    ignored = shutil.ignore_patterns(
        ".*", "__pycache__", "*.egg-info", "build", "dist", "runs", "data.local", "node_modules"
    )
    shutil.copytree(root, target, ignore=ignored, symlinks=True)


def run_tests(root: Path, tests: Sequence[str], *, timeout_seconds: float) -> int | None:
    """Exit code of pytest in a tree, None where it ran out of time; ended with all it started."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    log = root / _LOG
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=root,
            env=_environment(root),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _environment(root: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(root), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


def check_import(root: Path) -> None:
    """Make sure that tests in a copy import the copy.

    Raises:
        TableError: if they would test the installed package.
    """
    command = [sys.executable, "-c", "import cdrmix; print(cdrmix.__file__)"]
    done = subprocess.run(
        command, cwd=root, env=_environment(root), capture_output=True, text=True, check=True
    )
    imported = Path(done.stdout.strip())
    if root not in imported.parents:
        raise TableError(f"tests in {root} import {imported}: nothing would be noticed")


def _check_tests_pass(located: Sequence[Located], root: Path, *, timeout_seconds: float) -> None:
    """Run all tests once in the tree as it is.

    Raises:
        TableError: if one of them fails without any fault.
    """
    all_cases = dict.fromkeys(t for one in located if not one.fault.select for t in one.tests)
    chosen = dict.fromkeys(one.tests for one in located if one.fault.select)
    for tests in filter(None, (tuple(all_cases), *chosen)):
        if run_tests(root, tests, timeout_seconds=timeout_seconds * len(located)) != 0:
            log = (root / _LOG).read_text(encoding="utf-8", errors="replace")
            raise TableError(f"{log[-3000:]}\nThese tests fail without any fault, and show nothing")


def verdict(located: Located, root: Path, *, number: int, timeout_seconds: float) -> str:
    """Apply a fault, run its tests, and take the fault away again.

    Returns:
        noticed; TIMEOUT where the tests did not end, which may be the fault or a busy machine; or
        MISSED.
    Raises:
        TableError: if pytest could not run the tests, whatever they would have said.
    """
    path = root / located.path
    fault = located.fault
    source = path.read_text(encoding="utf-8")
    before = path.stat()
    path.write_text(source.replace(fault.text, fault.replacement), encoding="utf-8")
    # Python takes compiled code for current whose second and size are the source's: a time of its
    # own for each fault, and the old one afterwards, keep one fault's code out of the next run.
    os.utime(path, (before.st_atime, before.st_mtime + 1000 + number))
    try:
        code = run_tests(root, located.tests, timeout_seconds=timeout_seconds)
    finally:
        path.write_text(source, encoding="utf-8")
        os.utime(path, (before.st_atime, before.st_mtime))
    if code in (4, 5):  # pytest's codes of wrong arguments, and of no test
        raise TableError(f"{fault.area}: {fault.name}: pytest cannot run {' '.join(located.tests)}")
    return "TIMEOUT" if code is None else "noticed" if code else "MISSED"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the faults that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="TEXT",
        help="faults with this in their area or name; may be repeated",
    )
    parser.add_argument("--check", action="store_true", help="check the table and run nothing")
    parser.add_argument(
        "--timeout",
        type=float,
        default=_TIMEOUT_SECONDS,
        metavar="SECONDS",
        help="for the tests of one fault (default: %(default).0f)",
    )
    parser.add_argument(
        "--trust", action="store_true", help="do not run the tests without a fault first"
    )
    flags = parser.parse_args(arguments)
    # TERM ends as Ctrl-C does: the copy goes, and so do the tests that run in it
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _run(flags)
    except TableError as error:
        print(error, file=sys.stderr)
        return 2


def _run(flags: argparse.Namespace) -> int:
    faults = read_faults(TABLE)
    if flags.only:
        faults = [
            fault
            for fault in faults
            if any(text in f"{fault.area}: {fault.name}" for text in flags.only)
        ]
    located = locate(faults, ROOT)
    if flags.check or not located:
        print(f"{len(located)} faults, each with its text in one place and tests to notice it")
        return 0 if located else 2
    with tempfile.TemporaryDirectory(prefix="cdrmix-mutate-") as folder:
        tree = Path(folder).resolve() / "tree"
        copy_tree(ROOT, tree)
        check_import(tree)
        if not flags.trust:
            _check_tests_pass(located, tree, timeout_seconds=flags.timeout)
        verdicts = []
        for number, one in enumerate(located):
            began = time.monotonic()
            verdicts.append(verdict(one, tree, number=number, timeout_seconds=flags.timeout))
            seconds = time.monotonic() - began
            print(
                f"{verdicts[-1]:7} {seconds:5.1f} s  {one.fault.area}: {one.fault.name}"
                f" ({one.path})",
                flush=True,
            )
    noticed = verdicts.count("noticed")
    late = verdicts.count("TIMEOUT")
    print(f"{noticed} of {len(located)} faults were noticed, and {late} timed out")
    return 0 if noticed == len(located) else 1


if __name__ == "__main__":
    sys.exit(main())
