"""Ranks as processes of this machine: real collectives without a cluster or a launcher.

The runs of one small layout, each by real processes, and what they are compared by.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from cdrmix import runtime
from cdrmix.checkpoint.checkpoint_file import CheckpointFile
from cdrmix.config.schema import Config
from cdrmix.errors import TrainingError
from cdrmix.monitoring.metrics import deterministic_part
from cdrmix.monitoring.sinks import read_metrics
from cdrmix.planning.layout import Degrees
from cdrmix.planning.shrink import Rehearsal

# Imported once by the server that the ranks are forked from; without the last three, which
# DeepSpeed imports inside initialize(), each rank would pay seconds for them.
_PRELOADED = [
    "cdrmix.sessions.session",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.pipe.engine",
    "deepspeed.ops.op_builder.all_ops",
]
_OUTPUT_SHOWN_LINES = 25


class RanksFailed(Exception):
    """A rank ended with another code than 0, or was still busy at the time limit."""


def run_ranks(
    action: Callable[..., int], world_size: int, *args: Any, log: Path, timeout: float
) -> None:
    """Run `action(*args)` on every rank of a world of CPU processes, and wait for all of them.

    Args:
        action: function of a module; returns the exit code of its rank.
        world_size: number of processes.
        args: picklable, the same for every rank.
        log: file that the ranks' output is appended to.
        timeout: seconds until a world that is still busy is ended.
    Raises:
        RanksFailed: if a rank does not return 0 in time, with the end of what was printed.
    """
    runtime.use_cpus_only()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    port = runtime.free_port()
    ranks = [
        context.Process(target=_be_rank, args=(rank, world_size, port, log, action, args))
        for rank in range(world_size)
    ]
    for rank in ranks:
        rank.start()
    try:
        ended = _wait(ranks, timeout)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    codes = [rank.exitcode for rank in ranks]
    if not ended or any(codes):
        lines = log.read_text(errors="replace").splitlines()[-_OUTPUT_SHOWN_LINES:]
        fault = f"exit codes {codes}" if ended else f"still busy after {timeout:.0f} s"
        raise RanksFailed("\n  ".join([f"{world_size} ranks: {fault}. They wrote last:", *lines]))


def _wait(ranks: list[ForkServerProcess], timeout: float) -> bool:
    """Whether all ended in time; the first that fails ends the wait."""
    deadline = time.monotonic() + timeout
    while any(rank.is_alive() for rank in ranks):
        if any(rank.exitcode for rank in ranks):
            time.sleep(0.5)  # for the others to say what they have to say
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _be_rank(
    rank: int, world_size: int, port: int, log: Path, action: Callable[..., int], args: tuple
) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    runtime.take_place(rank, world_size, port)
    sys.exit(action(*args))


TOLERANCE = 1e-5  # relative, of what is measured in float32
_LEAST = 1e-2  # what is smaller is compared as if it were as large: some metrics should be zero
_SECONDS = 300.0  # for one start; on two idle cores the largest takes ten
_ALONE = Degrees()


@dataclass(frozen=True)
class Check:
    """One comparison.

    Attributes:
        name: what was compared.
        deviation: largest relative difference found; None where it could not be compared.
        allowed: largest that passes; 0 means equal to the bit.
        fault: what went wrong instead, or empty.
    """

    name: str
    deviation: float | None
    allowed: float
    fault: str = ""

    def __str__(self) -> str:
        mark = "ok    " if self.passed else "FAILED"
        if self.deviation is None:
            return f"{mark} {self.name}: {self.fault}"
        if self.allowed:
            found = f"within {self.deviation:.1e}, allowed are {self.allowed:.0e}"
        else:
            found = "equal to the bit" if self.passed else f"differs by {self.deviation:.1e}"
        return f"{mark} {self.name}: {found}"

    @property
    def passed(self) -> bool:
        """Whether what was found is what should be."""
        return self.deviation is not None and self.deviation <= self.allowed


class SmallRuns:
    """One small layout in a folder of its own.

    Args:
        folder: to be made.
        corpus: a built folder.
        small: the layout.
        backbone: run directory of a finished Stage A, for a layout of Stage B.
    """

    def __init__(
        self, folder: Path, corpus: Path, small: Rehearsal, *, backbone: Path | None = None
    ) -> None:
        folder.mkdir()
        self._folder = folder
        self._small = small
        config = small.config
        update: dict[str, Any] = {"data": config.data.model_copy(update={"path": str(corpus)})}
        if backbone is not None:
            assert config.stage_b is not None, "Stage B has its section"
            update["stage_b"] = config.stage_b.model_copy(update={"run": str(backbone)})
        self._config = config.model_copy(update=update)
        self._is_stage_b = backbone is not None

    @property
    def first(self) -> Path:
        """Run directory of the first run."""
        return self._folder / "first"

    def checks(self) -> Iterator[Check]:
        """Run and compare; ends at the first start that fails."""
        whole = self._config
        alone = self._alone()
        starts = [
            ("goes on from its checkpoint", whole, "resumed", "first", 0.0),
            ("equals one process", alone, "alone", None, TOLERANCE),
            ("goes on in one process", alone, "moved", "first", TOLERANCE),
        ]
        if not self._is_stage_b:  # long there, and what goes on repeats half of it
            starts.insert(0, ("a second run", whole, "again", None, 0.0))
        try:
            self._train(whole, "first", None)
            for name, config, run, source, allowed in starts:
                self._train(config, run, source)
                yield Check(name, self._difference(run, "first", bits=not allowed), allowed)
        except RanksFailed as failure:
            yield Check("runs", None, 0.0, str(failure))

    def _alone(self) -> Config:
        """The same micro-steps in one process."""
        degrees = self._small.degrees
        training = self._config.training
        assert training.micro_batch_size is not None, "rehearsals give it"
        micro = training.micro_batch_size * degrees.sample_ranks
        values = self._config.model_dump(mode="json", exclude_unset=True)
        values["parallel"] = asdict(_ALONE)
        values["training"] |= {"micro_batch_size": micro}
        if self._is_stage_b:
            values["stage_b"].pop("pipeline", None)
        return Config.model_validate(values)

    def _train(self, config: Config, run: str, source: str | None) -> None:
        is_whole = config is self._config
        degrees = self._small.degrees if is_whole else _ALONE
        resume = "never"
        if source is not None:
            resume = str(self._folder / source / "checkpoints" / str(self._small.saved_step))
        run_ranks(
            _train,
            degrees.world_size,
            config,
            self._small.profile if is_whole else "zero1",
            self._folder / run,
            resume,
            log=self._folder / f"{run}.log",
            timeout=_SECONDS,
        )

    def _difference(self, run: str, like: str, *, bits: bool) -> float:
        """Largest relative difference of what the two runs measured; with `bits` also whether
        their last weights are equal to the bit, which any difference makes infinite."""
        found, expected = (
            {line["step"]: line for line in read_metrics(self._folder / name / "metrics.jsonl")}
            for name in (run, like)
        )
        steps = sorted(found.keys() & expected.keys())
        assert steps and steps[-1] == self._small.last_step, f"{run}: logged steps {steps}"
        compare = _apart_in_stage_b if self._is_stage_b else _apart
        largest = max(compare(found[step], expected[step]) for step in steps)
        if bits and not self._have_equal_weights(run, like):
            return float("inf")
        return largest

    def _have_equal_weights(self, run: str, like: str) -> bool:
        last = str(self._small.last_step)
        paths = [self._folder / name / "checkpoints" / last for name in (run, like)]
        with CheckpointFile(paths[0]) as ours, CheckpointFile(paths[1]) as theirs:
            return ours.names() == theirs.names() and all(
                ours.read(name).equal(theirs.read(name)) for name in ours.names()
            )


def _apart(found: Mapping[str, float], expected: Mapping[str, float]) -> float:
    """Relative difference of loss and gradient norm of a step of Stage A."""
    names = ("loss", "grad_norm")
    return max(_relative(found[name] - expected[name], abs(expected[name])) for name in names)


def _apart_in_stage_b(found: Mapping[str, float], expected: Mapping[str, float]) -> float:
    """Relative difference of all that a step of Stage B measured but times and memory."""
    ours = deterministic_part(found)
    theirs = deterministic_part(expected)
    if ours.keys() != theirs.keys():
        return float("inf")
    return max(
        _relative(ours[name] - value, max(abs(value), _LEAST)) for name, value in theirs.items()
    )


def _relative(difference: float, size: float) -> float:
    apart = abs(difference) / size
    return apart if math.isfinite(apart) else float("inf")  # a nan would get lost in a maximum


def _train(config: Config, profile: str, run_dir: Path, resume: str) -> int:
    """What one rank does: a training run as launch/train.py starts it."""
    from cdrmix import log, runtime
    from cdrmix.cluster.starts import StartUp
    from cdrmix.planning.cluster import processes
    from cdrmix.planning.profile import choose
    from cdrmix.sessions.session import run_training

    log.configure(rank=runtime.environment_rank())
    try:
        choice = choose(config, processes(runtime.environment_world_size()), profile=profile)
        runtime.set_threads()
        runtime.initialize_distributed(timeout_minutes=_SECONDS / 60)
        start_up = StartUp()
        return run_training(config, choice, run_dir=run_dir, resume=resume, start_up=start_up)
    except TrainingError as error:
        if runtime.speaks_for_errors():
            print(f"error: {error}")
        return error.exit_code
    finally:
        runtime.destroy_distributed()
