"""Sections that name code of a user's: plug-ins of all kinds, and the `hooks` of a run."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    AfterValidator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    StringConstraints,
)
from pydantic_core import CoreSchema, core_schema

from cdrmix.config.section import Section

# package.module:Name, by which a configuration names a class of a user's.
_PATH = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*"
PluginPath = Annotated[str, StringConstraints(pattern=rf"^{_PATH}$")]


def is_plugin(name: str) -> bool:
    """True if a name is one of a user's class, package.module:Name, and none of ours."""
    return re.fullmatch(_PATH, name) is not None


def label_of(name: str) -> str:
    """Returns the name of a user's class without its module; a name of ours as it is."""
    return name.partition(":")[2] or name


class HashableDict(dict[str, Any]):
    """Mapping of JSON values in a section that is a key of caches."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(json.dumps(self, sort_keys=True))


class NamesPlugins:
    """Mark of a field whose value, or each entry of it, may be package.module:Name."""


@dataclass(frozen=True)
class NameOrPlugin(NamesPlugins):
    """Annotation of a text that is one of our names, or package.module:Name.

    pydantic's union of both would report a wrong name twice, and below a key that no file has.
    """

    names: tuple[str, ...]

    @property
    def allowed(self) -> str:
        """Says what is allowed, for messages and the reference."""
        return f"one of {', '.join(self.names)}, or package.module:Name of your own"

    def check(self, name: str) -> str:
        """Returns a name that is allowed; raises ValueError for others."""
        if name in self.names or is_plugin(name):
            return name
        near = difflib.get_close_matches(name, self.names, n=1)
        advice = f" (did you mean '{near[0]}'?)" if near else ""
        known = f"one of {', '.join(self.names)}{advice}"
        raise ValueError(f"given {name!r}, allowed is {known}, or package.module:Name of your own")

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"anyOf": [{"enum": list(self.names)}, {"type": "string", "pattern": f"^{_PATH}$"}]}


class PluginConfig(Section):
    """Class of a user's, and its options."""

    use: PluginPath
    """Class, as package.module:Name, of an installed package or of a file in `plugins`."""
    options: dict[str, Any] = {}
    """Options of the class, which it checks itself."""


class NamedPlugin(NamedTuple):
    """Class of a user's, where a configuration or recipe names it."""

    key: str  # dotted, with the number of an entry: hooks[0]
    path: str  # package.module:Name


def named_plugins(section: Section, key: str = "") -> Iterator[NamedPlugin]:
    """Yields the classes of a user's that a section, or one inside of it, names."""
    if isinstance(section, PluginConfig) and is_plugin(section.use):  # a tracker may be one of ours
        yield NamedPlugin(key, section.use)
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        names_plugins = any(isinstance(mark, NamesPlugins) for mark in field.metadata)
        inner = f"{key}.{name}".lstrip(".")
        for number, each in enumerate(value if isinstance(value, tuple) else (value,)):
            place = f"{inner}[{number}]" if isinstance(value, tuple) else inner
            if isinstance(each, Section):
                yield from named_plugins(each, place)
            elif names_plugins and isinstance(each, str) and is_plugin(each):
                yield NamedPlugin(place, each)


def plugins_of(section: Section) -> list[str]:
    """Paths of all classes of a user's that a section, or one inside of it, names; each once."""
    return list(dict.fromkeys(each.path for each in named_plugins(section)))


class HookConfig(PluginConfig):
    """Code that a run calls at fixed places."""

    name: str | None = Field(None, pattern=r"^[\w.-]{1,100}$")
    """Name in metrics, logs and checkpoints, unlike that of any other hook; null: the class's."""
    priority: int = 0
    """Hooks are called by rising priority, those of one priority in the order of the list."""
    on_error: Literal["stop", "warn"] = "stop"
    """stop: an error in the hook ends the run. warn: it switches the hook off on all ranks."""
    unsafe: bool = False
    """Give the hook the engine itself, with which it can change what is trained."""

    @property
    def label(self) -> str:
        """Name given, or else that of the class."""
        return self.name or self.use.partition(":")[2]


def _have_names_of_their_own(hooks: tuple[HookConfig, ...]) -> tuple[HookConfig, ...]:
    names = [hook.label for hook in hooks]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"several hooks are called {', '.join(twice)}: give each a `name`")
    return hooks


# Not strict: a list is what JSON has, such as a checkpoint's copy of the configuration.
HookConfigs = Annotated[
    tuple[HookConfig, ...], Field(strict=False), AfterValidator(_have_names_of_their_own)
]
