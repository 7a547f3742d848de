"""Stopped or killed at any point and resumed, a run ends as if nothing had happened: bit by bit."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cdrmix.checkpoint import folder, store
from cdrmix.models import compiled
from cdrmix.monitoring.sinks import read_metrics
from tests.equal_runs import assert_equal_runs
from tests.harness import RanksFailed, run_ranks
from tests.small_run import STEPS, arguments, before_step, refused, start

pytestmark = pytest.mark.usefixtures("leaves_nothing")

# So that a step names what is on the disk; tests/distributed/test_background_saves.py has the rest.
IN_FRONT = ("--set", "checkpoint.background=false")


def train(argv: list[str], fault: str = "", step: int = 0, rank: int = 0) -> int:
    """What one rank of `launch/train.py` does, with a fault of this rank's own making."""
    if fault and int(os.environ["RANK"]) == rank:
        FAULTS[fault](step)
    return start(argv)


def train_compiled(argv: list[str], fault: str = "", step: int = 0) -> int:
    """Runs `train` with compiled blocks, by their graphs alone: kernels would take a minute."""
    compiled._BACKEND = "aot_eager"
    return train([*argv, "--set", "training.compile=blocks"], fault, step)


def _in_save(function: str, step: int, number: int = signal.SIGKILL) -> None:
    """Be signalled inside the save of `step`, when `function` of a folder is called."""
    original = getattr(folder, function)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if any(f"{step}.tmp" in str(arg) for arg in args):
            os.kill(os.getpid(), number)
        return original(*args, **kwargs)

    setattr(folder, function, wrapped)


def _after_the_rename(step: int) -> None:
    """Be killed as soon as the checkpoint of `step` has its name, which `latest` does not say."""
    original = os.rename

    def wrapped(source: Any, target: Any) -> None:
        original(source, target)
        if Path(target).name == str(step):
            os.kill(os.getpid(), signal.SIGKILL)

    os.rename = wrapped  # type: ignore[assignment]


def _signal(number: int) -> Callable[[int], None]:
    return lambda step: before_step(step, lambda: os.kill(os.getpid(), number))


FAULTS: dict[str, Callable[[int], None]] = {
    "TERM": _signal(signal.SIGTERM),
    "USR1": _signal(signal.SIGUSR1),
    "HUP": _signal(signal.SIGHUP),
    "USR2": _signal(signal.SIGUSR2),
    "KILL": _signal(signal.SIGKILL),
    "KILL after the rename": _after_the_rename,
    "KILL while tensors are written": lambda step: _in_save("write_tensors", step),
    "TERM while tensors are written": lambda step: _in_save("write_tensors", step, signal.SIGTERM),
    "KILL before the rename": lambda step: _in_save("publish", step),
}


@pytest.fixture(scope="module")
def uninterrupted(
    small_corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], Path]:
    """Run directory of an uninterrupted run on so many ranks."""
    done: dict[int, Path] = {}

    def get(world: int) -> Path:
        if world not in done:
            run_dir = tmp_path_factory.mktemp("uninterrupted") / "run"
            assert run_ranks(train, world, arguments(small_corpus, run_dir)) == [0] * world
            done[world] = run_dir
        return done[world]

    return get


@pytest.mark.parametrize(("name", "world"), [("TERM", 2), ("USR1", 1), ("HUP", 2)])
def test_a_signal_saves_and_stops_and_the_resumed_run_is_the_uninterrupted_one(
    name: str, world: int, small_corpus: Path, tmp_path: Path, uninterrupted: Callable
) -> None:
    run_dir = tmp_path / "run"
    argv = arguments(small_corpus, run_dir)
    codes = run_ranks(train, world, argv, name, 4, world - 1)  # one rank is told, all stop
    assert codes == [75] * world
    assert (run_dir / "checkpoints" / "latest").read_text() == "5\n"
    assert run_ranks(train, world, [*argv, "--resume", "auto"]) == [0] * world
    assert_equal_runs(run_dir, uninterrupted(world), steps=STEPS)


def test_a_signal_in_the_middle_of_a_save_waits_for_its_end(
    small_corpus: Path, tmp_path: Path, uninterrupted: Callable
) -> None:
    run_dir = tmp_path / "run"
    argv = arguments(small_corpus, run_dir, *IN_FRONT)
    assert run_ranks(train, 2, argv, "TERM while tensors are written", 6, 1) == [75, 75]
    assert (run_dir / "checkpoints" / "latest").read_text() == "6\n"
    assert run_ranks(train, 2, [*argv, "--resume", "auto"]) == [0, 0]
    assert_equal_runs(run_dir, uninterrupted(2), steps=STEPS)


