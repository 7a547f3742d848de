"""The hooks of a run: those of its configuration, and our own."""

from __future__ import annotations

from cdrmix import runtime
from cdrmix.config.schema import Config
from cdrmix.engines.optimizer_check import OptimizerCheck
from cdrmix.hooks.dispatch import Hooks, NamedHook, configured_hooks

# Before hooks of priority 0, which then see a step that was checked.
_FIRST = -1000


def hooks_of_run(config: Config) -> Hooks:
    """Makes the hooks of a run, the same on all ranks; collective. Raises ConfigError on every
    rank."""
    hooks: list[NamedHook] = runtime.together(lambda: configured_hooks(config.hooks))
    if config.optimizer.kind == "muon":
        # A colon is in no name of the configuration.
        name = "cdrmix:optimizer_check"
        hooks.append(NamedHook(name, OptimizerCheck(), _FIRST, unsafe=True, is_ours=True))
    names = runtime.all_gather_object([each.name for each in hooks])
    assert all(each == names[0] for each in names), "a hook has a vote on every rank, or on none"
    return Hooks(hooks)
