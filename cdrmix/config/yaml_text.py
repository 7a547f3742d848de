"""Reads and writes YAML with the scalars of YAML 1.2. PyYAML follows YAML 1.1, where `3e-4` and
`300e9` are text, `on` and `no` are booleans, `010` is 8 and `1:30` is 90. Here these are numbers
and text, and only true and false are booleans. Output is quoted so that readers of either version
see the same values."""

from __future__ import annotations

import re
from typing import Any

import yaml

from cdrmix.errors import ConfigError

# PyYAML wants a point and a signed exponent, so that 3e-4 and 1e9 would be text.
_FLOAT = (
    r"^(?:[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
# Type, pattern, and the first characters of a scalar for which PyYAML tries the pattern.
_SCALARS = (
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    # Without yes, no, on and off: `no` is also the code of a language.
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    # Decimal alone: YAML 1.1 reads 010 as octal, and 1:30 by sixties. Before floats: both patterns
    # fit 8, and the first one counts.
    ("int", r"^[-+]?[0-9][0-9_]*$", list("-+0123456789")),
    ("float", _FLOAT, list("-+.0123456789")),
)


class _Loader(yaml.SafeLoader):
    """Safe loader with the scalars of YAML 1.2; tags and duplicate keys are errors."""

    # Begun empty: `add_implicit_resolver` would otherwise extend a copy of those of YAML 1.1.
    yaml_implicit_resolvers: dict = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        # PyYAML resolves explicit tags to types that the schema has no use for, such as dates.
        event = self.peek_event()
        if tag := getattr(event, "tag", None):
            problem = f"tags such as '{tag}' are not used"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        # PyYAML silently takes the last of several equal keys.
        seen: set[str] = set()
        for key, _ in node.value:
            mark = key.start_mark
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key must be a word", problem_mark=mark)
            if key.value in seen:
                problem = f"the key '{key.value}' stands here a second time"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _construct_number(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    text = loader.construct_scalar(node).replace("_", "").lower()
    kind = int if node.tag.endswith(":int") else float
    return kind(text.replace(".inf", "inf").replace(".nan", "nan"))


for _kind, _pattern, _first in _SCALARS:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(_pattern), _first)
_Loader.add_constructor("tag:yaml.org,2002:int", _construct_number)
_Loader.add_constructor("tag:yaml.org,2002:float", _construct_number)


class _Dumper(yaml.SafeDumper):
    """Safe dumper that also quotes text which only YAML 1.2 reads as a number."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(_FLOAT), list("-+.0123456789"))


def parse_yaml(text: str, *, place: str) -> Any:
    """Parses one YAML document from `place`, a file or other origin. Raises ConfigError with line,
    column and the line itself, if it is not YAML or repeats a key."""
    try:
        return yaml.load(text, _Loader)  # noqa: S506 (a SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = error.problem or error.context or "not YAML"
        if mark is None:
            raise ConfigError(f"{place}: {problem}") from None
        lines = text.splitlines() or [""]
        # An error at the end of the text is marked behind its last line.
        line = lines[min(mark.line, len(lines) - 1)]
        raise ConfigError(
            f"{place}: line {mark.line + 1}, column {mark.column + 1}: {problem}\n"
            f"  {line}\n  {' ' * mark.column}^"
        ) from None
    except yaml.reader.ReaderError as error:
        problem = f"character {error.position} is not allowed in YAML: {error.reason}"
        raise ConfigError(f"{place}: {problem}") from None
    except RecursionError:
        raise ConfigError(f"{place}: nested too deeply; a few levels are enough here") from None


def parse_scalar(text: str) -> Any:
    """Parses one scalar of a command line, where `'8'` is text and `8` a number; text that YAML
    would split or trim stays unchanged."""
    try:
        node = yaml.compose(text, _Loader)
    except yaml.YAMLError:
        return text
    if not isinstance(node, yaml.ScalarNode):
        # A list or a mapping such as `key: value` is text here, and nothing at all is null.
        return text if text.strip() else None
    value = yaml.load(text, _Loader)  # noqa: S506 (a SafeLoader)
    # Text without quotes stays as the user typed it: YAML would cut it at a comment or trim it.
    return text if isinstance(value, str) and node.style is None else value


def dump_yaml(value: Any) -> str:
    """Writes plain values as YAML, keys in their order, floats in full precision."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
