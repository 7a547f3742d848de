"""What a user gets wrong ends every rank with code 2 and one message, and takes nothing away."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import resource
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cdrmix.checkpoint import store
from cdrmix.data.shards import new_manifest, read_manifest, write_manifest
from cdrmix.data.shards import write_shards as write_token_shards
from cdrmix.data.token_dataset import TokenDataset
from cdrmix.monitoring.sinks import read_metrics
from tests.equal_runs import assert_equal_runs
from tests.harness import ROOT, run_ranks
from tests.small_run import CONFIG, STEPS, arguments, before_step, refused, start

pytestmark = pytest.mark.usefixtures("leaves_nothing")

# What a refused start may leave in a run directory of its own: nothing of a run.
NOT_OF_A_RUN = {".lock", "train.log"}
# Checkpoints of the steps before a fault are then on the disk when it comes.
IN_FRONT = ("--set", "checkpoint.background=false")
REASONING = "model_configs/cdrmix-reason-1b.yaml"


def test_max_steps_without_a_stage_a_are_warned_of(
    small_corpus: Path, run_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    more = ["--set", "training.stage=b", "--set", "stage_b.run=nowhere", "--max-steps", "2"]
    config = "model_configs/cdrmix-reason-tiny.yaml"
    text = refused(arguments(small_corpus, run_dir, *more, config=config), capfd)
    assert "warning: --max-steps, or training.max_steps, counts steps of Stage A, which" in text


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (
            ["--set", "model.moe.topk=2"],
            ["--set model.moe.topk", "unknown key", "Did you mean 'top_k'?"],
        ),
        (
            ["--set", "training.seed=often"],
            ["--set training.seed", "'often'", "allowed is a whole number from 0"],
        ),
        (
            ["--set", "model.num_heads=3"],
            ["model.num_heads", "hidden_size / num_heads = 64 / 3", "Try num_heads = 2 or 1"],
        ),
        (
            ["--set", "parallel.expert=2", "--set", "model.moe.num_experts=7"],
            ["parallel.expert = 2 does not divide model.moe.num_experts = 7", "Try"],
        ),
        (
            ["--set", "training.global_batch_size=7"],
            ["training.global_batch_size = 7", "Try training.global_batch_size = 6 or 8"],
        ),
        (
            ["--set", "parallel.data=4"],
            ["parallel.data", "is not the number of ranks, 2", "Try parallel.data = 2"],
        ),
        (
            ["--set", "training.stage=b"],
            ["training.stage = b", "needs a reasoning variant", "no stage_b section"],
        ),
        (["--profile", "zero22"], ["--profile zero22", "Did you mean 'zero2'?", "Known: "]),
        (["--max-steps", "0"], ["training.max_steps", "0", "from 1"]),
        (["--max-steps", "soon"], ["--max-steps", "'soon'", "--help"]),
        (["--stpes", "3"], ["--stpes", "--help"]),
        (["--set", "training.seed"], ["--set training.seed", "PATH=VALUE"]),
    ],
)
def test_a_wrong_flag_or_override(
    more: list[str],
    told: list[str],
    small_corpus: Path,
    run_dir: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    text = refused(arguments(small_corpus, run_dir, *more), capfd)
    assert [part for part in told if part not in text] == []
    assert not run_dir.exists()


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("  num_heads: 4", "  num_heads: [4", ["expected ',' or ']'", "line ", "column "]),
        ("  num_heads: 4", "  num_head: 4", ["model.num_head: unknown key", "'num_heads'"]),
        ("  num_layers: 4", "  num_layers: four", ["model.num_layers", "'four'", "from 1"]),
    ],
)
def test_a_wrong_configuration_file(
    old: str, new: str, told: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / CONFIG).read_text()
    assert old in text
    file = tmp_path / "mine.yaml"
    file.write_text(text.replace(old, new))
    shown = refused(["--config", str(file), "--run-dir", str(tmp_path / "run")], capfd)
    assert [part for part in [str(file), *told] if part not in shown] == []


def test_a_configuration_that_is_not_there(capfd: pytest.CaptureFixture[str]) -> None:
    shown = refused(["--config", "model_configs/cdrmix-core-tny.yaml"], capfd)
    assert "model_configs/cdrmix-core-tny.yaml: no such file. Did you mean" in shown


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"zero_optimization": {"stage": 3}},
            ["zero_optimization.stage = 3 cannot run with model.moe", "Try profile 'zero2'"],
        ),
        (
            {"zero_optimization": {"stage": 1}, "train_batch_size": 8},
            ["train_batch_size: belongs to the run", "Set training.global_batch_size"],
        ),
        (
            {"zero_optimization": {"stage": 1, "reduce_bucket": 1}},
            ["zero_optimization.reduce_bucket: unknown key", "'reduce_bucket_size'"],
        ),
        ({"zero_optimisation": {"stage": 1}}, ["zero_optimisation: unknown key", "ignore it"]),
    ],
)
def test_a_wrong_deepspeed_file(
    settings: dict[str, Any],
    told: list[str],
    small_corpus: Path,
    tmp_path: Path,
    run_dir: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(settings))
    text = refused(arguments(small_corpus, run_dir, "--profile", str(file)), capfd)
    assert [part for part in [str(file), *told] if part not in text] == []
    assert not run_dir.exists()


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 2)


def _alter(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "file", "told"),
    [
        (Path.unlink, "train-code-00000.bin", "cannot be read: No such file or directory"),
        (_truncate, "train-prose-00000.idx", "the manifest says"),
        (_alter, "validation-code-00000.bin", "altered: its sha256 is"),
        (_alter, "tokenizer.json", "altered: its sha256 is"),
        (Path.unlink, "manifest.json", "manifest.json"),
    ],
)
def test_a_damaged_corpus(
    damage: Callable[[Path], None],
    file: str,
    told: str,
    small_corpus: Path,
    tmp_path: Path,
    run_dir: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "data"
    shutil.copytree(small_corpus, folder)
    damage(folder / file)
    text = refused(arguments(folder, run_dir), capfd)
    assert f"{folder / file}" in text
    assert told in text
    assert {path.name for path in run_dir.rglob("*")} <= NOT_OF_A_RUN


def test_a_tokenizer_of_another_vocabulary(
    small_corpus: Path, run_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = refused(arguments(small_corpus, run_dir, "--set", "model.vocab_size=2048"), capfd)
    size = read_manifest(small_corpus).tokenizer.num_tokens
    assert f"has {size} tokens, but model.vocab_size = 2048" in text
    assert f"Set model.vocab_size to at least {size}" in text


def reshard(corpus: Path, folder: Path, *, train: int, max_tokens: int = 2**27) -> Path:
    """The first `train` tokens of the corpus, in shards of `max_tokens`; its validation split."""
    shutil.copytree(corpus, folder)
    manifest = read_manifest(corpus)
    for path in folder.glob("train-*"):
        path.unlink()
    stream = TokenDataset(corpus, "train", train).rows(np.array([0]))[0, :train]
    shards = write_token_shards(
        folder,
        [(stream[start : start + max_tokens], max_tokens) for start in range(0, train, max_tokens)],
        split="train",
        domain="code",
        dtype=manifest.dtype,
        max_tokens=max_tokens,
    )
    write_manifest(
        folder,
        new_manifest(
            [*shards, *(shard for shard in manifest.shards if shard.split != "train")],
            vocab_size=manifest.vocab_size,
            tokenizer=manifest.tokenizer,
            eos_id=manifest.eos_id,
            source=manifest.source,
        ),
    )
    return folder


def test_a_corpus_too_small_for_one_sample(
    small_corpus: Path, tmp_path: Path, run_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = reshard(small_corpus, tmp_path / "data", train=40)
    text = refused(arguments(folder, run_dir), capfd)
    assert f"{folder / 'manifest.json'}: split 'train' has 40 tokens" in text
    assert "training.sequence_length = 64 needs 65" in text
    assert "Use a larger corpus" in text


def test_a_mended_start_takes_the_run_directory_of_the_refused_one(
    tmp_path: Path, small_corpus: Path, run_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = refused(arguments(tmp_path / "no-data", run_dir), capfd)
    assert str(tmp_path / "no-data") in text
    assert run_ranks(start, 2, arguments(small_corpus, run_dir, "--max-steps", "1")) == [0, 0]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ([], "Stage B starts from a finished Stage A. Try --set stage_b.run=RUN_DIR"),
        (["--resume", "auto"], "--resume auto: holds no checkpoint to take the backbone from"),
        (["--set", "stage_b.run=nowhere"], "stage_b.run = nowhere: holds no checkpoint"),
    ],
)
def test_stage_b_without_a_stage_a_is_refused_before_anything_is_written(
    more: list[str], told: str, run_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = ["--set", "training.stage=b", "--run-dir", str(run_dir), *more]
    assert told in refused(["--config", REASONING, *flags], capfd)
    assert not run_dir.exists()


@contextlib.contextmanager
def small_disk(folder: Path, size: str, *options: str) -> Iterator[Path]:
    """A file system of its own at `folder`; skips the test where mounting is not allowed."""
    folder.mkdir()
    settings = ",".join([f"size={size}", *options])
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", settings, "tmpfs", folder],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_run_directory_below_a_file(
    small_corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    run_dir = tmp_path / "file" / "run"
    text = refused(arguments(small_corpus, run_dir), capfd)
    assert f"{run_dir}: cannot write the run directory (Not a directory)" in text
    assert "Give a --run-dir that this user can write to" in text
    assert (tmp_path / "file").read_text() == "mine"


def test_a_run_directory_on_a_read_only_disk(
    small_corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with small_disk(tmp_path / "disk", "1m", "ro") as disk:
        text = refused(arguments(small_corpus, disk / "run"), capfd)
    assert f"{disk / 'run'}: cannot write the run directory (Read-only file system)" in text


def start_on_a_taken_port(argv: list[str]) -> int:
    with socket.socket() as other_job:
        other_job.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other_job.bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))
        other_job.listen()
        return start(argv)


def test_a_port_that_another_job_has_taken(
    small_corpus: Path, run_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_ranks(start_on_a_taken_port, 1, arguments(small_corpus, run_dir)) == [69]
    text = capfd.readouterr().out
    assert "error: 127.0.0.1:" in text
    assert "--master_port" in text
    assert "Traceback" not in text
    assert not run_dir.exists()


def test_resume_auto_needs_a_run_directory(
    small_corpus: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = refused(arguments(small_corpus, None, "--resume", "auto"), capfd)
    assert "--resume auto: needs --run-dir" in text


@pytest.mark.parametrize("there", [True, False])
def test_a_resume_path_without_a_checkpoint_is_left_alone(
    there: bool, small_corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "letters"
    if there:
        path.mkdir()
        (path / "mine.txt").write_text("mine")
    before = digests(tmp_path)
    text = refused(arguments(small_corpus, None, "--resume", str(path)), capfd)
    assert f"--resume {path}: no checkpoint there" in text
    assert digests(tmp_path) == before


def digests(folder: Path) -> dict[str, str]:
    """sha256 by path of every file below a folder, the log and the lock left out."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        if path.is_file()
        else "folder"
        for path in sorted(folder.rglob("*"))
        if path.name not in NOT_OF_A_RUN
    }


