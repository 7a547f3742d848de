"""Orders in which a save makes things durable, and what it makes of a file system that fails."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cdrmix.checkpoint import files, folder, saver, store
from cdrmix.checkpoint.candidates import step_folders
from cdrmix.checkpoint.store import find_newest
from cdrmix.errors import InfrastructureError, StateError
from tests.checkpoints import on_ranks, save_checkpoint, whole


def save_step(root: Path, step: int, *, keep: int = 10) -> None:
    held = [whole("w", torch.full((8,), float(step)))]
    save_checkpoint(root, step, held, state={}, rank_state={}, keep=keep)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Every fsync and rename of this process in order: (kind, file name); of a rename, the new."""
    recorded: list[tuple[str, str]] = []
    fsync = os.fsync

    def synced(descriptor: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        recorded.append(("fsync", name.partition(".tmp-")[0]))
        fsync(descriptor)

    def renaming(kind: str, original: Callable) -> Callable:
        def renamed(source: Any, target: Any) -> None:
            recorded.append((kind, Path(target).name))
            original(source, target)

        return renamed

    monkeypatch.setattr(os, "fsync", synced)
    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, renaming(name, getattr(os, name)))
    return recorded


def test_a_save_is_durable_before_it_has_its_name_and_latest_comes_last(
    tmp_path: Path, calls: list[tuple[str, str]]
) -> None:
    root = tmp_path / "checkpoints"
    save_step(root, 1)
    calls.clear()
    save_step(root, 2, keep=1)
    named = calls.index(("rename", "2"))
    contents = ["rank-00000.safetensors", "rank-00000.json", "index.json", "state.json"]
    for name in contents:
        assert calls.index(("fsync", name)) < calls.index(("fsync", "manifest.json")), calls
    folder_synced = calls.index(("fsync", "2"))  # under its first name
    assert calls.index(("fsync", "manifest.json")) < folder_synced < named, calls
    latest = calls.index(("replace", "latest"))
    assert ("fsync", "checkpoints") in calls[named:latest], "its name, before latest tells it"
    assert ("fsync", "latest.tmp") in calls[named:latest]
    dropped = calls.index(("rename", "1.tmp-removed"))
    assert ("fsync", "checkpoints") in calls[latest:dropped], "latest, before an older one goes"


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries without waiting."""
    monkeypatch.setattr(files, "READ_RETRY_SECONDS", (0.0, 0.0, 0.0))
    monkeypatch.setattr(saver, "RETRY_SECONDS", (0.0, 0.0))


def failing(original: Callable, number: int, times: int, where: str) -> Callable:
    """`original`, which fails the first `times` that it is called for a path with `where` in it."""
    left = [times]

    def wrapped(path: Path, *args: Any, **kwargs: Any) -> Any:
        if where in str(path) and left[0]:
            left[0] -= 1
            raise OSError(number, os.strerror(number), str(path))
        return original(path, *args, **kwargs)

    return wrapped


@pytest.mark.usefixtures("pauses")
@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.EACCES])
def test_a_read_that_fails_for_a_while_costs_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    save_step(tmp_path, 1)
    save_step(tmp_path, 2)
    original = store.damage.__globals__["digest"]
    for times in (2, 99):
        monkeypatch.setattr(
            "cdrmix.checkpoint.files.digest",
            failing(original, number, times, "2/rank-00000.safetensors"),
        )
        if times == 2:
            found = find_newest(tmp_path)
            assert found is not None and (found.step, found.skipped) == (2, ())
            continue
        for outcome in on_ranks(2, lambda _: find_or_error(tmp_path)):
            assert isinstance(outcome, InfrastructureError), "not the older one, on any rank"
            assert outcome.exit_code == 69
            assert "rank-00000.safetensors: cannot be read for now" in str(outcome)


def find_or_error(root: Path) -> Any:
    try:
        return find_newest(root)
    except InfrastructureError as error:
        return error


@pytest.mark.usefixtures("pauses")
def test_a_copy_of_the_same_step_is_taken_where_one_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, copy = tmp_path / "run", tmp_path / "copy"
    for root in (run, copy):
        save_step(root, 1)
        save_step(root, 2)
    original = store.damage.__globals__["digest"]
    monkeypatch.setattr(
        "cdrmix.checkpoint.files.digest", failing(original, errno.EIO, 99, "run/2/")
    )
    found = find_newest(run, copy)
    assert found is not None and found.path == copy / "2"


@pytest.mark.usefixtures("pauses")
@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ESTALE, InfrastructureError), (errno.ENOSPC, StateError)]
)
def test_a_write_that_goes_on_failing_says_whether_waiting_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type
) -> None:
    save_step(tmp_path, 1)
    original = folder.write_share
    monkeypatch.setattr(folder, "write_share", failing(original, number, 99, "2.tmp-"))
    with pytest.raises(kind) as caught:
        save_step(tmp_path, 2)
    assert type(caught.value) is kind
    found = find_newest(tmp_path)
    assert found is not None and found.step == 1


@pytest.mark.usefixtures("pauses")
def test_two_failures_in_one_save_are_both_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_step(tmp_path, 1)
    for name in ("write_share", "publish"):
        original = getattr(folder, name)
        monkeypatch.setattr(folder, name, failing(original, errno.EIO, 1, "2.tmp-"))
    save_step(tmp_path, 2)
    found = find_newest(tmp_path)
    assert found is not None and (found.step, found.skipped) == (2, ())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2", "latest"]


def test_what_was_passed_over_is_renamed_and_outlives_later_saves(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_step(tmp_path, step)
    (tmp_path / "3" / "index.json").write_text("")
    found = find_newest(tmp_path)
    assert found is not None and found.step == 2
    store.set_aside(found, [tmp_path], newer=True)
    save_step(tmp_path, 3, keep=1)
    save_step(tmp_path, 4, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3.set-aside-1", "4", "latest"]


def test_a_copy_that_missed_a_save_does_not_bring_a_given_up_timeline_back(tmp_path: Path) -> None:
    run, copy = tmp_path / "run", tmp_path / "copy"
    for root in (run, copy):
        save_step(root, 5)
        save_step(root, 8)
    save_step(run, 6)  # a rollback behind step 5, whose first save the copy missed
    assert [path.name for path in step_folders(run)] == ["6", "5"]
    found = find_newest(run, copy)
    assert found is not None and found.path == run / "6"
    for path in (run / "6" / "manifest.json", copy / "8" / "manifest.json"):
        content = json.loads(path.read_text())  # of a version without numbers: by step, as it did
        del content["save"]
        path.write_text(json.dumps(content))
    for path in (run / "5" / "manifest.json", copy / "5" / "manifest.json"):
        path.unlink()
    found = find_newest(run, copy)
    assert found is not None and found.path == copy / "8"