@pytest.mark.parametrize(
    ("fault", "world", "resumes_at"),
    [
        ("KILL", 2, 3),
        ("KILL while tensors are written", 2, 3),
        ("KILL before the rename", 1, 3),
        ("KILL after the rename", 2, 6),
    ],
)
def test_a_killed_run_resumes_from_the_last_whole_checkpoint(
    fault: str,
    world: int,
    resumes_at: int,
    small_corpus: Path,
    tmp_path: Path,
    uninterrupted: Callable,
) -> None:
    run_dir = tmp_path / "run"
    argv = arguments(small_corpus, run_dir, *IN_FRONT)
    step = 5 if fault == "KILL" else 6
    with pytest.raises(RanksFailed, match="SIGKILL"):
        run_ranks(train, world, argv, fault, step, 0)
    found = store.find_newest(run_dir)
    assert found is not None
    assert found.step == resumes_at
    assert run_ranks(train, world, [*argv, "--resume", "auto"]) == [0] * world
    assert_equal_runs(run_dir, uninterrupted(world), steps=STEPS)


def test_usr2_saves_and_goes_on(small_corpus: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    argv = [*arguments(small_corpus, run_dir), "--set", "checkpoint.every_steps=null"]
    assert run_ranks(train, 1, argv, "USR2", 3) == [0]
    steps = sorted(int(p.name) for p in (run_dir / "checkpoints").iterdir() if p.name.isdigit())
    assert steps == [4, STEPS]


def _alter(checkpoints: Path) -> None:
    shard = checkpoints / "7" / "rank-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)


def _truncate(checkpoints: Path) -> None:
    shard = checkpoints / "7" / "rank-00000.safetensors"
    os.truncate(shard, shard.stat().st_size - 1)


def _corrupt_latest(checkpoints: Path) -> None:
    (checkpoints / "latest").write_bytes(b"\xff\x00 nowhere")


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (_alter, "skipped checkpoint 7: rank-00000.safetensors"),
        (_truncate, "skipped checkpoint 7: rank-00000.safetensors"),
        (_corrupt_latest, "checkpoints/7"),
    ],
)
def test_a_damaged_checkpoint_is_skipped_with_its_reason(
    damage: Callable[[Path], None],
    told: str,
    small_corpus: Path,
    tmp_path: Path,
    uninterrupted: Callable,
) -> None:
    run_dir = tmp_path / "run"
    argv = arguments(small_corpus, run_dir)
    assert run_ranks(train, 1, argv, "TERM", 6) == [75]
    damage(run_dir / "checkpoints")
    assert run_ranks(train, 1, [*argv, "--resume", "auto"]) == [0]
    log = (run_dir / "train.log").read_text()
    assert told in log
    assert "resumed from" in log
    assert_equal_runs(run_dir, uninterrupted(1), steps=STEPS)


def test_a_run_saved_on_two_ranks_goes_on_on_one_with_the_same_losses(
    small_corpus: Path, tmp_path: Path, uninterrupted: Callable
) -> None:
    run_dir = tmp_path / "run"
    argv = arguments(small_corpus, run_dir)
    assert run_ranks(train, 2, argv, "TERM", 3, 0) == [75, 75]
    assert run_ranks(train, 1, [*argv, "--resume", "auto"]) == [0]
    found = [line["loss"] for line in read_metrics(run_dir / "metrics.jsonl")]
    expected = [line["loss"] for line in read_metrics(uninterrupted(2) / "metrics.jsonl")]
    assert found == pytest.approx(expected, rel=1e-4)


def test_tokens_are_counted_on_when_the_global_batch_has_changed(
    small_corpus: Path, run_dir: Path
) -> None:
    argv = arguments(small_corpus, run_dir)
    assert run_ranks(train, 1, argv, "TERM", 3) == [75]
    smaller = [*argv, "--set", "training.global_batch_size=4", "--resume", "auto"]
    assert run_ranks(train, 1, smaller) == [0]
    seen = [line["tokens_seen"] for line in read_metrics(run_dir / "metrics.jsonl")]
    assert seen == [64 * samples for samples in (8, 16, 24, 32, 36, 40, 44, 48)]


