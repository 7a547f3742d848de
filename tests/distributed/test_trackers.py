"""Trackers of real runs: what they show behind a kill, and that none stops or slows a run."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest
import yaml

from cdrmix import cli
from cdrmix.config.load import load_config
from cdrmix.config.redaction import redacted
from cdrmix.errors import StateError
from cdrmix.hooks import RunView
from cdrmix.monitoring.sinks import read_metrics, without_non_finite
from cdrmix.tracking.copies import copy_run
from cdrmix.tracking.hook import TrackerHook
from tests.equal_runs import result_of
from tests.harness import RanksFailed, run_ranks
from tests.small_run import CONFIG, STEPS, arguments, before_step, overrides, refused, start
from tests.trackers import points_of_mlflow, points_of_tensorboard, rows_of_wandb

KILLED_BEHIND, LAST_SAVE = 5, 3
PATIENT = "monitoring.tracker_wait_seconds=120"


def trackers(*names: str) -> list[str]:
    return overrides([f"monitoring.trackers={json.dumps(names)}"])


def start_and_end(argv: list[str], step: int, how: signal.Signals, folders: list[str]) -> int:
    """One rank whose processes all get a signal behind a step, once trackers have written it."""

    def end() -> None:
        wait_for(step, [Path(folder) for folder in folders])
        os.killpg(0, how)

    before_step(step, end)
    return start(argv)


def wait_for(step: int, folders: list[Path]) -> None:
    deadline = time.monotonic() + 60
    while any(last_step(folder) < step for folder in folders):
        assert time.monotonic() < deadline, folders
        time.sleep(0.02)


def last_step(folder: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        return int((folder / "last_step").read_text())
    return 0


@pytest.fixture(scope="module")
def killed(small_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directory of a run that was killed, went on from an earlier step, and was stopped by a
    signal to all of its processes."""
    run_dir = tmp_path_factory.mktemp("killed") / "run"
    names = ("tensorboard", "mlflow")
    folders = [str(run_dir / "tracking" / name) for name in names]
    argv = [*arguments(small_corpus, run_dir), *trackers(*names), *overrides([PATIENT])]
    with pytest.raises(RanksFailed):
        run_ranks(start_and_end, 1, argv, KILLED_BEHIND, signal.SIGKILL, folders)
    assert max(line["step"] for line in read_metrics(run_dir / "metrics.jsonl")) > LAST_SAVE
    again = [*argv, "--resume", "auto"]
    assert run_ranks(start_and_end, 1, again, STEPS - 2, signal.SIGTERM, []) == [75]
    return run_dir


def test_a_killed_run_that_went_on_shows_each_step_once(killed: Path) -> None:
    lines = read_metrics(killed / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, STEPS))
    losses = [(line["step"], line["loss"]) for line in lines]
    shown = points_of_tensorboard(killed / "tracking" / "tensorboard")
    assert shown["loss"] == [(step, pytest.approx(loss)) for step, loss in losses]
    shown = points_of_mlflow(killed / "tracking" / "mlflow")
    assert shown["loss"] == losses
    assert shown.keys() == {key for line in lines for key in line}
    assert "warning: tracker" not in (killed / "train.log").read_text()


