"""Calls the hooks of a run, each event in one order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from cdrmix.config.plugin import HookConfig
from cdrmix.hooks.hook import Hook, RunView, StepFigures
from cdrmix.hooks.plugin import make_plugin


@dataclass(frozen=True)
class NamedHook:
    """A hook with what the configuration says of it."""

    name: str
    hook: Hook
    priority: int = 0
    on_error: Literal["stop", "warn"] = "stop"
    unsafe: bool = False
    names_metrics: bool = False  # one of ours, whose numbers are in the table of metrics


def configured_hooks(hooks: Sequence[HookConfig]) -> list[NamedHook]:
    """Makes the hooks that the section `hooks` of a configuration names; raises ConfigError."""
    return [
        NamedHook(
            each.use.partition(":")[2],
            make_plugin(each, Hook, where=f"hooks[{number}]"),
            each.priority,
            each.on_error,
            each.unsafe,
        )
        for number, each in enumerate(hooks)
    ]


class Hooks:
    """The hooks of a run on this rank."""

    def __init__(self, hooks: Sequence[NamedHook] = ()) -> None:
        # A stable sort: hooks of one priority stay in the order given.
        self._hooks = sorted(hooks, key=lambda each: each.priority)
        self._views: list[RunView] = []

    def start(self, view: RunView, *, resumed: bool) -> None:
        """Begins a stage: `on_start` and, where it goes on from a checkpoint, `on_resume`."""
        self._views = []
        for each in self._hooks:
            own = view if each.unsafe else replace(view, engine=None)
            self._views.append(own)
            each.hook.on_start(own)
            if resumed:
                each.hook.on_resume(view.step)

    def step_done(self, step: int, measured: StepFigures) -> None:
        """Tells of a step."""
        for view in self._views:
            view.step = step
        self._call("on_step", step, measured)

    def log(self, step: int, record: dict[str, float]) -> dict[str, float]:
        """Returns a line of metrics with what the hooks add to it."""
        for each in self._hooks:
            added = each.hook.on_log(step, record) or {}
            prefix = "" if each.names_metrics else f"plugin/{each.name}/"
            record |= {f"{prefix}{key}": value for key, value in added.items()}
        return record

    def evaluated(self, step: int, results: Mapping[str, float]) -> None:
        """Tells of an evaluation."""
        self._call("on_evaluation", step, results)

    def rewound(self, step: int) -> None:
        """Tells that the run has gone back."""
        for view in self._views:
            view.step = step
        self._call("on_rewind", step)

    def failed(self, exception: BaseException) -> None:
        """Tells of the error that ends this rank."""
        self._call("on_error", exception)

    def end(self, outcome: Literal["done", "stopped"]) -> None:
        """Tells of the end of the stage."""
        self._call("on_end", outcome)

    def _call(self, event: str, *arguments: Any) -> None:
        for each in self._hooks:
            getattr(each.hook, event)(*arguments)
