"""Jobs that an engine of others runs: rounds until each has its result, and what users are told."""

from __future__ import annotations

import io
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from tqdm import tqdm

from cdrmix.corpus import remote_jobs
from cdrmix.corpus.build import build_dataset
from cdrmix.corpus.remote_jobs import (
    Amounts,
    Engine,
    Pool,
    RoundsEngine,
    error_as_json,
    error_from_json,
    pack_job,
    run_call,
    run_packed,
    write_calls,
)
from cdrmix.errors import DataError, StateError


@dataclass(frozen=True)
class Toy:
    out: Path

    def is_done(self) -> bool:
        return self.out.exists()


def make_file(toy: Toy) -> None:
    toy.out.touch(exist_ok=False)


def refuse(toy: Toy) -> None:
    raise DataError(f"{toy.out}: is not mine")


class Toys(RoundsEngine):
    """Runs a round by a function of the test."""

    logs = "the logs"

    def __init__(self, run_round) -> None:
        self._run_round = run_round

    def end(self) -> None:
        pass

    def run_round(self, function, jobs, show) -> None:
        self._run_round(jobs, show)


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every progress bar as a terminal shows it, after each change."""
    shown: list[str] = []

    class Shown(tqdm):
        def __init__(self, *arguments, disable, **options) -> None:
            super().__init__(*arguments, disable=False, file=io.StringIO(), **options)

        def update(self, n=1) -> None:
            super().update(n)
            shown.append(str(self))

    monkeypatch.setattr(remote_jobs, "tqdm", Shown)
    return shown


def engines() -> list[Engine]:
    def run_round(jobs, show) -> None:
        for toy in jobs:
            make_file(toy)
            show()

    return [Pool(1), Toys(run_round)]


@pytest.mark.parametrize("number", [0, 1], ids=["pool", "rounds"])
def test_the_progress_is_in_bytes_or_tokens_where_the_sizes_are_known(
    bars: list[str], tmp_path: Path, number: int
) -> None:
    for unit, shown in (("B", "B/s"), ("tokens", " tokens/s")):
        jobs = [Toy(tmp_path / f"{unit}{n}") for n in range(2)]
        amounts = Amounts(unit, [3_000_000, 1_000_000])
        engines()[number].run_all(make_file, jobs, what="toys", amounts=amounts)
        assert "75%" in bars[0] and "3.00M/4.00M" in bars[0]
        assert "100%" in bars[-1] and shown in bars[-1]
        bars.clear()
    engines()[number].run_all(make_file, [Toy(tmp_path / "one")], what="toys")
    assert "1/1 " in bars[-1] and "tasks/s" in bars[-1].replace("s/tasks", "tasks/s")


def test_what_a_round_leaves_undone_is_run_again_and_nothing_else(tmp_path: Path) -> None:
    jobs = [Toy(tmp_path / str(n)) for n in range(6)]
    make_file(jobs[0])
    rounds = []

    def run_every_other(remaining, show):
        rounds.append([int(job.out.name) for job in remaining])
        for job in remaining[::2]:
            make_file(job)
        show()

    Toys(run_every_other).run_all(make_file, jobs, what="toys")
    assert rounds == [[1, 2, 3, 4, 5], [2, 4], [4]]
    assert all(job.is_done() for job in jobs)


def test_three_rounds_without_a_result_end_a_build(tmp_path: Path) -> None:
    rounds = []
    engine = Toys(lambda remaining, show: rounds.append(len(remaining)))
    with pytest.raises(DataError, match=r"toys: 1 jobs ended 3 times .* See the logs"):
        engine.run_all(make_file, [Toy(tmp_path / "never")], what="toys")
    assert rounds == [1, 1, 1]


def test_a_job_runs_where_the_build_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    packed = pack_job(make_file, Toy(Path("relative")))
    monkeypatch.chdir("/")
    assert run_packed(packed) is None
    assert (tmp_path / "relative").exists()
    assert Path.cwd() == Path("/")


def test_an_error_of_the_users_is_kept_for_the_build(tmp_path: Path) -> None:
    write_calls(tmp_path / "jobs", refuse, [Toy(tmp_path / "a"), Toy(tmp_path / "b")])
    with pytest.raises(DataError, match="is not mine"):
        run_call(tmp_path / "jobs", 1)
    (file,) = (tmp_path / "jobs").glob("*.error")
    error = error_from_json(file.read_bytes())
    assert type(error) is DataError
    assert str(error) == f"{tmp_path / 'b'}: is not mine"


@pytest.mark.parametrize(
    "error", [StateError("a"), OSError(28, "No space left", "/full"), OSError("of pyarrow")]
)
def test_errors_of_other_processes_come_back_the_same(error: Exception) -> None:
    again = error_from_json(error_as_json(error))
    assert (type(again), str(again)) == (type(error), str(error))


def test_errors_are_read_as_text_and_not_executed() -> None:
    with pytest.raises(ValueError, match="Expecting value"):
        error_from_json(b"cos\nsystem\n(S'touch planted'\ntR.")
    planted = json.dumps({"kind": "TYPE_CHECKING", "text": "no class"}).encode()
    assert type(error_from_json(planted)) is DataError


@pytest.mark.parametrize("mode", [0o775, 0o707, 0o710])
def test_jobs_in_a_folder_that_others_can_use_are_not_run(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "jobs"
    before = os.umask(0o002)
    write_calls(folder, make_file, [Toy(tmp_path / "a")])
    os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(mode)
    with pytest.raises(DataError, match="mode 0700"):
        run_call(folder, 0)
    assert not (tmp_path / "a").exists()


def test_a_job_that_ends_twice_without_a_result_is_told_and_goes_on(tmp_path: Path) -> None:
    jobs = [Toy(tmp_path / str(n)) for n in range(3)]
    blamed: list[Toy] = []

    def run_round(remaining, show):
        for job in remaining:
            if job != jobs[1] or blamed:
                make_file(job)

    def blame(job: Toy) -> bool:
        blamed.append(job)
        return True

    Toys(run_round).run_all(make_file, jobs, what="toys", blame=blame)
    assert blamed == [jobs[1]]
    assert all(job.is_done() for job in jobs)


@pytest.mark.parametrize(("engine", "package"), [("slurm", "datatrove"), ("ray", "ray")])
def test_an_engine_that_is_not_installed_names_its_extra(
    engine: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("cdrmix.corpus.slurm_jobs", "cdrmix.corpus.ray_jobs"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == package] or [package]:
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not there
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("sources: [{name: a, type: local, path: ., domain: code}]\nsteps: []\n")
    with pytest.raises(DataError, match=rf"needs the package '{package}': .*'cdrmix\[{engine}\]'"):
        build_dataset(recipe, tmp_path / "out", workers=1, engine=engine)


def test_options_of_sbatch_without_slurm_are_refused(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("sources: [{name: a, type: local, path: ., domain: code}]\nsteps: []\n")
    with pytest.raises(DataError, match="--sbatch time: is for --engine slurm"):
        build_dataset(recipe, tmp_path / "out", workers=1, sbatch={"time": "5"})
