"""Continual pre-training on ranks: replay, what is forgotten, and a run that goes on."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
import yaml

from cdrmix.data.shards import read_manifest
from cdrmix.data.token_dataset import TokenDataset
from cdrmix.engines.forgetting import Forgetting
from cdrmix.monitoring.sinks import read_metrics
from tests.distributed.test_hugging_face import MODULES, quiet
from tests.equal_runs import result_of
from tests.harness import run_ranks
from tests.hf_models import make_folder
from tests.small_run import STEPS, arguments, before_step, overrides, refused, start
from tests.unit.data.token_folder import write_backwards

pytestmark = pytest.mark.usefixtures("leaves_nothing")

LENGTH = 64
FORGETTING = "cpt.forgetting={every_steps: 4, tokens: 640}"


@pytest.fixture(scope="module")
def base(small_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directory of the model that is trained on."""
    run_dir = tmp_path_factory.mktemp("base") / "run"
    assert run_ranks(start, 1, arguments(small_corpus, run_dir)) == [0]
    return run_dir


@pytest.fixture(scope="module")
def new(small_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same text backwards, by the same tokenizer."""
    folder = tmp_path_factory.mktemp("data") / "new"
    return write_backwards(folder, small_corpus, length=LENGTH)


def continued(base: Path, new: Path, run_dir: Path, old: Path | str, *settings: str) -> list[str]:
    """Command line of a run that trains the base on; `old` is the source of its replay."""
    cpt = [f"training.start_from={base}", f"cpt.replay.source={old}", "cpt.replay.fraction=0.25"]
    return arguments(new, run_dir, *overrides([*cpt, FORGETTING, *settings]))


def resumed(run_dir: Path, *settings: str) -> list[str]:
    return ["--run-dir", str(run_dir), "--resume", "auto", *overrides(settings)]


def stop_before(argv: list[str], step: int) -> int:
    """One rank that is told to stop before it takes a step."""
    before_step(step, lambda: os.kill(os.getpid(), signal.SIGTERM))
    return start(argv)


def never_measures_the_base(argv: list[str]) -> int:
    """One rank of a run whose base was measured before."""

    original = Forgetting.on_measure

    def measure(self: Forgetting, step: int) -> dict[str, float]:
        assert self.sets[-1].base_loss is not None, "measured anew"
        return original(self, step)

    Forgetting.on_measure = measure  # type: ignore[method-assign]
    return start(argv)


def measures(run_dir: Path) -> dict[int, dict[str, float]]:
    lines = read_metrics(run_dir / "metrics.jsonl")
    return {
        int(line["step"]): {k: v for k, v in line.items() if k.startswith("cpt/")}
        for line in lines
        if "cpt/gain_nats" in line
    }


@pytest.fixture(scope="module")
def whole(
    base: Path, new: Path, small_corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """An uninterrupted run with replay on two ranks."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    assert run_ranks(start, 2, continued(base, new, run_dir, small_corpus)) == [0, 0]
    return run_dir


def test_a_run_measures_before_its_first_step_at_intervals_and_at_its_end(
    whole: Path, base: Path, small_corpus: Path, new: Path
) -> None:
    found = measures(whole)
    assert [*found] == [0, 4, STEPS]
    assert found[0]["cpt/forgetting_nats"] == found[0]["cpt/gain_nats"] == 0
    for values in found.values():
        rise = values["cpt/old_loss"] - found[0]["cpt/old_loss"]
        assert values["cpt/forgetting_nats"] == pytest.approx(rise)
        fall = found[0]["cpt/new_loss"] - values["cpt/new_loss"]
        assert values["cpt/gain_nats"] == pytest.approx(fall)
    summary = json.loads((whole / "metrics.json").read_text())["cpt"]
    assert summary["gain_nats"] == found[STEPS]["cpt/gain_nats"] > 0.01
    digests = {each["name"]: each["digest"] for each in summary["sets"]}
    assert digests == {
        small_corpus.name: TokenDataset(small_corpus, "validation", LENGTH).manifest_digest,
        "new": TokenDataset(new, "validation", LENGTH).manifest_digest,
    }
    # the base is the model that ended the run before: its own loss, up to the tokens that are read
    last = json.loads((base / "metrics.json").read_text())["evaluation"]["loss"]
    assert found[0]["cpt/old_loss"] == pytest.approx(last, abs=0.3)
    log = (whole / "train.log").read_text()
    assert "forgetting +0.0000  gain +0.0000" in log


def test_a_quarter_of_the_samples_is_replay(whole: Path) -> None:
    line = read_metrics(whole / "metrics.jsonl")[-1]
    counts = {key: value for key, value in line.items() if key.startswith("data/domain/")}
    assert counts == {
        "data/domain/new/samples": 48,
        "data/domain/replay%2Fall/samples": 16,
    }


def test_a_run_that_was_stopped_ends_as_if_it_had_not_been(
    whole: Path, base: Path, new: Path, small_corpus: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    argv = continued(base, new, run_dir, small_corpus)
    assert run_ranks(stop_before, 2, argv, 5) == [75, 75]
    moved = shutil.copytree(small_corpus, tmp_path / "moved")
    argv = resumed(run_dir, f"cpt.replay.source={moved}")
    assert run_ranks(never_measures_the_base, 2, argv) == [0, 0]
    (lines, tensors), (expected, others) = (result_of(each, STEPS) for each in (run_dir, whole))
    assert lines == expected
    assert tensors.keys() == others.keys()
    assert all(torch.equal(tensors[name], others[name]) for name in tensors)
    assert measures(run_dir) == measures(whole)


def test_another_share_is_refused_when_resumed_and_other_ranks_are_not(
    whole: Path, small_corpus: Path, new: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_dir = shutil.copytree(whole, tmp_path / "run")
    more = f"training.max_steps={STEPS + 1}"
    text = refused(resumed(run_dir, more, "cpt.replay.fraction=0.5"), capfd)
    assert "1/4 of the samples" in text and "1/2 of the samples" in text
    text = refused(resumed(run_dir, more, f"cpt.forgetting.data=[{new}]"), capfd)
    assert "was measured on other data" in text
    assert run_ranks(start, 1, resumed(run_dir, more)) == [0]
    assert [*measures(run_dir)] == [0, 4, STEPS, STEPS + 1]


def test_a_run_that_forgets_too_much_is_saved_and_stopped(
    base: Path, new: Path, small_corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    settings = ["cpt.replay.fraction=0", "training.learning_rate=0.5", "training.warmup_steps=0"]
    argv = continued(base, new, run_dir, small_corpus, *settings, "cpt.forgetting.stop_above=1e-3")
    text = refused(argv, capfd)
    assert f"nats of {small_corpus.name} are forgotten, above 0.001: the run was stopped" in text
    assert "cpt.forgetting: stop" in text
    assert (run_dir / "checkpoints" / "4").is_dir()
    assert [*measures(run_dir)] == [0, 4]
    assert run_ranks(start, 1, resumed(run_dir, "cpt.forgetting.stop_above=null")) == [0]


def test_the_model_writes_its_own_replay_once_and_alike_on_any_number_of_ranks(
    base: Path, new: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = ["cpt.replay.self_tokens=600", "cpt.replay.self_document_tokens=40"]
    settings += [f"cpt.forgetting.data=[{new}]", "evaluation.every_steps=null"]
    written = []
    for ranks in (1, 2):
        run_dir = tmp_path / f"run-{ranks}"
        argv = continued(base, new, run_dir, "self", *settings)
        assert run_ranks(stop_before, ranks, argv, 5) == [75] * ranks
        folder = run_dir / "replay"
        manifest = read_manifest(folder)
        assert 600 <= manifest.splits["train"].tokens < 640
        written.append((folder / "train-self-00000.bin").read_bytes())
        assert "documents of the starting model" in (run_dir / "train.log").read_text()
    assert written[0] == written[1]
    capfd.readouterr()
    # goes on elsewhere, on what was written at the start
    other = tmp_path / "other"
    argv = ["--run-dir", str(other), "--resume", str(run_dir)]
    assert run_ranks(start, 1, argv) == [0]
    assert (other / "replay" / "train-self-00000.bin").read_bytes() == written[0]
    assert "the starting model writes" not in (other / "train.log").read_text()
    line = read_metrics(other / "metrics.jsonl")[-1]
    assert line["data/domain/replay%2Fself/samples"] == 16
    shutil.rmtree(run_dir / "replay")
    text = refused([*resumed(run_dir)], capfd)
    assert "Bring it back" in text


def quietly(argv: list[str], stopped_before: int = 0) -> int:
    """One rank of a run of a Hugging Face model, told to stop before a step."""
    quiet()
    return stop_before(argv, stopped_before) if stopped_before else start(argv)


@pytest.mark.parametrize("lora", ["null", "{rank: 4}"])
def test_a_hugging_face_model_is_continued_under_zero_3(
    lora: str, new: Path, small_corpus: Path, tmp_path: Path
) -> None:
    quiet()
    folder = make_folder(tmp_path / "base", "llama", vocab_size=4096, tokenizer=small_corpus)
    values = {
        "name": "continued",
        "model": {"kind": "hf", "path": str(folder)},
        "training": {
            "max_steps": 4,
            "global_batch_size": 4,
            "sequence_length": LENGTH,
            "precision": "fp32",
            "learning_rate": 1e-2,
            "min_learning_rate": 1e-3,
            "warmup_steps": 1,
        },
        "data": {"path": str(new)},
        "cpt": {
            "replay": {"source": "self", "fraction": 0.5, "self_tokens": 300},
            "forgetting": {"data": [str(small_corpus)], "every_steps": 2, "tokens": 640},
        },
        "evaluation": {"every_steps": None, "final_tokens": 640, "sample_tokens": 1},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    run_dir = tmp_path / "run"
    argv = ["--config", str(tmp_path / "run.yaml"), "--run-dir", str(run_dir)]
    argv += ["--profile", "zero3", "--set", f"model.lora={lora}"]
    assert run_ranks(quietly, 2, argv, 2, preloaded=MODULES) == [75, 75]
    assert read_manifest(run_dir / "replay").splits["train"].tokens >= 300
    again = [*resumed(run_dir), "--profile", "zero2"]
    assert run_ranks(quietly, 1, again, preloaded=MODULES) == [0]
    found = measures(run_dir)
    assert [*found] == [0, 2, 4]
    assert found[4]["cpt/gain_nats"] > 1e-3  # a few adapters learn less in four steps
    line = read_metrics(run_dir / "metrics.jsonl")[-1]
    assert line["data/domain/replay%2Fself/samples"] == 8
