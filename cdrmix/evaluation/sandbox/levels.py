"""Levels of the sandbox: which of them this machine has."""

from __future__ import annotations

from dataclasses import dataclass

from cdrmix.evaluation.sandbox.program import LevelName


@dataclass(frozen=True)
class LevelState:
    """A level on this machine.

    Attributes:
        description: of the level as results name it, such as "kernel: Landlock ABI 7, seccomp
            x86_64"; "" if it is missing.
        missing: why this machine does not have it and what to do; "": it has it.
    """

    name: LevelName
    description: str
    missing: str


def available_levels() -> dict[LevelName, LevelState]:
    """State of each level on this machine."""
    raise NotImplementedError


def require_level(level: LevelName) -> LevelState:
    """State of a level that this machine has.

    Raises:
        PlanError: the machine does not have it, with the reason.
    """
    raise NotImplementedError