def test_a_changed_model_is_refused_by_the_names_of_its_keys(
    small_corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    argv = arguments(small_corpus, run_dir)
    assert run_ranks(train, 1, argv, "TERM", 1) == [75]
    changed = [*argv, "--resume", "auto", "--set", "model.moe.expert_hidden_size=96"]
    text = refused(changed, capfd)
    assert "model.moe.expert_hidden_size: 64 -> 96" in text


def test_an_existing_run_directory_is_never_overwritten(
    small_corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "notes.txt").write_text("mine")
    text = refused(arguments(small_corpus, run_dir), capfd)
    assert str(run_dir) in text
    assert "--resume auto" in text
    assert [entry.name for entry in run_dir.iterdir()] == ["notes.txt"]


def test_state_that_is_damaged_throughout_ends_with_3(
    small_corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    argv = arguments(small_corpus, run_dir)
    assert run_ranks(train, 1, argv, "TERM", 1) == [75]
    for manifest in run_dir.glob("checkpoints/*/manifest.json"):
        manifest.write_text(
            json.dumps({"format": 1, "files": {"gone": {"bytes": 1, "sha256": ""}}})
        )
    text = refused([*argv, "--resume", "auto"], capfd, code=3)
    assert "every checkpoint is damaged" in text


def test_a_run_with_mamba_layers_goes_on_where_it_was_stopped(
    small_corpus: Path, tmp_path: Path
) -> None:
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    layers = ("--set", "model.transformer_fraction=0.25", "--set")
    listed = (*layers, "model.mixers=[mamba, routing_mamba]")
    argv = arguments(small_corpus, stopped, *listed)
    assert run_ranks(train, 1, argv, "TERM", 4, 0) == [75]
    assert run_ranks(train, 1, [*argv, "--resume", "auto"]) == [0]
    assert run_ranks(train, 1, arguments(small_corpus, whole, *listed)) == [0]
    assert_equal_runs(stopped, whole, steps=STEPS)
    last = read_metrics(whole / "metrics.jsonl")[-1]
    assert 0 < last["routing_mamba/routing_entropy_bits"] <= 3
    evaluation = json.loads((whole / "metrics.json").read_text())["evaluation"]
    assert [len(layer["utilisation"]) for layer in evaluation["mixers"]] == [8]
    assert [layer["layer"] for layer in evaluation["mixers"]] == [1]


def test_a_zero3_run_of_a_dense_model_goes_on_where_it_was_stopped(
    small_corpus: Path, tmp_path: Path
) -> None:
    dense = ("--set", "model.moe=null", "--profile")
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    argv = arguments(small_corpus, stopped, *dense, "zero3_offload")
    assert run_ranks(train, 2, argv, "TERM", 4, 1) == [75, 75]
    assert run_ranks(train, 2, [*argv, "--resume", "auto"]) == [0, 0]
    assert run_ranks(train, 2, arguments(small_corpus, whole, *dense, "zero3_offload")) == [0, 0]
    assert_equal_runs(stopped, whole, steps=STEPS)
    unpartitioned = tmp_path / "unpartitioned"
    assert run_ranks(train, 1, arguments(small_corpus, unpartitioned, *dense, "zero1")) == [0]
    found, expected = (
        [
            (line["loss"], line.get("eval/loss", 1.0))
            for line in read_metrics(path / "metrics.jsonl")
        ]
        for path in (whole, unpartitioned)
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.slow
def test_a_run_goes_on_with_compiled_blocks_and_without(small_corpus: Path, tmp_path: Path) -> None:
    model = ("--set", "model.moe=null", "--set", "model.transformer_fraction=0")
    plain, changed = tmp_path / "plain", tmp_path / "changed"
    assert run_ranks(train, 1, arguments(small_corpus, plain, *model)) == [0]
    argv = arguments(small_corpus, changed, *model)
    go_on = [*argv, "--resume", "auto"]
    assert run_ranks(train, 1, argv, "TERM", 2) == [75]
    assert run_ranks(train_compiled, 1, go_on, "TERM", 4) == [75]
    # what is not given stays as it was
    assert run_ranks(train, 1, [*go_on, "--set", "training.compile=off"]) == [0]
    wanted, losses = (
        [line["loss"] for line in read_metrics(path / "metrics.jsonl")] for path in (plain, changed)
    )
    assert losses == pytest.approx(wanted, rel=1e-5)
    assert "graph 1 compiled" in (changed / "train.log").read_text()
