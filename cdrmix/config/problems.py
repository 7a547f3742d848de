"""Checks plain values against a schema and words every problem for the user.

pydantic checks the known keys, this file finds the unknown ones; each message has the path, the
given value, the allowed ones and the meaning of the field.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from cdrmix.config.model import DERIVED_MODEL_FIELDS, Section
from cdrmix.config.schema import Config

Keys = tuple[str, ...]
AnySection = TypeVar("AnySection", bound=Section)

_KINDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
}
# Their arguments are types of entries, not alternatives.
_CONTAINERS = (tuple, list, Sequence, dict, Mapping)
_BOUNDS = (
    ("ge", "from"),
    ("gt", "above"),
    ("le", "up to"),
    ("lt", "below"),
    ("multiple_of", "a multiple of"),
)


@dataclass(frozen=True)
class Problem:
    """One problem of a configuration.

    Attributes:
        path: keys that lead to it; none for the whole file.
        text: message without its place.
        meant: for an unknown key, the known key that it resembles.
    """

    path: Keys
    text: str
    meant: str | None = None


def validate(values: Any, root: type[AnySection]) -> tuple[AnySection | None, list[Problem]]:
    """Builds a `root` section from plain values; None with all problems if they are invalid.

    Whole floats become ints where the field takes ints (300e9 is a whole number), and lists become
    tuples; nothing else is converted.
    """
    if not isinstance(values, dict):
        problem = "the file is empty" if values is None else f"given {shown(values)}"
        return None, [Problem((), f"{problem}; allowed is {_kind_of(root)}")]
    problems: list[Problem] = []
    # Unknown keys are taken out first: pydantic reports them without saying what was meant.
    known = _known(values, root, root, (), problems)
    try:
        config = root.model_validate(known)
    except ValidationError as error:
        return None, problems + _pydantic_problems(error.errors(), known, root, problems)
    return (None, problems) if problems else (config, [])


def _pydantic_problems(
    details: list[ErrorDetails], known: dict[str, Any], root: type[Section], unknown: list[Problem]
) -> list[Problem]:
    failed = {_path(detail) for detail in details}
    problems = []
    for detail in details:
        path = _path(detail)
        if any(len(other) > len(path) and other[: len(path)] == path for other in failed):
            continue  # pydantic also reports a list as too short when one of its entries is wrong
        # The error of a derived field belongs to the fields that it was derived from.
        is_derived = path[:1] == ("model",) and path[-1] in DERIVED_MODEL_FIELDS
        is_derived = is_derived and known["model"].get(path[-1]) is None
        # A value that could not be derived is no fault of its own.
        sources_failed = failed & {("model", "hidden_size"), ("model", "num_heads")}
        # A misspelt key is reported once, and not also as the one that is missing.
        misspelt = any(p.path[:-1] == path[:-1] and p.meant == path[-1] for p in unknown)
        if not (is_derived and sources_failed) and not (misspelt and detail["type"] == "missing"):
            problems.append(Problem(path[:-1] if is_derived else path, _message(detail, root)))
    return problems


def _known(
    values: dict[Any, Any],
    section: type[Section],
    root: type[Section],
    path: Keys,
    problems: list[Problem],
) -> dict[str, Any]:
    """Returns the values of known keys, and appends a problem for each unknown key."""
    known: dict[str, Any] = {}
    for name, value in values.items():
        field = section.model_fields.get(name)
        if field is not None:
            known[name] = _plain(value, field.annotation, root, (*path, name), problems)
            continue
        key = str(name)
        names = sorted(section.model_fields)
        # A key of this section that is spelt alike is likelier than one of another section.
        near = difflib.get_close_matches(key, names, n=1)
        elsewhere = [".".join(place) for place in _field_paths(root) if place[-1] == key]
        advice = f" It belongs at '{elsewhere[0]}'." if elsewhere else ""
        advice = f" Did you mean '{near[0]}'?" if near else advice
        text = f"unknown key.{advice} Known: {', '.join(names)}"
        problems.append(Problem((*path, key), text, meant=near[0] if near else None))
    return known


def _plain(
    value: Any, annotation: Any, root: type[Section], path: Keys, problems: list[Problem]
) -> Any:
    inner = section_of(annotation)
    if inner is not None and isinstance(value, dict):
        return _known(value, inner, root, path, problems)
    item = _item_of(annotation)
    if item is not None and isinstance(value, list):
        return tuple(
            _plain(entry, item, root, (*path, str(number)), problems)
            for number, entry in enumerate(value)
        )
    # YAML reads 300e9 as a float, and a literal of numbers (head_dim) is a whole number, too.
    wants_int = any(kind is int or isinstance(kind, int) for kind in alternatives(annotation))
    if wants_int and isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _field_paths(section: type[Section], path: Keys = ()) -> Iterator[Keys]:
    for key, field in section.model_fields.items():
        yield (*path, key)
        inner = section_of(field.annotation)
        if inner is not None:
            yield from _field_paths(inner, (*path, key))


def _path(detail: ErrorDetails) -> Keys:
    return tuple(str(key) for key in detail["loc"])


def _message(detail: ErrorDetails, root: type[Section]) -> str:
    if detail["type"] == "value_error":
        return str(detail["ctx"]["error"])
    field = field_at(_path(detail), root)
    assert field is not None, f"pydantic names a field that the schema lacks: {detail['loc']}"
    meaning = f". {field.description}" if field.description else ""
    if detail["type"] == "missing":
        return f"missing; give {allowed(field)}{meaning}"
    value = f"given {shown(detail['input'])}"
    if detail["type"] == "too_short":
        lengths = detail["ctx"]
        least = f"allowed are {lengths['min_length']} or more"
        return f"{value} of {lengths['actual_length']}, {least}{meaning}"
    # The path of an entry ends in its index; what is allowed is then that of the entry.
    item = _item_of(field.annotation) if str(detail["loc"][-1]).isdigit() else None
    kinds = allowed(field) if item is None else _kind_of(item)
    words = [kind for kind in alternatives(field.annotation) if isinstance(kind, str)]
    near = difflib.get_close_matches(str(detail["input"]), words, n=1)
    advice = f" (did you mean '{near[0]}'?)" if near else ""
    return f"{value}, allowed is {kinds}{advice}{meaning}"


def field_at(path: Keys, root: type[Section] = Config) -> FieldInfo | None:
    """Finds the field of `root` at a path of keys; None if there is none.

    The index of an entry stands for the list that it is in.
    """
    section: type[Section] | None = root
    field = None
    for key in path:
        if field is not None and key.isdigit() and _item_of(field.annotation) is not None:
            section = section_of(_item_of(field.annotation))
            continue
        field = section.model_fields.get(key) if section is not None else None
        if field is None:
            return None
        section = section_of(field.annotation)
    return field


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """Splits an annotation into types and literals: `int | None` -> (int, NoneType).

    A literal becomes its words: `Literal["a"] | None` -> ("a", NoneType).
    """
    if get_origin(annotation) in _CONTAINERS:
        return (annotation,)
    kinds = get_args(annotation) or (annotation,)
    return tuple(
        word
        for kind in kinds
        for word in (get_args(kind) if get_origin(kind) is Literal else [kind])
    )


def section_of(annotation: Any) -> type[Section] | None:
    """Finds the section class in an annotation such as `MoEConfig | None`; None if it has none."""
    for kind in alternatives(annotation):
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind
    return None


def _item_of(annotation: Any) -> Any:
    """Entry type X of a `tuple[X, ...]`; None for other annotations."""
    for kind in (annotation, *get_args(annotation)):
        if get_origin(kind) is tuple:
            return get_args(kind)[0]
    return None


def is_nullable(field: FieldInfo) -> bool:
    """True if the field allows null."""
    return NoneType in alternatives(field.annotation)


def allowed(field: FieldInfo) -> str:
    """Describes the allowed values of a field: kind, bounds, null."""
    kinds = [kind for kind in alternatives(field.annotation) if kind is not NoneType]
    if get_origin(field.annotation) in _CONTAINERS:
        text = _kind_of(field.annotation)
    elif all(isinstance(kind, str | int) for kind in kinds):
        text = f"one of {', '.join(str(kind) for kind in kinds)}"
    else:
        text = _kind_of(kinds[0])
    bounds = [
        f"{word} {getattr(bound, name)}"
        for name, word in _BOUNDS
        for bound in field.metadata
        if hasattr(bound, name)
    ]
    text = " ".join((text, " and ".join(bounds))).strip()
    return f"{text}, or null" if is_nullable(field) else text


def _kind_of(kind: Any) -> str:
    if kind in _KINDS:
        return _KINDS[kind]
    if not isinstance(kind, type) or not issubclass(kind, Section):
        return "a section" if get_origin(kind) in (dict, Mapping) else "a list"
    return f"a section with the keys {', '.join(kind.model_fields)}"


def shown(value: Any) -> str:
    """Formats a value as in YAML, sections and lists by their kind."""
    if value is None:
        return "null"
    # before numbers: true is an int to Python
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a section" if value else "an empty section"
    if isinstance(value, list | tuple):
        return "a list"
    # With escapes: text with line breaks stays in its line of the message.
    return repr(value)
