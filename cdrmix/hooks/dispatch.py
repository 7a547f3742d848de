"""Calls the hooks of a run, each event in one order, and carries their votes between the ranks.

A hook that raises is called no more on its rank. That it failed is a vote in the collective before
the next step, and there all ranks end, or go on without it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar

from cdrmix import runtime
from cdrmix.config.plugin import HookConfig
from cdrmix.errors import ConfigError, TrainingError
from cdrmix.hooks.events import EVENTS, check_events
from cdrmix.hooks.failure import Failure, failure_of
from cdrmix.hooks.hook import Hook, RunView, StepFigures, Wishes
from cdrmix.hooks.plugin import make_plugin
from cdrmix.hooks.returned import added_numbers, other_batch
from cdrmix.hooks.state import from_json, to_json
from cdrmix.log import get_logger, log_shown

logger = get_logger(__name__)
T = TypeVar("T")
# Of a step's time, beyond which a hook is warned of.
_MOST_SHARE = 0.02


@dataclass(frozen=True)
class NamedHook:
    """A hook with what the configuration says of it."""

    name: str
    hook: Hook
    priority: int = 0
    on_error: Literal["stop", "warn"] = "stop"
    unsafe: bool = False
    # Added by CDRmix: its time and its coming and going are not told, and the numbers that it adds
    # to a line have names of the table of metrics.
    is_ours: bool = False


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


@dataclass
class _Called:
    """A hook on this rank."""

    named: NamedHook
    listens: frozenset[str]  # to these events
    request: Wishes = field(default_factory=Wishes)
    view: RunView | None = None  # once it has started
    seconds: float = 0.0  # in it since the last logged line
    failure: Failure | None = None  # which the other ranks may not know of yet
    is_off: bool = False  # alike on all ranks
    is_slow: bool = False  # and that was told


class Ending(NamedTuple):
    """Error of a hook that ends the run on all ranks."""

    error: TrainingError
    is_state_good: bool  # worth a save: the hook could not change what is trained


class Hooks:
    """The hooks of a run on this rank."""

    def __init__(self, hooks: Sequence[NamedHook] = ()) -> None:
        # A stable sort: hooks of one priority stay in the order given.
        self._hooks = [
            _Called(each, _overridden(type(each.hook)))
            for each in sorted(hooks, key=lambda each: each.priority)
        ]
        self._evaluated_step: int | None = None
        self._step_under_way: int | None = None  # the newest that `backward_done` has told of
        self._num_lines = 0  # with times, since the start of the stage

    # --- events ----------------------------------------------------------------------------

    def start(self, view: RunView, *, state: Mapping[str, Any] | None) -> None:
        """Begins a stage: `on_start`, and then, where it goes on from a checkpoint with this
        state.json, `load_state_dict` and `on_resume`."""
        self._evaluated_step = self._step_under_way = None
        self._num_lines = 0
        for each in self._hooks:
            # What the last step of a stage asked for is done by its end, but for the stop.
            each.request.wants_save = each.request.wants_evaluation = False
            engine = view.engine if each.named.unsafe else None
            each.view = replace(view, request=each.request, engine=engine)
            self._ask(each, "on_start", partial(each.named.hook.on_start, each.view))
        if state is not None:
            self._load(state)
            self._call("on_resume", view.step)
        for each in self._hooks:
            each.seconds = 0.0

    def batch(self, batch: T) -> T:
        """Returns a batch, or what hooks have put in its place."""
        for each in self._listening("on_batch"):
            is_mapping = isinstance(batch, Mapping)
            given: Mapping[str, Any] = batch if is_mapping else {"lessons": batch}  # type: ignore[assignment]
            other = self._ask(each, "on_batch", partial(other_batch, each.named.hook, given))
            if other is not None:
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
        self._evaluated_step = step
        self._call("on_evaluation", step, MappingProxyType(dict(results)))

    def is_evaluated(self, step: int) -> bool:
        """True if the newest evaluation was of this step."""
        return self._evaluated_step == step

    def log(self, step: int, record: dict[str, float]) -> dict[str, float]:
        """Returns a line of metrics with what the hooks add to it."""
        for each in self._listening("on_log"):
            name = None if each.named.is_ours else each.named.name
            add = partial(added_numbers, each.named.hook, step, record, name=name)
            record |= self._ask(each, "on_log", add) or {}
        return record

    def saved(self, step: int, folder: Path) -> None:
        """Tells of a checkpoint that has its name."""
        self._call("on_checkpoint", step, folder)

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
            self._tell_of(error)
            raise

    def end(self, outcome: Literal["done", "stopped"]) -> None:
        """Tells of the end of the stage."""
        self._call("on_end", outcome)

    # --- what they ask for, and how they fail ----------------------------------------------

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
        of_ranks = runtime.all_gather_object([each.failure for each in self._hooks])
        ending = None
        for each, failures in zip(self._hooks, zip(*of_ranks, strict=True), strict=True):
            failure = next(filter(None, failures), None)
            if failure is None:
                continue
            _log_traceback(each.named, failure)
            if each.named.on_error == "warn":
                self._switch_off(each, failure)
            elif ending is None:
                error = failure.kind(f"hook {_described(each.named)}: {failure.told}")
                ending = Ending(error, not each.named.unsafe)
        return ending

    # --- state and time --------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Entry `hooks` of state.json: state by name; empty without any. Called on all ranks."""
        states = {}
        for each in self._hooks:
            state = self._ask(each, "state_dict", partial(_state_of, each.named.hook))
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
    def _timed(self) -> list[_Called]:
        return [each for each in self._hooks if not each.named.is_ours]

    def _load(self, state: Mapping[str, Any]) -> None:
        """Gives the hooks their parts of a checkpoint's state.json."""
        states: dict[str, Any] = state.get("hooks", {})
        for each in self._hooks:
            if each.named.name in states:
                load = partial(_give_state, each.named.hook, states[each.named.name])
                self._ask(each, "load_state_dict", load)
        names = [each.named.name for each in self._hooks]
        ours = [each.named.name for each in self._hooks if each.named.is_ours]
        new = [name for name in names if name not in states and name not in ours]
        gone = [name for name in states if name not in names]
        changes = [f"{', '.join(new)}: not in this checkpoint, and begin anew"] * bool(new)
        changes += [f"{', '.join(gone)}: in it, and not in this run"] * bool(gone)
        if changes:
            logger.info("hooks: %s", "; ".join(changes))

    # --- calls -----------------------------------------------------------------------------

    def _now_at(self, step: int) -> None:
        for each in self._hooks:
            if each.view is not None:
                each.view.step = step

    def _listening(self, event: str) -> list[_Called]:
        return [each for each in self._hooks if event in each.listens]

    def _call(self, event: str, *arguments: Any) -> None:
        for each in self._hooks:
            if event in each.listens:
                self._ask(each, event, partial(getattr(each.named.hook, event), *arguments))

    def _ask(self, each: _Called, event: str, action: Callable[[], T]) -> T | None:
        """Calls a hook that has not failed; notes its error, which is None's, as its time."""
        if each.is_off or each.failure is not None:
            return None
        began = time.perf_counter()
        try:
            return action()
        except Exception as error:  # the other ranks wait in `agree` and learn of it there
            if each.named.hook.collective:
                raise
            each.failure = failure_of(error, event=event, rank=runtime.rank())
            return None
        finally:
            each.seconds += time.perf_counter() - began

    def _switch_off(self, each: _Called, failure: Failure) -> None:
        each.is_off, each.failure = True, None
        if runtime.rank() == 0:
            logger.warning(
                "warning: hook %s: %s. It is off from here on, on all ranks (on_error: warn)",
                *(_described(each.named), failure.told),
            )

    def _tell_of(self, error: BaseException) -> None:
        """`on_error`, also of the hook that has failed."""
        for each in self._listening("on_error"):
            if each.view is not None and not each.is_off:
                try:
                    each.named.hook.on_error(error)
                except Exception as another:  # the first error is the one to tell
                    why = failure_of(another, event="on_error", rank=runtime.rank()).told
                    logger.warning("warning: hook %s: %s", _described(each.named), why)


def _overridden(kind: type[Hook]) -> frozenset[str]:
    """Events that a class does something at."""
    return frozenset(event for event in EVENTS if getattr(kind, event) is not getattr(Hook, event))


def _described(named: NamedHook) -> str:
    kind = type(named.hook)
    return f"{named.name} ({kind.__module__}:{kind.__qualname__})"


def _log_traceback(named: NamedHook, failure: Failure) -> None:
    if failure.traceback and runtime.rank() == 0:
        log_shown(logger, f"hook {named.name}: {failure.told}\n{failure.traceback.rstrip()}")


def _state_of(hook: Hook) -> dict[str, Any]:
    return to_json(hook.state_dict())


def _give_state(hook: Hook, content: Any) -> None:
    hook.load_state_dict(from_json(content))
