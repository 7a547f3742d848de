"""Section `cpt`: its checks, its shipped files, and what may change when a run is resumed."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest

from cdrmix.config.cpt import CptConfig, ReplayConfig
from cdrmix.config.load import kept_values, load_config, shipped
from cdrmix.config.schema import Config
from cdrmix.errors import ConfigError
from tests.unit.config.test_resuming import make_run, resumed

FOLDER = shipped("model_configs") / "continue"
TINY = FOLDER / "cpt-tiny.yaml"
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 300,
    "intermediate_size": 128,
}


def test_the_tiny_file_is_whole() -> None:
    config = load_config(TINY)
    assert config.name == "cpt-tiny"
    assert config.cpt is not None and config.cpt.replays and not config.cpt.writes_replay
    assert config.cpt.old_data == ("experiments/continue-tiny/data/old",)


@pytest.mark.parametrize("name", ["cpt-rtx4090", "cpt-multi-gpu"])
def test_files_for_hugging_face_models_name_the_folders_that_they_lack(
    name: str, tmp_path: Path
) -> None:
    path = FOLDER / f"{name}.yaml"
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    lines = str(caught.value).splitlines()
    assert [line.split(": ")[1] for line in lines] == ["model", "data.path", "cpt.replay.source"]
    assert "needs path, the folder of a Hugging Face model" in lines[0]
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    folders = {"model.path": tmp_path, "data.path": "/new", "cpt.replay.source": "/old"}
    config = load_config(path, [f"{key}={value}" for key, value in folders.items()])
    assert config.name == name
    assert config.model.hidden_size == 64
    assert (config.model.lora is not None) == (name == "cpt-rtx4090")
    assert config.cpt is not None and config.cpt.replay is not None
    assert config.cpt.replay.share == Fraction(1, 10)


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("cpt.replay.fraction=1.0", "below 1"),
        ("cpt.replay.fraction=0.00001", "is below 0.0001"),
        ("cpt.replay.source=s3://bucket/old", "is no folder"),
        ("cpt.forgetting.data=[/a, /b, /a]", "given twice"),
        ("cpt.forgetting.data=[]", "data"),
        ("cpt={forgetting: {stop_above: 0.5}}", "needs old data to measure"),
        ("cpt={replay: {source: self}, forgetting: {stop_above: 0.5}}", "needs old data"),
    ],
)
def test_values_that_cannot_be_are_refused(setting: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_config(TINY, [setting])


@pytest.mark.parametrize("fraction", [0.1, 1 / 3, 0.0375, 0.0001])
def test_a_share_is_the_ratio_that_was_written(fraction: float) -> None:
    share = ReplayConfig(fraction=fraction, source="old").share
    assert abs(share - Fraction(fraction)) < 1e-8
    assert share.denominator <= 10_000


def test_old_data_default_to_the_folder_of_the_replay() -> None:
    def old(**values: object) -> tuple[str, ...]:
        return CptConfig.model_validate(values).old_data

    assert old() == ()
    assert old(replay={"source": "a"}) == ("a",)
    assert old(replay={"source": "a", "fraction": 0}) == ("a",)
    assert old(replay={"source": "self"}) == ()
    assert old(replay={"source": "a"}, forgetting={"data": ["b", "c"]}) == ("b", "c")


def test_folders_are_kept_as_absolute_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    values = kept_values(load_config(TINY, ["cpt.forgetting.data=[here, /there]"]))["cpt"]
    assert values["replay"]["source"] == str(tmp_path / "experiments/continue-tiny/data/old")
    assert values["forgetting"]["data"] == (str(tmp_path / "here"), "/there")
    own = kept_values(load_config(TINY, ["cpt.replay.source=self"]))["cpt"]
    assert own["replay"]["source"] == "self"
    assert Config.model_validate(kept_values(load_config(TINY))).cpt is not None


@pytest.mark.parametrize(
    "setting",
    ["cpt=null", "cpt.forgetting.tokens=7", "cpt.replay.self_tokens=7"],
)
def test_what_was_measured_before_the_first_step_cannot_change(
    setting: str, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", config=TINY)
    with pytest.raises(ConfigError, match="cannot change"):
        resumed(run, setting)


@pytest.mark.parametrize(
    "setting",
    [
        "cpt.forgetting.stop_above=0.5",
        "cpt.forgetting.every_steps=3",
        "cpt.forgetting.data=[/moved]",
        "cpt.replay.source=/moved",
    ],
)
def test_limits_intervals_and_places_may_change(setting: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", config=TINY)
    assert resumed(run, setting).cpt not in (None, resumed(run).cpt)
