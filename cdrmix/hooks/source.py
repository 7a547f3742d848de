"""Looks at the hooks of a configuration before a start, in their sources alone.

Nothing of a user's is imported for it, which may take seconds, bring torch, or do anything. What a
source does not tell, such as a class that another module gives, the ranks find out.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import find_spec
from pathlib import Path

from cdrmix.config.plugin import HookConfig
from cdrmix.errors import ConfigError
from cdrmix.hooks.events import EVENTS, unknown_event, wrong_arguments


def check_sources(hooks: Sequence[HookConfig]) -> None:
    """Refuses hooks whose module or class is not there, or whose methods are no events.

    Raises ConfigError with all that is wrong.
    """
    problems = [
        f"hooks[{number}].use: {each.use}{problem}"
        for number, each in enumerate(hooks)
        for problem in _problems(*each.use.split(":"))
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def _problems(module: str, name: str) -> Iterator[str]:
    spec = _found(module)
    if spec is None:
        yield (
            f": there is no module {module}. Install its package, or put its file into the folder "
            "`plugins` beside the configuration"
        )
    elif isinstance(spec.loader, SourceFileLoader) and spec.origin is not None:
        try:
            tree = ast.parse(Path(spec.origin).read_bytes(), spec.origin)
        except (OSError, SyntaxError, ValueError) as error:
            yield f": {spec.origin} cannot be read: {error}"
        else:
            yield from _problems_in(tree, module, name)


def _found(module: str) -> ModuleSpec | None:
    """Place of a module, found without importing the packages that it is in."""
    spec, places, path = None, None, ""
    for part in module.split("."):
        path = f"{path}.{part}".lstrip(".")
        if spec is not None and (places := spec.submodule_search_locations) is None:
            return None
        finders = (getattr(each, "find_spec", None) for each in sys.meta_path)
        try:
            spec = next(filter(None, (find(path, places) for find in finders if find)), None)
        except KeyError:  # of a namespace package, whose own parent is not imported yet
            return find_spec(module)  # imports its parents
        if spec is None:
            return None
    return spec


def _problems_in(tree: ast.Module, module: str, name: str) -> Iterator[str]:
    names: dict[str, ast.stmt] = {}
    for statement in _outermost(tree.body):
        if isinstance(statement, ast.ImportFrom | ast.Import):
            for alias in statement.names:
                names[alias.asname or alias.name] = statement
        elif isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names[statement.name] = statement
        else:
            stored = (each for each in ast.walk(statement) if isinstance(each, ast.Name))
            names |= {each.id: statement for each in stored if isinstance(each.ctx, ast.Store)}
    found = names.get(name)
    if isinstance(found, ast.ClassDef):
        yield from _problems_of(found)
    elif found is None and not {"*", "__getattr__"} & names.keys():
        close = get_close_matches(name, names, n=1)
        yield f": {module} has no {name}" + (f". Did you mean {close[0]}?" if close else "")


def _outermost(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module, also of its conditions."""
    for statement in body:
        if isinstance(statement, ast.If | ast.Try | ast.With):
            for part in ("body", "orelse", "finalbody"):
                yield from _outermost(getattr(statement, part, ()))
            for handler in getattr(statement, "handlers", ()):
                yield from _outermost(handler.body)
        else:
            yield statement


def _problems_of(found: ast.ClassDef) -> Iterator[str]:
    for method in found.body:
        if not isinstance(method, ast.FunctionDef) or not method.name.startswith("on_"):
            continue
        arguments = method.args
        wrong = None
        if method.name not in EVENTS:
            wrong = unknown_event(method.name) if not method.decorator_list else None
        elif arguments.vararg is None and not method.decorator_list:
            given = [*arguments.posonlyargs, *arguments.args]
            wrong = wrong_arguments(method.name, [each.arg for each in given[1:]])
        if wrong:
            yield f".{method.name}: {wrong}"
