"""Checkpoints in tiers: what a fault leaves in one of them, a run goes on from in another."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cdrmix.checkpoint import folder, host_tiers, saver
from cdrmix.checkpoint.files import damage
from cdrmix.monitoring.metrics import deterministic_part
from cdrmix.monitoring.sinks import read_metrics
from tests.equal_runs import assert_equal_runs
from tests.harness import RanksFailed, run_ranks
from tests.small_run import STEPS, arguments, before_step, overrides, refused, start

pytestmark = pytest.mark.usefixtures("leaves_nothing")

# Saves end before training goes on, so that a kill always finds the same ones.
IN_FRONT = "checkpoint.background=false"


def with_tiers(place: Path, *more: str) -> list[str]:
    """Flags of a run with all tiers below a folder: memory each step, disk each second one."""
    return overrides(
        [
            f"checkpoint.tiers.memory={{folder: {place}/memory, every_steps: 1, keep: 4}}",
            f"checkpoint.tiers.local={{path: {place}/local, every_steps: 2}}",
            f"checkpoint.tiers.archive={{path: {place}/archive, answer_seconds: 20}}",
            *more,
        ]
    )


@pytest.fixture(scope="module")
def uninterrupted(
    small_corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], Path]:
    """Run directory of a run on so many ranks, without tiers."""
    done: dict[int, Path] = {}

    def get(world: int) -> Path:
        if world not in done:
            done[world] = tmp_path_factory.mktemp("plain") / "run"
            argv = arguments(small_corpus, done[world])
            assert run_ranks(start, world, argv) == [0] * world
        return done[world]

    return get


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def be_killed(argv: list[str], archived: str) -> int:
    """Be killed behind step 5, when a file of the archive is there."""

    def wait_and_die() -> None:
        await_file(Path(archived))
        die()

    before_step(5, wait_and_die)
    return start(argv)


def await_file(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} is not there"
        time.sleep(0.01)


def on_hosts(argv: list[str]) -> int:
    """Each rank on a host of its own, with memory and disk that no other one sees."""
    rank = os.environ["RANK"]
    tiers = host_tiers.host_tiers

    def of_host(*args: Any) -> tuple[host_tiers.HostTier, ...]:
        return tuple(
            replace(each, folder=each.folder.parent / f"host{rank}" / each.folder.name)
            for each in tiers(*args)
        )

    from cdrmix.engines import tiers_of_run

    host_tiers.host_name = lambda: f"host{rank}"
    tiers_of_run.host_tiers = of_host
    return start(argv)


class Killed(NamedTuple):
    """A run on one rank that was killed behind step 5, as it was then each time that it is asked
    for: step 5 is in memory, step 4 on the disk, step 3 in the run directory and the archive."""

    place: Path
    argv: list[str]

    @property
    def run_dir(self) -> Path:
        return self.place / "run"

    def tier(self, name: str) -> Path:
        (of_run,) = (self.place / name).iterdir()
        return of_run


@pytest.fixture(scope="module")
def killed_once(small_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Killed:
    place = tmp_path_factory.mktemp("killed") / "place"
    argv = [*arguments(small_corpus, place / "run"), *with_tiers(place, IN_FRONT)]
    with pytest.raises(RanksFailed, match="SIGKILL"):
        run_ranks(be_killed, 1, argv, str(place / "archive/run/3/manifest.json"))
    shutil.copytree(place, place.with_name("copy"))
    return Killed(place, argv)


@pytest.fixture
def killed(killed_once: Killed) -> Killed:
    shutil.rmtree(killed_once.place)
    shutil.copytree(killed_once.place.with_name("copy"), killed_once.place)
    return killed_once


def alter(checkpoint: Path) -> None:
    with (checkpoint / "rank-00000.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 255]))


def nothing(run: Killed) -> None:
    pass


def lose_memory(run: Killed) -> None:
    shutil.rmtree(run.place / "memory")


def lose_the_host(run: Killed) -> None:
    lose_memory(run)
    shutil.rmtree(run.place / "local")


def alter_memory(run: Killed) -> None:
    alter(run.tier("memory") / "5")
    for step in "234":
        shutil.rmtree(run.tier("memory") / step)


def truncate_manifest(run: Killed) -> None:
    manifest = run.tier("memory") / "5" / "manifest.json"
    manifest.write_text(manifest.read_text()[:100])


def memory_of_somebody_else(run: Killed) -> None:
    memory = run.tier("memory")
    memory.rename(run.place / "elsewhere")
    memory.symlink_to(run.place / "elsewhere")


def outdate_memory(run: Killed) -> None:
    for step in "345":
        shutil.rmtree(run.tier("memory") / step)
    shutil.rmtree(run.place / "local")


def lose_all_but_the_archive(run: Killed) -> None:
    lose_the_host(run)
    shutil.rmtree(run.run_dir / "checkpoints" / "3")


def damage_all_but_the_archive(run: Killed) -> None:
    lose_the_host(run)
    alter(run.run_dir / "checkpoints" / "3")


def half_archived(run: Killed) -> None:
    """An upload of a later step that did not come to its end."""
    half = run.place / "archive" / "run" / "4"
    shutil.copytree(run.tier("local") / "4", half)
    (half / "manifest.json").unlink()
    damage_all_but_the_archive(run)


FAULTS = [
    (nothing, "memory/{run}/5", ""),
    (lose_memory, "local/{run}/4", "memory: has no checkpoint of this run"),
    (lose_the_host, "run/checkpoints/3", "local: has no checkpoint of this run"),
    (alter_memory, "local/{run}/4", "5: rank-00000.safetensors: its content has changed"),
    (truncate_manifest, "memory/{run}/4", "5: manifest.json: not a manifest"),
    (memory_of_somebody_else, "local/{run}/4", "is not a folder of this user"),
    (outdate_memory, "run/checkpoints/3", ""),
    (lose_all_but_the_archive, "run/checkpoints/3", "fetched checkpoint 3 of"),
    (damage_all_but_the_archive, "run/checkpoints/3", "fetched checkpoint 3 of"),
    (half_archived, "run/checkpoints/3", "fetched checkpoint 3 of"),
]


@pytest.mark.parametrize(("fault", "place", "told"), FAULTS, ids=[f[0].__name__ for f in FAULTS])
def test_a_killed_run_goes_on_from_the_nearest_good_checkpoint(
    fault: Callable[[Killed], None],
    place: str,
    told: str,
    killed: Killed,
    uninterrupted: Callable[[int], Path],
) -> None:
    name = killed.tier("memory").name
    fault(killed)
    assert run_ranks(start, 1, [*killed.argv, "--resume", "auto"]) == [0]
    log = (killed.run_dir / "train.log").read_text()
    assert f"resumed from {killed.place}/{place.format(run=name)}" in log
    assert told in log
    assert_equal_runs(killed.run_dir, uninterrupted(1), steps=STEPS)
    assert not (killed.place / "memory" / name).is_dir() or fault is memory_of_somebody_else
    archived = killed.place / "archive" / "run"
    assert damage(archived / str(STEPS)) == []


def failing(function: str, below: Path, *, steps: tuple[int, ...], times: int, error: int) -> None:
    """Have a function of checkpoint folders fail for some steps in a tier."""
    saver.RETRY_SECONDS = ()
    original = getattr(folder, function)
    left = iter(range(times))

    def wrapped(temporary: Path, *args: Any, **kwargs: Any) -> Any:
        is_hit = temporary.is_relative_to(below) and int(temporary.name.partition(".")[0]) in steps
        if is_hit and next(left, None) is not None:
            raise OSError(error, os.strerror(error), str(temporary))
        return original(temporary, *args, **kwargs)

    setattr(folder, function, wrapped)


def with_full_memory(argv: list[str], place: str) -> int:
    """Rank 1 cannot write to memory from step 4 on, and rank 0 cannot name step 2 on its disk."""
    memory, local = Path(place) / "memory", Path(place) / "local"
    if os.environ["RANK"] == "1":
        failing("write_share", memory, steps=(4, 5, 6, 7, 8), times=9, error=errno.ENOSPC)
    else:
        failing("publish", local, steps=(2,), times=1, error=errno.EIO)
    return start(argv)


def test_a_tier_that_cannot_be_written_is_told_and_costs_nothing_else(
    small_corpus: Path, tmp_path: Path, run_dir: Path, uninterrupted: Callable[[int], Path]
) -> None:
    argv = [*arguments(small_corpus, run_dir), *with_tiers(tmp_path, IN_FRONT)]
    assert run_ranks(with_full_memory, 2, argv, str(tmp_path)) == [0, 0]
    assert_equal_runs(run_dir, uninterrupted(2), steps=STEPS)
    log = (run_dir / "train.log").read_text()
    for step in (4, 5, 6, 7, 8):
        lack = f"checkpoint.tiers.memory: has no checkpoint of step {step}: rank 1: "
        assert f"warning: {lack}" in log
    assert "checkpoint.tiers.local: has no checkpoint of step 2: rank 0: " in log
    tiers = json.loads((run_dir / "metrics.json").read_text())["checkpoints"]["tiers"]
    assert tiers["memory"] == {"steps": [3, 2, 1], "failed": 5}
    assert tiers["local"] == {"steps": [8], "failed": 1}
    assert tiers["archive"]["steps"][0] == STEPS


def killed_in(argv: list[str], function: str, below: str) -> int:
    """Be killed at a function of checkpoint folders for step 5 in a tier."""
    original = getattr(folder, function)

    def wrapped(temporary: Path, *args: Any, **kwargs: Any) -> Any:
        if temporary.is_relative_to(below) and temporary.name.startswith("5."):
            die()
        return original(temporary, *args, **kwargs)

    setattr(folder, function, wrapped)
    return start(argv)


@pytest.mark.parametrize("function", ["prepare", "write_account", "publish"])
@pytest.mark.parametrize("tier", ["memory", "local"])
def test_a_kill_in_a_save_to_a_tier_leaves_the_one_before(
    tier: str,
    function: str,
    small_corpus: Path,
    tmp_path: Path,
    run_dir: Path,
    uninterrupted: Callable[[int], Path],
) -> None:
    each_step = f"checkpoint.tiers.local={{path: {tmp_path}/local, every_steps: 1}}"
    argv = [*arguments(small_corpus, run_dir), *with_tiers(tmp_path, IN_FRONT, each_step)]
    with pytest.raises(RanksFailed, match="SIGKILL"):
        run_ranks(killed_in, 1, argv, function, str(tmp_path / tier))
    (of_run,) = (tmp_path / tier).iterdir()
    if tier == "local":
        shutil.rmtree(tmp_path / "memory")  # which would be nearer
    assert run_ranks(start, 1, [*argv, "--resume", "auto"]) == [0]
    log = (run_dir / "train.log").read_text()
    assert f"resumed from {of_run}/4" in log
    assert "skipped" not in log
    assert_equal_runs(run_dir, uninterrupted(1), steps=STEPS)


def killed_in_an_upload(argv: list[str]) -> int:
    """Be killed when the second file of step 6 goes to the archive."""
    from cdrmix.checkpoint import archive

    put = archive.Archive._put
    files: list[str] = []

    def put_or_die(self: archive.Archive, source: Path, target: str, *more: Any) -> None:
        if source.parent.name == "6":
            files.append(target)
        if len(files) == 2:
            die()
        put(self, source, target, *more)

    archive.Archive._put = put_or_die
    before_step(7, lambda: time.sleep(60))  # the upload is a thread's
    return start(argv)


def test_a_kill_in_an_upload_leaves_the_one_before(
    small_corpus: Path, tmp_path: Path, run_dir: Path, uninterrupted: Callable[[int], Path]
) -> None:
    argv = [*arguments(small_corpus, run_dir), *with_tiers(tmp_path, IN_FRONT)]
    with pytest.raises(RanksFailed, match="SIGKILL"):
        run_ranks(killed_in_an_upload, 1, argv)
    (archived,) = (tmp_path / "archive").iterdir()
    assert (archived / "6").is_dir() and not (archived / "6" / "manifest.json").exists()
    for tier in ("memory", "local"):
        shutil.rmtree(tmp_path / tier)
    for step in ("3", "6"):
        shutil.rmtree(run_dir / "checkpoints" / step)
    assert run_ranks(start, 1, [*argv, "--resume", "auto"]) == [0]
    assert "fetched checkpoint 3 of" in (run_dir / "train.log").read_text()
    assert_equal_runs(run_dir, uninterrupted(1), steps=STEPS)
    assert damage(archived / "6") == []


def killed_on_hosts(argv: list[str]) -> int:
    """Rank 1 is killed behind step 5, on a host of its own."""
    if os.environ["RANK"] == "1":
        before_step(5, die)
    return on_hosts(argv)


def test_parts_on_hosts_are_joined_and_a_lost_host_costs_the_steps_since_the_run_directory(
    small_corpus: Path, tmp_path: Path, run_dir: Path, uninterrupted: Callable[[int], Path]
) -> None:
    argv = [*arguments(small_corpus, run_dir), *with_tiers(tmp_path, IN_FRONT)]
    with pytest.raises(RanksFailed, match="SIGKILL"):
        run_ranks(killed_on_hosts, 2, argv)
    parts = [tmp_path / "memory" / f"host{rank}" for rank in (0, 1)]
    files = [sorted(path.name for path in part.glob("*/5/rank-*")) for part in parts]
    assert files == [[f"rank-0000{n}.json", f"rank-0000{n}.safetensors"] for n in (0, 1)]
    copy = tmp_path.with_name(f"{tmp_path.name}-copy")
    shutil.copytree(tmp_path, copy)

    assert run_ranks(on_hosts, 2, [*argv, "--resume", "auto"]) == [0, 0]
    log = (run_dir / "train.log").read_text()
    assert f"joined checkpoint 5 of the tiers of the hosts in {run_dir}/checkpoints" in log
    assert f"resumed from {run_dir}/checkpoints/5" in log
    assert_equal_runs(run_dir, uninterrupted(2), steps=STEPS)

    shutil.rmtree(tmp_path)
    shutil.copytree(copy, tmp_path)
    for tier in ("memory", "local"):
        shutil.rmtree(tmp_path / tier / "host1")
    assert run_ranks(on_hosts, 2, [*argv, "--resume", "auto"]) == [0, 0]
    log = (run_dir / "train.log").read_text()
    assert "the hosts of 1 of 2 ranks have no part" in log
    assert f"resumed from {run_dir}/checkpoints/3" in log
    assert_equal_runs(run_dir, uninterrupted(2), steps=STEPS)


def test_a_run_goes_on_from_the_url_of_an_archive_in_another_directory(
    killed: Killed, uninterrupted: Callable[[int], Path], tmp_path: Path
) -> None:
    new = tmp_path / "new"
    words = ["--run-dir", str(new), "--resume", f"file://{killed.place}/archive/run"]
    assert run_ranks(start, 1, [*killed.argv, *words]) == [0]
    assert f"resumed from {new}/checkpoints/3" in (new / "train.log").read_text()
    expected = {line["step"]: line for line in read_metrics(uninterrupted(1) / "metrics.jsonl")}
    lines = read_metrics(new / "metrics.jsonl")
    assert [line["step"] for line in lines] == [4, 5, 6, 7, 8]
    for line in lines:
        assert deterministic_part(line) == deterministic_part(expected[line["step"]])
    assert not list((killed.place / "memory").glob("cdrmix-new*"))


def test_an_archive_that_cannot_be_written_ends_a_start_before_its_engine(
    small_corpus: Path, tmp_path: Path, run_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "archive").write_text("a file")
    text = refused([*arguments(small_corpus, run_dir), *with_tiers(tmp_path)], capfd)
    assert "checkpoint.tiers.archive: " in text
    assert "cannot be written: Not a directory" in text
    assert "optimizer:" not in text
