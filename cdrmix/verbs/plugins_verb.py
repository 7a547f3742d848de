"""The verb `cdrmix plugins`: what a configuration or data recipe may name, and what one names."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdrmix.errors import ConfigError
from cdrmix.verbs.flags import Verbs

if TYPE_CHECKING:
    from cdrmix.config.section import Section

# Group of entry points by which an installed package tells of its classes. None is loaded by it.
GROUP = "cdrmix.plugins"
_WIDTH_WITHOUT_TERMINAL = 100


@dataclass(frozen=True)
class ExtensionPoint:
    """Key that takes classes of a user's.

    Attributes:
        key: dotted, of a configuration, or of a data recipe where it begins with `recipe: `.
        what: what such a class does.
        base: class that it is made of, as package.module:Name.
        ours: values of the key that are not a user's.
    """

    key: str
    what: str
    base: str
    ours: tuple[str, ...] = ()


@dataclass(frozen=True)
class Named:
    """Class of a user's that a file names: its place in it, and what is there.

    Attributes:
        sha256: of its code, as in the record of a start and the identity of a data build.
        options: that it knows, each with its type and default; None: it takes none.
    """

    key: str
    path: str
    file: str | None = None
    sha256: str | None = None
    options: dict[str, str] | None = None
    error: str | None = None


def add_plugins(verbs: Verbs) -> None:
    """`cdrmix plugins`: list the extension points, and the classes that a file names."""
    parser = verbs.add_parser(
        "plugins",
        help="classes of your own that a configuration or data recipe may name",
        description="Lists the keys that take package.module:Name, the class that each is made of, "
        "and what there is of ours; with --config also what that file names, whether it can be "
        "imported, its digest and its options. See docs/extending.md.",
    )
    flag = parser.add_argument
    flag("--config", metavar="FILE", type=Path, help="configuration or data recipe to look at")
    flag("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_run)


def extension_points() -> list[ExtensionPoint]:
    """Returns all keys that take a class of a user's."""
    from cdrmix.config.evaluation import SUITE_NAMES
    from cdrmix.config.model import BLOCK_TYPES
    from cdrmix.config.schema import SCHEDULES
    from cdrmix.config.tracking import TRACKERS
    from cdrmix.corpus.recipe_steps import STEPS

    step = "cdrmix.data.document:DocumentStep"
    return [
        ExtensionPoint("hooks", "code called at fixed places of a run", "cdrmix.hooks:Hook"),
        ExtensionPoint(
            "monitoring.trackers",
            "a copy of the metrics elsewhere",
            "cdrmix.tracking:Tracker",
            TRACKERS,
        ),
        ExtensionPoint(
            "model.mixers",
            "a block type",
            "cdrmix.planning.blocks.block_type:BlockType",
            tuple(BLOCK_TYPES),
        ),
        ExtensionPoint(
            "objectives.plugins", "a term of the loss", "cdrmix.planning.plugins:LossTerm"
        ),
        ExtensionPoint(
            "optimizer.kind",
            "an optimizer",
            "cdrmix.planning.plugins:OptimizerType",
            ("adamw", "muon"),
        ),
        ExtensionPoint(
            "training.schedule",
            "learning rates by step",
            "cdrmix.planning.plugins:Schedule",
            SCHEDULES,
        ),
        ExtensionPoint(
            "evaluation.suites",
            "scores of a model",
            "cdrmix.evaluation.suite:Suite",
            SUITE_NAMES,
        ),
        ExtensionPoint(
            "checkpoint.retention",
            "which checkpoints stay",
            "cdrmix.checkpoint.retention:Retention",
            ("keep",),
        ),
        ExtensionPoint("recipe: steps", "a change to documents", step, tuple(STEPS)),
        ExtensionPoint("recipe: validators", "a check of documents", step),
        ExtensionPoint(
            "recipe: sources",
            "texts",
            "cdrmix.corpus.text_source:TextSource",
            ("local", "huggingface"),
        ),
    ]


