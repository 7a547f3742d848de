"""docs/data.md names every step, parameter, default and threshold as the code has it."""

import inspect
import re
from dataclasses import fields
from typing import Any, get_type_hints

import pytest

from cdrmix.config.problems import alternatives
from cdrmix.corpus.recipe_steps import STEPS, step_class
from cdrmix.corpus.steps.filter import PROFILES, RULES, FilterRule
from cdrmix.corpus.steps.scrub import KINDS
from tests.harness import ROOT

pytest.importorskip("rensa", reason="the [data] extra is not installed")

from cdrmix.corpus.steps import dedup  # noqa: E402
from cdrmix.corpus.steps.minhash import MinHash, SimHash  # noqa: E402

PAGE = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
_TYPES = {int: "whole number", float: "number", bool: "true or false", str: "text"}


def table(head: str) -> list[str]:
    """Rows of the table of the page whose first line begins so."""
    rows = PAGE.partition(f"\n{head}")[2].partition("\n\n")[0].splitlines()[2:]
    assert rows, f"docs/data.md has no table {head}"
    return rows


def written(value: Any) -> str:
    """A value as a recipe has it."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(written, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:.10g}" if isinstance(value, float) else str(value)


def kind_of(annotation: Any) -> str:
    kinds = [kind for kind in alternatives(annotation) if kind is not type(None)]
    words = [kind for kind in kinds if isinstance(kind, str)]
    if words:
        return " or ".join(words)
    if "Mapping" in str(annotation):
        return "domain: profile"
    return "list" if "Sequence" in str(annotation) else _TYPES[kinds[0]]


def parameter_rows(step: str) -> list[str]:
    """The cells of each parameter of a step up to its default."""
    constructor = step_class(step).__init__
    hints = get_type_hints(constructor)
    rows = []
    for name, parameter in inspect.signature(constructor).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            default = written(parameter.default) + default_of_method(step, name)
            rows.append(f"| `{step}` | `{name}` | {kind_of(hints[name])} | {default} |")
    return rows


def default_of_method(step: str, name: str) -> str:
    """What null means for `dedup`: the default of the method's class."""
    if step != "dedup":
        return ""
    values = [
        f"{method.__name__.lower()} {written(field.default)}"
        for method in (MinHash, SimHash)
        for field in fields(method)
        if field.name == name
    ]
    return f": {', '.join(values)}" if values else ""


def rule_row(rule: FilterRule) -> str:
    limits = [getattr(rule, profile) for profile in PROFILES]
    cells = [
        "" if pair is None else " to ".join(f"{value:,.10g}" for value in dict.fromkeys(pair))
        for pair in limits
    ]
    figure = rule.figure if rule.n is None else f"{rule.figure}[{rule.n}]"
    start = f"| {rule.reason} | `{figure}` at {rule.bound} |"
    return " ".join([start, *(f"{cell} |" if cell else "|" for cell in cells)])


def test_every_parameter_stands_with_its_type_and_default() -> None:
    rows = table("| step | parameter | type | default |")
    assert ["|".join(re.split(r"(?<!\\)\|", row)[:5]) + "|" for row in rows] == [
        row for step in STEPS for row in parameter_rows(step)
    ]
    assert all(row.split("|")[5].strip() for row in rows), "a parameter without its meaning"


def test_every_threshold_of_the_filter_stands_with_its_reason() -> None:
    assert table("| reason | figure | web | prose |") == [rule_row(rule) for rule in RULES]


def test_every_step_stands_with_its_reasons() -> None:
    rows = table("| step | reasons that a report names |")
    assert [row.split("`")[1] for row in rows] == list(STEPS)
    for row, name in zip(rows, STEPS, strict=True):
        told = getattr(step_class(name), "judge", step_class).__doc__ or ""
        if name not in ("filter", "language", "scrub") and "Reason" in told:
            for reason in told.partition(": ")[2].strip(" .").split(", "):
                assert reason in row
    assert all(reason in "\n".join(rows) for reason in dedup._REASONS[1:])


def test_every_kind_of_private_data_is_named() -> None:
    (row,) = (row for row in table("| step | parameter |") if row.startswith("| `scrub`"))
    assert set(re.findall(r"`(\w+)`", row)) == {"scrub", "kinds", *KINDS}
