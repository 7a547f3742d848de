"""Finds the classes that a configuration names as package.module:Name."""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Collection
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from cdrmix.config.plugin import PluginConfig
from cdrmix.errors import ConfigError, TrainingError

Kind = TypeVar("Kind")


def make_plugin(
    plugin: PluginConfig,
    kind: type[Kind],
    *,
    where: str,
    keys: tuple[str, str] = ("use", "options"),
) -> Kind:
    """Imports a class of a user's and makes its instance of the configured options.

    Args:
        kind: base class that it must have.
        where: path of the section in the configuration, for messages.
        keys: of the section, with the class and its options.
    Raises:
        ConfigError: if there is no such class, it is no `kind`, or it refuses the options.
    """
    use, of_options = (f"{where}.{key}" for key in keys)
    found = plugin_class(plugin.use, kind, where=use)
    if missing := getattr(found, "__abstractmethods__", None):
        raise ConfigError(
            f"{use}: {plugin.use} lacks {', '.join(sorted(missing))}, without which it cannot be "
            f"planned or run: see {kind.__module__}.{kind.__qualname__}"
        )
    options = getattr(found, "Options", None)
    if options is None:
        if plugin.options:
            raise ConfigError(f"{of_options}: {plugin.use} takes none: it has no class Options")
        return _made(plugin, found, where=use)
    assert issubclass(options, BaseModel), f"{plugin.use}.Options is no pydantic model"
    try:
        made = options.model_validate(plugin.options, extra="forbid")
    except ValidationError as error:
        known = ", ".join(sorted(options.model_fields))
        first = error.errors()[0]
        at = ".".join(str(part) for part in first["loc"])
        raise ConfigError(
            f"{of_options}{at and f'.{at}'}: {first['msg']} ({plugin.use} knows: {known})"
        ) from error
    return _made(plugin, found, made, where=use)


def _made(plugin: PluginConfig, found: type[Kind], *options: BaseModel, where: str) -> Kind:
    factory: Any = found
    try:
        made: Kind = factory(*options)
    except TrainingError:
        raise
    except Exception as error:  # any that code of a user's may raise
        raise ConfigError(
            f"{where}: {plugin.use} cannot be made: {type(error).__name__}: {error}"
        ) from error
    return made


def plugin_class(path: str, kind: type[Kind], *, where: str) -> type[Kind]:
    """Imports package.module:Name. Raises ConfigError if it is no class of `kind`."""
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # any that code of a user's may raise while it is imported
        raise ConfigError(
            f"{where}: {path}: {module_name} cannot be imported: {type(error).__name__}: {error}. "
            "Install its package, or put its file into the folder `plugins` beside the "
            "configuration"
        ) from error
    found = getattr(module, name, None)
    if found is None:
        close = get_close_matches(name, dir(module), n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise ConfigError(f"{where}: {path}: {module_name} has no {name}.{hint}")
    if not isinstance(found, type) or not issubclass(found, kind):
        raise ConfigError(
            f"{where}: {path} is no class made of {kind.__module__}.{kind.__qualname__}"
        )
    return found


def plugin_digest(path: str) -> str | None:
    """Returns the sha256 (hex) of the file that an imported plug-in stands in; None: no file."""
    file = getattr(sys.modules.get(path.partition(":")[0]), "__file__", None)
    return None if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()


def plugin_digests(paths: Collection[str]) -> dict[str, str | None]:
    """Imports classes and returns `plugin_digest` of each by its path. Raises ConfigError if one
    cannot be imported."""
    for path in paths:
        plugin_class(path, object, where="plug-in")
    return {path: plugin_digest(path) for path in paths}
