"""Events of a run by name, and checks of a class that wants to be called at them."""

from __future__ import annotations

import inspect
from difflib import get_close_matches

from cdrmix.errors import ConfigError
from cdrmix.hooks.hook import Hook

# Names of each event's arguments, by the event.
EVENTS: dict[str, tuple[str, ...]] = {
    name: tuple(inspect.signature(method).parameters)[1:]
    for name, method in vars(Hook).items()
    if name.startswith("on_")
}


def check_events(kind: type[Hook], *, where: str) -> None:
    """Refuses a class with a method that no event calls, or that takes others than its event gives.

    Raises ConfigError with all that is wrong. `where` begins each message.
    """
    problems = [
        f"{where}.{name}: {wrong}"
        for name in dir(kind)
        if name.startswith("on_") and (wrong := _wrong(kind, name))
    ]
    if kind.on_measure is not Hook.on_measure:
        if not kind.collective:
            problems.append(
                f"{where}.on_measure: is called on all ranks alike, which the class has to promise "
                "by collective = True"
            )
        if kind.measures_at is Hook.measures_at:
            problems.append(
                f"{where}.on_measure: is called where measures_at(step, is_last) says so, and the "
                "class defines no such method"
            )
    if problems:
        raise ConfigError("\n".join(problems))


def _wrong(kind: type[Hook], name: str) -> str | None:
    method = inspect.getattr_static(kind, name)
    if name not in EVENTS:
        return unknown_event(name) if callable(getattr(kind, name)) else None
    if not inspect.isfunction(method) or inspect.iscoroutinefunction(method):
        return "is no plain method"
    parameters = list(inspect.signature(method).parameters.values())[1:]
    if any(each.kind == each.VAR_POSITIONAL for each in parameters):
        return None
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return wrong_arguments(name, [each.name for each in parameters if each.kind in by_place])


def unknown_event(name: str) -> str:
    """Problem of a method that begins as events do, and is none."""
    close = get_close_matches(name, EVENTS, n=1, cutoff=0.5)
    hint = f"Did you mean {close[0]}? " if close else ""
    return f"is no event, and would never be called. {hint}Events: {', '.join(EVENTS)}"


def wrong_arguments(event: str, names: list[str]) -> str | None:
    """Problem of a method with arguments of such names; those in an event's order, which may begin
    with an underscore, have none."""
    right = EVENTS[event]
    if [name.lstrip("_") for name in names] == list(right):
        return None
    return f"takes ({', '.join(names)}), and the event gives ({', '.join(right)})"
