"""Time for which a save stalls training: written in the background, or while training waits.

Both save the same engine's state, in turns, with everything that a run saves. Wall time: a disk's
time is no CPU time. In the background that is what `Saver.start` takes and what the next step waits
for the copy before its optimizer, with the former save over, as it is where checkpoints are further
apart than a write takes.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cdrmix import runtime
from cdrmix.checkpoint import engine_state
from cdrmix.checkpoint.saver import Saver
from cdrmix.config.load import load_config
from cdrmix.config.schema import Config
from cdrmix.models.backbone import logical_name
from cdrmix.planning.cluster import processes
from cdrmix.planning.profile import choose
from tools.benchmark.timing import median_ratio, report

CONFIG = Path("model_configs/cdrmix-core-tiny.yaml")
# name -> what differs from the tiny variant
STATES: dict[str, list[str]] = {
    "cdrmix-core-tiny": [],
    "width 512": [
        "model.hidden_size=512",
        "model.num_heads=16",
        "model.moe.expert_hidden_size=512",
    ],
}


class Training(NamedTuple):
    """An engine, and a step of it."""

    engine: Any
    step: Callable[[], object]


def start_training(config: Config) -> Training:
    """After one step, so that the optimizer has all of its state."""
    from cdrmix.engines.loop import start_engine
    from cdrmix.engines.training_step import train_step
    from cdrmix.parallel.apply import build_model
    from cdrmix.parallel.topology import make_topology

    plan = choose(config, processes(1))
    topology = make_topology(plan.degrees)
    engine = start_engine(build_model(config, plan, topology), config, plan, topology)
    length = config.training.sequence_length
    shape = (plan.gradient_accumulation_steps, plan.micro_batch_size, length + 1)
    ids = torch.randint(0, config.model.vocab_size, shape)
    batch = {"input_ids": ids[..., :-1], "labels": ids[..., 1:].contiguous()}
    tokens = float(config.training.global_batch_size * length)

    def step() -> None:
        train_step(engine, config, topology, batch, step=0, weights=[tokens])

    step()
    return Training(engine, step)


class Saves:
    """Saves of one engine into one folder, step after step."""

    def __init__(
        self, training: Training, config: Config, folder: Path, *, background: bool
    ) -> None:
        self._engine = training.engine
        self._train = training.step
        self._config = config
        self._saver = Saver([folder], keep=1, background=background)
        self._step = 0

    def stall(self) -> float:
        """Seconds for which one save in the background holds training up, which takes a step
        meanwhile; returns when it is over."""
        before = self._saver.stall_seconds
        self._start()
        with engine_state.before_each_step(self._engine, self._saver.wait_for_copy):
            self._train()
        stalled = self._saver.stall_seconds - before
        self._saver.wait()
        return stalled

    def whole(self) -> float:
        """Seconds that one save takes from beginning to end."""
        began = time.perf_counter()
        self._start()
        self._saver.wait()
        return time.perf_counter() - began

    def _start(self) -> None:
        self._step += 1
        self._saver.start(
            self._step,
            engine_state.fragments(self._engine, logical_name),
            state={
                "engine": engine_state.counters(self._engine),
                "config": self._config.model_dump(mode="json"),
            },
            rank_state={"random": runtime.random_state()},
        )

    @property
    def num_bytes(self) -> int:
        """Bytes that a save writes."""
        assert self._saver.last is not None
        return self._saver.last.bytes


def measure_state(name: str, rounds: int) -> dict[str, Any]:
    """Median seconds of both ways to save a state, and what the first save takes, which also
    allocates the memory."""
    config = load_config(CONFIG, STATES[name])
    training = start_training(config)
    with tempfile.TemporaryDirectory() as folder:
        behind = Saves(training, config, Path(folder) / "behind", background=True)
        in_front = Saves(training, config, Path(folder) / "in_front", background=False)
        first = behind.stall()
        in_front.whole()
        waited = []
        stalled = []
        for _ in range(rounds):
            waited.append(in_front.whole())
            stalled.append(behind.stall())
        return {
            "name": name,
            "bytes": behind.num_bytes,
            "seconds": {
                "synchronous": statistics.median(waited),
                "background": statistics.median(stalled),
                "first in the background": first,
            },
            "background_over_synchronous": median_ratio(stalled, waited),
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
    """Print a line per state."""
    for state in result["states"]:
        milliseconds = {kind: 1e3 * seconds for kind, seconds in state["seconds"].items()}
        shown = ", ".join(f"{kind} {value:.1f} ms" for kind, value in milliseconds.items())
        ratio = state["background_over_synchronous"]
        print(f"{state['name']:18} {state['bytes'] / 1e6:6.1f} MB: {shown}; {ratio:.1%}")


if __name__ == "__main__":
    report(measure, show, rounds=15, description=__doc__)
