"""Starts that are refused before any rank, and those that are not."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cdrmix.config.load import load_config, shipped
from cdrmix.config.schema import Config
from cdrmix.errors import (
    ConfigError,
    DataError,
    NoUsableStateError,
    PlanError,
    StateError,
    TrainingError,
)
from cdrmix.evaluation.suite import SUITES
from cdrmix.sessions.preflight import check_start
from tests.checkpoints import save_checkpoint
from tests.conftest import TINY
from tests.harness import ROOT
from tests.hf_models import make_folder
from tests.made_run import made_run
from tests.unit.data.token_folder import write_token_folder
from tests.unit.reasoning.own_rows import write_rows

REASON = shipped("model_configs") / "cdrmix-reason-tiny.yaml"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Built folder of three domains, one of them shorter than a sample of 64 tokens."""
    splits = {
        "train/code": [range(300)],
        "train/prose": [range(200)],
        "train/notes": [range(20)],
        "validation": [range(100)],
    }
    return write_token_folder(tmp_path / "data", splits)


def small(data: Path | str, *settings: str, file: Path = TINY) -> Config:
    return load_config(file, [f"data.path={data}", "training.sequence_length=64", *settings])


def check(config: Config, **given: Any) -> None:
    flags = {"world_size": 2, "profile": None, "device": "cpu", "run_dir": None, "resume": "never"}
    check_start(config, **(flags | given))


def refusal(config: Config, kind: type[TrainingError], **given: Any) -> str:
    with pytest.raises(TrainingError) as caught:
        check(config, **given)
    assert type(caught.value) is kind
    return str(caught.value)


def test_what_a_suite_lacks_is_told_before_the_start(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SUITES, "infill", ("tests.small_suites", "HeldOut"))
    tasks = tmp_path / "tasks.jsonl"
    config = small(data, f"evaluation.suites=[{{name: infill, tasks: {tasks}}}]")
    assert refusal(config, DataError) == f"{tasks}: there is no such file of tasks"
    tasks.touch()
    check(config)
    options = small(data, "evaluation.suites=[{name: infill, options: {windw: 8}}]")
    assert refusal(options, ConfigError) == (
        "evaluation.suites, infill: it has no options windw. Known: window"
    )
    code = small(data, "evaluation.suites=[{name: code}]")
    assert "evaluation.execute_code = false" in refusal(code, PlanError)


def test_classes_that_are_not_there_are_told_before_the_start(data: Path) -> None:
    config = small(
        data,
        "evaluation.suites=[{name: 'no_such_module:Suite'}]",
        "checkpoint.retention={use: 'no_such_module:Rule'}",
    )
    suite, rule = sorted(refusal(config, ConfigError).splitlines(), reverse=True)
    assert suite.startswith("evaluation.suites: no_such_module:Suite: no_such_module cannot be")
    assert rule.startswith("checkpoint.retention.use: no_such_module:Rule: no_such_module cannot")
    assert "put its file into" in suite


def test_a_start_that_can_become_a_run_is_let_through(data: Path, tmp_path: Path) -> None:
    check(small(data), run_dir=tmp_path / "a" / "run")
    assert not (tmp_path / "a").exists(), "a check writes nothing"
    check(small("s3://bucket/folder"))
    check(small("sample", "model.vocab_size=4099"))  # not built


def test_all_faults_are_told_at_once_a_line_each(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.json").write_text("{}")
    config = small(tmp_path / "none", "parallel.data=3")
    lines = refusal(config, PlanError, run_dir=tmp_path / "run").splitlines()
    assert len(lines) == 3
    assert "parallel.data" in lines[0]
    assert lines[1].startswith(f"{tmp_path / 'none' / 'manifest.json'}: not found")
    assert lines[2].startswith(f"{tmp_path / 'run'}: the run directory exists")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["model.vocab_size=256"], "has 300 tokens, but model.vocab_size = 256"),
        (["training.sequence_length=128"], "split 'validation' has 100 tokens"),
        (["data.mixture={phases: [{weights: {books: 1}}]}"], "no domain books in this data set"),
        (["data.mixture={phases: [{weights: {notes: 1}}]}"], "too few tokens for one sample"),
        (["data.path=ftp:// "], "data.path = ftp:// : not a URL"),
    ],
)
def test_a_data_set_that_does_not_fit(settings: list[str], told: str, data: Path) -> None:
    text = refusal(small(data, *settings), DataError)
    assert told in text
    assert len(text.splitlines()) == 1


def test_the_recipe_of_a_variant_is_named_where_its_data_are_missing(tmp_path: Path) -> None:
    there = tmp_path / "no data"
    config = load_config(TINY, [f"data.path={there}", "data.recipe=standard"])
    told = refusal(config, DataError)
    command = f"cdrmix data build --config model_configs/data/standard.yaml --out '{there}'"
    assert f"`{command}` builds one" in told


