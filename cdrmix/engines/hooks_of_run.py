"""The hooks of a run: those of its configuration, and our own."""

from __future__ import annotations

from cdrmix import runtime
from cdrmix.config.schema import Config
from cdrmix.hooks.dispatch import Hooks, NamedHook, configured_hooks


def hooks_of_run(config: Config) -> Hooks:
    """Makes the hooks of a run; collective. Raises ConfigError on every rank."""
    hooks: list[NamedHook] = runtime.together(lambda: configured_hooks(config.hooks))
    return Hooks(hooks)
