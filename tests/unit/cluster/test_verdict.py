"""Who is to blame, and what the head and the watchdogs say to each other."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from cdrmix.cluster.messages import (
    MESSAGE_BYTES,
    Channel,
    Clock,
    Inbox,
    Outcome,
    encode,
    read_outcome,
    write_outcome,
)
from cdrmix.cluster.verdict import Peer, accuse, is_suspicious, threads

DEADLINE_SECONDS = 20.0
WAITS = """Thread 0x1 (most recent call first):
  File "/x/cdrmix/cluster/heartbeat.py", line 1 in _run
Thread 0x2 (most recent call first):
  File "/x/torch/distributed/distributed_c10d.py", line 9 in all_reduce
  File "/x/loop.py", line 5 in train
"""
READS = 'Thread 0x3 (most recent call first):\n  File "/x/loader.py", line 3 in next\n'


def peers(*told: dict[str, object]) -> list[Peer]:
    """Ranks in order, each with what its watchdog told."""
    ranks = []
    for rank, message in enumerate(told):
        ranks.append(Peer(rank, host=f"host-{rank // 2}"))
        ranks[-1].note({"step": 7, "phase": "training", "allowed_seconds": 20.0, **message})
    return ranks


def blamed(*told: dict[str, object]) -> str:
    return accuse(peers(*told), deadline_seconds=DEADLINE_SECONDS)


def test_a_death_comes_before_the_silence_that_follows_it() -> None:
    assert blamed({"quiet_seconds": 30}, {}, {"died": True}) == (
        "rank 2 on host-1 died at step 7 (training)"
    )


def test_a_host_that_cannot_be_reached_is_named_by_its_ranks() -> None:
    found = peers({}, {}, {}, {})
    for peer in found[2:]:
        peer.unheard_seconds = 21.0
    text = accuse(found, deadline_seconds=DEADLINE_SECONDS)
    assert text.count("on host-1 cannot be reached for 21 s, last seen at step 7 (training)") == 2
    assert "host-0" not in text


def test_a_stopped_process_is_told_from_one_that_hangs() -> None:
    silent = {"quiet_seconds": 25, "stack": "", "state": "T"}
    assert "its process is stopped (state T)" in blamed({}, silent)
    assert "(state D) does not answer" in blamed({}, {**silent, "state": "D"})


@pytest.mark.parametrize("guilty", [0, 1, 2])
def test_of_stuck_ranks_the_one_that_does_not_wait_is_guilty(guilty: int) -> None:
    told: list[dict[str, object]] = [{"stuck_seconds": 25, "stack": WAITS} for _ in range(3)]
    told[guilty] = {"stuck_seconds": 25, "stack": READS}
    text = blamed(*told)
    assert text.startswith(f"rank {guilty} on ")
    assert "line 3 in next" in text
    assert text.count("stuck for 25 s") == 1


def test_where_all_wait_in_the_same_place_nobody_is_singled_out() -> None:
    text = blamed(*({"stuck_seconds": 25, "stack": WAITS} for _ in range(4)))
    assert text.endswith("All 4 ranks wait for each other")


def test_a_stack_shows_the_main_thread_first_and_not_our_own() -> None:
    assert [block[1].split()[-1] for block in threads(WAITS)] == ["all_reduce"]
    assert [block[1].split()[-1] for block in threads(READS + WAITS)] == ["all_reduce", "next"]


@pytest.mark.parametrize("guilty", [(0, 1), (1, 3), (0, 2, 3), (0, 1, 2, 3)])
def test_several_ranks_that_do_not_wait_are_all_guilty(guilty: tuple[int, ...]) -> None:
    told: list[dict[str, object]] = [{"stuck_seconds": 25, "stack": WAITS} for _ in range(5)]
    for rank in guilty:
        told[rank] = {"stuck_seconds": 25 + rank, "stack": READS}
    text = blamed(*told)
    assert re.findall(r"rank (\d) on host-\d is stuck for (\d+) s", text) == [
        (str(rank), str(25 + rank)) for rank in guilty[:3]
    ]
    assert ("and 1 more" in text) == (len(guilty) > 3)
    assert "all_reduce" not in text
    assert "wait for each other" not in text


def test_ranks_that_wait_in_two_places_are_told_from_each_other_by_their_number() -> None:
    elsewhere = WAITS.replace("in all_reduce", "in broadcast")
    told = [{"stuck_seconds": 25, "stack": stack} for stack in (WAITS, elsewhere, WAITS, WAITS)]
    text = blamed(*told)
    assert text.startswith("rank 1 on host-0 is stuck")
    assert text.count("is stuck") == 1


def test_ranks_that_are_all_busy_in_one_place_do_not_wait_for_each_other() -> None:
    text = blamed(*({"stuck_seconds": 25, "stack": READS} for _ in range(2)))
    assert text.count("is stuck") == 2
    assert "wait for each other" not in text


def test_a_busy_rank_that_is_late_by_less_than_those_that_wait_for_it_is_guilty() -> None:
    waiting = {"stuck_seconds": 20.5, "stack": WAITS}
    text = blamed(waiting, {"stuck_seconds": 19.5, "stack": READS}, waiting)
    assert text.startswith("rank 1 on host-0 is stuck for 20 s")


def suspicious(*told: dict[str, object]) -> bool:
    return is_suspicious(peers(*told), deadline_seconds=DEADLINE_SECONDS)


def test_ranks_may_wait_as_long_as_the_one_that_they_wait_for_may_take() -> None:
    waiting = {"stuck_seconds": 25, "stack": WAITS}
    writing = {"stuck_seconds": 25, "phase": "logging", "allowed_seconds": 1800.0}
    assert suspicious(waiting, waiting)
    assert not suspicious(waiting, writing)
    assert suspicious(waiting, {**writing, "stuck_seconds": 1801})
    assert suspicious(waiting, {**writing, "left": 0}), "it is waited for no longer"


def test_a_rank_that_has_left_is_no_suspect() -> None:
    (peer,) = peers({"left": 0})
    peer.unheard_seconds = 99.0
    assert not is_suspicious([peer], deadline_seconds=DEADLINE_SECONDS)


@pytest.mark.parametrize(
    "report", [{"left": "0"}, {"step": None}, {"quiet_seconds": "9"}, {"stack": ["x"]}]
)
def test_a_report_of_a_wrong_type_changes_nothing(report: dict[str, object]) -> None:
    (peer,) = peers({})
    before = replace(peer)
    with pytest.raises(ValueError, match="of rank 0 is"):
        peer.note({"step": 9, **report})
    assert peer == before


def test_a_report_cannot_forge_a_line_of_the_log() -> None:
    stack = 'Thread 0x1 (x)\n2026-01-01 00:00:00 ERROR forged\x1b[2J\n  File "a"\u202e\n'
    (peer,) = peers({"stuck_seconds": 25, "phase": "a\nb", "stack": stack})
    peer.host = "evil\r\n2026 ERROR forged"
    text = accuse([peer], deadline_seconds=DEADLINE_SECONDS)
    assert re.search("[^\n -~]", text) is None
    assert all(line.startswith("  ") for line in text.split("\n")[1:])


def test_messages_arrive_whole_however_they_were_cut() -> None:
    sent = encode({"a": 1}) + encode({"b": [2]})
    inbox = Inbox()
    arrived = [message for byte in sent for message in inbox.take(bytes([byte]))]
    assert arrived == [{"a": 1}, {"b": [2]}]


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\n", b"[" * 100_000 + b"\n", b"[]\n", b"\xff\n", b"x" * 101]
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        Inbox(100 if data.startswith(b"x") else MESSAGE_BYTES).take(data)


def channels() -> tuple[Channel, Channel]:
    """Both sides of a connection."""
    head, caller = (
        Channel("token", head_nonce=b"1", caller_nonce=b"2", is_head=is_head)
        for is_head in (True, False)
    )
    return head, caller


def test_an_authenticated_line_counts_once_in_its_place_and_direction() -> None:
    head, caller = channels()
    first, second = (caller.encode({"step": step}) for step in (1, 2))
    order = head.encode({"end": True})
    with pytest.raises(ValueError, match="not the next one"):
        head.take(order)  # reflected, and of the number that is awaited
    assert head.take(first) == [{"step": 1}]
    forged = second.replace(b'"step": 2', b'"step": 3')
    for line in (first, forged, order, second[65:], b"\n", b"x" * 64 + second[64:]):
        with pytest.raises(ValueError, match="not the next one"):
            head.take(line)
    assert head.take(second) == [{"step": 2}]
    another = Channel("token", head_nonce=b"3", caller_nonce=b"2", is_head=True)
    with pytest.raises(ValueError, match="not the next one"):
        another.take(first)
    assert caller.take(order) == [{"end": True}]


def test_time_in_which_we_did_not_run_does_not_count() -> None:
    clock = Clock(1.0, now=0.0)
    assert [clock.advance(now) for now in (1.0, 2.5, 100.0, 101.0)] == [1.0, 1.5, 2.0, 1.0]


def test_an_outcome_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_outcome(tmp_path) is None
    write_outcome(tmp_path, Outcome(75, "stopped", 3))
    assert read_outcome(tmp_path) == Outcome(75, "stopped", 3)
    (tmp_path / "outcome.json").write_text('{"exit_code": 1')
    assert read_outcome(tmp_path) is None