def test_a_damaged_tokenizer_and_a_mistake_are_told_together(data: Path) -> None:
    (data / "tokenizer.json").unlink()
    text = refusal(small(data, "model.vocab_size=256"), DataError)
    assert f"{data / 'tokenizer.json'}: cannot be read: No such file" in text
    assert "model.vocab_size = 256" in text
    (data / "tokenizer.json").write_text("{} ")
    assert "tokenizer.json: altered: its sha256 is" in refusal(small(data), DataError)


def test_a_sample_corpus_that_is_there_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_token_folder(tmp_path / "data" / "sample-4096", {"train/code": [range(300)]})
    assert "no split 'validation'" in refusal(small("sample"), DataError)


def save(run_dir: Path, step: int, config: Config, **state: Any) -> Path:
    values = {"config": config.model_dump(mode="json"), **state}
    save_checkpoint(run_dir / "checkpoints", step, [], state=values, rank_state={}, keep=2)
    return run_dir / "checkpoints" / str(step)


def test_a_resume_from_nothing_or_from_another_model(data: Path, tmp_path: Path) -> None:
    config = small(data)
    run_dir = tmp_path / "run"
    assert "no checkpoint there" in refusal(config, StateError, resume=str(run_dir))
    assert "needs --run-dir" in refusal(config, StateError, resume="auto")
    check(config, run_dir=run_dir, resume="auto")  # starts at step 0
    checkpoint = save(run_dir, 3, config)
    for given in ({"run_dir": run_dir, "resume": "auto"}, {"resume": str(checkpoint)}):
        check(config, **given)
        text = refusal(small(data, "model.num_layers=8"), StateError, **given)
        assert text.startswith(f"{checkpoint}: was trained with another model. Changed: model.")
        assert "model.num_layers: 4 -> 8" in text


def test_damaged_checkpoints_are_passed_over_and_told_where_none_is_whole(
    data: Path, tmp_path: Path
) -> None:
    config = small(data)
    run_dir = tmp_path / "run"
    save(run_dir, 3, config)
    (save(run_dir, 6, small(data, "model.num_layers=8")) / "state.json").write_text("{")
    check(config, run_dir=run_dir, resume="auto")
    (run_dir / "checkpoints" / "3" / "index.json").unlink()
    for given in ({"run_dir": run_dir, "resume": "auto"}, {"resume": str(run_dir)}):
        text = refusal(config, NoUsableStateError, **given)
        assert "every checkpoint is damaged:\n  6: state.json: 1 bytes" in text
    # its copies may be whole, which the ranks will see
    check(small(data, f"checkpoint.replica={tmp_path}"), run_dir=run_dir, resume="auto")


def test_a_run_directory_that_exists_or_cannot_be_made(data: Path, tmp_path: Path) -> None:
    config = small(data)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "train.log").write_text("of a start that was refused")
    check(config, run_dir=run_dir)
    (run_dir / "metrics.json").write_text("{}")
    assert "exists and is never overwritten" in refusal(config, StateError, run_dir=run_dir)
    below = run_dir / "train.log" / "run"
    assert f"{below}: cannot write the run directory (Not a directory)" in refusal(
        config, StateError, run_dir=below
    )


def test_stage_b_needs_a_stage_a_and_goes_on_without_it(data: Path, tmp_path: Path) -> None:
    config = small(data, "training.stage=b", file=REASON)
    gone = small(data, "training.stage=b", f"stage_b.run={tmp_path / 'gone'}", file=REASON)
    run_dir = tmp_path / "run"
    told = "gone: holds no checkpoint to take the backbone from"
    assert "Stage B starts from a finished Stage A" in refusal(config, ConfigError)
    save(run_dir, 1, gone, stage="a")
    assert told in refusal(gone, StateError, run_dir=run_dir, resume="auto")
    save(run_dir, 2, gone, stage="b")
    check(gone, run_dir=run_dir, resume="auto")
    check(gone, resume=str(run_dir))
    assert told in refusal(gone, StateError, run_dir=tmp_path / "new")


