"""Hooks and plug-ins: what a run calls at fixed places, and how code of a user's is found."""

from cdrmix.hooks.hook import Hook, RunView, StepFigures, Wishes

__all__ = ["Hook", "RunView", "StepFigures", "Wishes"]
