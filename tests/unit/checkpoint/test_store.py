"""The checkpoint store on plain tensors: what is saved comes back, and damage is never taken."""

from __future__ import annotations

import errno
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from safetensors.torch import load_file

from cdrmix.checkpoint import folder, saver
from cdrmix.checkpoint.checkpoint_file import CheckpointFile
from cdrmix.checkpoint.fragments import Box, Fragment, Span
from cdrmix.checkpoint.host_memory import HostMemory
from cdrmix.checkpoint.saver import Saved, Saver
from cdrmix.checkpoint.store import FoundCheckpoint, find_newest
from cdrmix.errors import InfrastructureError, NoUsableStateError, StateError
from tests.checkpoints import on_ranks, save_checkpoint, whole


def save_steps(root: Path, *steps: int, keep: int = 10) -> None:
    for step in steps:
        weights = torch.full((64,), float(step))
        save_checkpoint(root, step, [whole("w", weights)], state={}, rank_state={}, keep=keep)


def names_in(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def found_in(path: Path) -> FoundCheckpoint:
    found = find_newest(path)
    assert found is not None
    return found


def flip_byte(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_saved_tensors_and_states_come_back(tmp_path: Path) -> None:
    tensors = {
        "weight": torch.randn(5, 7),
        "half": torch.randn(3, 3).to(torch.bfloat16),
        "mask": torch.tensor([True, False, True]),
        "count": torch.tensor(41),
    }
    state = {"loader": {"samples_consumed": 12}, "config": {"name": "tiny"}}
    held = [whole(name, tensor) for name, tensor in tensors.items()]
    saved = save_checkpoint(tmp_path, 3, held, state=state, rank_state={"seed": 0.1}, keep=2)
    assert saved.path == tmp_path / "3"
    assert saved.bytes == sum(path.stat().st_size for path in saved.path.glob("rank-*"))
    with CheckpointFile(found_in(tmp_path).path) as reader:
        for name, tensor in tensors.items():
            assert torch.equal(reader.full(name), tensor)
            assert reader.full(name).dtype == tensor.dtype
        assert reader.state == {**state, "step": 3, "world_size": 1}
        assert reader.rank_state(0) == {"seed": 0.1}
        assert reader.rank_state(1) is None
    assert (tmp_path / "latest").read_text() == "3\n"


def test_tensor_files_are_plain_safetensors(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(9), "b": torch.zeros(0), "c": torch.arange(3, dtype=torch.int8)}
    save_checkpoint(
        tmp_path,
        1,
        [whole(name, tensor) for name, tensor in tensors.items()],
        state={},
        rank_state={},
        keep=1,
    )
    loaded = load_file(tmp_path / "1" / "rank-00000.safetensors")
    assert loaded.keys() == {"param/a", "param/b", "param/c"}
    assert all(torch.equal(loaded[f"param/{name}"], tensors[name]) for name in tensors)
    assert {path.suffix for path in (tmp_path / "1").iterdir()} == {".json", ".safetensors"}


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "altered weight": (
        lambda folder: flip_byte(folder / "rank-00000.safetensors", -3),
        "rank-00000.safetensors: its content has changed",
    ),
    "altered index": (
        lambda folder: flip_byte(folder / "index.json", 40),
        "index.json: its content has changed",
    ),
    "truncated": (
        lambda folder: (folder / "rank-00000.safetensors").write_bytes(b"short"),
        r"rank-00000.safetensors: 5 bytes, \d+ were written",
    ),
    "missing file": (
        lambda folder: (folder / "rank-00000.json").unlink(),
        "rank-00000.json: No such file",
    ),
    "missing manifest": (
        lambda folder: (folder / "manifest.json").unlink(),
        "manifest.json: No such file",
    ),
    "garbled manifest": (
        lambda folder: (folder / "manifest.json").write_text('{"files": [1]'),
        "manifest.json: not a manifest",
    ),
    "manifest of another kind": (
        lambda folder: (folder / "manifest.json").write_text("[]"),
        "manifest.json: not a manifest",
    ),
    "manifest that lists nothing": (
        lambda folder: (folder / "manifest.json").write_text('{"format": 1, "files": {}}'),
        "it does not list index.json",
    ),
    "manifest of a later format": (
        lambda folder: (folder / "manifest.json").write_text('{"format": 99, "files": {}}'),
        "format 99, this version reads 1",
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_checkpoint_is_skipped_with_its_reason(tmp_path: Path, what: str) -> None:
    save_steps(tmp_path, 10, 20)
    harm, reason = DAMAGE[what]
    harm(tmp_path / "20")
    for found in on_ranks(3, lambda _: find_newest(tmp_path)):
        assert (found.path, found.step) == (tmp_path / "10", 10)
        ((name, why),) = found.skipped
        assert name == "20"
        assert pytest.raises(AssertionError, match=reason).matches(AssertionError(why))


@pytest.mark.parametrize("latest", [None, "", "999\n", "ten", "10\n", "\x00\xff"])
def test_what_verifies_counts_whatever_latest_says(tmp_path: Path, latest: str | None) -> None:
    save_steps(tmp_path, 10, 20)
    (tmp_path / "latest").unlink()
    if latest is not None:
        (tmp_path / "latest").write_text(latest)
    assert found_in(tmp_path).step == 20


def test_all_checkpoints_damaged_is_no_usable_state(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    for step in "12":
        (tmp_path / step / "state.json").unlink()
    with pytest.raises(NoUsableStateError, match=r"2: state.json: No such.*\n.*1: state") as caught:
        find_newest(tmp_path)
    assert caught.value.exit_code == 3


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert find_newest(tmp_path / "nowhere") is None
    assert find_newest(tmp_path) is None
    (tmp_path / "7.tmp-1234abcd").mkdir()
    assert find_newest(tmp_path) is None


def test_a_run_its_checkpoints_folder_or_one_checkpoint_can_be_named(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    save_steps(root, 10, 20)
    shutil.copytree(root / "10", tmp_path / "kept")
    assert found_in(tmp_path).path == root / "20"
    assert found_in(root).path == root / "20"
    assert found_in(root / "10").path == root / "10"
    assert found_in(tmp_path / "kept").step == 10
    (root / "10" / "manifest.json").unlink()
    with pytest.raises(NoUsableStateError):
        find_newest(root / "10")


def test_the_newest_keep_stay(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3, 10, keep=2)
    assert names_in(tmp_path) == ["10", "3", "latest"]


def test_a_truncated_checkpoint_does_not_push_a_whole_one_out(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, keep=2)
    (tmp_path / "2" / "index.json").write_text("")
    save_steps(tmp_path, 3, keep=2)
    assert names_in(tmp_path) == ["1", "2", "3", "latest"]
    save_steps(tmp_path, 4, keep=2)
    assert names_in(tmp_path) == ["3", "4", "latest"]


def test_going_back_drops_the_newer_ones_once_the_new_one_is_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("cdrmix"), "propagate", True)
    save_steps(tmp_path, 10, 20, 30)
    save_steps(tmp_path, 15)
    assert names_in(tmp_path) == ["10", "15", "latest"]
    assert found_in(tmp_path).step == 15
    assert "30: removed, because the run has gone back to step 15" in caplog.text


def test_the_same_step_again_replaces_the_checkpoint(tmp_path: Path) -> None:
    save_steps(tmp_path, 5)
    (tmp_path / "5" / "stray").write_text("old")
    save_checkpoint(tmp_path, 5, [whole("w", torch.ones(3))], state={}, rank_state={}, keep=1)
    assert names_in(tmp_path) == ["5", "latest"]
    assert not (tmp_path / "5" / "stray").exists()
    with CheckpointFile(tmp_path / "5") as reader:
        assert torch.equal(reader.full("w"), torch.ones(3))


def test_a_checkpoint_that_was_being_replaced_at_a_kill_is_found_and_put_back(
    tmp_path: Path,
) -> None:
    save_steps(tmp_path, 4, 5)
    (tmp_path / "5").rename(tmp_path / "5.replaced")
    assert found_in(tmp_path).step == 5
    save_steps(tmp_path, 6)
    assert names_in(tmp_path) == ["4", "5", "6", "latest"]


def test_leftovers_of_dead_saves_go_at_the_next_one(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    shutil.copytree(tmp_path / "1", tmp_path / "2.tmp-0a1b2c3d")
    shutil.copytree(tmp_path / "1", tmp_path / "0.tmp-removed")
    save_steps(tmp_path, 3)
    assert names_in(tmp_path) == ["1", "3", "latest"]


def test_the_newest_good_one_of_a_folder_and_its_copy_is_found(tmp_path: Path) -> None:
    run, copy = tmp_path / "run" / "checkpoints", tmp_path / "copy"
    save_steps(run, 10, 20, 30)
    save_steps(copy, 10, 20, 30)

    def found() -> Path:
        (first, second) = on_ranks(2, lambda _: find_newest(run.parent, copy))
        assert first == second
        return first.path

    assert found() == run / "30"
    flip_byte(run / "30" / "rank-00000.safetensors", -3)
    assert found() == copy / "30"
    (copy / "30" / "index.json").unlink()
    assert found() == run / "20"
    skipped = find_newest(run.parent, copy)
    assert skipped is not None
    assert [name for name, _ in skipped.skipped] == ["30", str(copy / "30")]
    shutil.rmtree(run)
    assert found() == copy / "20"


def test_old_checkpoints_that_cannot_be_dropped_leave_the_save_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unlistable(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error", str(tmp_path))

    monkeypatch.setattr(logging.getLogger("cdrmix"), "propagate", True)
    monkeypatch.setattr(folder, "drop_others", unlistable)
    outcomes = on_ranks(2, lambda rank: save_halves(tmp_path, rank))
    assert [type(outcome) for outcome in outcomes] == [Saved, Saved]
    assert "old checkpoints cannot be dropped" in caplog.text
    assert found_in(tmp_path).step == 1


def test_a_fault_of_ours_in_the_folders_end_reaches_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(folder, "drop_others", broken)
    outcomes = on_ranks(2, lambda rank: save_halves(tmp_path, rank))
    assert [type(outcome) for outcome in outcomes] == [ZeroDivisionError, StateError]


def test_a_save_tells_how_long_training_waited_for_its_copy_and_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("cdrmix"), "propagate", True)
    caplog.set_level(logging.INFO)
    original = folder.write_share

    def slowly(*args: Any) -> None:
        time.sleep(0.3)
        original(*args)

    monkeypatch.setattr(folder, "write_share", slowly)
    writing = Saver([tmp_path], keep=1, background=True)
    writing.start(1, [whole("w", torch.ones(8))], state={}, rank_state={})
    copied = writing.stall_seconds
    assert 0 < copied < 0.3
    assert writing.votes() == [1.0, 0.0]
    assert (writing.step, writing.saved_step) == (1, None)
    writing.wait()
    writing.close()
    assert writing.saved_step == 1
    (told,) = (record.args for record in caplog.records if record.message.startswith("saved "))
    assert copied < told[-1] <= writing.stall_seconds
    assert told[-1] > 0.2


def test_the_state_may_change_once_the_copy_was_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_copy, weights = threading.Event(), torch.ones(8)
    copy = HostMemory._copy

    def slowly(self: HostMemory, tensors: Sequence[torch.Tensor], *, pin: bool) -> Any:
        assert may_copy.wait(10)
        return copy(self, tensors, pin=pin)

    monkeypatch.setattr(HostMemory, "_copy", slowly)
    writing = Saver([tmp_path], keep=1, background=True)
    writing.start(1, [whole("w", weights)], state={}, rank_state={})
    assert writing.is_copying
    started = writing.stall_seconds
    threading.Timer(0.1, may_copy.set).start()
    writing.wait_for_copy()
    assert not writing.is_copying
    assert writing.stall_seconds - started > 0.05, "that is a part of the stall"
    weights.zero_()
    writing.wait()
    writing.close()
    with CheckpointFile(tmp_path / "1") as reader:
        assert reader.full("w").tolist() == [1.0] * 8


def test_a_copy_that_fails_is_told_once_the_save_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object, pin: bool) -> NoReturn:
        raise MemoryError("no room for the copy")

    monkeypatch.setattr(HostMemory, "_copy", failing)
    writing = Saver([tmp_path], keep=1, background=True)
    writing.start(1, [whole("w", torch.ones(8))], state={}, rank_state={})
    writing.wait_for_copy()
    with pytest.raises(MemoryError, match="no room for the copy"):
        writing.wait()
    writing.close()
    assert find_newest(tmp_path) is None


def test_a_rank_that_fails_does_not_wait_for_what_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = threading.Event()
    monkeypatch.setattr(folder, "write_share", lambda *_: written.wait(10))
    writing = Saver([tmp_path], keep=1, background=True)
    writing.start(1, [whole("w", torch.ones(8))], state={}, rank_state={})
    began = time.monotonic()
    writing.close(waits=False)
    assert time.monotonic() - began < 5
    written.set()


def save_halves(root: Path, rank: int) -> Saved:
    half = Span(Box.whole((8,)), 4 * rank, 4)
    held = [Fragment("w", "param", (8,), half, torch.ones(4))]
    return save_checkpoint(root, 1, held, state={}, rank_state={}, keep=2)


def failing_after_one(rank: int, error: Exception) -> Iterator[Fragment]:
    half = Span(Box.whole((8,)), 4 * rank, 4)
    yield Fragment("w", "param", (8,), half, torch.ones(4))
    if rank == 1:
        raise error


def test_one_failing_rank_makes_all_raise_the_same_and_leaves_the_old_state(
    tmp_path: Path,
) -> None:
    save_steps(tmp_path, 1)
    error = OSError(errno.EIO, "Input/output error", "/data/x")
    outcomes = on_ranks(
        2,
        lambda rank: save_checkpoint(
            tmp_path,
            2,
            failing_after_one(rank, error),
            state={},
            rank_state={},
            keep=1,
        ),
    )
    assert [type(outcome) for outcome in outcomes] == [InfrastructureError, InfrastructureError]
    assert str(outcomes[0]) == str(outcomes[1])
    assert "step 2 was not saved: rank 1: /data/x: Input/output error" in str(outcomes[0])
    assert names_in(tmp_path) == ["1", "latest"]
    assert (tmp_path / "latest").read_text() == "1\n"


def test_a_fault_of_ours_keeps_its_type_where_it_happened_and_stops_the_others(
    tmp_path: Path,
) -> None:
    outcomes = on_ranks(
        2,
        lambda rank: save_checkpoint(
            tmp_path,
            2,
            failing_after_one(rank, ZeroDivisionError("ours")),
            state={},
            rank_state={},
            keep=1,
        ),
    )
    assert [type(outcome) for outcome in outcomes] == [StateError, ZeroDivisionError]
    assert names_in(tmp_path) == []


def test_an_unwritable_place_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver, "RETRY_SECONDS", (0.0,))
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match="rank 0: .*file/checkpoints: Not a directory"):
        save_steps(tmp_path / "file" / "checkpoints", 1)


def test_only_checkpoints_before_a_step_are_gone_back_to(tmp_path: Path) -> None:
    run, copy = tmp_path / "run" / "checkpoints", tmp_path / "copy"
    save_steps(run, 10, 20, 30)
    save_steps(copy, 20)

    def newest_before(step: int) -> int | None:
        found = find_newest(run.parent, copy, before=step)
        return None if found is None else found.step

    assert [newest_before(step) for step in (31, 30, 21, 20, 11, 10)] == [30, 20, 20, 10, 10, None]
    flip_byte(run / "20" / "rank-00000.safetensors", -3)
    found = find_newest(run.parent, copy, before=30)
    assert found is not None and found.path == copy / "20"
