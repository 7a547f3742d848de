"""Stall of a save with and without tiers, and time to find and verify a checkpoint in each tier.

All save the same engine's state in the background, in turns. `memory alone` is a save to the tier
of the host by its own interval; `with tiers` one to the run directory, which has memory, local disk
and archive beside it. Wall time on one rank. What a start reads of a checkpoint is listed, digested
and loaded; an archive is copied into a run directory first.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from cdrmix import runtime
from cdrmix.checkpoint import engine_state, store
from cdrmix.checkpoint.archive import Archive, Uploads
from cdrmix.checkpoint.checkpoint_file import CheckpointFile
from cdrmix.checkpoint.host_saver import HostSaver
from cdrmix.checkpoint.host_tiers import host_tiers
from cdrmix.checkpoint.tiers import TieredSaver
from cdrmix.config.checkpoint import CheckpointConfig
from cdrmix.config.load import load_config
from cdrmix.engines.tiers_of_run import fetched
from cdrmix.models.backbone import logical_name
from tools.benchmark.checkpoint import CONFIG, STATES, Training, start_training
from tools.benchmark.timing import report

KINDS = ("run directory alone", "with tiers", "memory alone")


class Saves:
    """Saves of one engine to the tiers below a folder, step after step."""

    def __init__(self, training: Training, folder: Path, memory: Path, *, has_tiers: bool) -> None:
        self._training = training
        self.run_dir = folder / "run"
        hosts = uploads = None
        self.folders: dict[str, Path] = {}
        self.archive = Archive(str(folder / "archive"), answer_seconds=60)
        if has_tiers:
            local = {"path": str(folder / "local")}
            tiers = {"memory": {"folder": str(memory), "every_steps": 1}, "local": local}
            config = CheckpointConfig.model_validate({"tiers": tiers})
            of_host = host_tiers(config, self.run_dir)
            self.folders |= {tier.name: tier.folder for tier in of_host}
            hosts = HostSaver(of_host, self.run_dir, background=True)
            uploads = Uploads(self.archive, every_steps=None, keep=1)
        roots = [self.run_dir / "checkpoints"]
        self.saver = TieredSaver(roots, hosts=hosts, uploads=uploads, keep=1, background=True)
        self._step = 0

    def stall(self, *, in_memory_alone: bool = False) -> float:
        """Seconds for which one save holds training up, which takes a step meanwhile."""
        self._step += 1
        before = self.saver.stall_seconds
        start = self.saver.start_in_host_tiers if in_memory_alone else self.saver.start
        engine = self._training.engine
        start(
            self._step,
            engine_state.fragments(engine, logical_name),
            state={"engine": engine_state.counters(engine)},
            rank_state={"random": runtime.random_state()},
        )
        with engine_state.before_each_step(engine, self.saver.wait_for_copy):
            self._training.step()
        stalled = self.saver.stall_seconds - before
        self.saver.wait()
        self.saver.finish(seconds=600)
        return stalled


def seconds_to_read(place: Path) -> float:
    """Seconds to find the newest checkpoint of a folder, verify it and read all of it."""
    began = time.perf_counter()
    found = store.find_newest(place)
    assert found is not None
    with CheckpointFile(found.path) as reader:
        for name in reader.names():
            for kind in reader.kinds(name):
                reader.full(name, kind)
    return time.perf_counter() - began


def measure_state(name: str, rounds: int) -> dict[str, Any]:
    """Median seconds of each kind of save, and to read each tier."""
    training = start_training(load_config(CONFIG, STATES[name]))
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="cdrmix-bench-") as memory,  # noqa: S108
    ):
        plain = Saves(training, Path(folder) / "plain", Path(memory), has_tiers=False)
        tiered = Saves(training, Path(folder) / "tiers", Path(memory), has_tiers=True)
        stalls: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for number in range(rounds + 1):
            times = (plain.stall(), tiered.stall(), tiered.stall(in_memory_alone=True))
            if number:  # the first saves allocate the memory that they copy to
                for kind, seconds in zip(KINDS, times, strict=True):
                    stalls[kind].append(seconds)
        tiered.stall()
        places: dict[str, Path] = {**tiered.folders, "run directory": tiered.run_dir}
        reads = {k: [seconds_to_read(p) for _ in range(rounds)] for k, p in places.items()}
        reads["archive"] = []
        for number in range(rounds):
            back = Path(folder) / f"back{number}"
            began = time.perf_counter()
            assert fetched(tiered.archive, tiered.archive.steps()[0], back)
            reads["archive"].append(time.perf_counter() - began + seconds_to_read(back))
        for saves in (plain, tiered):
            saves.saver.close()
    return {
        "name": name,
        "stall_seconds": {kind: statistics.median(each) for kind, each in stalls.items()},
        "read_seconds": {kind: statistics.median(each) for kind, each in reads.items()},
    }


def measure(rounds: int) -> dict[str, Any]:
    """All states."""
    runtime.use_cpus_only()
    runtime.map_environment()
    runtime.keep_freed_memory()
    torch.set_num_threads(1)
    runtime.initialize_distributed()
    states = [measure_state(name, rounds) for name in STATES]
    runtime.destroy_distributed()
    return {"rounds": rounds, "states": states}


def show(result: dict[str, Any]) -> None:
    """Print two lines per state."""
    for state in result["states"]:
        for what in ("stall", "read"):
            times = state[f"{what}_seconds"].items()
            shown = ", ".join(f"{kind} {1e3 * seconds:.1f} ms" for kind, seconds in times)
            print(f"{state['name']:18} {what}: {shown}")


if __name__ == "__main__":
    report(measure, show, rounds=9, description=__doc__)
