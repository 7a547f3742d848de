import json
import math
import sys
from collections import Counter, OrderedDict, namedtuple

import numpy as np
import pytest

from cdrmix.evaluation.sandbox.host import Answer, Case, equal_values
from cdrmix.evaluation.sandbox.judging import lines_of
from cdrmix.evaluation.sandbox.values import NotPlain, decode_value, encode_value

PLAIN = [
    None,
    True,
    0,
    -(2**70),
    2**20_000,
    0.1,
    math.inf,
    "text \udc80 \0",
    b"\x00\xff",
    bytearray(b"a"),
    1 + 2j,
    [],
    [1, [2, (3,)]],
    (),
    {1, "a", (2,)},
    frozenset({1}),
    {},
    {"a": 1, (1, 2): [3], None: {"type": "tuple", "value": []}},
]


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: type(value).__name__)
def test_plain_values_cross_unchanged(value):
    back = decode_value(json.loads(json.dumps(encode_value(value))))
    assert back == value
    assert type(back) is type(value)


def test_not_a_number_crosses():
    assert math.isnan(decode_value(json.loads(json.dumps(encode_value(math.nan)))))


def test_subclasses_become_the_built_in_type():
    point = namedtuple("point", "x y")
    values = [Counter("aab"), OrderedDict(a=1), point(1, 2), np.float64(0.5), np.arange(3)]
    assert [decode_value(encode_value(value)) for value in values] == [
        {"a": 2, "b": 1},
        {"a": 1},
        (1, 2),
        0.5,
        [0, 1, 2],
    ]


def test_what_is_not_plain_does_not_cross():
    nested: list = []
    nested.append(nested)
    for value in (object(), nested, range(3), iter([]), len, {"a": object()}):
        with pytest.raises(NotPlain):
            encode_value(value)


def test_keys_of_one_hash_are_refused_before_they_take_hours():
    prime = sys.hash_info.modulus
    numbers = [number * prime for number in range(1, 20_000)]
    for kind, value in (("set", numbers), ("dict", [[number, 0] for number in numbers])):
        with pytest.raises(NotPlain, match="keys of one hash"):
            decode_value({"type": kind, "value": value})
    assert len(decode_value(encode_value(set(range(-5000, 5000))))) == 10_000


@pytest.mark.parametrize(
    "text",
    [
        '{"type": "list", "value": []}',
        '{"type": ["x"], "value": []}',
        '{"type": "int", "value": "x"}',
        '{"type": "int", "value": 3}',
        '{"type": "dict", "value": [[1]]}',
        '{"type": "dict", "value": [[[], 1]]}',
        '{"type": "set", "value": [[1]]}',
        '{"type": "bytes", "value": "0"}',
        '{"type": "complex", "value": ["a", "b"]}',
        '{"type": "set", "value": 1}',
        '{"type": "set"}',
        '{"a": 1}',
        "[" * 300 + "]" * 300,
    ],
)
def test_hostile_text_is_not_plain(text: str):
    with pytest.raises(NotPlain):
        decode_value(json.loads(text))


def test_only_lines_with_the_nonce_are_read():
    report = 'no\nsecret{"kind": "done"}\nxsecret{"kind": "error"}\nsecret[1]\nsecret{\nsecret{}'
    assert lines_of(report, "secret") == [{"kind": "done"}]
    assert lines_of("secret" + "[" * 200_000 + "\n", "secret") == []


@pytest.mark.parametrize(
    ("value", "expected", "tolerance", "is_equal"),
    [
        (1, 1, 0, True),
        (1, 1.0, 0, True),
        (True, 1, 0, True),
        (1, "1", 0, False),
        ([1], (1,), 0, False),
        ([1, 2], [1, 2, 3], 0, False),
        ({1}, frozenset({1}), 0, True),
        (0.1 + 0.2, 0.3, 0, False),
        (0.1 + 0.2, 0.3, 1e-9, True),
        ([{"a": (0.1 + 0.2,)}], [{"a": (0.3,)}], 1e-9, True),
        ({"a": 1}, {"b": 1}, 0, False),
        (math.nan, math.nan, 0, True),
        (math.inf, 1.0, 1e-9, False),
        (10**400, 1.0, 1e-9, False),
        ("1.0", 1.0, 1e-9, False),
        (None, 0, 0, False),
        (None, None, 0, True),
        (b"a", "a", 0, False),
    ],
)
def test_equality_of_values(value, expected, tolerance: float, is_equal: bool):
    assert equal_values(value, expected, tolerance) is is_equal
    assert equal_values(expected, value, tolerance) is is_equal


def test_a_case_asks_for_a_value_or_an_exception():
    assert Case("f()", 1).is_right(Answer(1))
    assert not Case("f()", None).is_right(Answer(None, error="KeyError"))
    assert Case("f()", raises="KeyError").is_right(Answer(None, error="KeyError"))
    assert not Case("f()", raises="KeyError").is_right(Answer(None))