def test_a_refused_resume_leaves_a_finished_run_as_it_was(
    small_corpus: Path, run_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    argv = arguments(small_corpus, run_dir)
    assert run_ranks(start, 2, argv) == [0, 0]
    before = digests(run_dir)
    assert {"metrics.json", "report.html", "config_snapshot.yaml"} <= before.keys()
    again = [*argv, "--resume", "auto", "--set", f"training.max_steps={STEPS + 1}"]
    text = refused([*again, "--set", "model.moe.expert_hidden_size=96"], capfd)
    assert "model.moe.expert_hidden_size: 64 -> 96" in text
    refused([*again, "--set", "training.seed=2"], capfd)
    refused([*again, "--set", "data.path=/nowhere"], capfd)
    assert digests(run_dir) == before


# Faults in the middle of a run, each of one rank's own.


def _metrics_are_full() -> None:
    """Have this process's open metrics.jsonl refuse what is written, as a full disk does."""
    full = os.open("/dev/full", os.O_WRONLY)
    for link in Path("/proc/self/fd").iterdir():
        if link.exists() and link.readlink().name == "metrics.jsonl":
            os.dup2(full, int(link.name))


def _files_are_small() -> None:
    """Let no file of this process grow beyond what logs take."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))


FAULTS: dict[str, Callable[[], None]] = {
    "no room for metrics": _metrics_are_full,
    "no room for a checkpoint": _files_are_small,
}


def start_with_fault(argv: list[str], fault: str, rank: int, step: int) -> int:
    if int(os.environ["RANK"]) == rank:
        before_step(step, FAULTS[fault])
    return start(argv)


@pytest.mark.parametrize(
    ("fault", "rank", "told"),
    [
        (
            "no room for metrics",
            0,
            "metrics.jsonl: cannot be written: No space left on device",
        ),
        ("no room for a checkpoint", 1, "rank-00001.safetensors: File too large"),
    ],
)
def test_one_rank_without_room_ends_all_and_loses_nothing(
    fault: str,
    rank: int,
    told: str,
    small_corpus: Path,
    run_dir: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    argv = arguments(small_corpus, run_dir, *IN_FRONT)
    text = refused(argv, capfd, fault, rank, 4, run=start_with_fault)
    assert told in text
    found = store.find_newest(run_dir)
    assert found is not None
    assert (found.step, found.skipped) == (3, ())
    assert not list((run_dir / "checkpoints").glob("*.tmp-*"))
    assert run_ranks(start, 2, [*argv, "--resume", "auto"]) == [0, 0]
    steps = [line["step"] for line in read_metrics(run_dir / "metrics.jsonl")]
    assert steps == list(range(1, STEPS + 1))


def start_and_fill(argv: list[str], disk: str, step: int) -> int:
    def fill() -> None:
        with contextlib.suppress(OSError), open(Path(disk) / "ballast", "wb", 0) as ballast:
            while True:
                ballast.write(bytes(2**16))

    if int(os.environ["RANK"]) == 0:
        before_step(step, fill)
    return start(argv)


def test_a_disk_that_fills_up_ends_all_and_loses_nothing(
    small_corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with small_disk(tmp_path / "disk", "40m") as disk:
        run_dir = disk / "run"
        argv = arguments(small_corpus, run_dir, *IN_FRONT)
        text = refused(argv, capfd, str(disk), 4, run=start_and_fill)
        assert str(run_dir) in text
        assert "No space left on device" in text
        found = store.find_newest(run_dir)
        assert found is not None
        assert (found.step, found.skipped) == (3, ())
        (disk / "ballast").unlink()
        assert run_ranks(start, 2, [*argv, "--resume", "auto"]) == [0, 0]
        whole = tmp_path / "uninterrupted"
        assert run_ranks(start, 2, arguments(small_corpus, whole)) == [0, 0]
        assert_equal_runs(run_dir, whole, steps=STEPS)


def start_and_unlink(argv: list[str], path: str, step: int) -> int:
    if int(os.environ["RANK"]) == 0:
        before_step(step, lambda: Path(path).unlink())
    return start(argv)


def test_a_shard_that_disappears_from_one_rank_saves_and_ends_all(
    small_corpus: Path, tmp_path: Path, run_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # Four samples of 64 tokens a shard: shard 2s is rank 0's and shard 2s + 1 rank 1's in step s.
    # The last label of rank 1 is the first token of the next shard: step 5 lacks shard 12.
    folder = reshard(small_corpus, tmp_path / "data", train=256 * 40, max_tokens=256)
    missing = folder / "train-code-00012.bin"
    in_order = ("--set", "data.order=sequential")
    argv = arguments(folder, run_dir, *in_order)
    content = missing.read_bytes()
    text = refused(argv, capfd, str(missing), 1, run=start_and_unlink)
    assert f"{missing}: cannot be read: No such file or directory" in text
    found = store.find_newest(run_dir)
    assert found is not None
    assert found.step == 5
    missing.write_bytes(content)
    assert run_ranks(start, 2, [*argv, "--resume", "auto"]) == [0, 0]
    whole = tmp_path / "uninterrupted"
    assert run_ranks(start, 2, arguments(folder, whole, *in_order)) == [0, 0]
    assert_equal_runs(run_dir, whole, steps=STEPS)
