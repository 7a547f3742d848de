"""Fixtures and conditions that all kinds of tests share."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: tests share the cores of a laptop

import contextlib
import random
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from cdrmix.config.load import load_config
from cdrmix.data.sample import build_sample
from tests.harness import ROOT

TINY = ROOT / "model_configs" / "cdrmix-core-tiny.yaml"

# marker: (whether this machine has what the test needs, what is missing)
_CONDITIONS: dict[str, tuple[Callable[[], bool], str]] = {
    "gpu": (torch.cuda.is_available, "no CUDA device"),
    "compiler": (lambda: bool(shutil.which("c++")), "no C++ compiler"),
}


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
    assert not left, f"a run left buffers in shared memory (see cdrmix/runtime.py): {left}"


def _shared_memory_buffers() -> set[str]:
    found = set()
    for path in Path("/dev/shm").glob("deepspeed_*"):
        with contextlib.suppress(FileNotFoundError):  # another run's, unlinked meanwhile
            if path.stat().st_uid == os.getuid():
                found.add(path.name)
    return found


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
