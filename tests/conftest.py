"""Fixtures and conditions that all kinds of tests share."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: tests share the cores of a laptop
# Where it is set, every process that a test starts would compile the package again: 1 s of CPU.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import contextlib
import random
import shutil
import signal
import sys
import sysconfig
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from cdrmix.config.load import load_config
from cdrmix.data.sample import build_sample
from tests.harness import ROOT

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels of Triton run on CPUs

# Under nohup HUP is ignored, and would be by all that the tests start.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
sys.dont_write_bytecode = False  # of what it makes multiprocessing say to its children

TINY = ROOT / "model_configs" / "cdrmix-core-tiny.yaml"

# What tests start inherits it, and with it what that starts.
_STARTED_BY = "CDRMIX_TESTS"
os.environ[_STARTED_BY] = str(os.getpid())
_SECONDS_TO_END = 10.0

# marker: (whether this machine has what the test needs, what is missing)
_CONDITIONS: dict[str, tuple[Callable[[], bool], str]] = {
    "gpu": (torch.cuda.is_available, "no CUDA device"),
    "compiler": (lambda: bool(shutil.which("c++")), "no C++ compiler"),
}


# Tests that --fast leaves out: launchers, hosts, whole runs that are killed and go on.
_SLOW = (
    "tests/cluster/",
    "tests/integration/",
    "tests/distributed/test_background_saves",
    "tests/distributed/test_bad_input",
    "tests/distributed/test_checkpoint_state",
    "tests/distributed/test_communication",
    "tests/distributed/test_continuing",
    "tests/distributed/test_health",
    "tests/distributed/test_hugging_face",
    "tests/distributed/test_late_copies",
    "tests/distributed/test_layouts",
    "tests/distributed/test_partitioned",
    "tests/distributed/test_stage_b",
    "tests/distributed/test_store_faults",
    "tests/distributed/test_supervision",
    "tests/distributed/test_tiers",
    "tests/distributed/test_trackers",
)


# The files that take longest, begun early: one of them at the end would run beside nothing.
_LONG = (
    "tests/distributed/test_layouts",
    "tests/distributed/test_partitioned_checkpoints",
    "tests/integration/test_data_engines",
    "tests/integration/test_learning",
    "tests/integration/test_rehearse",
    "tests/parity/test_compiled",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "leave out tests/cluster, tests/integration, whole runs on ranks and what is marked slow"
    parser.addoption("--fast", action="store_true", help=text)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        # The labs mostly wait: one worker begins with them, and the other has the cores.
        begins = ("tests/cluster/", _LONG)
        items.sort(key=lambda item: [not item.nodeid.startswith(each) for each in begins])
    if config.getoption("fast"):
        slow = [
            item
            for item in items
            if item.nodeid.startswith(_SLOW) or item.get_closest_marker("slow")
        ]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hand out whole files, whose tests share fixtures, and all labs to the same worker."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "tests/cluster" if file.startswith("tests/cluster/") else file

    config.option.loadscopereorder = False  # in the order of pyproject.toml, the cheap kinds first
    return ByFile(config, log)


# Reasons to skip that hold in CI too; with CI=true in the environment any other one is an error.
_CI_LACKS = (
    "no CUDA device",
    "fla-core is not installed",  # its kernels need a GPU
    "this machine has no way to the outside",
    "no IPv6 loopback on this machine",
    "orphans become children of process",  # of a container whose first process adopts none
    # Privileges of the container that CI runs in.
    "unshare --net is not allowed here",
    "cannot mount a small file system here",
    "a tmpfs cannot be mounted here",
    "cannot make network namespaces",
    "level kernel: ",  # Landlock and seccomp
    "level bwrap: ",  # user namespaces
)


def _check_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Make a skip a failure in CI, unless CI cannot have what is missing."""
    if os.environ.get("CI") != "true" or not report.skipped or hasattr(report, "wasxfail"):
        return
    assert isinstance(report.longrepr, tuple), report.longrepr
    reason = report.longrepr[2].removeprefix("Skipped: ")
    if not reason.startswith(_CI_LACKS):
        report.outcome = "failed"
        report.longrepr = (
            f"{report.nodeid}: skipped in CI: {reason}. CI must have this (.ci/run, Makefile, "
            "setup.py), or the reason must be one of _CI_LACKS in tests/conftest.py."
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, pytest.TestReport]:
    report: pytest.TestReport = yield
    _check_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, Any, pytest.CollectReport]:
    report: pytest.CollectReport = yield
    _check_skip(report)
    return report


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, (is_met, missing) in _CONDITIONS.items():
        if item.get_closest_marker(marker) and not is_met():
            pytest.skip(missing)


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """Every test draws the same numbers, alone or in company."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _shared_memory_is_left_clean() -> Iterator[None]:
    """DeepSpeed's shared-memory all-reduce, were it on, would leave 69 MB per rank and run."""
    before = _shared_memory_buffers()
    yield
    left = sorted(_shared_memory_buffers() - before)
    assert not left, f"a run left buffers in shared memory (see cdrmix/runtime): {left}"


def _shared_memory_buffers() -> set[str]:
    found = set()
    for path in Path("/dev/shm").glob("deepspeed_*"):
        with contextlib.suppress(FileNotFoundError):  # another run's, unlinked meanwhile
            if path.stat().st_uid == os.getuid():
                found.add(path.name)
    return found


@pytest.fixture
def leaves_nothing() -> Iterator[None]:
    """No process, with the ports that it holds, and no file in shared memory outlives the test."""
    before = _started_processes(), _shared_memory_files()
    yield
    deadline = time.monotonic() + _SECONDS_TO_END
    while True:
        files = _shared_memory_files() - before[1]
        left = _started_processes() - before[0], {name for name in files if not _is_mapped(name)}
        if not any(left) or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    assert not any(left), f"the test left {left[0] or ''} {left[1] or ''}"


def _started_processes() -> set[psutil.Process]:
    """Living processes that come of these tests, but for what lives longer than one of them."""
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_ours = process.environ().get(_STARTED_BY) == str(os.getpid())
            if not is_ours or process.status() == psutil.STATUS_ZOMBIE:
                continue
            is_zygote = process.ppid() == os.getpid() and "tests.zygote" in process.cmdline()
            if not is_zygote and process.name() != "sshd":  # of a lab's host
                found.add(process)
    return found


def _shared_memory_files() -> set[str]:
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


def _is_mapped(name: str) -> bool:
    """Tell whether a process uses a file in shared memory; tests run beside others' of theirs."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # another user's, or ended
            if f"/dev/shm/{name}" in maps.read_text():
                return True
    return False


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run directory that does not exist yet."""
    return tmp_path / "run"


@pytest.fixture(scope="session")
def small_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A built folder for cdrmix-core-tiny, from a few packages of the standard library."""
    stdlib, sources = Path(sysconfig.get_path("stdlib")), tmp_path_factory.mktemp("sources")
    for package in ("asyncio", "email", "json", "logging", "unittest"):
        shutil.copytree(stdlib / package, sources / package)
    folder = tmp_path_factory.mktemp("data") / "small"
    build_sample(folder, load_config(TINY).model.vocab_size, stdlib=sources)
    return folder
