"""Interface of a hook: the events of a run, and what a hook may see and ask for.

Every event comes on all ranks, at the same place and in the same order. A hook must not communicate
with other ranks: what it asks for by `RunView.request` travels in the collective that each step has
anyway, and counts for all ranks once any of them asked. So does an error that it raises.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel

if TYPE_CHECKING:
    from cdrmix.config.schema import Config


@dataclass
class Wishes:
    """Requests of the hooks of this rank, carried out before the next step, on all ranks."""

    wants_save: bool = False
    wants_evaluation: bool = False
    reason_to_stop: str | None = None

    def save(self) -> None:
        """Asks for a checkpoint."""
        self.wants_save = True

    def evaluate(self) -> None:
        """Asks for an evaluation on held-out data, which Stage B has none of between steps."""
        self.wants_evaluation = True

    def stop(self, reason: str) -> None:
        """Asks for the end of the run, after a save; `reason` goes to the log. Nothing starts the
        run again by itself."""
        self.reason_to_stop = reason


@dataclass
class RunView:
    """A run as a hook sees it on this rank."""

    directory: Path
    config: Config
    stage: Literal["a", "b"]  # pretraining, reasoning enablement
    rank: int
    world_size: int
    num_steps: int  # at which the stage ends
    step: int  # optimizer steps completed
    request: Wishes = field(default_factory=Wishes)
    engine: Any = None  # DeepSpeed's engine, for hooks with `unsafe: true` alone


class StepFigures(NamedTuple):
    """One optimizer step as this rank measured it."""

    seconds: float  # wall time, the wait for data included
    waited_seconds: float  # of it, for data
    is_skipped: bool  # the optimizer took no step, as a gradient was not finite


class Hook:
    """Base class of hooks: a hook defines those of these methods that it needs.

    With a class attribute `Options`, a pydantic model, its instance is made of the configured
    options, `Name(options)`; without, options are refused, and it is made as `Name()`.
    """

    Options: ClassVar[type[BaseModel] | None] = None
    # A hook that runs collectives in its events, on all ranks alike. What it raises ends its rank
    # at once, as the others cannot be told; a TrainingError it must raise on all of them.
    collective: ClassVar[bool] = False

    def on_start(self, run: RunView) -> None:
        """Called once the engine is there and a checkpoint, if any, is loaded. `run` stays valid
        and up to date until the end of the stage."""

    def on_batch(self, batch: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Called with this rank's share of a step, tensors by name on the host; may return another
        one of the same names, shapes and types in its place. Ranks of one tensor group or pipeline
        have the same batch, and must return the same. In Stage B it is `lessons`, a list."""
        return None

    def on_backward_done(self, step: int) -> None:
        """Called behind the last backward pass of a step and before the optimizer changes the
        weights; `step` counts those completed before. A step that is skipped has no such call, one
        of Stage B's policy, which may be several of the optimizer, that before the first."""

    def on_step(self, step: int, measured: StepFigures) -> None:
        """Called behind each step, the `step`-th."""

    def on_evaluation(self, step: int, results: Mapping[str, float]) -> None:
        """Called behind the evaluations of a step, before the first one or at the end, with their
        metrics: held-out losses, rows of suites, what hooks have measured, and of Stage B
        `reasoning/TASK/LENGTHx`."""

    def measures_at(self, step: int, is_last: bool) -> bool:
        """Tells if `on_measure` is to be called behind a step, or before the first one of a stage;
        alike on all ranks. `is_last`: the stage ends there."""
        return False

    def on_measure(self, step: int) -> Mapping[str, float] | None:
        """Called on all ranks where `measures_at` says so, the model standing still between two
        steps; may have all ranks compute together, and needs `collective`. The numbers returned,
        alike on all ranks, join the line of the step, which is then written in any case, as
        plugin/NAME/KEY."""
        return None

    def on_log(self, step: int, record: Mapping[str, float]) -> Mapping[str, float] | None:
        """Called with each line before it goes to metrics.jsonl; may return further numbers, which
        join the line as plugin/NAME/KEY, those of rank 0."""
        return None

    def on_checkpoint(self, step: int, folder: Path) -> None:
        """Called once the checkpoint of a step has its name; training may be steps further."""

    def on_resume(self, step: int) -> None:
        """Called behind `on_start` where the run goes on from the checkpoint of a step."""

    def on_rewind(self, step: int) -> None:
        """Called when the run has gone back to the checkpoint of an earlier step."""

    def on_error(self, exception: BaseException) -> None:
        """Called once on a rank that ends with an error behind `on_start`; other ranks may be
        gone."""

    def on_end(self, outcome: Literal["done", "stopped"]) -> None:
        """Called at the end of the stage, or once a signal or a hook has stopped it."""

    def state_dict(self) -> dict[str, Any]:
        """State that a checkpoint keeps, that of rank 0: JSON values, and tensors that are the same
        on all ranks, up to 16 MiB together."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over the state of a checkpoint, before `on_resume` or `on_rewind`."""
