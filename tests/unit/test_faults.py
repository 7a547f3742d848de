"""The fault matrix names each fault once."""

from collections import Counter

from tests.faults import FAULTS


def test_no_fault_is_listed_twice() -> None:
    names = Counter(fault for fault, _, _ in FAULTS)
    tests = Counter((beginning, text) for _, beginning, text in FAULTS)
    assert [name for name, times in names.items() if times > 1] == []
    assert [test for test, times in tests.items() if times > 1] == []
