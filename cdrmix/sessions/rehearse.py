"""Rehearses a plan: its layout, shrunk, with real steps and collectives on this machine.

Each small layout trains, saves and ends; resumes from its first checkpoint; and resumes from it in
one process. One process trains the same micro-steps from the start. Runs of one layout are compared
to the bit, the others to a relative 1e-5. Stage B starts from the first layout's backbone.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from cdrmix import runtime
from cdrmix.checkpoint.checkpoint_file import CheckpointFile
from cdrmix.config.schema import Config
from cdrmix.data.sample import build_sample
from cdrmix.errors import PlanError, TrainingError
from cdrmix.log import get_logger
from cdrmix.monitoring.metrics import deterministic_part
from cdrmix.monitoring.sinks import read_metrics
from cdrmix.planning import shrink
from cdrmix.planning.cluster import Cluster
from cdrmix.planning.comparison import Comparison, compare, unavailable
from cdrmix.planning.cost import time_text
from cdrmix.planning.layout import Degrees
from cdrmix.planning.shrink import Aspect, Rehearsal
from cdrmix.planning.text_page import Page

logger = get_logger(__name__)
# Packages of the standard library whose text is enough to train a tokenizer of 512 slots on.
_TEXT = ("asyncio", "email", "json", "logging", "unittest")
TOLERANCE = 1e-5  # relative, of float32 metrics whose sums are taken in another order
_LEAST = 1e-2  # metrics of Stage B below this are compared as if as large: some should be zero
_SECONDS = 300.0  # for one start; on two idle cores the largest takes ten
# Imported once by the server that the ranks are forked from. DeepSpeed imports its three inside
# initialize(), and the report needs the last three: they would cost each world seconds.
_PRELOADED = [
    "cdrmix.sessions.session",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.pipe.engine",
    "deepspeed.ops.op_builder.all_ops",
    "cdrmix.monitoring.report",
    "matplotlib.backends.backend_svg",
    "matplotlib.figure",
]
_OUTPUT_SHOWN_LINES = 25


class RanksFailed(Exception):
    """A rank ended with another code than 0, or was still busy at the time limit."""


def run_ranks(
    action: Callable[..., int], world_size: int, *args: Any, log: Path, timeout: float
) -> None:
    """Run `action(*args)` on every rank of a world of CPU processes, and wait for all of them.

    Args:
        action: function of a module; returns the exit code of its rank. Arguments are picklable.
        log: file that the output of all ranks is appended to.
        timeout: seconds until a world that is still busy is ended.
    Raises:
        RanksFailed: if a rank does not return 0 in time, with the end of what was printed.
    """
    runtime.use_cpus_only()
    # A fork of this process could inherit locks that other threads hold; a new interpreter for each
    # rank would import torch and DeepSpeed anew.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    port = runtime.free_port()
    ranks = [
        context.Process(target=_be_rank, args=(rank, world_size, port, log, action, args))
        for rank in range(world_size)
    ]
    for rank in ranks:
        rank.start()
    deadline = time.monotonic() + timeout
    try:
        while any(rank.is_alive() for rank in ranks) and time.monotonic() < deadline:
            if any(rank.exitcode for rank in ranks):
                time.sleep(0.5)  # the others may have errors to write
                break
            time.sleep(0.05)
        # After a failure the others may wait for the rank that failed: they are not late.
        is_late = not any(r.exitcode for r in ranks) and any(r.is_alive() for r in ranks)
    finally:
        for rank in ranks:
            # Not terminate(): to a rank SIGTERM is a request to save, for which it needs others.
            rank.kill()
            rank.join()
    codes = [rank.exitcode for rank in ranks]
    if any(codes):  # of a rank that was killed above too
        lines = log.read_text(errors="replace").splitlines()[-_OUTPUT_SHOWN_LINES:]
        fault = f"still busy after {timeout:.0f} s" if is_late else f"exit codes {codes}"
        raise RanksFailed("\n  ".join([f"{world_size} ranks: {fault}. They wrote last:", *lines]))


def _be_rank(
    rank: int, world_size: int, port: int, log: Path, action: Callable[..., int], args: tuple
) -> None:
    # C++ libraries write to the descriptors, past sys.stdout.
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    runtime.take_place(rank, world_size, port)
    sys.exit(action(*args))


@dataclass(frozen=True)
class Check:
    """A comparison of two runs by their largest relative difference."""

    name: str
    deviation: float | None  # None where a run failed
    allowed: float  # 0 means equal to the bit
    fault: str = ""  # error of the run that failed

    def __str__(self) -> str:
        if self.deviation is None:
            result = self.fault
        elif self.allowed:
            result = f"within {self.deviation:.1e}, allowed are {self.allowed:.0e}"
        else:
            result = "equal to the bit" if self.passed else f"differs by {self.deviation:.1e}"
        return f"{self.name}: {result}"

    @property
    def passed(self) -> bool:
        """True if the deviation is allowed."""
        return self.deviation is not None and self.deviation <= self.allowed


class SmallRuns:
    """Runs of one small layout on a built corpus, in a folder of their own, which is made here.

    A layout of Stage B takes its backbone from the run directory of a finished Stage A.
    """

    def __init__(
        self, folder: Path, corpus: Path, small: Rehearsal, *, backbone: Path | None = None
    ) -> None:
        folder.mkdir()
        self._folder = folder
        self.first = folder / "first"  # run directory of the first run
        self._small = small
        config = small.config
        update: dict[str, Any] = {"data": config.data.model_copy(update={"path": str(corpus)})}
        if backbone is not None:
            assert config.stage_b is not None, "Stage B has its section"
            update["stage_b"] = config.stage_b.model_copy(update={"run": str(backbone)})
        self._config = config.model_copy(update=update)
        self._is_stage_b = backbone is not None

    def checks(self) -> Iterator[Check]:
        """Train the layout and yield comparisons; end at the first start that fails."""
        whole = self._config
        alone = self._alone()
        starts = [
            ("goes on from its checkpoint", whole, "resumed", True, 0.0),
            ("equals one process", alone, "alone", False, TOLERANCE),
            ("goes on in one process", alone, "moved", True, TOLERANCE),
        ]
        if not self._is_stage_b:  # Stage B is slow, and its resumed run repeats half of it
            starts.insert(0, ("a second run", whole, "again", False, 0.0))
        try:
            self._train(whole, "first")
            for name, config, run, resumes, allowed in starts:
                self._train(config, run, resumes=resumes)
                yield Check(name, self._difference(run, bits=not allowed), allowed)
        except RanksFailed as failure:
            yield Check("runs", None, 0.0, str(failure))

    def _alone(self) -> Config:
        """Returns the configuration with the same micro-steps in one process."""
        training = self._config.training
        assert training.fixed_micro_batch_size is not None, "rehearsals give it"
        micro = training.fixed_micro_batch_size * self._small.degrees.sample_ranks
        values = self._config.model_dump(mode="json", exclude_unset=True)
        values["parallel"] = asdict(Degrees())
        values["training"] |= {"micro_batch_size": micro}
        if self._is_stage_b:
            values["stage_b"].pop("pipeline", None)
        return Config.model_validate(values)

    def _train(self, config: Config, run: str, *, resumes: bool = False) -> None:
        is_whole = config is self._config
        world_size = self._small.degrees.world_size if is_whole else 1
        profile = self._small.profile if is_whole else "zero1"
        saved = self.first / "checkpoints" / str(self._small.saved_step)
        run_ranks(
            _train,
            world_size,
            *(config, profile, self._folder / run, str(saved) if resumes else "never"),
            log=self._folder / f"{run}.log",
            timeout=_SECONDS,
        )

    def _difference(self, run: str, *, bits: bool) -> float:
        """Largest relative difference of the metrics of a run from those of the first; with `bits`,
        infinite if their last weights are not equal to the bit."""
        folders = (self._folder / run, self.first)
        logged = [read_metrics(folder / "metrics.jsonl") for folder in folders]
        ours, theirs = (
            {line["step"]: deterministic_part(line) for line in lines} for lines in logged
        )
        # A resumed run has only the steps after its checkpoint.
        steps = sorted(ours.keys() & theirs.keys())
        assert steps and steps[-1] == self._small.last_step, f"{run}: logged steps {steps}"
        least = _LEAST if self._is_stage_b else 0.0
        largest = 0.0
        for step in steps:
            names: Collection[str] = ("loss", "grad_norm")
            if self._is_stage_b:  # all metrics but times and memory
                names = theirs[step].keys()
                if ours[step].keys() != names:
                    return float("inf")
            for name in names:
                value = theirs[step][name]
                apart = abs(ours[step][name] - value) / max(abs(value), least)
                # A maximum would drop a nan.
                largest = max(largest, apart if math.isfinite(apart) else float("inf"))
        if not bits:
            return largest
        last = f"checkpoints/{self._small.last_step}"
        with CheckpointFile(folders[0] / last) as one, CheckpointFile(folders[1] / last) as other:
            are_equal = one.names() == other.names() and all(
                one.read(name).equal(other.read(name)) for name in one.names()
            )
        return largest if are_equal else float("inf")


def _train(config: Config, profile: str, run_dir: Path, resume: str) -> int:
    """Train on one rank as launch/train.py does; returns its exit code."""
    # Here, so that only the ranks pay for DeepSpeed.
    from cdrmix import log
    from cdrmix.cluster.starts import StartUp
    from cdrmix.planning.cluster import processes
    from cdrmix.planning.profile import choose
    from cdrmix.sessions.session import run_training

    log.configure(rank=runtime.environment_rank())
    try:
        plan = choose(config, processes(runtime.environment_world_size()), profile=profile)
        runtime.set_threads()
        runtime.initialize_distributed(timeout_minutes=_SECONDS / 60)
        start_up = StartUp()
        return run_training(config, plan, run_dir=run_dir, resume=resume, start_up=start_up)
    except TrainingError as error:
        if runtime.speaks_for_errors():
            print(f"error: {error}")
        return error.exit_code
    finally:
        runtime.destroy_distributed()


@dataclass(frozen=True)
class RehearsedStage:
    """Rehearsal of a stage."""

    title: str
    planned: dict[str, Any]  # layout of the plan, as plain values
    small: list[Rehearsal]  # the layouts that were run
    checks: list[list[Check]]  # by layout
    aspects: list[Aspect]

    def to_json(self) -> dict[str, Any]:
        """Returns plain values."""
        layouts = [
            {
                "profile": each.profile,
                "degrees": asdict(each.degrees),
                "checks": [asdict(check) | {"passed": check.passed} for check in checks],
            }
            for each, checks in zip(self.small, self.checks, strict=True)
        ]
        return {
            "planned": self.planned,
            "layouts": layouts,
            "aspects": [asdict(aspect) for aspect in self.aspects],
        }

    def add_to(self, page: Page, heads: list[str]) -> None:
        """Adds comparisons and properties; `heads` are the names of the layouts."""
        page.add(self.title, hang=4)
        for head, each, checks in zip(heads, self.small, self.checks, strict=True):
            page.add()
            page.add(f"{head}: {each.describe()}, {each.degrees.world_size} processes", hang=4)
            for check in checks:
                style = "ok" if check.passed else "fail"
                mark = page.styled(f"{'ok' if check.passed else 'FAILED':6}", style)
                for line in f"  {mark} {check}".split("\n"):  # a fault has the output of its ranks
                    page.add(line, hang=9)
        exercised = {True: page.styled("yes", "ok"), False: page.styled("no", "warning"), None: ""}
        rows = [
            [each.name, each.planned, *each.rehearsed, exercised[each.is_exercised]]
            for each in self.aspects
        ]
        page.add()
        page.add_table([["", "planned", *heads, "exercised"], *rows])
        page.add()


@dataclass(frozen=True)
class Rehearsed:
    """Rehearsal of a plan."""

    compared: Comparison
    stage_a: RehearsedStage
    stage_b: RehearsedStage | None  # None where the run has none
    seconds: float

    @property
    def passed(self) -> bool:
        """True if all comparisons passed."""
        stages = [stage for stage in (self.stage_a, self.stage_b) if stage is not None]
        layouts = [checks for stage in stages for checks in stage.checks]
        return all(check.passed for checks in layouts for check in checks)

    def to_json(self) -> dict[str, Any]:
        """Returns plain values."""
        stage_b = {} if self.stage_b is None else {"stage_b": self.stage_b.to_json()}
        return {
            "name": self.compared.config.name,
            "passed": self.passed,
            **self.stage_a.to_json(),
            **stage_b,
            "seconds": self.seconds,
        }

    def as_text(self, stream: TextIO | None = None) -> str:
        """Tables for people, of the width and in the colours of the terminal that `stream` is."""
        page = Page(stream)
        numbers = itertools.count(1)  # layouts of Stage B go on behind those of Stage A
        for stage in (self.stage_a, self.stage_b):
            if stage is not None:
                stage.add_to(page, [f"rehearsed {next(numbers)}" for _ in stage.small])
        verdict = page.styled("passed", "ok") if self.passed else page.styled("FAILED", "fail")
        page.add(f"rehearsal {verdict} in {time_text(self.seconds)}")
        return str(page)


def rehearse(config: Config, cluster: Cluster) -> Rehearsed:
    """Plan a run on a cluster, and run its layout shrunk on this machine, or raise PlanError."""
    began = time.monotonic()
    compared = compare(config, cluster)
    plan = compared.plan
    if plan.missing:
        raise PlanError("\n".join(unavailable(plan, config, cluster)))
    small = shrink.rehearsals(config, plan)
    planned = shrink.planned_stage_b(config, plan, cluster)
    stage_b = [] if planned is None else [shrink.stage_b_rehearsal(config, planned, small[0])]
    with tempfile.TemporaryDirectory(prefix="cdrmix-rehearsal-") as folder:
        checks = _run(Path(folder), small, stage_b)
    stage_a = RehearsedStage(
        title=f"{config.name} on {cluster}: {plan.describe()}",
        planned=plan.estimates_to_json(),
        small=small,
        checks=checks[: len(small)],
        aspects=shrink.aspects(config, plan, small),
    )
    after = None
    if planned is not None:
        title = f"Stage B: {shrink.rehearsal_text(planned.name, planned.degrees)}"
        if not compared.stage_b_fits:
            title += "; does NOT fit that cluster's memory, see cdrmix plan"
        after = RehearsedStage(
            title=title,
            planned=planned.to_json(),
            small=stage_b,
            checks=checks[len(small) :],
            aspects=shrink.stage_b_aspects(config, planned, stage_b[0]),
        )
    return Rehearsed(compared, stage_a, after, time.monotonic() - began)


def _run(root: Path, small: list[Rehearsal], stage_b: list[Rehearsal]) -> list[list[Check]]:
    """Run every layout, those of Stage B last: they start from the first one's backbone."""
    logger.info("building a corpus of a few files")
    stdlib = Path(sysconfig.get_path("stdlib"))
    sources = root / "sources"
    for package in _TEXT:
        shutil.copytree(stdlib / package, sources / package)
    (sources / "pydoc_data").mkdir()
    shutil.copy(stdlib / "pydoc_data" / "topics.py", sources / "pydoc_data")
    corpus = root / "corpus"
    # Of sources that every Python has: a rehearsal needs no data set and no network.
    build_sample(corpus, small[0].config.model.vocab_size, stdlib=sources)
    layouts = [(layout, "") for layout in small] + [(layout, "Stage B, ") for layout in stage_b]
    checks = list[list[Check]]()
    backbones = list[Path]()
    for number, (layout, stage) in enumerate(layouts, 1):
        logger.info("running %d of %d: %s%s", number, len(layouts), stage, layout.describe())
        backbone = backbones[0] if stage else None
        runs = SmallRuns(root / str(number), corpus, layout, backbone=backbone)
        checks.append(list(runs.checks()))
        backbones.append(runs.first)
    return checks