def test_track_makes_a_copy_of_exactly_the_lines(
    killed: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    metrics = killed / "metrics.jsonl"
    # Of a run still going, in Stage B, whose loss is not finite.
    last = {"step": STEPS, "loss": "NaN", "stage_b/loss": "Infinity", "suite/code/x/pass@1": 0.5}
    whole = metrics.read_text() + json.dumps(last) + "\n" + '{"step": 9, "lo'
    copy = tmp_path / "run"
    copy.mkdir()
    (copy / "metrics.jsonl").write_text(whole)
    (copy / "config_snapshot.yaml").write_text((killed / "config_snapshot.yaml").read_text())
    lines = read_metrics(copy / "metrics.jsonl")
    for _ in range(2):  # the second in the place of the first
        capfd.readouterr()
        assert cli.main(["track", str(copy), "--to", "wandb", "--json"]) == 0
        told = json.loads(capfd.readouterr().out)
        assert (told["lines"], told["first_step"], told["last_step"]) == (STEPS, 1, STEPS)
        (rows,) = rows_of_wandb(Path(told["folder"]))
        kept = [{k: v for k, v in row.items() if not k.startswith("_")} for row in rows]
        found = [{key: float(value) for key, value in row.items()} for row in kept]
        assert without_non_finite(found) == without_non_finite(lines)
    assert cli.main(["track", str(copy), "--to", "tensorboard", "--out", str(tmp_path / "tb")]) == 0
    shown = points_of_tensorboard(tmp_path / "tb")
    assert [step for step, _ in shown["loss"]] == list(range(1, STEPS + 1))
    assert shown["suite/code/x/pass@1"] == [(STEPS, 0.5)]
    (tmp_path / "tb" / "last_step").unlink()
    (tmp_path / "tb" / "writer.log").unlink()
    assert cli.main(["track", str(copy), "--to", "tensorboard", "--out", str(tmp_path / "tb")]) == 2
    assert "exists and is no copy of a tracker" in capfd.readouterr().err


SECRETIVE = """
from pydantic import BaseModel
from cdrmix.tracking import Tracker

class Secretive(Tracker):
    class Options(BaseModel):
        api_key: str

    def __init__(self, options):
        self.key = options.api_key

    def open(self, run):
        (run.folder / "key").write_text(self.key)

    def write(self, lines):
        pass
"""


def track(argv: list[str]) -> int:
    """`cdrmix track` in a process of its own, which has imported no plug-in."""
    return cli.main(["track", *argv])


def test_a_copy_is_made_with_secrets_of_a_configuration_and_not_without(
    killed: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "secretive.py").write_text(SECRETIVE)
    use = "secretive:Secretive"
    given = [{"use": use, "options": {"api_key": "abc"}}]
    config = load_config(CONFIG).model_dump(mode="json", exclude_unset=True)
    config["monitoring"] = {"trackers": given}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    shutil.copy(killed / "metrics.jsonl", run_dir)
    kept = redacted(config) | {"plugins": str(tmp_path / "plugins")}
    snapshot = run_dir / "config_snapshot.yaml"
    snapshot.write_text(yaml.safe_dump(kept))
    argv = [str(run_dir), "--to", use]
    assert run_ranks(track, 1, argv) == [2]
    assert "holds no secrets of its options. Give --config" in capfd.readouterr().out
    assert not (run_dir / "tracking").exists()
    assert run_ranks(track, 1, [*argv, "--config", str(tmp_path / "run.yaml")]) == [0]
    assert (run_dir / "tracking" / "Secretive" / "key").read_text() == "abc"
    shutil.copytree(tmp_path / "plugins", run_dir / "plugins")
    snapshot.write_text(yaml.safe_dump(kept | {"plugins": str(run_dir / "plugins")}))
    assert run_ranks(track, 1, argv) == [2]
    assert "lies in the run itself, which may be of anyone" in capfd.readouterr().out


FAILING = tuple(f"tests.trackers:{name}" for name in ("Raises", "Blocks", "OnFullDisk"))


def start_and_count_processes(argv: list[str]) -> tuple[int, list[int]]:
    """Exit code of a rank, and processes of trackers before its last step and behind its end."""
    counts: list[int] = []
    before_step(STEPS - 1, lambda: counts.append(num_processes()))
    code = start(argv)
    return code, [*counts, num_processes()]


def num_processes() -> int:
    count = 0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # the watchdog, which nobody waits for
            count += "cdrmix.tracking" in " ".join(process.cmdline())
    return count


def test_failing_blocking_and_full_trackers_change_nothing_and_are_told_once(
    small_corpus: Path, tmp_path: Path
) -> None:
    settings = ["monitoring.tracker_wait_seconds=3"]
    argv = arguments(small_corpus, tmp_path / "plain")
    assert run_ranks(start, 1, argv) == [0]
    argv = [*arguments(small_corpus, tmp_path / "run"), *trackers(*FAILING), *overrides(settings)]
    assert run_ranks(start_and_count_processes, 1, argv) == [(0, [3, 0])]
    lines, tensors = result_of(tmp_path / "plain", STEPS)
    lines_with, tensors_with = result_of(tmp_path / "run", STEPS)
    assert lines == lines_with
    assert all(tensors[name].equal(tensors_with[name]) for name in tensors)
    plain = read_metrics(tmp_path / "plain" / "metrics.jsonl")
    assert not any("tracker/dropped" in line for line in plain)
    log = (tmp_path / "run" / "train.log").read_text()
    for name in FAILING:
        missing = (
            rf"warning: tracker {name}: (\d) lines? of metrics.jsonl may be missing in its copy"
        )
        (lost,) = re.findall(missing, log)
        assert int(lost) == STEPS or "OnFullDisk" in name
        told = log.count(f"cdrmix track {tmp_path / 'run'} --to {name}")
        assert told in (1, 2), "at the first fault, where that is known before the end, and at it"
    for why in ("RuntimeError: no such server", "too slow for the end", "File too large"):
        assert why in log
    noise = (tmp_path / "run" / "tracking" / "Raises" / "writer.log").read_text()
    assert "noise of a package" in noise
    assert "Traceback" in noise


def test_a_tracker_that_cannot_be_made_ends_the_start(
    small_corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    argv = [*arguments(small_corpus, tmp_path / "run"), *trackers("tests.trackers:Blocs")]
    told = refused(argv, capfd)
    assert "tests.trackers has no Blocs. Did you mean Blocks?" in told


def hook_of(run_dir: Path, *names: str, step: int = 0) -> TrackerHook:
    """The hook of a run, which has started."""
    run_dir.mkdir(exist_ok=True)
    config = load_config(CONFIG, [f"monitoring.trackers={json.dumps(names)}"])
    assert config.monitoring.trackers is not None
    hook = TrackerHook(config.monitoring.trackers, wait_seconds=120)
    view = RunView(run_dir, config, "a", rank=0, world_size=1, num_steps=100, step=step)
    hook.on_start(view)
    return hook


def log(hook: TrackerHook, run_dir: Path, *steps: int) -> None:
    """Logs lines as a run does."""
    for step in steps:
        line = {"step": step, "loss": 10.0 * step}
        hook.on_log(step, line)
        with (run_dir / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


def test_a_rewind_shows_each_step_once_in_every_tracker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/dev/null")  # nothing can be written in there
    monkeypatch.setenv("WANDB_MODE", "online")  # our configuration alone says so
    run_dir = tmp_path / "run"
    hook = hook_of(run_dir, "wandb", "mlflow")
    log(hook, run_dir, 1, 2, 3, 4, 5)
    (run_dir / "metrics.jsonl").write_text('{"step": 1, "loss": 10.0}\n')
    hook.on_rewind(1)
    log(hook, run_dir, 2, 3)
    hook.on_end("done")
    assert points_of_mlflow(run_dir / "tracking" / "mlflow")["loss"] == [(1, 10), (2, 20), (3, 30)]
    first, second = rows_of_wandb(run_dir / "tracking" / "wandb")
    assert [row["step"] for row in first] == [1, 2, 3, 4, 5]
    assert [(row["step"], row["loss"]) for row in second] == [(2, 20), (3, 30)]


def test_a_tracker_that_blocks_costs_lines_and_no_time(tmp_path: Path) -> None:
    hook = hook_of(tmp_path / "run", "tests.trackers:Blocks")
    began = time.process_time(), time.monotonic()
    added = [hook.on_log(step, {"step": step, "text": 0.0}) for step in range(4_000)]
    assert added[0] == {}
    assert 0 < added[-1]["tracker/dropped"] < 4_000
    assert time.monotonic() - began[1] < 30, "it blocks for a minute"
    hook.on_error(RuntimeError())  # waits for nothing
    assert time.monotonic() - began[1] < 30


def test_a_tracker_that_is_turned_on_late_gets_the_earlier_lines(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    log(hook_of(run_dir), run_dir, 1, 2, 3)
    hook = hook_of(run_dir, "tensorboard", step=2)
    log(hook, run_dir, 3, 4)
    folder = run_dir / "tracking" / "tensorboard"
    wait_for(4, [folder])
    with pytest.raises(StateError, match="the run is writing here"):
        copy_run(run_dir, "tensorboard", out=None)
    hook.on_end("done")
    assert [step for step, _ in points_of_tensorboard(folder)["loss"]] == [1, 2, 3, 4]
