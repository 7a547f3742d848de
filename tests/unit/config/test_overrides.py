"""Overrides take lists and sections, and names of other trainers are led to the right key."""

from pathlib import Path

import pytest

from cdrmix.config.common_names import COMMON_NAMES
from cdrmix.config.load import load_config
from cdrmix.config.problems import field_paths
from cdrmix.config.schema import Config
from tests.unit.config.test_config import REASON, TINY, changed_tiny, problems


def test_an_override_takes_lists_and_sections_as_yaml() -> None:
    given = load_config(TINY, ["data.mixture={phases: [{weights: {a: 1, b: 0.5}, tokens: 1e6}]}"])
    assert given.data.mixture is not None
    (phase,) = given.data.mixture.phases
    assert (phase.weights, phase.tokens) == ({"a": 1.0, "b": 0.5}, 1_000_000)
    as_json = ['data.mixture.phases=[{"samples": 5}, {}]', "data.mixture.temperature=2"]
    mixture = load_config(TINY, as_json).data.mixture
    assert mixture is not None
    assert ([each.samples for each in mixture.phases], mixture.temperature) == ([5, None], 2.0)
    ratios = load_config(REASON, ["stage_b.training.length_ratios=[1, 2]"])
    assert ratios.stage_b.training.length_ratios == (1, 2)
    named = load_config(TINY, ["launch.environment={A: 1}", "launch.environment.B=[x]"])
    assert named.launch.environment == {"A": "1", "B": "[x]"}
    assert load_config(TINY, ["evaluation.sample_prompt=[x"]).evaluation.sample_prompt == "[x"


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("data.mixture={phases: [", "--set data.mixture: line 1, column 11: expected"),
        ("data.mixture={temperature:2}", "Put a blank behind the colon: {temperature: 2}"),
        ("data.mixture.phases=[{weights: {a:1}}]", "Put a blank behind the colon: {a: 1}"),
        ("data.mixture.phases.0.tokens=5", "is a list. Set the whole: --set 'data.mixture.phases="),
        ("data.mixture.phases=[{wieghts: {a: 1}}]", "phases.0.wieghts: unknown key. Did you mean"),
        ("training.seed=[1]", "given '[1]', allowed is a whole number"),
    ],
)
def test_a_list_or_section_that_is_none_is_told_as_what_it_is(override: str, told: str) -> None:
    line = problems(TINY, override)[0]
    assert line.startswith(f"--set {override.partition('=')[0]}")
    assert told in line


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("training.lr=1", "training.learning_rate"),
        ("lr=1", "training.learning_rate"),
        ("training.batch_size=8", "training.global_batch_size"),
        ("training.seq_len=8", "training.sequence_length"),
        ("model.block_size=8", "training.sequence_length"),
        ("training.max_iters=8", "training.max_steps"),
        ("training.num_steps=8", "training.max_steps"),
        ("training.wd=0", "training.weight_decay"),
    ],
)
def test_a_name_of_other_trainers_is_led_to_the_key(override: str, meant: str) -> None:
    (line,) = problems(TINY, override)
    assert f"unknown key. Did you mean '{meant}'?" in line


def test_a_name_of_other_trainers_in_a_file_is_one_problem_not_two(tmp_path: Path) -> None:
    (line,) = problems(changed_tiny(tmp_path, " learning_rate:", " lr:"))
    assert "training.lr: unknown key. Did you mean 'training.learning_rate'?" in line


def test_names_of_other_trainers_mean_keys_that_there_are_and_are_none_themselves() -> None:
    paths = {".".join(path) for path in field_paths(Config)}
    assert {*COMMON_NAMES.values()} <= paths
    ours = {*COMMON_NAMES} & {path.rpartition(".")[2] for path in paths}
    assert ours == {"steps"}  # of `profile`; in `training` it means max_steps
    assert "max_steps" in problems(TINY, "training.steps=5")[0]
