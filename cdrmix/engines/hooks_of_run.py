"""The hooks of a run: those of its configuration, and our own.

The losses on old and new data, `engines.forgetting`, join them once the data is there.
"""

from __future__ import annotations

import sys

from cdrmix import runtime
from cdrmix.cluster.heartbeat import Heartbeat
from cdrmix.config.schema import Config
from cdrmix.engines.optimizer_check import OptimizerCheck
from cdrmix.hooks.called import NamedHook
from cdrmix.hooks.dispatch import Hooks, configured_hooks
from cdrmix.monitoring.system_figures import SystemFigures
from cdrmix.optimizers.average import KeepAverage
from cdrmix.planning.plan import Plan
from cdrmix.tracking.choice import trackers_of
from cdrmix.tracking.hook import TrackerHook
from cdrmix.tracking.writer import make_tracker

# Before hooks of priority 0, which then see a step that was checked.
_FIRST = -1000
# Behind them: what they do in a step belongs to it.
_LAST = 1000


def hooks_of_run(config: Config, plan: Plan, heartbeat: Heartbeat) -> Hooks:
    """Makes the hooks of a run, the same on all ranks; collective. Raises ConfigError on every
    rank."""
    hooks: list[NamedHook] = runtime.together(lambda: configured_hooks(config.hooks))
    if config.optimizer.kind == "muon":
        check = OptimizerCheck(tensor_ranks=plan.degrees.tensor)
        hooks.append(NamedHook("cdrmix:optimizer_check", check, _FIRST, unsafe=True))
    if config.training.ema_decay is not None:
        average = KeepAverage(config.training.ema_decay)
        hooks.append(NamedHook("cdrmix:average", average, _FIRST, unsafe=True))
    if config.monitoring.trackers != ():
        hooks.append(_trackers(config))
    if config.monitoring.system:
        system = SystemFigures(runtime.local_rank())
        hooks.append(NamedHook("cdrmix:system", system, _LAST, on_error="warn"))
    if config.profile is not None:
        # Only here: a run without one imports nothing of it.
        from cdrmix.profiling.profiler import Profiler

        profiler = Profiler(config.profile, long_phase=heartbeat.phase)
        hooks.append(NamedHook("cdrmix:profile", profiler, _LAST, on_error="warn"))
    names = runtime.all_gather_object([each.name for each in hooks])
    assert all(each == names[0] for each in names), "a hook has a vote on every rank, or on none"
    return Hooks(hooks, long_phase=heartbeat.phase)


def _trackers(config: Config) -> NamedHook:
    """The trackers, which only rank 0 has, behind all hooks that add to the lines that they get."""
    trackers = trackers_of(config) if runtime.rank() == 0 else ()

    def check() -> None:
        for tracker in trackers:
            make_tracker(tracker)

    runtime.together(check)
    hook = TrackerHook(trackers, wait_seconds=config.monitoring.tracker_wait_seconds)
    # A fault of our own here ends no run either.
    return NamedHook("cdrmix:trackers", hook, sys.maxsize, on_error="warn")
