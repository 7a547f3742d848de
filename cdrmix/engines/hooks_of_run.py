"""The hooks of a run: those of its configuration, and our own."""

from __future__ import annotations

import sys

from cdrmix import runtime
from cdrmix.config.schema import Config
from cdrmix.hooks.dispatch import Hooks, NamedHook, configured_hooks
from cdrmix.tracking.choice import trackers_of
from cdrmix.tracking.hook import TrackerHook
from cdrmix.tracking.writer import make_tracker


def hooks_of_run(config: Config) -> Hooks:
    """Makes the hooks of a run; collective. Raises ConfigError on every rank."""
    hooks: list[NamedHook] = runtime.together(lambda: configured_hooks(config.hooks))
    return Hooks([*hooks, *_trackers(config)])


def _trackers(config: Config) -> list[NamedHook]:
    """The trackers of rank 0, behind all hooks that add to the lines that they get."""
    trackers = trackers_of(config) if runtime.rank() == 0 else ()

    def check() -> None:
        for tracker in trackers:
            make_tracker(tracker)

    runtime.together(check)
    if not trackers:
        return []
    hook = TrackerHook(trackers, wait_seconds=config.monitoring.tracker_wait_seconds)
    return [NamedHook("trackers", hook, priority=sys.maxsize, names_metrics=True)]
