"""Values of programs as JSON: written in the sandbox, read outside of it.

Only built-in types cross, so that nothing of a program's own, such as an `__eq__` that is always
true, is there when values are compared. Lists and scalars are JSON's; the rest is an object with
"type" and "value".
"""

from __future__ import annotations

import sys
from typing import Any

_DEEPEST = 100
# Above it, JSON's decimal digits take time that grows with their square.
_LONGEST_DECIMAL_BITS = 1024
_FEW = 1000


class NotPlain(Exception):
    """A value is not made of built-in types, or is nested too deeply."""


def encode_value(value: Any, depth: int = 0) -> Any:
    """Encodes a value as what JSON has; subclasses become the built-in type.

    Raises:
        NotPlain: it cannot be.
    """
    if depth > _DEEPEST:
        raise NotPlain(f"nested more than {_DEEPEST} deep")
    if value is None or value is True or value is False:
        return value
    if isinstance(value, int):
        number = int(value)
        if number.bit_length() <= _LONGEST_DECIMAL_BITS:
            return number
        return {"type": "int", "value": hex(number)}
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, list):
        return [encode_value(item, depth + 1) for item in value]
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            items = [encode_value(item, depth + 1) for item in value]
            return {"type": kind.__name__, "value": items}
    if isinstance(value, dict):
        pairs = [
            [encode_value(key, depth + 1), encode_value(item, depth + 1)]
            for key, item in value.items()
        ]
        return {"type": "dict", "value": pairs}
    if isinstance(value, (bytes, bytearray)):
        return {"type": type(value).__name__, "value": value.hex()}
    if isinstance(value, complex):
        return {"type": "complex", "value": [value.real, value.imag]}
    numpy = sys.modules.get("numpy")
    if numpy and isinstance(value, (numpy.generic, numpy.ndarray)):
        return encode_value(value.tolist(), depth + 1)
    raise NotPlain(f"of the type {type(value).__name__}")


def decode_value(encoded: Any, depth: int = 0) -> Any:
    """Decodes what `encode_value` made. The text comes from a program that is not trusted.

    Raises:
        NotPlain: it is something else.
    """
    if depth > 2 * _DEEPEST:
        raise NotPlain("nested too deeply")
    if encoded is None or isinstance(encoded, (bool, int, float, str)):
        return encoded
    if isinstance(encoded, list):
        return [decode_value(item, depth + 1) for item in encoded]
    if not isinstance(encoded, dict) or encoded.keys() != {"type", "value"}:
        raise NotPlain("not an encoded value")
    try:
        return _decode_tagged(encoded["type"], encoded["value"], depth + 1)
    except (TypeError, ValueError) as error:
        raise NotPlain("not an encoded value") from error


def _decode_tagged(kind: str, value: Any, depth: int) -> Any:
    if kind == "int":
        return int(value, 16)
    if kind == "bytes":
        return bytes.fromhex(value)
    if kind == "bytearray":
        return bytearray.fromhex(value)
    if kind == "complex":
        real, imaginary = value
        return complex(real, imaginary)
    if kind == "dict":
        pairs = [(decode_value(key, depth), decode_value(item, depth)) for key, item in value]
        _refuse_collisions([key for key, _ in pairs])
        return dict(pairs)
    kinds = {"tuple": tuple, "set": set, "frozenset": frozenset}
    if kind not in kinds:
        raise NotPlain(f"of the type {kind!r}"[:80])
    items = [decode_value(item, depth) for item in value]
    if kind != "tuple":
        _refuse_collisions(items)
    return kinds[kind](items)


def _refuse_collisions(keys: list[Any]) -> None:
    """Refuses keys that were chosen to have one hash: a set of them takes hours to be made."""
    if len(keys) > _FEW and 2 * len({hash(key) for key in keys}) < len(keys):
        raise NotPlain("keys of one hash")
