from __future__ import annotations

import mmap

import pytest
import torch

from cdrmix.monitoring import peak_memory
from cdrmix.monitoring.peak_memory import BETWEEN, PeakMemory, take_peak_bytes
from cdrmix.runtime.phases import phase, watched_by

on_cpu = pytest.mark.skipif(torch.cuda.is_initialized(), reason="the CUDA allocator's peak counts")
MIB = 2**20


def spike(mib: int) -> None:
    if mib == 0:
        return
    # pages of its own: malloc may give memory that is resident already
    with mmap.mmap(-1, mib * MIB) as held:
        for page in range(0, len(held), mmap.PAGESIZE):
            held[page] = 1


@on_cpu
def test_a_peak_is_in_bytes_and_that_since_the_last_call() -> None:
    take_peak_bytes()
    before = take_peak_bytes()
    peaks = []
    for mib in (128, 64, 0):  # the second spike lies below the first
        spike(mib)
        peaks.append(take_peak_bytes() - before)
    assert peaks == pytest.approx([2**27, 2**26, 0], abs=2**24)


@on_cpu
def test_each_phase_has_the_peak_of_its_own_time() -> None:
    memory = PeakMemory()
    memory.take()
    with watched_by(memory.watch):
        with phase("forward"):
            spike(64)
        with phase("optimizer"):
            spike(32)
            with phase("checkpoint"):  # a wait inside of the optimizer
                spike(128)
        usual = take_peak_bytes()
    with phase("data"):  # nobody watches any more
        spike(256)
        take_peak_bytes()
    above = {name: peak - usual for name, peak in memory.by_phase().items()}
    assert above.pop(BETWEEN) < 16 * MIB
    expected = {"forward": 64 * MIB, "optimizer": 32 * MIB, "checkpoint": 128 * MIB}
    assert above == pytest.approx(expected, abs=16 * MIB)
    assert memory.take() - usual == pytest.approx(128 * MIB, abs=16 * MIB)


def told(
    peaks: dict[int, dict[str, int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> list[str]:
    """Warnings of 40 steps of 100 MiB, but for those with other peaks (MiB) by phase."""
    memory = PeakMemory()
    present = 0
    monkeypatch.setattr(peak_memory, "take_peak_bytes", lambda: present)
    caplog.clear()
    for step in range(1, 41):
        for name, mib in ({"forward": 100} | peaks.get(step, {})).items():
            with memory.watch(name):
                present = mib * MIB
            present = 0
        memory.step_done(step)
    return [record.getMessage() for record in caplog.records]


def test_a_step_above_the_ones_before_is_told_of_with_its_phase(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert told({}, monkeypatch, caplog) == []
    assert told({20: {"backward": 124}}, monkeypatch, caplog) == []
    lines = told({20: {"backward": 300}, 30: {"data": 160, "forward": 80}}, monkeypatch, caplog)
    assert lines == [
        "warning: memory of step 20: 0.29 GiB in the phase backward, 3.00 times the median of the "
        "steps before it",
        "warning: memory of step 30: 0.16 GiB in the phase data, 1.60 times the median of the "
        "steps before it",
    ]
    (line,) = told({20: {BETWEEN: 300}}, monkeypatch, caplog)
    assert "0.29 GiB between two phases, 3.00 times" in line


def test_the_same_spike_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    again = {step: {"evaluation": 200} for step in (15, 20, 25, 30)} | {35: {"evaluation": 230}}
    lines = told(again, monkeypatch, caplog)
    assert [line.split(":")[1] for line in lines] == [" memory of step 15", " memory of step 35"]


def test_the_first_steps_have_nothing_to_stand_out_from(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert told({5: {"forward": 900}}, monkeypatch, caplog) == []
