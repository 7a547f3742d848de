"""Who is to blame, and what the head and the watchdogs say to each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdrmix.cluster.outcome import Outcome, read_outcome, write_outcome
from cdrmix.cluster.verdict import Peer, accuse, threads
from cdrmix.cluster.wire import Clock, Inbox, encode

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
    found = []
    for rank, message in enumerate(told):
        found.append(Peer(rank, host=f"host-{rank // 2}"))
        found[-1].note({"step": 7, "phase": "training", "allowed_seconds": 20.0, **message})
    return found


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


def test_a_rank_that_has_left_is_no_suspect() -> None:
    (peer,) = peers({"left": 0})
    peer.unheard_seconds = 99.0
    assert not peer.is_suspect(DEADLINE_SECONDS)


def test_messages_arrive_whole_however_they_were_cut() -> None:
    sent = encode({"a": 1}) + encode({"b": [2]})
    inbox = Inbox()
    arrived = [message for byte in sent for message in inbox.take(bytes([byte]))]
    assert arrived == [{"a": 1}, {"b": [2]}]
    with pytest.raises(ValueError):
        Inbox().take(b"GET / HTTP/1.1\r\n")


def test_time_in_which_we_did_not_run_does_not_count() -> None:
    clock = Clock(1.0, now=0.0)
    assert [clock.advance(now) for now in (1.0, 2.5, 100.0, 101.0)] == [1.0, 1.5, 2.0, 1.0]


def test_an_outcome_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_outcome(tmp_path) is None
    write_outcome(tmp_path, Outcome(75, "stopped", 3))
    assert read_outcome(tmp_path) == Outcome(75, "stopped", 3)
    (tmp_path / "outcome.json").write_text('{"exit_code": 1')
    assert read_outcome(tmp_path) is None