def test_a_base_is_looked_at_unless_a_checkpoint_holds_all_weights(
    data: Path, tmp_path: Path
) -> None:
    sizes = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 320}
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps({**sizes, "num_attention_heads": 2}))
    (base / "pytorch_model.bin").write_bytes(b"")
    shutil.copyfile(data / "tokenizer.json", base / "tokenizer.json")
    training = {"max_steps": 1, "global_batch_size": 2, "sequence_length": 64}
    training |= {"learning_rate": 1e-3, "min_learning_rate": 1e-4, "warmup_steps": 0}
    model = {"kind": "hf", "path": str(base)}
    path = {"path": str(data)}
    config = Config.model_validate(
        {"name": "further", "model": model, "training": training, "data": path}
    )
    assert "its weights are pickles (pytorch_model.bin)" in refusal(config, DataError)
    run_dir = tmp_path / "run"
    state = {"config": config.model_dump(mode="json")}
    save_checkpoint(run_dir / "checkpoints", 1, [], state=state, rank_state={}, keep=1)
    check(config, run_dir=run_dir, resume="auto")


def test_a_hook_that_is_not_there_is_told_with_the_other_faults(tmp_path: Path) -> None:
    hooks = "hooks=[{use: 'no_such_module:Hook'}, {use: 'tests.noting_hooks:Notings'}]"
    told = refusal(small(tmp_path / "none", hooks), ConfigError).split("\n")
    assert told[0].startswith("hooks[0].use: no_such_module:Hook: there is no module")
    assert told[1].endswith("tests.noting_hooks has no Notings. Did you mean Noting?")
    assert str(tmp_path / "none") in told[2]


def test_a_start_is_checked_without_torch() -> None:
    check = (
        "import sys\n"
        "import cdrmix.sessions.preflight, cdrmix.cluster.launch, launch.train\n"
        "assert launch.train.main(['--config', 'none.yaml']) == 2\n"
        "print({'torch', 'deepspeed'} & {*sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "set()\n"), done.stderr
    assert done.stderr.count("error: ") == 1


def test_old_data_that_do_not_fit_are_told_by_their_key(data: Path, tmp_path: Path) -> None:
    def with_cpt(old: Path, *settings: str) -> Config:
        start = f"training.start_from={made_start}"
        return small(data, start, f"cpt.replay.source={old}", *settings)

    made_start = tmp_path / "base"
    made_run(made_start)
    lines = {"train": [range(300)], "validation": [range(100)]}
    old = write_token_folder(tmp_path / "old", lines)

    def told(config: Config) -> list[str]:
        with pytest.raises(TrainingError) as caught:
            check(config)
        text = str(caught.value).splitlines()
        # the base is of another tokenizer and of other sizes, which is told besides
        return [line for line in text if "start_from" not in line and not line.startswith(" ")]

    assert not any("cpt." in line for line in told(with_cpt(old)))
    (line,) = (each for each in told(with_cpt(tmp_path / "none")) if "none" in each)
    assert line.startswith(f"{tmp_path / 'none' / 'manifest.json'}: not found. cpt.replay.source")
    lists = f"cpt.forgetting.data=[{tmp_path / 'gone'}]"
    assert any("cpt.forgetting.data" in line for line in told(with_cpt(old, lists)))
    other = write_token_folder(tmp_path / "other", lines)
    manifest = json.loads((other / "manifest.json").read_text())
    manifest["tokenizer"]["sha256"] = "0" * 64
    (other / "manifest.json").write_text(json.dumps(manifest))
    assert any("another tokenizer than data.path" in line for line in told(with_cpt(other)))
    short = write_token_folder(tmp_path / "short", {"train": [range(300)]})
    assert any("no split 'validation'" in line for line in told(with_cpt(short)))


def test_data_of_another_tokenizer_than_that_of_a_hugging_face_model(
    small_corpus: Path, tmp_path: Path
) -> None:
    folder = make_folder(tmp_path / "model", "llama", vocab_size=4096)
    config = load_config(TINY)
    model = {"kind": "hf", "path": str(folder)}

    def of(path: Path | str) -> Config:
        values = config.model_dump() | {"model": model, "data": {"path": str(path)}}
        return Config.model_validate(values)

    text = refusal(of(small_corpus), DataError)
    assert "data.path: its tokens are of another tokenizer than the model's" in text
    assert str(folder) in text
    text = refusal(of("sample"), DataError)
    assert text.startswith("data.path = sample: is built with a tokenizer of its own")
    shutil.copyfile(small_corpus / "tokenizer.json", folder / "tokenizer.json")
    check(of(small_corpus))


def test_rows_of_a_users_tasks_are_told_before_the_start(data: Path, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "tasks.jsonl", 4)
    config = small(data, f"stage_b.training.task_file={path}", file=REASON)
    good = path.read_text()
    path.write_text(good + '{"task": 1}\n')
    assert f"{path}:5: task is 1, not str" in refusal(config, DataError)
    path.unlink()
    assert f"{path}: No such file or directory" in refusal(config, DataError)
    of_stage_a = small(data, f"stage_b.training.task_file={path}", "training.stage=a", file=REASON)
    check(of_stage_a)  # which does not read it
