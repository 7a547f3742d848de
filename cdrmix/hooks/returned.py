"""Checks of what hooks return."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

from cdrmix.errors import ConfigError
from cdrmix.hooks.hook import Hook


def other_batch(hook: Hook, batch: Mapping[str, Any]) -> dict[str, Any] | None:
    """Batch that a hook puts in the place of another; ConfigError if it is of another kind."""
    other = hook.on_batch(MappingProxyType(dict(batch)))
    if other is None:
        return None
    if not isinstance(other, Mapping) or other.keys() != batch.keys():
        found = sorted(other) if isinstance(other, Mapping) else type(other).__name__
        raise ConfigError(f"on_batch returned {found}, and the batch is {sorted(batch)}")
    for name, values in batch.items():
        if (given := _kind(other[name])) != (right := _kind(values)):
            raise ConfigError(f"on_batch returned {name} of {given}, and it is of {right}")
    return dict(other)


def _kind(values: Any) -> str:
    """Type and shape of a tensor, or type and length of lessons."""
    if isinstance(values, list):
        return f"{len(values)} in a list"
    dtype = str(getattr(values, "dtype", type(values).__name__)).removeprefix("torch.")
    return f"{dtype} {list(getattr(values, 'shape', ()))}"


def added_numbers(
    hook: Hook, step: int, record: Mapping[str, float], *, name: str | None
) -> dict[str, float]:
    """Numbers that a hook adds to a line; see `_named`."""
    return _named(hook.on_log(step, MappingProxyType(dict(record))), "on_log", name)


def measured_numbers(hook: Hook, step: int, *, name: str | None) -> dict[str, float]:
    """Numbers that a hook has measured; see `_named`."""
    return _named(hook.on_measure(step), "on_measure", name)


def _named(added: Mapping[str, float] | None, event: str, name: str | None) -> dict[str, float]:
    """Numbers as plugin/NAME/KEY, or by their own names where there is no `name`; ConfigError if
    one is no number."""
    numbers = {}
    for key, value in (added or {}).items():
        try:
            number = int(value) if isinstance(value, int) else float(value)
        except (TypeError, ValueError):
            raise ConfigError(f"{event} returned {key!r}: {value!r}, which is no number") from None
        numbers[key if name is None else f"plugin/{name}/{quote(str(key), safe='')}"] = number
    return numbers
