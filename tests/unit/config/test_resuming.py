"""A run that goes on has its own configuration, and overrides alone change it."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from cdrmix.config.load import load_config, snapshot_yaml
from cdrmix.config.resuming import config_of_start, resumed_run
from cdrmix.config.resuming_rules import when_resumed
from cdrmix.config.schema import Config
from cdrmix.config.yaml_text import dump_yaml
from cdrmix.errors import ConfigError

TINY = Path("model_configs/cdrmix-core-tiny.yaml").resolve()
REASON = TINY.with_name("cdrmix-reason-tiny.yaml")


def make_run(folder: Path, *overrides: str, config: Path = TINY, stage: str = "a") -> Path:
    """What the configuration reads of a run directory that has saved its step 4."""
    own = load_config(config, overrides)
    checkpoint = folder / "checkpoints" / "4"
    checkpoint.mkdir(parents=True)
    (folder / "config_snapshot.yaml").write_text(snapshot_yaml(own))
    state: dict[str, Any] = {"stage": stage, "config": own.model_dump(mode="json")}
    (checkpoint / "state.json").write_text(json.dumps(state))
    return folder


def resumed(run: Path, *overrides: str, config: Path | None = None) -> Config:
    return config_of_start(config, overrides, run_dir=run, resume="auto")


def test_an_average_of_the_weights_may_begin_and_end_with_a_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run(tmp_path / "run")
    with caplog.at_level(logging.INFO):
        assert resumed(run, "training.ema_decay=0.99").training.ema_decay == 0.99
    assert "training.ema_decay: null -> 0.99" in caplog.text
    assert "warning" not in caplog.text, "the ranks tell what becomes of it"
    assert "is dropped" in when_resumed("training.ema_decay")


def test_a_new_run_needs_a_file(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="no checkpoint or run directory there") as caught:
        config_of_start(None, [], run_dir=tmp_path, resume=nowhere)
    assert str(caught.value).startswith(f"--resume {nowhere}: ")
    why = {"never": "give --run-dir DIR --resume auto", "auto": f"{tmp_path} holds no run yet"}
    for resume, reason in why.items():
        with pytest.raises(ConfigError, match="--config FILE: missing") as caught:
            config_of_start(None, [], run_dir=tmp_path, resume=resume)
        assert f"Shipped in {TINY.parent}: cdrmix-core-1b, " in str(caught.value)
        assert reason in str(caught.value)
    for resume in (*why, nowhere):
        made = config_of_start(TINY, ["training.seed=7"], run_dir=tmp_path, resume=resume)
        assert made == load_config(TINY, ["training.seed=7"])
    with pytest.raises(ConfigError, match="needs --run-dir"):
        config_of_start(TINY, [], run_dir=None, resume="auto")


def test_a_run_goes_on_with_its_own_values(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run(tmp_path / "run", "training.learning_rate=1e-2", "training.max_steps=60")
    with caplog.at_level(logging.INFO):
        own = resumed(run)
    assert (own.training.learning_rate, own.training.num_steps) == (1e-2, 60)
    assert not caplog.records
    # of the run's checkpoint, or of the directory by its path
    for place in (run, run / "checkpoints", run / "checkpoints" / "4"):
        assert config_of_start(None, [], run_dir=None, resume=str(place)) == own


def test_code_in_the_directory_of_a_run_is_not_run(tmp_path: Path) -> None:
    code = tmp_path / "run" / "plugins"
    run = make_run(tmp_path / "run", f"plugins={code}", "hooks=[{use: 'planted:Hook'}]")
    (tmp_path / "mine").mkdir()
    with pytest.raises(ConfigError, match="lies in the run itself"):
        resumed(run)
    with pytest.raises(ConfigError, match="lies in the run itself"):
        config_of_start(None, [], run_dir=None, resume=str(run / "checkpoints" / "4"))
    assert resumed(run, f"plugins={tmp_path / 'mine'}").plugins == str(tmp_path / "mine")
    # elsewhere it is the run's own choice
    other = make_run(tmp_path / "other", f"plugins={tmp_path / 'mine'}")
    assert resumed(other).plugins == str(tmp_path / "mine")


def test_a_checkpoint_without_its_run_tells_its_configuration(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "training.seed=7")
    copied = (run / "checkpoints" / "4").rename(tmp_path / "copied")
    own = config_of_start(None, [], run_dir=tmp_path / "new", resume=str(copied))
    assert own.training.seed == 7


def test_a_run_that_lost_its_snapshot_goes_on_with_its_checkpoints_values(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run(tmp_path / "run", "training.seed=7")
    (run / "config_snapshot.yaml").unlink()
    assert resumed(run).training.seed == 7
    assert resumed(run, config=TINY).training.seed == 7, "not the file's"
    assert str(run / "checkpoints" / "4" / "state.json") in caplog.text
    with pytest.raises(ConfigError, match="cannot change"):
        resumed(run, "model.num_layers=8", config=TINY)


def test_a_path_to_resume_tells_the_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "checkpoints" / "run")  # a folder of runs may have any name
    for place in (run, run / "checkpoints", run / "checkpoints" / "4"):
        assert resumed_run(str(place)) == run
    monkeypatch.chdir(run.parent)
    assert resumed_run("run") == Path("run")
    assert resumed_run("auto") is None
    copies = (run / "checkpoints").rename(tmp_path / "copies")
    assert resumed_run(str(copies)) is None, "holds copies of checkpoints, and is no run"
    assert resumed_run(str(copies / "4")) is None


def test_a_run_that_cannot_be_read_is_the_users_error(tmp_path: Path) -> None:
    place = tmp_path / ("x" * 300)
    for run_dir, resume in ((place, "auto"), (None, str(place))):
        with pytest.raises(ConfigError, match=r"xxx: cannot be read \(File name too long\)"):
            config_of_start(TINY, [], run_dir=run_dir, resume=resume)


def test_a_misspelt_key_of_the_model_is_told_as_such(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "model.moe=null")
    with pytest.raises(ConfigError, match="hidden_size") as caught:
        resumed(run, "model.hiden_size=64")
    assert "cannot change" not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot change"):
        resumed(run, "model.moe.num_experts=4")


def test_values_of_a_file_are_named_and_not_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changed = (
        "training.learning_rate=1e-2",
        "training.max_steps=60",
        "monitoring.log_every_steps=3",
    )
    run = make_run(tmp_path / "run", *changed)
    own = resumed(run, "monitoring.log_every_steps=5", config=TINY)
    assert own.training.learning_rate == 1e-2
    (line,) = [each.getMessage() for each in caplog.records if "not taken" in each.message]
    assert "training.learning_rate = 0.01, not 0.004; training.max_steps = 60, not 500" in line
    assert line.endswith("To change them give --set KEY=VALUE")
    assert "log_every_steps" not in line, "set, and so taken"
    assert "\n" not in line
    caplog.clear()
    many = [f"training.{key}=0.5" for key in ("beta1", "beta2", "epsilon", "weight_decay")]
    many += ["evaluation.every_steps=7", "evaluation.baselines=false", "checkpoint.keep=9"]
    resumed(make_run(tmp_path / "many", *many), config=TINY)
    assert "; and" not in caplog.text and ", and 1 more. To change" in caplog.text


@pytest.mark.parametrize(
    ("override", "level", "line"),
    [
        ("training.learning_rate=1e-2", "WARNING", "training.learning_rate: 0.004 -> 0.01"),
        ("training.max_steps=600", "WARNING", "training.max_steps: 500 -> 600"),
        ("training.precision=bf16", "WARNING", "training.precision: fp32 -> bf16"),
        ("health.loss_spike.action=stop", "WARNING", "health.loss_spike.action: warn -> stop"),
        ("monitoring.log_every_steps=3", "INFO", "monitoring.log_every_steps: 10 -> 3"),
        ("parallel.tensor=2", "INFO", "parallel.tensor: 1 -> 2"),
        ("checkpoint.keep=9", "INFO", "checkpoint.keep: 3 -> 9"),
    ],
)
def test_a_change_is_told_by_its_kind(
    override: str, level: str, line: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run(tmp_path / "run")
    with caplog.at_level(logging.INFO):
        resumed(run, override)
    ((found, text),) = [(each.levelname, each.getMessage()) for each in caplog.records]
    assert found == level
    assert f"changed since the run's last start: {line}" in text


@pytest.mark.parametrize(
    ("override", "stage"),
    [
        ("model.num_layers=8", "a"),
        ("model.hidden_size=256", "a"),
        ("model.moe=null", "a"),
        ("training.seed=7", "a"),
        ("training.seed=7", "b"),
        ("training.sequence_length=128", "a"),
        ("data.order=sequential", "a"),
        ("optimizer.kind=muon", "a"),
        ("training.stage=a", "b"),
        ("stage_b=null", "b"),
        ("stage_b.adapters.rank=3", "b"),
        ("stage_b.training.window_tokens=128", "b"),
        ("stage_b.training.backbone_lr_scale=0.1", "b"),
    ],
)
def test_a_key_that_cannot_change_is_refused_with_its_rule(
    override: str, stage: str, tmp_path: Path
) -> None:
    frozen = "stage_b.training.backbone_lr_scale=0"
    run = make_run(tmp_path / "run", frozen, config=REASON, stage=stage)
    key = override.partition("=")[0]
    with pytest.raises(ConfigError, match="cannot change when the run of .* is resumed") as caught:
        resumed(run, override)
    assert str(caught.value).startswith(f"{key}: ")
    rule = when_resumed(key)
    assert rule == "refused" or f"({rule})" in str(caught.value)


@pytest.mark.parametrize(
    ("override", "stage", "also"),
    [
        ("training.seed=7", "a", "data.order=sequential"),
        ("training.sequence_length=512", "b", ""),
        ("data.order=sequential", "b", ""),
        ("data.window_samples=9", "a", ""),
        ("stage_b.adapters.rank=3", "a", ""),
        ("optimizer.kind=muon", "b", ""),
        ("optimizer.neuron_norm=true", "a", ""),
    ],
)
def test_what_is_refused_in_one_case_may_change_in_another(
    override: str, stage: str, also: str, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", *filter(None, [also]), config=REASON, stage=stage)
    assert resumed(run, override) != resumed(run)


@pytest.mark.parametrize("key", ["optimizer.experts=adamw", "optimizer.neuron_norm=true"])
def test_states_of_muon_cannot_change(key: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "optimizer.kind=muon")
    assert resumed(run, "optimizer.scale=spectral") != resumed(run)
    with pytest.raises(ConfigError, match="other states are kept"):
        resumed(run, key)


def test_the_tokens_of_a_step_cannot_change_where_tokens_give_the_length(tmp_path: Path) -> None:
    by_tokens = ("training.max_steps=null", "training.total_tokens=1000000")
    run = make_run(tmp_path / "run", *by_tokens)
    with pytest.raises(ConfigError, match="unless max_steps is given too"):
        resumed(run, "training.global_batch_size=16")
    changed = resumed(run, "training.global_batch_size=16", "training.max_steps=300")
    assert (changed.training.global_batch_size, changed.training.num_steps) == (16, 300)


def test_a_run_without_a_checkpoint_may_change_all(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "checkpoints" / "4" / "state.json").unlink()
    assert resumed(run, "model.num_layers=8").model.num_layers == 8


def test_secrets_are_filled_from_the_file_or_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = "https://me:hushhush@host/shards"
    file = tmp_path / "mine.yaml"
    text = snapshot_yaml(load_config(TINY)).replace("path: sample", f"path: {url}")
    file.write_text(text.replace("environment: {}", "environment: {TOKEN: abc}"))
    run = make_run(tmp_path / "run", config=file)
    assert "hushhush" not in (run / "config_snapshot.yaml").read_text()
    own = resumed(run, config=file)
    assert own.data.path == url
    assert own.launch.environment == {"TOKEN": "abc"}
    with pytest.raises(ConfigError, match="holds no passwords"):
        resumed(run)
    other = resumed(run, "data.path=https://me:other@host/shards")
    assert other.launch.environment == {"TOKEN": "<redacted>"}, "the environment has it"
    with pytest.raises(ConfigError) as caught:
        resumed(run, "model.num_layers=8", config=file)
    assert "hushhush" not in f"{caught.value} {caplog.text}"


def test_paths_lead_to_the_same_folders_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = ("data.path=shards", "checkpoint.replica=copies", "stage_b.run=first")
    run = make_run(tmp_path / "run", *settings, "training.stage=b", config=REASON)
    with caplog.at_level(logging.INFO):
        resumed(run, *settings)
    assert not caplog.records, "no change"
    (tmp_path / "away").mkdir()
    monkeypatch.chdir(tmp_path / "away")
    own = resumed(run)
    assert own.data.path == str(tmp_path / "shards")
    assert own.checkpoint.replica == str(tmp_path / "copies")
    assert own.stage_b is not None and own.stage_b.run == str(tmp_path / "first")
    assert resumed(make_run(tmp_path / "sample")).data.path == "sample"


def test_stage_b_may_begin_on_a_run_that_has_none(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert resumed(run, config=REASON).stage_b is None
    own = resumed(run, "training.stage=b", config=REASON)
    assert own.stage_b == load_config(REASON).stage_b


def test_of_several_overrides_the_last_one_counts(tmp_path: Path) -> None:
    settings = ("model.moe.expert_hidden_size=64", "model.moe=null")
    run = make_run(tmp_path / "run", *settings)
    assert resumed(run, *settings) == resumed(run)


def test_a_layout_that_the_plan_chose_is_chosen_anew_and_a_given_one_stays(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "parallel.tensor=2", "training.activation_checkpointing=false")
    config = resumed(run)
    assert config.parallel.model_fields_set == {"tensor"}
    assert config.parallel.tensor == 2
    assert "activation_checkpointing" in config.training.model_fields_set
    assert "sequence_checkpoint_tokens" not in config.training.model_fields_set
    open_run = make_run(tmp_path / "open")
    assert not resumed(open_run).parallel.model_fields_set
    assert resumed(open_run, "parallel.pipeline=2").parallel.model_fields_set == {"pipeline"}


def test_a_file_gives_the_layout_of_a_resumed_run_and_nothing_else(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "parallel.tensor=2", "training.learning_rate=1e-3")
    config = config_of_start(TINY, ["parallel.expert=2"], run_dir=run, resume="auto")
    assert config.parallel.model_fields_set == {"expert"}
    assert (config.parallel.tensor, config.parallel.expert) == (1, 2)
    assert config.training.learning_rate == 1e-3


def test_a_snapshot_of_an_earlier_version_leaves_the_layout_to_the_plan(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "parallel.pipeline=2")
    whole = load_config(TINY, ["parallel.pipeline=2"]).model_dump()
    whole["training"]["activation_checkpointing"] = False  # what was "none" then
    (run / "config_snapshot.yaml").write_text(dump_yaml(whole))
    assert resumed(run).parallel.model_fields_set == {"pipeline"}
    assert "activation_checkpointing" not in resumed(run).training.model_fields_set
