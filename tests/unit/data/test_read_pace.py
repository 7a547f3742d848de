"""Rules of reading ahead: when a rank reads more at once, and when it gives memory back."""

from __future__ import annotations

from typing import Any

from cdrmix.config.resources import ResourcesConfig
from cdrmix.data.read_ahead import ReadFigures, ReadLimits
from cdrmix.data.read_pace import ReadPace, Window, first_limits

GIB = 2.0**30
BATCH_BYTES = 2**20


def window(
    *,
    waited: float,
    step_seconds: float = 0.1,
    read_seconds: float = 0.4,
    cpu_share: float = 0.0,
    memory: float = GIB,
    idle: float = 4,
    network: float = 0.0,
) -> Window:
    """Ten steps that waited for a share of their time; each batch took so long to read."""
    seconds = 10 * step_seconds / (1 - waited)
    figures = ReadFigures(10, 10 * read_seconds, cpu_share * 10 * read_seconds)
    return Window(10, seconds, waited * seconds, figures, memory, idle, network)


def pace(*, pins: bool = False, **given: Any) -> ReadPace:
    return ReadPace(ResourcesConfig.model_validate(given), pins=pins)


def test_threads_are_as_many_as_reads_take_steps_and_batches_go_with_them() -> None:
    change = pace().judge(window(waited=0.7), ReadLimits(2, 1), BATCH_BYTES)
    assert change is not None
    assert change.limits == ReadLimits(10, 5)  # 0.4 s a read, 0.1 s a step, a quarter to spare
    assert change.why == (
        "steps waited for data 70 % of the time, and the readers for disk or network 100 % of "
        "theirs"
    )


def test_steps_that_hardly_wait_change_nothing() -> None:
    assert pace().judge(window(waited=0.01), ReadLimits(2, 1), BATCH_BYTES) is None


def test_what_is_given_stays_as_it_is() -> None:
    fixed = pace(prefetch_batches=3, reader_threads=2)
    assert not fixed.adapts
    assert first_limits(ResourcesConfig(prefetch_batches=3, reader_threads=2)) == ReadLimits(3, 2)
    assert fixed.judge(window(waited=0.7), ReadLimits(3, 2), BATCH_BYTES) is None
    assert fixed.relieve(-GIB, ReadLimits(3, 2)) is None
    threads = pace(reader_threads=1).judge(window(waited=0.7), ReadLimits(2, 1), BATCH_BYTES)
    assert threads is not None and threads.limits == ReadLimits(4, 1)
    batches = pace(prefetch_batches=3).judge(window(waited=0.7), ReadLimits(3, 1), BATCH_BYTES)
    assert batches is not None and batches.limits == ReadLimits(3, 3)


def test_batches_take_a_quarter_of_the_memory_that_is_left_and_none_where_none_is() -> None:
    some = pace().judge(window(waited=0.7, memory=16 * BATCH_BYTES), ReadLimits(2, 1), BATCH_BYTES)
    assert some is not None and some.limits == ReadLimits(6, 5)
    assert pace().judge(window(waited=0.7, memory=-1), ReadLimits(2, 2), BATCH_BYTES) is None


def test_reading_that_is_work_takes_idle_cores_alone() -> None:
    busy = window(waited=0.7, cpu_share=0.9, idle=0.3)
    batches_alone = pace().judge(busy, ReadLimits(2, 1), BATCH_BYTES)
    assert batches_alone is not None and batches_alone.limits.threads == 1
    idle = window(waited=0.7, cpu_share=0.9, idle=2.5)
    change = pace().judge(idle, ReadLimits(2, 1), BATCH_BYTES)
    assert change is not None and change.limits.threads == 3


def test_a_growth_that_does_not_help_is_taken_back_and_not_tried_again_soon() -> None:
    judge = pace()
    slow = window(waited=0.7)
    first = judge.judge(slow, ReadLimits(2, 1), BATCH_BYTES)
    assert first is not None
    assert judge.judge(slow, first.limits, BATCH_BYTES) is None, "settles"
    back = judge.judge(slow, first.limits, BATCH_BYTES)
    assert back is not None and back.limits == ReadLimits(2, 1)
    assert "no faster" in back.why
    quiet = [judge.judge(slow, back.limits, BATCH_BYTES) for _ in range(64)]
    assert quiet == [None] * 64
    assert judge.judge(slow, back.limits, BATCH_BYTES) is not None


def test_a_full_memory_halves_the_batches_and_holds_growth_back() -> None:
    judge = pace()
    limits = ReadLimits(12, 6)
    sizes = []
    while (change := judge.relieve(-GIB, limits)) is not None:
        limits = change.limits
        sizes.append((limits.batches, limits.threads))
    assert sizes == [(6, 6), (3, 3), (1, 1)]
    held = [judge.judge(window(waited=0.7), limits, BATCH_BYTES) for _ in range(16)]
    assert held == [None] * 16
    assert judge.judge(window(waited=0.7), limits, BATCH_BYTES) is not None
    assert judge.relieve(1.0, limits) is None


def test_pinned_memory_is_given_back_last_and_taken_again_once_there_is_room() -> None:
    judge = pace(pins=True)
    limits = ReadLimits(2, 1, pins=True)
    change = judge.relieve(-GIB, limits)
    assert change is not None and change.limits == ReadLimits(1, 1, pins=False)
    assert judge.relieve(-GIB, change.limits) is None
    alone = judge.relieve(-GIB, ReadLimits(1, 1, pins=True))
    assert alone is not None and alone.limits == ReadLimits(1, 1, pins=False)
    short = [judge.judge(window(waited=0.0, memory=-1), change.limits, 1) for _ in range(20)]
    assert short == [None] * 20
    little = window(waited=0.0, memory=4 * BATCH_BYTES)
    assert judge.judge(little, change.limits, BATCH_BYTES) is None
    again = judge.judge(window(waited=0.0), change.limits, BATCH_BYTES)
    assert again is not None and again.limits == ReadLimits(1, 1, pins=True)
    assert again.why == "there is room again"
    assert judge.judge(window(waited=0.0), again.limits, BATCH_BYTES) is None


def test_a_full_link_is_told_and_gets_no_more_readers() -> None:
    judge = pace()
    limits = ReadLimits(4, 2)
    full = judge.judge(window(waited=0.7, network=0.93), limits, BATCH_BYTES)
    assert full is not None and full.limits == limits
    assert "its link is at 93 % of its speed" in full.why
    quiet = [judge.judge(window(waited=0.7, network=0.93), limits, BATCH_BYTES) for _ in range(64)]
    assert quiet == [None] * 64, "told once, for a while"
    grown = judge.judge(window(waited=0.7, network=0.5), limits, BATCH_BYTES)
    assert grown is not None and grown.limits.threads > 2
    idle = judge.judge(window(waited=0.0, network=0.99), limits, BATCH_BYTES)
    assert idle is None, "steps that do not wait"
