"""The list of keys that take classes of a user's: whole, and of classes that are there."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import EntryPoint

import pytest

from cdrmix import cli
from cdrmix.config.plugin import NamesPlugins, PluginConfig
from cdrmix.config.problems import item_of, section_of
from cdrmix.config.schema import Config
from cdrmix.config.section import Section
from cdrmix.corpus.recipe import Recipe
from cdrmix.verbs import plugins_verb
from cdrmix.verbs.plugins_verb import extension_points


def keys_for_classes(section: type[Section], path: str = "") -> Iterator[str]:
    """Keys of a schema that take a class of a user's, those of lists by the list."""
    for name, field in section.model_fields.items():
        key = f"{path}.{name}".lstrip(".")
        item = item_of(field.annotation)
        inner = section_of(field.annotation) if item is None else section_of(item)
        is_marked = any(isinstance(mark, NamesPlugins) for mark in field.metadata)
        if is_marked or (inner is not None and issubclass(inner, PluginConfig)):
            yield key
        elif inner is not None and item is not None and any(keys_for_classes(inner)):
            yield key  # of an entry, such as the name of a suite
        elif inner is not None:
            yield from keys_for_classes(inner, key)


def test_every_key_that_takes_a_class_is_listed() -> None:
    keys = {*keys_for_classes(Config)} | {f"recipe: {key}" for key in keys_for_classes(Recipe)}
    assert keys == {point.key for point in extension_points()}


@pytest.mark.parametrize("point", extension_points(), ids=lambda point: point.key)
def test_the_class_to_make_one_of_is_there(point: plugins_verb.ExtensionPoint) -> None:
    module, _, name = point.base.partition(":")
    assert isinstance(getattr(import_module(module), name), type)


def test_classes_of_packages_are_listed_and_not_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = EntryPoint("noise", "no_such_package.hooks:Noise", plugins_verb.GROUP)
    monkeypatch.setattr(plugins_verb, "entry_points", lambda group: [entry])
    assert cli.main(["plugins", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["entry_points"] == [
        {"name": "noise", "class": "no_such_package.hooks:Noise", "package": None}
    ]
    assert cli.main(["plugins"]) == 0
    assert "no_such_package.hooks:Noise" in capsys.readouterr().out


def test_the_list_needs_no_torch() -> None:
    code = (
        "import sys; from cdrmix import cli; cli.main(['plugins']); print('torch' in sys.modules)"
    )
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout
    assert output.splitlines()[-1] == b"False"
