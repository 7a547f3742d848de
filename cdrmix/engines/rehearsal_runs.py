"""The runs of one small layout, each by real processes, and what they are compared by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from cdrmix.checkpoint.reader import CheckpointReader
from cdrmix.config.schema import Config
from cdrmix.engines.local_ranks import RanksFailed, run_ranks
from cdrmix.errors import TrainingError
from cdrmix.monitoring.sinks import read_metrics
from cdrmix.planning.layout import Degrees
from cdrmix.planning.rehearsal import SAVED_STEP, STEPS, Rehearsal

TOLERANCE = 1e-5  # relative, of losses and gradient norms in float32
_SECONDS = 300.0  # for one start; on two idle cores the largest takes ten
_ALONE = Degrees(data=1, tensor=1, pipeline=1, sequence=1, expert=1)


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
    """One small layout in a folder of its own."""

    def __init__(self, folder: Path, corpus: Path, small: Rehearsal) -> None:
        folder.mkdir()
        self._folder, self._small = folder, small
        data = small.config.data.model_copy(update={"path": str(corpus)})
        self._config = small.config.model_copy(update={"data": data})

    def checks(self) -> Iterator[Check]:
        """Run and compare; ends at the first start that fails."""
        whole, alone = self._config, self._alone()
        starts = (
            ("a second run", whole, "again", None, 0.0),
            ("goes on from its checkpoint", whole, "resumed", "first", 0.0),
            ("equals one process", alone, "alone", None, TOLERANCE),
            ("goes on in one process", alone, "moved", "first", TOLERANCE),
        )
        try:
            self._train(whole, "first", None)
            for name, config, run, source, allowed in starts:
                self._train(config, run, source)
                yield Check(name, self._difference(run, "first", bits=not allowed), allowed)
        except RanksFailed as failure:
            yield Check("runs", None, 0.0, str(failure))

    def _alone(self) -> Config:
        """The same micro-steps in one process."""
        degrees, training = self._small.degrees, self._config.training
        assert training.micro_batch_size is not None, "rehearsals give it"
        micro = training.micro_batch_size * degrees.sample_ranks
        values = self._config.model_dump(mode="json", exclude_unset=True)
        values["parallel"] = asdict(_ALONE)
        values["training"] |= {"micro_batch_size": micro}
        return Config.model_validate(values)

    def _train(self, config: Config, run: str, source: str | None) -> None:
        is_whole = config is self._config
        degrees = self._small.degrees if is_whole else _ALONE
        resume = "never"
        if source is not None:
            resume = str(self._folder / source / "checkpoints" / str(SAVED_STEP))
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
        """Largest relative difference of the two runs' losses and norms; with `bits` also whether
        their last weights are equal to the bit, which any difference makes infinite."""
        found, expected = (
            {line["step"]: line for line in read_metrics(self._folder / name / "metrics.jsonl")}
            for name in (run, like)
        )
        steps = sorted(found.keys() & expected.keys())
        assert steps and steps[-1] == STEPS, f"{run}: logged steps {steps}"
        largest = max(
            abs(found[step][key] - expected[step][key]) / abs(expected[step][key])
            for step in steps
            for key in ("loss", "grad_norm")
        )
        if bits and not self._have_equal_weights(run, like):
            return float("inf")
        return largest

    def _have_equal_weights(self, run: str, like: str) -> bool:
        paths = [self._folder / name / "checkpoints" / str(STEPS) for name in (run, like)]
        with CheckpointReader(paths[0]) as ours, CheckpointReader(paths[1]) as theirs:
            return ours.names() == theirs.names() and all(
                ours.read(name).equal(theirs.read(name)) for name in ours.names()
            )


def _train(config: Config, profile: str, run_dir: Path, resume: str) -> int:
    """What one rank does: a training run as launch/train.py starts it."""
    from cdrmix import log, runtime
    from cdrmix.cluster.start_up import StartUp
    from cdrmix.engines.session import run_training
    from cdrmix.planning.cluster import processes
    from cdrmix.planning.profile import choose

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
