"""Checks plain values against a schema and words every problem for the user. pydantic checks the
known keys, this file finds the unknown ones; each message has the path, the given value, the
allowed ones and the meaning of the field."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from cdrmix.config.common_names import COMMON_NAMES
from cdrmix.config.model import DERIVED_MODEL_FIELDS
from cdrmix.config.plugin import NameOrPlugin
from cdrmix.config.schema import Config
from cdrmix.config.section import Section

Keys = tuple[str, ...]
AnySection = TypeVar("AnySection", bound=Section)

_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
# Their arguments are types of entries, not alternatives.
_CONTAINERS = (tuple, list, Sequence, dict, Mapping)
_BOUNDS = {
    "ge": "from",
    "gt": "above",
    "le": "up to",
    "lt": "below",
    "multiple_of": "a multiple of",
}


@dataclass(frozen=True)
class Problem:
    """One problem of a configuration."""

    path: Keys  # keys that lead to it; none for the whole file
    text: str  # message without its place
    meant: str | None = None  # for an unknown key, the known key that it resembles


def validate(values: Any, root: type[AnySection]) -> tuple[AnySection | None, list[Problem]]:
    """Builds a `root` section from plain values; None with all problems if they are invalid. Lists
    become tuples, and whole floats ints where a field takes ints; nothing else is converted."""
    if not isinstance(values, dict):
        problem = "the file is empty" if values is None else f"given {shown(values)}"
        return None, [Problem((), f"{problem}; allowed is {_kind_of(root)}")]
    problems: list[Problem] = []
    # Unknown keys are taken out first: pydantic reports them without saying what was meant.
    known = _known(values, root, root, (), problems)
    try:
        config = root.model_validate(known)
    except ValidationError as error:
        details = error.errors()
    else:
        return (None, problems) if problems else (config, [])
    unknown = [(problem.path[:-1], problem.meant) for problem in problems]
    by_path = list(_of_fields(details, root))
    failed = {path for path, _ in by_path}
    # A value that could not be derived is no fault of its own.
    sources_failed = failed & {("model", "hidden_size"), ("model", "num_heads")}
    for path, detail in by_path:
        if any(len(other) > len(path) and other[: len(path)] == path for other in failed):
            continue  # pydantic also reports a list as too short when one of its entries is wrong
        # A misspelt key is reported once, and not also as the one that is missing.
        if detail["type"] == "missing" and (path[:-1], path[-1]) in unknown:
            continue
        # The error of a derived field belongs to the fields that it was derived from.
        is_derived = path[:1] == ("model",) and path[-1] in DERIVED_MODEL_FIELDS
        if not is_derived or known["model"].get(path[-1]) is not None:
            problems.append(Problem(path, _message(path, detail, root)))
        elif not sources_failed:
            problems.append(Problem(path[:-1], _message(path, detail, root)))
    return None, problems


def _of_fields(
    details: list[ErrorDetails], root: type[Section]
) -> Iterator[tuple[Keys, ErrorDetails]]:
    """Errors with the path of their field, one for each value: where a word may stand for a number,
    pydantic has an error for both, below the field."""
    last: Keys | None = None
    for detail in details:
        path = tuple(str(key) for key in detail["loc"])
        above = field_at(path[:-1], root)
        if above is not None and _words_or_number(above):
            path = path[:-1]
            if path == last:
                continue
            last = path
        yield path, detail


def _words_or_number(field: FieldInfo) -> bool:
    kinds = alternatives(field.annotation)
    return any(isinstance(kind, str) for kind in kinds) and (int in kinds or float in kinds)


def _known(
    values: dict, section: type[Section], root: type[Section], path: Keys, problems: list[Problem]
) -> dict[str, Any]:
    """Returns the values of known keys, and appends a problem for each unknown key."""
    known: dict[str, Any] = {}
    for name, value in values.items():
        field = section.model_fields.get(name)
        if field is not None:
            known[name] = _plain(value, field.annotation, root, (*path, name), problems)
            continue
        key = str(name)
        advice, meant = _meant_by(key, section, root, path)
        text = f"unknown key.{advice} Known: {', '.join(sorted(section.model_fields))}"
        problems.append(Problem((*path, key), text, meant=meant))
    return known


def _meant_by(
    key: str, section: type[Section], root: type[Section], path: Keys
) -> tuple[str, str | None]:
    """Returns advice on an unknown key of a section, and the key of that section that it means."""
    paths = [".".join(place) for place in field_paths(root)]
    common = COMMON_NAMES.get(key.lower())
    if common in paths:
        *around, last = common.split(".")
        return f" Did you mean '{common}'?", last if tuple(around) == path else None
    # A key of this section that is spelt alike is likelier than one of another section.
    if near := difflib.get_close_matches(key, sorted(section.model_fields), n=1):
        return f" Did you mean '{near[0]}'?", near[0]
    elsewhere = [place for place in paths if place.rpartition(".")[2] == key]
    return (f" It belongs at '{elsewhere[0]}'." if elsewhere else ""), None


def nearest_paths(dotted: str, root: type[Section] = Config) -> list[str]:
    """Finds up to three dotted paths that an unknown one may mean, the likeliest first: by a name
    of other trainers, the same last key, or a like spelling."""
    paths = [".".join(place) for place in field_paths(root)]
    last = dotted.rpartition(".")[2]
    common = COMMON_NAMES.get(last.lower())
    if common in paths:
        return [common]
    same = [path for path in paths if path.rpartition(".")[2] == last]
    # Of the same last key those whose sections are spelt alike come first: trainig.seed.
    near = difflib.get_close_matches(dotted, same or paths, n=3, cutoff=0.0 if same else 0.6)
    if near:
        return near
    keys = {path.rpartition(".")[2]: path for path in reversed(paths)}
    return [keys[key] for key in difflib.get_close_matches(last, keys, n=3, cutoff=0.7)]


def _plain(
    value: Any, annotation: Any, root: type[Section], path: Keys, problems: list[Problem]
) -> Any:
    inner = section_of(annotation)
    if inner is not None and isinstance(value, dict):
        return _known(value, inner, root, path, problems)
    item = item_of(annotation)
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


def field_paths(section: type[Section], path: Keys = ()) -> Iterator[Keys]:
    """Yields the keys of all fields of a section, and of those inside; entries of lists have none
    of their own."""
    for key, field in section.model_fields.items():
        yield (*path, key)
        inner = section_of(field.annotation)
        if inner is not None:
            yield from field_paths(inner, (*path, key))


def _message(path: Keys, detail: ErrorDetails, root: type[Section]) -> str:
    if detail["type"] == "value_error":
        return str(detail["ctx"]["error"])
    field = field_at(path, root)
    assert field is not None, f"pydantic names a field that the schema lacks: {detail['loc']}"
    meaning = f". {field.description}" if field.description else ""
    if detail["type"] == "missing":
        kind = "a path" if _is_path(path[-1], field) else allowed(field)
        return f"missing. Give {kind}" + (f": {field.description}" if field.description else "")
    value = f"given {shown(detail['input'])}"
    if detail["type"] == "too_short":
        length, least = (detail["ctx"][key] for key in ("actual_length", "min_length"))
        return f"{value} of {length}, allowed are {least} or more{meaning}"
    # The path of an entry ends in its index; what is allowed is then that of the entry.
    item = item_of(field.annotation) if path[-1].isdigit() else None
    kinds = allowed(field) if item is None else _kind_of(item)
    words = [kind for kind in alternatives(field.annotation) if isinstance(kind, str)]
    near = difflib.get_close_matches(str(detail["input"]), words, n=1)
    advice = f" (did you mean '{near[0]}'?)" if near else ""
    return f"{value}, allowed is {kinds}{advice}{meaning}"


def _is_path(key: str, field: FieldInfo) -> bool:
    """True if a key is one of a file or folder, by its last word."""
    words = ("path", "file", "folder", "source")
    return field.annotation is str and key.rpartition("_")[2] in words


def field_at(path: Keys, root: type[Section] = Config) -> FieldInfo | None:
    """Field of `root` at a path of keys, where an entry's index stands for its list; or None."""
    section: type[Section] | None = root
    field = None
    for key in path:
        if field is not None and key.isdigit() and item_of(field.annotation) is not None:
            section = section_of(item_of(field.annotation))
            continue
        field = section.model_fields.get(key) if section is not None else None
        if field is None:
            return None
        section = section_of(field.annotation)
    return field


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """Types and literals in an annotation: `int | Literal["a"] | None` -> (int, "a", NoneType)."""
    if get_origin(annotation) in _CONTAINERS:
        return (annotation,)
    kinds = [_bare(kind) for kind in get_args(annotation) or (annotation,)]
    words = (get_args(kind) if get_origin(kind) is Literal else [kind] for kind in kinds)
    return tuple(chain.from_iterable(words))


