"""Calls the hooks of a run, each event in one order, and carries their votes between the ranks.

A hook that raises is called no more on its rank. That it failed is a vote in the collective before
the next step, and there all ranks end, or go on without it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar

from cdrmix import runtime
from cdrmix.config.plugin import HookConfig
from cdrmix.errors import ConfigError, TrainingError
from cdrmix.hooks.called import Called, NamedHook, is_own_name, log_traceback
from cdrmix.hooks.events import check_events
from cdrmix.hooks.hook import Hook, RunView, StepFigures, Wishes
from cdrmix.hooks.plugin import make_plugin
from cdrmix.hooks.returned import added_numbers, measured_numbers, other_batch
from cdrmix.hooks.state import from_json, to_json
from cdrmix.log import get_logger

logger = get_logger(__name__)
T = TypeVar("T")
# Of a step's time, beyond which a hook is warned of.
_MOST_SHARE = 0.02


def configured_hooks(hooks: Sequence[HookConfig]) -> list[NamedHook]:
    """Makes the hooks that the section `hooks` of a configuration names; raises ConfigError."""
    made = []
    for number, each in enumerate(hooks):
        hook = make_plugin(each, Hook, where=f"hooks[{number}]")
        check_events(type(hook), where=f"hooks[{number}].use: {each.use}")
        if hook.collective and each.on_error == "warn":
            raise ConfigError(
                f"hooks[{number}].on_error = warn: {each.use} is collective, and one rank cannot "
                "be without it. Give stop"
            )
        made.append(NamedHook(each.label, hook, each.priority, each.on_error, each.unsafe))
    return made


class Ending(NamedTuple):
    """Error of a hook that ends the run on all ranks."""

    error: TrainingError
    is_state_good: bool  # worth a save: the hook could not change what is trained


class Hooks:
    """The hooks of a run on this rank."""

    def __init__(
        self,
        hooks: Sequence[NamedHook] = (),
        *,
        long_phase: Callable[[str], AbstractContextManager[None]] = lambda _: (
            contextlib.nullcontext()
        ),
    ) -> None:
        """`long_phase` makes a context that may last long, while other ranks wait for this one."""
        # A stable sort: hooks of one priority stay in the order given.
        self._hooks = [Called(each) for each in sorted(hooks, key=lambda each: each.priority)]
        self._long_phase = long_phase
        self._inherited: Mapping[str, Any] | None = None
        self._evaluated_step: int | None = None
        self._step_under_way: int | None = None  # the newest that `backward_done` has told of
        self._num_lines = 0  # with times, since the start of the stage

    def add(self, hook: NamedHook) -> None:
        """Adds a hook before the start of a stage, the same on all ranks."""
        self._hooks.append(Called(hook))
        self._hooks.sort(key=lambda each: each.named.priority)

    def start(self, view: RunView, *, state: Mapping[str, Any] | None) -> None:
        """Begins a stage: `on_start`, and then, where it goes on from a checkpoint with this
        state.json, `load_state_dict` and `on_resume`."""
        self._evaluated_step = self._step_under_way = None
        self._num_lines = 0
        for each in self._hooks:
            each.start(view)
        given = self._inherited if state is None else state
        self._inherited = None
        if given is not None:
            self._load(given)
        if state is not None:
            self._call("on_resume", view.step)
        for each in self._hooks:
            each.seconds = 0.0

    def inherit(self, state: Mapping[str, Any]) -> None:
        """Has the first stage of this process go on with the state of the one before, of which
        this is state.json."""
        if all(each.view is None for each in self._hooks):
            self._inherited = state

    def batch(self, batch: T) -> T:
        """Returns a batch, or what hooks have put in its place."""
        for each in self._listening("on_batch"):
            is_mapping = isinstance(batch, Mapping)
            given: Mapping[str, Any] = batch if is_mapping else {"lessons": batch}  # type: ignore[assignment]
            other = each.ask("on_batch", partial(other_batch, each.hook, given))
            if other is not None:
                each.changes_batches = True
                batch = other if is_mapping else other["lessons"]  # type: ignore[assignment]
        return batch

    def backward_done(self, step: int) -> None:
        """Tells, once a step, that the optimizer comes next: some engines step it in parts."""
        if self._step_under_way != step:
            self._step_under_way = step
            self._call("on_backward_done", step)

    def step_done(self, step: int, measured: StepFigures) -> None:
        """Tells of a step."""
        self._now_at(step)
        self._call("on_step", step, measured)

    def evaluated(self, step: int, results: Mapping[str, float]) -> None:
        """Tells of the evaluations of a step."""
        if "eval/loss" in results:
            self._evaluated_step = step
        self._call_for_long("on_evaluation", step, MappingProxyType(dict(results)))

    def is_evaluated(self, step: int) -> bool:
        """True if the newest held-out loss is that of this step."""
        return self._evaluated_step == step

    def measuring(self, step: int, *, is_last: bool) -> list[Called]:
        """Hooks that measure the model behind a step, alike on all ranks."""
        return [
            each
            for each in self._listening("on_measure")
            if each.ask("measures_at", partial(each.hook.measures_at, step, is_last))
        ]

    def measured(self, measuring: Sequence[Called], step: int) -> dict[str, float]:
        """Has these hooks measure the model; collective. Returns their metrics."""
        metrics: dict[str, float] = {}
        for each in measuring:
            measure = partial(measured_numbers, each.hook, step, name=each.metrics_name)
            metrics |= each.ask("on_measure", measure) or {}
        return metrics

    def log(self, step: int, record: dict[str, float]) -> dict[str, float]:
        """Returns a line of metrics with what the hooks add to it."""
        for each in self._listening("on_log"):
            add = partial(added_numbers, each.hook, step, record, name=each.metrics_name)
            record |= each.ask("on_log", add) or {}
        return record

    def saved(self, step: int, folder: Path) -> None:
        """Tells of a checkpoint that has its name."""
        self._call_for_long("on_checkpoint", step, folder)

    def rewound(self, step: int, state: Mapping[str, Any]) -> None:
        """Tells that the run has gone back to a checkpoint with this state.json."""
        self._evaluated_step = self._step_under_way = None
        self._now_at(step)
        self._load(state)
        self._call("on_rewind", step)

    @contextlib.contextmanager
    def told_of_errors(self) -> Iterator[None]:
        """Tells of the error that leaves the context, once; the hooks of a stage have started."""
        try:
            yield
        except (Exception, KeyboardInterrupt) as error:
            for each in self._listening("on_error"):
                each.tell_of_error(error)
            raise

    def end(self, outcome: Literal["done", "stopped"]) -> None:
        """Tells of the end of the stage."""
        self._call("on_end", outcome)
        for each in self._hooks:
            if each.view is not None:  # the next stage needs the engine's memory
                each.view.engine = None

    def take_wishes(self) -> Wishes:
        """Returns what this rank's hooks ask for, those of all in one; a stop stays asked for."""
        wishes = Wishes()
        for each in self._hooks:
            own = each.request
            if each.is_off:
                continue
            wishes.wants_save |= own.wants_save
            wishes.wants_evaluation |= own.wants_evaluation
            if own.reason_to_stop is not None and wishes.reason_to_stop is None:
                wishes.reason_to_stop = f"hook {each.named.name}: {own.reason_to_stop}"
            own.wants_save = own.wants_evaluation = False
        return wishes

    def votes(self, wishes: Wishes) -> list[float]:
        """Numbers to be summed over all ranks for `heed`: 1 if this one wants an evaluation, then 1
        for each hook that failed here. None without hooks."""
        if not self._hooks:
            return []
        failed = [float(each.failure is not None) for each in self._hooks]
        return [float(wishes.wants_evaluation), *failed]

    def heed(self, votes: Sequence[float]) -> tuple[bool, Ending | None]:
        """Tells by the sums of all ranks' votes if an evaluation is wanted, and what ends the run;
        collective where a hook has failed, which is switched off where that is wanted."""
        wants_evaluation, *failed = votes or [0.0]
        return wants_evaluation > 0, self._settle() if any(failed) else None

    def agreed(self) -> Ending | None:
        """Tells between steps what ends the run, the same on all ranks; collective."""
        return self._settle() if self._hooks else None

    def check(self) -> None:
        """Raises what a hook has failed with on any rank, on all of them; collective."""
        if (ending := self.agreed()) is not None:
            raise ending.error

    def _settle(self) -> Ending | None:
        here = [(each.failure, each.changes_batches) for each in self._hooks]
        ending = None
        for each, of_ranks in zip(
            self._hooks, zip(*runtime.all_gather_object(here), strict=True), strict=True
        ):
            failure = next((failed for failed, _ in of_ranks if failed), None)
            if failure is None:
                continue
            log_traceback(each.named, failure)
            # Of the step that comes, the failed hook's rank may have another batch than the others.
            changes_batches = any(changes for _, changes in of_ranks)
            if each.named.on_error == "warn" and not changes_batches:
                each.switch_off(failure)
            elif ending is None:
                error = failure.kind(f"{each.named}: {failure.told}")
                ending = Ending(error, not each.named.unsafe)
        return ending

    def state_dict(self) -> dict[str, Any]:
        """Entry `hooks` of state.json: state by name; empty without any. Called on all ranks."""
        states = {}
        for each in self._hooks:
            state = each.ask("state_dict", partial(_state_of, each.hook))
            if state is not None and (state or not each.named.is_ours):
                states[each.named.name] = state
        return {"hooks": states} if states else {}

    def take_seconds(self) -> list[float]:
        """Returns the time in each hook of the configuration since the last call, on this rank."""
        taken = [each.seconds for each in self._timed]
        for each in self._hooks:
            each.seconds = 0.0
        return taken

    def timed(
        self, seconds: Sequence[float], *, num_steps: int, step_seconds: float
    ) -> dict[str, float]:
        """Metrics of these times, those of the slowest rank, over some steps; warns of a hook that
        takes too much of a step."""
        self._num_lines += 1
        metrics = {}
        for each, taken in zip(self._timed, seconds, strict=True):
            of_step = taken / num_steps
            metrics[f"hooks/{each.named.name}/seconds"] = of_step
            # The first line has what a hook does once, such as imports.
            is_slow = of_step > _MOST_SHARE * step_seconds and self._num_lines > 1
            if is_slow and not each.is_slow and runtime.rank() == 0:
                logger.warning(
                    "warning: hook %s takes %.1f ms a step, %.1f %% of its %.0f ms: do less in it, "
                    "or less often",
                    *(each.named.name, 1e3 * of_step, 100 * of_step / step_seconds),
                    1e3 * step_seconds,
                )
            each.is_slow |= is_slow
        return metrics

    @property
    def _timed(self) -> list[Called]:
        return [each for each in self._hooks if not each.named.is_ours]

    def _load(self, state: Mapping[str, Any]) -> None:
        """Gives the hooks their parts of a checkpoint's state.json."""
        states: dict[str, Any] = state.get("hooks", {})
        for each in self._hooks:
            if each.named.name in states:
                give = partial(_give_state, each.hook, states[each.named.name])
                each.ask("load_state_dict", give)
        names = [each.named.name for each in self._hooks]
        ours = [each.named.name for each in self._hooks if each.named.is_ours]
        new = [name for name in names if name not in states and name not in ours]
        gone = [name for name in states if name not in names and not is_own_name(name)]
        changes = [f"{', '.join(new)}: not in this checkpoint, and begin anew"] * bool(new)
        changes += [f"{', '.join(gone)}: in it, and not in this run"] * bool(gone)
        if changes:
            logger.info("hooks: %s", "; ".join(changes))

    def _listening(self, event: str) -> list[Called]:
        return [each for each in self._hooks if event in each.listens]

    def _now_at(self, step: int) -> None:
        for each in self._hooks:
            if each.view is not None:
                each.view.step = step

    def _call(self, event: str, *arguments: Any) -> None:
        for each in self._hooks:
            each.call(event, *arguments)

    def _call_for_long(self, event: str, *arguments: Any) -> None:
        """Calls hooks that may send a file away, or wait for a service: beyond the deadline of a
        step."""
        if self._listening(event):
            with self._long_phase("in hooks"):
                self._call(event, *arguments)


def _state_of(hook: Hook) -> dict[str, Any]:
    return to_json(hook.state_dict())


def _give_state(hook: Hook, content: Any) -> None:
    hook.load_state_dict(from_json(content))
