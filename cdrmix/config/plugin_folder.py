"""The folder of a user's plug-in files, from which a configuration may name classes.

A process has one at a time, that of the configuration that it loaded last. It stands behind all
other places of modules, so that no file in it takes the place of an installed module.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from cdrmix.errors import ConfigError

# Name of the folder that is taken where it stands beside a configuration or data recipe.
PLUGINS = "plugins"
_in_use: list[Path] = []  # none or one


def with_plugin_folder(values: Any, file: Path) -> Any:
    """Returns the values of a file with the folder `plugins` beside it, if they name none and it is
    there."""
    beside = file.absolute().parent / PLUGINS
    if not isinstance(values, dict) or values.get(PLUGINS) is not None or not beside.is_dir():
        return values
    return {**values, PLUGINS: str(beside)}


def with_used_plugins(values: Any) -> Any:
    """Makes the modules of the folder that values name importable, and returns the values with its
    absolute path. Relative paths start at the working directory."""
    if not isinstance(values, dict) or not isinstance(values.get(PLUGINS), str):
        return values
    folder = os.path.abspath(os.path.expanduser(values[PLUGINS]))
    use_plugin_folder(Path(folder))
    return {**values, PLUGINS: folder}


def use_plugin_folder(folder: Path | None) -> None:
    """Makes the modules of a folder importable in this process, in place of those of the folder
    before; None changes nothing. The folder need not exist until a module of it is imported."""
    if folder is None or folder in _in_use:
        return
    for before in _in_use:
        # Or a module of that folder would be taken for one of the same name in this one.
        for name in [name for name, module in sys.modules.items() if _is_in(module, before)]:
            del sys.modules[name]
        sys.path.remove(str(before))
    if str(folder) not in sys.path:  # a worker process begins with the path of the one before
        sys.path.append(str(folder))
    _in_use[:] = [folder]


def plugin_folder() -> Path | None:
    """Returns the folder that this process uses; None: none so far."""
    return _in_use[0] if _in_use else None


def check_names() -> None:
    """Refuses files of the folder that are named like a module from elsewhere, which would be
    imported in their place. Raises ConfigError."""
    importlib.invalidate_caches()  # a file may have come since the folder was last looked at
    for path in chain.from_iterable(map(_modules, _in_use)):
        name = path.stem
        if name in sys.modules:
            origin = getattr(sys.modules[name], "__file__", None)
        else:
            spec = importlib.util.find_spec(name)
            origin = None if spec is None else spec.origin
        if origin is None or not Path(origin).is_relative_to(path.parent):
            raise ConfigError(
                f"{path}: there is another module named {name} ({origin or 'built in'}), which "
                "would be imported in its place. Give the file another name"
            )


def _modules(folder: Path) -> Iterator[Path]:
    """Files and packages of a folder that can be imported, by name."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        is_module = path.suffix == ".py" or (path / "__init__.py").is_file()
        if is_module and path.stem.isidentifier():
            yield path


def _is_in(module: Any, folder: Path) -> bool:
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and Path(file).is_relative_to(folder)