def named_in(file: Path) -> tuple[Section, list[Named]]:
    """Reads a configuration or data recipe, and imports the classes that it names.

    Raises:
        ConfigError: if the file is wrong in another way; a recipe imports its classes itself.
    """
    from cdrmix.config.load import load_config, read_config_text
    from cdrmix.config.plugin import named_plugins
    from cdrmix.config.yaml_text import parse_yaml
    from cdrmix.corpus.recipe import load_recipe

    values = parse_yaml(read_config_text(file), place=str(file))
    is_recipe = isinstance(values, dict) and "sources" in values
    config: Section = load_recipe(file) if is_recipe else load_config(file)
    points = {each.key: each for each in extension_points()}
    found = []
    for key, path in named_plugins(config):
        plain = key.partition("[")[0]
        found.append(_named(key, path, points[f"recipe: {plain}" if is_recipe else plain].base))
    return config, found


def _named(key: str, path: str, base: str) -> Named:
    from cdrmix.hooks.plugin import code_files, plugin_class, plugin_digest

    module, _, name = base.partition(":")
    try:
        kind: type[Any] = getattr(import_module(module), name)
        plugin = plugin_class(path, kind, where=key)
    except ConfigError as error:
        return Named(key, path, error=str(error))
    files = code_files(path.partition(":")[0])
    options = getattr(plugin, "Options", None)
    return Named(
        key,
        path,
        file=str(files[0]) if files else None,
        sha256=plugin_digest(path),
        options=None if options is None else dict(_options(options)),
    )


def _options(section: Any) -> Iterator[tuple[str, str]]:
    for name, field in section.model_fields.items():
        kind = getattr(field.annotation, "__name__", str(field.annotation))
        yield name, kind if field.is_required() else f"{kind} = {field.default!r}"


def _run(arguments: argparse.Namespace) -> None:
    config, named = named_in(arguments.config) if arguments.config else (None, [])
    packages = [
        {"name": each.name, "class": each.value, "package": each.dist.name if each.dist else None}
        for each in entry_points(group=GROUP)
    ]
    if arguments.json:
        content = {
            "points": [asdict(each) for each in extension_points()],
            "folder": getattr(config, "plugins", None),
            "named": [asdict(each) for each in named],
            "entry_points": packages,
        }
        print(json.dumps(content), flush=True)
    else:
        _print(config, named, packages, file=arguments.config)
    if problems := [each.error for each in named if each.error]:
        raise ConfigError("\n".join(problems))


def _print(
    config: Section | None,
    named: Sequence[Named],
    packages: Sequence[dict[str, str | None]],
    *,
    file: Path | None,
) -> None:
    """Prints the tables for a person; errors are told behind them."""
    rows = []
    for point in extension_points():
        rows += [(point.key, f"{point.what}; a class made of {point.base}")]
        rows += [("", f"ours: {', '.join(point.ours)}")] * bool(point.ours)
    _print_table(("key", "what it takes"), rows)
    if config is not None:
        folder = getattr(config, "plugins", None) or "no folder `plugins` beside it"
        print(f"\n{file} ({folder}) names {len(named) or 'no'} classes of yours")
        for each in named:
            print(f"  {each.key}: {each.path}")
            if each.error:
                print("    cannot be used, see below")
                continue
            options = ", ".join(f"{name}: {kind}" for name, kind in (each.options or {}).items())
            print(f"    {each.file}, sha256 {(each.sha256 or '')[:12]}")
            print(f"    options: {options or 'none'}")
    if packages:
        print("\nof installed packages, loaded only where a file names them")
        _print_table(
            ("name", "class", "package"), [tuple(map(str, each.values())) for each in packages]
        )
    sys.stdout.flush()


def _print_table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    """Prints columns; the last one is folded at the width of the terminal."""
    from cdrmix.log import columns

    lines = [head, *rows]
    widths = [max(len(line[place]) for line in lines) + 2 for place in range(len(head) - 1)]
    start = " " * sum(widths)
    room = max(20, (columns(sys.stdout) or _WIDTH_WITHOUT_TERMINAL) - len(start))
    for line in lines:
        first, *more = textwrap.wrap(line[-1], room) or [""]
        cells = "".join(f"{cell:{width}}" for cell, width in zip(line[:-1], widths, strict=True))
        print(cells + first)
        for each in more:
            print(start + each)
