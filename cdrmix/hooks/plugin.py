"""Finds the classes that a configuration names as package.module:Name."""

from __future__ import annotations

import ast
import hashlib
import importlib
import sys
from collections.abc import Collection, Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from cdrmix.config.plugin import PluginConfig
from cdrmix.config.plugin_folder import check_names, plugin_folder
from cdrmix.errors import ConfigError, DataError, TrainingError

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
        where: path of the section in the configuration, for messages; empty: none.
        keys: of the section, with the class and its options; empty: the section itself.
    Raises:
        ConfigError: if there is no such class, it is no `kind`, or it refuses the options.
    """
    use, of_options = (".".join(filter(None, (where, key))) for key in keys)
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
        check_names()
        module = importlib.import_module(module_name)
    except ConfigError as error:
        raise ConfigError(f"{where}: {path}: {error}") from error
    except Exception as error:  # any that code of a user's may raise while it is imported
        folder = plugin_folder()
        files = f"the folder {folder}" if folder else "a folder `plugins` beside the configuration"
        missing = ", which is not there" if folder and not folder.is_dir() else ""
        raise ConfigError(
            f"{where}: {path}: {module_name} cannot be imported: {type(error).__name__}: {error}. "
            f"Install its package, or put its file into {files}{missing}"
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
    """Returns the sha256 (hex) of the code of an imported plug-in, as `code_files` finds it; None:
    it stands in no file."""
    files = code_files(path.partition(":")[0])
    if not files:
        return None
    digests = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    # Of one file its own, which people can compare.
    return (
        digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
    )


def plugin_digests(paths: Collection[str]) -> dict[str, str | None]:
    """Imports classes and returns `plugin_digest` of each by its path. Raises ConfigError if one
    cannot be imported."""
    for path in paths:
        plugin_class(path, object, where="plug-in")
    return {path: plugin_digest(path) for path in paths}


def check_code(digests: Iterable[tuple[str, str | None]]) -> None:
    """Imports plug-ins and refuses those whose code is not that of the digests. Raises DataError,
    or ConfigError if one cannot be imported."""
    began_with = dict(digests)
    for path, digest in plugin_digests(began_with).items():
        if began_with[path] != digest:
            raise DataError(
                f"{path}: its code has changed since the build began, or is another one here. "
                "Start the build again: what was made with other code is made anew"
            )


def code_files(module_name: str) -> list[Path]:
    """Files with the code of an imported module: its own first, then those of the folder of
    plug-ins that it imports if it is one of them, also in functions."""
    file = getattr(sys.modules.get(module_name), "__file__", None)
    if file is None:
        return []
    root = plugin_folder()
    if root is None or not Path(file).is_relative_to(root):
        return [Path(file)]
    files: dict[Path, None] = {}
    pending = [Path(file)]
    while pending:
        path = pending.pop()
        if path not in files:
            files[path] = None
            pending += sorted(_imported(path, root), reverse=True)
    return list(files)


def _imported(path: Path, root: Path) -> Iterator[Path]:
    """Files below `root` that a source file imports."""
    # As dotted names: of a package its own, of a module that of the package around it.
    package = path.parent.relative_to(root).parts
    names: set[tuple[str, ...]] = set()
    for node in ast.walk(ast.parse(path.read_bytes(), str(path))):
        if isinstance(node, ast.Import):
            names |= {tuple(alias.name.split(".")) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            origin = (*above, *(node.module.split(".") if node.module else ()))
            names |= {origin, *((*origin, alias.name) for alias in node.names)}
    for name in names:
        for end in range(1, len(name) + 1):  # the packages around a module are imported first
            place = root.joinpath(*name[:end])
            for file in (place.with_suffix(".py"), place / "__init__.py"):
                if file.is_file():
                    yield file
