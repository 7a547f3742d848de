"""Records of starts: one file each, never rewritten, and without secrets."""

import ast
import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cdrmix.cluster.handover import TRAIN
from cdrmix.cluster.start_records import (
    add_start_record,
    command_of_user,
    command_to_go_on,
    first_step,
    newest_number,
    newest_start,
    read_start_records,
    recorded_data,
    without_secrets,
)
from tests.harness import ROOT


def test_each_start_has_a_file_of_its_own(tmp_path: Path) -> None:
    assert read_start_records(tmp_path) == []
    assert newest_start(tmp_path) is None
    assert recorded_data(tmp_path) is None
    assert newest_number(tmp_path) == 0
    assert first_step(tmp_path, after=0, otherwise=7) == 7
    assert add_start_record(tmp_path, {"from_step": 0, "data": {"folder": "/a"}}) == 1
    first = (tmp_path / "starts" / "0001.json").read_bytes()
    second = {"from_step": 49, "data": {"folder": "/b"}, "config": {"data": {"path": "sample"}}}
    assert add_start_record(tmp_path, second) == 2
    assert (tmp_path / "starts" / "0001.json").read_bytes() == first
    assert [each["from_step"] for each in read_start_records(tmp_path)] == [0, 49]
    assert recorded_data(tmp_path) == recorded_data(tmp_path, data_path="sample") == Path("/b")
    assert recorded_data(tmp_path, data_path="/shards") is None
    assert first_step(tmp_path, after=1, otherwise=0) == 49
    assert first_step(tmp_path, after=2, otherwise=5) == 5, "the start left no record"


def test_a_damaged_record_is_skipped_and_stays_as_it_is(tmp_path: Path) -> None:
    add_start_record(tmp_path, {"from_step": 0})
    damaged = tmp_path / "starts" / "0002.json"
    damaged.write_text('{"number": 2, "fr')
    (tmp_path / "starts" / "notes.txt").write_text("of the user")
    assert add_start_record(tmp_path, {"from_step": 9}) == 3
    assert [each["number"] for each in read_start_records(tmp_path)] == [1, 3]
    assert damaged.read_text() == '{"number": 2, "fr'


def test_a_number_is_taken_by_one_start_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_start_record(tmp_path, {"from_step": 0})
    # a file server that does not list the newest file yet
    monkeypatch.setattr("cdrmix.cluster.start_records._files", lambda _: [])
    with pytest.raises(FileExistsError):
        add_start_record(tmp_path, {"from_step": 9})
    assert json.loads((tmp_path / "starts" / "0001.json").read_text())["from_step"] == 0


def test_a_record_that_cannot_be_written_whole_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="No space left"):
            add_start_record(tmp_path, {"from_step": 0})
    assert not list((tmp_path / "starts").iterdir())
    assert add_start_record(tmp_path, {"from_step": 0}) == 1


def test_a_command_is_kept_without_its_secrets() -> None:
    words = ["deepspeed", "launch/train.py", "--set", "launch.environment.TOKEN=hush"]
    words += ["--set", "launch={environment: {TOKEN: hush}}", "--set=launch.environment={T: hush}"]
    words += ["--set", "data.path=https://me:hush@host/shards", "--set", "training.seed=7"]
    safe = without_secrets(words)
    assert "hush" not in " ".join(safe)
    assert safe[3] == "launch.environment.TOKEN=<redacted>"
    assert safe[-1] == "training.seed=7"
    assert safe[:3] == words[:3]


@pytest.mark.parametrize(
    "word",
    [
        " launch.environment.TOKEN =hush",
        "launch . environment . TOKEN=hush",
        "--s=launch.environment.TOKEN=hush",
        "--set=launch.environment.TOKEN=hush",
        "--set= launch={environment: {TOKEN: hush}}",
        "hooks=[{use: 'my:Hook', options: {inner: {Api-Key: hush}}}]",
        "--set=monitoring={trackers: [{use: 'my:Tracker', options: {password: hush}}]}",
    ],
)
def test_a_value_is_left_out_however_its_key_is_written(word: str) -> None:
    (safe,) = without_secrets([word])
    assert "hush" not in safe
    assert safe.endswith("=<redacted>")


def test_without_a_launcher_the_command_is_the_script_and_its_words() -> None:
    words = command_of_user(["--local_rank=0", "--config", "a.yaml"])
    assert words == ["python", str(TRAIN), "--config", "a.yaml"]


@pytest.mark.parametrize("verb", ["train", "launch", "plan"])
def test_the_command_is_that_of_the_verb_that_launched(verb: str, tmp_path: Path) -> None:
    program, script = tmp_path / "cdrmix", tmp_path / TRAIN.name
    program.write_text(
        f"import subprocess, sys; subprocess.run([sys.executable, {str(script)!r}], check=True)"
    )
    script.write_text(
        "from cdrmix.cluster.start_records import command_of_user; print(command_of_user([]))"
    )
    words = [sys.executable, str(program), verb, "--run-dir", "x"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    found = ast.literal_eval(done.stdout)
    assert (found[-3:] == [verb, "--run-dir", "x"]) == (verb != "plan")


def test_under_slurm_the_command_to_go_on_queues_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert command_to_go_on(["python", "x.py"], tmp_path).startswith("python x.py --run-dir")
    (tmp_path / "job.sbatch").touch()
    assert command_to_go_on(["python", "x.py"], tmp_path) == f"sbatch {tmp_path}/job.sbatch"


def test_the_command_to_go_on_needs_no_configuration() -> None:
    words = ["deepspeed", "--num_gpus", "2", "launch/train.py", "--config", "a.yaml"]
    words += ["--set", "training.seed=7", "--set=data.path=x", "--max-steps", "60"]
    words += ["--profile", "zero2", "--resume=never"]
    command = command_to_go_on(words, Path("my runs/first"))
    kept = "deepspeed --num_gpus 2 launch/train.py --profile zero2"
    assert command == f"{kept} --run-dir 'my runs/first' --resume auto"
