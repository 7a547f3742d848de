"""Classes that are no hooks, told before a run: once by their source, once by themselves."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from cdrmix.config.load import load_config
from cdrmix.config.plugin import HookConfig
from cdrmix.errors import ConfigError
from cdrmix.hooks.dispatch import configured_hooks
from cdrmix.hooks.source import check_sources
from tests.conftest import TINY

SOURCE = """
from cdrmix.hooks import Hook

class Good(Hook):
    def on_step(self, step, _measured): ...
    def on_log(self, *arguments): ...
    def once(self): ...

class Typo(Hook):
    def on_setp(self, step, measured): ...

class Fewer(Hook):
    def on_step(self, step): ...

class Swapped(Hook):
    def on_log(self, record, step): ...

class Waiting(Hook):
    async def on_end(self, outcome): ...

class Collective(Hook):
    collective = True

class Apart(Hook):
    def measures_at(self, step, is_last): return True
    def on_measure(self, step): ...

class Never(Hook):
    collective = True
    def on_measure(self, step): ...

class Broken(Hook):
    def __init__(self): raise RuntimeError("no server")

class Other: ...
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a module of a package, whose import is noted in sys.modules."""
    package = tmp_path / "made_hooks"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "some.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield "made_hooks.some"
    for name in ("made_hooks", "made_hooks.some"):
        sys.modules.pop(name, None)


def entry(use: str, **more: object) -> HookConfig:
    return HookConfig.model_validate({"use": use, **more})


WRONG = {
    "Typo": r"hooks\[0\]\.use: .*:Typo\.on_setp: is no event, .* Did you mean on_step\?",
    "Fewer": r":Fewer\.on_step: takes \(step\), and the event gives \(step, measured\)",
    "Swapped": r":Swapped\.on_log: takes \(record, step\), and the event gives \(step, record\)",
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_method_is_told_by_the_source_and_by_the_class(name: str, module: str) -> None:
    hooks = [entry(f"{module}:{name}")]
    with pytest.raises(ConfigError, match=WRONG[name]):
        check_sources(hooks)
    assert module not in sys.modules
    with pytest.raises(ConfigError, match=WRONG[name]):
        configured_hooks(hooks)


def test_a_class_that_is_right_passes_both(module: str) -> None:
    hooks = [entry(f"{module}:Good", name="mine", priority=3)]
    check_sources(hooks)
    assert "made_hooks" not in sys.modules, "its packages neither"
    (made,) = configured_hooks(hooks)
    assert (made.name, made.priority) == ("mine", 3)


@pytest.mark.parametrize(
    ("use", "told"),
    [
        ("made_hooks.none:Good", "there is no module made_hooks.none"),
        ("no_such_package.some:Good", "there is no module no_such_package.some"),
        ("made_hooks.some.more:Good", "there is no module made_hooks.some.more"),
        ("made_hooks.some:Goot", r"made_hooks.some has no Goot. Did you mean Good\?"),
    ],
)
def test_a_wrong_path_is_told_by_the_source(use: str, told: str, module: str) -> None:
    with pytest.raises(ConfigError, match=told):
        check_sources([entry(use)])


@pytest.mark.parametrize(
    ("name", "more", "told"),
    [
        ("Waiting", {}, "on_end: is no plain method"),
        ("Collective", {"on_error": "warn"}, "is collective"),
        ("Apart", {}, r"on_measure: is called on all ranks alike, .* by collective = True"),
        ("Never", {}, r"on_measure: is called where measures_at\(step, is_last\) says so"),
        ("Broken", {}, r"hooks\[0\]\.use: .*:Broken cannot be made: RuntimeError: no server"),
        ("Other", {}, "is no class made of"),
    ],
)
def test_what_a_source_does_not_tell_is_told_by_the_class(
    name: str, more: dict[str, object], told: str, module: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        configured_hooks([entry(f"{module}:{name}", **more)])


def test_names_that_a_source_gets_from_elsewhere_are_left_to_the_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "made_names.py").write_text(
        "try:\n    from json import *\nexcept ImportError:\n    Kept = None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    check_sources([entry("made_names:Anything"), entry("math:Sine", name="compiled")])


def test_a_source_that_is_no_python_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "made_wrongly.py").write_text("class Hook(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    with pytest.raises(ConfigError, match=r"made_wrongly.py cannot be read: invalid syntax"):
        check_sources([entry("made_wrongly:Hook")])


def test_two_hooks_of_one_class_need_names(module: str) -> None:
    twice = f"hooks=[{{use: '{module}:Good'}}, {{use: '{module}:Good'}}]"
    with pytest.raises(ConfigError, match="several hooks are called Good: give each a `name`"):
        load_config(TINY, [twice])
    config = load_config(TINY, [twice.replace("'}]", "', name: other}]")])
    assert [each.label for each in config.hooks] == ["Good", "other"]
