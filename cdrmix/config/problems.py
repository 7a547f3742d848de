"""Checks plain values against a schema and words everything that is wrong in our own terms.

pydantic finds what is wrong with known keys, this file finds the unknown ones; both are told as
path, what was given, what is allowed and what it means.
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
    """One thing that is wrong.

    Attributes:
        path: keys that lead to it; none for the whole file.
        text: what is wrong, without its place.
        meant: of an unknown key, the known one that it resembles.
    """

    path: Keys
    text: str
    meant: str | None = None


def validate(values: Any, root: type[AnySection]) -> tuple[AnySection | None, list[Problem]]:
    """A `root` section made of plain values, or None with every problem in them.

    Whole floats become ints where ints are wanted (300e9 is a whole number), and lists become
    tuples; nothing else is converted.
    """
    if not isinstance(values, dict):
        given = "the file is empty" if values is None else f"given {shown(values)}"
        return None, [Problem((), f"{given}; allowed is {_kind_of(root)}")]
    problems: list[Problem] = []
    known = _known(values, root, root, (), problems)
    try:
        config = root.model_validate(known)
    except ValidationError as error:
        return None, problems + _from_pydantic(error.errors(), known, root, tuple(problems))
    return (None, problems) if problems else (config, [])


def _from_pydantic(
    details: list[ErrorDetails],
    known: dict[str, Any],
    root: type[Section],
    unknown: tuple[Problem, ...],
) -> list[Problem]:
    failed = {_path(detail) for detail in details}
    problems = []
    for detail in details:
        path = _path(detail)
        if any(len(other) > len(path) and other[: len(path)] == path for other in failed):
            continue  # a list counts as too short for want of the entry that is wrong
        derived = _is_derived(path, known)
        sources_failed = failed & {("model", "hidden_size"), ("model", "num_heads")}
        misspelt = any(p.path[:-1] == path[:-1] and p.meant == path[-1] for p in unknown)
        if not (derived and sources_failed) and not (misspelt and detail["type"] == "missing"):
            problems.append(Problem(path[:-1] if derived else path, _worded(detail, root)))
    return problems


def _is_derived(path: Keys, known: dict[str, Any]) -> bool:
    """True for a field that the user left to be derived: its sources are what is wrong."""
    if path[:1] != ("model",) or path[-1] not in DERIVED_MODEL_FIELDS:
        return False
    return known["model"].get(path[-1]) is None


def _known(
    values: dict[Any, Any],
    section: type[Section],
    root: type[Section],
    path: Keys,
    problems: list[Problem],
) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in values.items():
        field = section.model_fields.get(key)
        if field is None:
            problems.append(_unknown(str(key), section, root, path))
        else:
            kept[key] = _plain(value, field.annotation, root, (*path, key), problems)
    return kept


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
    wants_int = any(kind is int or isinstance(kind, int) for kind in alternatives(annotation))
    if wants_int and isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _unknown(key: str, section: type[Section], root: type[Section], path: Keys) -> Problem:
    known = sorted(section.model_fields)
    near = difflib.get_close_matches(key, known, n=1)
    elsewhere = [".".join(place) for place in _field_paths(root) if place[-1] == key]
    advice = f" It belongs at '{elsewhere[0]}'." if elsewhere else ""
    advice = f" Did you mean '{near[0]}'?" if near else advice
    text = f"unknown key.{advice} Known: {', '.join(known)}"
    return Problem((*path, key), text, meant=near[0] if near else None)


def _field_paths(section: type[Section], path: Keys = ()) -> Iterator[Keys]:
    for key, field in section.model_fields.items():
        yield (*path, key)
        inner = section_of(field.annotation)
        if inner is not None:
            yield from _field_paths(inner, (*path, key))


def _path(detail: ErrorDetails) -> Keys:
    return tuple(str(key) for key in detail["loc"])


def _worded(detail: ErrorDetails, root: type[Section]) -> str:
    if detail["type"] == "value_error":
        return str(detail["ctx"]["error"])
    field = field_at(_path(detail), root)
    assert field is not None, f"pydantic names a field that the schema lacks: {detail['loc']}"
    meaning = f". {field.description}" if field.description else ""
    if detail["type"] == "missing":
        return f"missing; give {allowed(field)}{meaning}"
    if detail["type"] == "too_short":
        lengths = detail["ctx"]
        given = f"given {shown(detail['input'])} of {lengths['actual_length']}"
        return f"{given}, allowed are {lengths['min_length']} or more{meaning}"
    item = _item_of(field.annotation) if str(detail["loc"][-1]).isdigit() else None
    kinds = allowed(field) if item is None else _kind_of(item)
    given = f"given {shown(detail['input'])}, allowed is {kinds}"
    return f"{given}{_near(detail, field)}{meaning}"


def _near(detail: ErrorDetails, field: FieldInfo) -> str:
    words = [kind for kind in alternatives(field.annotation) if isinstance(kind, str)]
    near = difflib.get_close_matches(str(detail["input"]), words, n=1)
    return f" (did you mean '{near[0]}'?)" if near else ""


def field_at(path: Keys, root: type[Section] = Config) -> FieldInfo | None:
    """Field of `root` that a path of keys leads to; None where there is no such field.

    The number of an entry leads to the list that it is in.
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
    """Types and literals that an annotation allows: `int | None` -> (int, NoneType).

    A literal among alternatives gives its words: `Literal["a"] | None` -> ("a", NoneType).
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
    """The section class in an annotation such as `MoEConfig | None`; None if it holds a value."""
    for kind in alternatives(annotation):
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind
    return None


def _item_of(annotation: Any) -> Any:
    """Type that a `tuple[X, ...]` holds; None for other annotations."""
    for kind in (annotation, *get_args(annotation)):
        if get_origin(kind) is tuple:
            return get_args(kind)[0]
    return None


def is_nullable(field: FieldInfo) -> bool:
    """True if null is a value of this field."""
    return NoneType in alternatives(field.annotation)


def allowed(field: FieldInfo) -> str:
    """Describes what a field takes: kind, bounds, null."""
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
    """A given value as it would be written in YAML, long ones by their kind."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a section" if value else "an empty section"
    if isinstance(value, list | tuple):
        return "a list"
    return repr(value)