def _bare(kind: Any) -> Any:
    """Type without its bounds: `Annotated[int, Field(ge=1)]` -> int."""
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def section_of(annotation: Any) -> type[Section] | None:
    """Section class in an annotation such as `MoEConfig | None`; None if it has none."""
    kinds = (kind for kind in alternatives(annotation) if isinstance(kind, type))
    return next((kind for kind in kinds if issubclass(kind, Section)), None)


def item_of(annotation: Any) -> Any:
    """Entry type X of a `tuple[X, ...]`; None for other annotations."""
    kinds = (annotation, *get_args(annotation))
    return next((get_args(kind)[0] for kind in kinds if get_origin(kind) is tuple), None)


def allowed(field: FieldInfo) -> str:
    """Describes the allowed values of a field: kind, bounds, null."""
    all_kinds = alternatives(field.annotation)
    if names := [each for each in field.metadata if isinstance(each, NameOrPlugin)]:
        return names[0].allowed
    kinds = [kind for kind in all_kinds if kind is not NoneType]
    words = [str(kind) for kind in kinds if isinstance(kind, str | int)]
    if len(words) == len(kinds):
        text = f"one of {', '.join(words)}"
    else:
        text = " or ".join([f"{_kind_of(kinds[0])} {bounds(field)}".strip(), *words])
    return f"{text}, or null" if NoneType in all_kinds else text


def bounds(field: FieldInfo) -> str:
    """Describes the range of a number, such as 'from 0 and below 1'; empty if it has none."""
    # Those of a number that a word may stand for are its type's: Annotated[int, Field(ge=1)].
    of_types = (get_args(kind)[1:] for kind in get_args(field.annotation))
    infos = (info for infos in of_types for info in infos if isinstance(info, FieldInfo))
    limits = [*field.metadata, *chain.from_iterable(info.metadata for info in infos)]
    return " and ".join(
        f"{word} {getattr(bound, name)}"
        for name, word in _BOUNDS.items()
        for bound in limits
        if hasattr(bound, name)
    )


def _kind_of(kind: Any) -> str:
    if kind in _KINDS:
        return _KINDS[kind]
    if isinstance(kind, type) and issubclass(kind, Section):
        return f"a section with the keys {', '.join(kind.model_fields)}"
    return "a section" if get_origin(kind) in (dict, Mapping) else "a list"


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
