"""A hook of a run on this rank: called, timed, and left alone once it has failed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeVar

from cdrmix import runtime
from cdrmix.hooks.events import EVENTS
from cdrmix.hooks.failure import Failure, failure_of
from cdrmix.hooks.hook import Hook, RunView, Wishes
from cdrmix.log import get_logger, log_shown

logger = get_logger(__name__)
T = TypeVar("T")


# A colon is in no name of the configuration.
_OWN = "cdrmix:"


def is_own_name(name: str) -> bool:
    """True for the names of our own hooks, which come and go with settings of theirs."""
    return name.startswith(_OWN)


@dataclass(frozen=True)
class NamedHook:
    """A hook with what the configuration says of it."""

    name: str
    hook: Hook
    priority: int = 0
    on_error: Literal["stop", "warn"] = "stop"
    unsafe: bool = False

    @property
    def is_ours(self) -> bool:
        """True of a hook that CDRmix adds: its time and its coming and going are not told, and the
        numbers that it adds to a line have names of the table of metrics."""
        return is_own_name(self.name)

    def __str__(self) -> str:
        kind = type(self.hook)
        return f"hook {self.name} ({kind.__module__}:{kind.__qualname__})"


@dataclass
class Called:
    """State of a hook on this rank; `is_off` is alike on all of them."""

    named: NamedHook
    listens: frozenset[str] = frozenset()  # to these events
    request: Wishes = field(default_factory=Wishes)
    view: RunView | None = None  # once it has started
    seconds: float = 0.0  # in it since the last logged line
    failure: Failure | None = None  # which the other ranks may not know of yet
    changes_batches: bool = False
    is_off: bool = False
    is_slow: bool = False  # and that was told

    def __post_init__(self) -> None:
        kind = type(self.named.hook)
        overridden = (e for e in EVENTS if getattr(kind, e) is not getattr(Hook, e))
        self.listens = frozenset(overridden)

    @property
    def hook(self) -> Hook:
        """Instance of the user's class."""
        return self.named.hook

    @property
    def metrics_name(self) -> str | None:
        """Name below which its metrics stand; None for ours, which have names of their own."""
        return None if self.named.is_ours else self.named.name

    def start(self, view: RunView) -> None:
        """`on_start` of a stage, with a view of the hook's own."""
        # What the last step of a stage asked for is done by its end, but for the stop.
        self.request.wants_save = self.request.wants_evaluation = False
        engine = view.engine if self.named.unsafe else None
        self.view = replace(view, request=self.request, engine=engine)
        self.ask("on_start", partial(self.hook.on_start, self.view))

    def ask(self, event: str, action: Callable[[], T]) -> T | None:
        """Calls the hook, and notes its time and its error; None if it has failed before."""
        if self.is_off or self.failure is not None:
            return None
        began = time.perf_counter()
        try:
            return action()
        except Exception as error:  # the other ranks wait in `agree` and learn of it there
            if self.hook.collective:
                raise
            self.failure = failure_of(error, event=event, rank=runtime.rank())
            return None
        finally:
            self.seconds += time.perf_counter() - began

    def call(self, event: str, *arguments: Any) -> None:
        """Calls the hook at an event that it listens to."""
        if event in self.listens:
            self.ask(event, partial(getattr(self.hook, event), *arguments))

    def switch_off(self, failure: Failure) -> None:
        """Leaves the hook alone from here on, on all ranks, and tells of it."""
        self.is_off, self.failure = True, None
        if runtime.rank() == 0:
            logger.warning(
                "warning: %s: %s. It is off from here on, on all ranks (on_error: warn)",
                *(self.named, failure.told),
            )

    def tell_of_error(self, error: BaseException) -> None:
        """`on_error`, also of a hook that has failed."""
        if self.view is None or self.is_off:
            return
        try:
            self.hook.on_error(error)
        except Exception as another:  # the first error is the one to tell
            why = failure_of(another, event="on_error", rank=runtime.rank()).told
            logger.warning("warning: %s: %s", self.named, why)


def log_traceback(named: NamedHook, failure: Failure) -> None:
    """Logs the frames of a hook to the file of the run; the message is for stderr."""
    if failure.traceback and runtime.rank() == 0:
        log_shown(logger, f"{named}: {failure.told}\n{failure.traceback.rstrip()}")
