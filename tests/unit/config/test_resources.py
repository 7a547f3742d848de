"""The section `resources`, and the older names of its keys."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from cdrmix.config import load
from cdrmix.config.load import changed_keys, load_config, resolve, snapshot_yaml
from cdrmix.config.yaml_text import parse_yaml
from cdrmix.errors import ConfigError
from tests.small_run import CONFIG


def test_what_is_left_out_is_adapted() -> None:
    resources = load_config(CONFIG).resources
    adapted = (resources.prefetch_batches, resources.reader_threads, resources.queue_size)
    assert adapted == ("auto", "auto", "auto")
    assert (resources.memory_share, resources.share) == ("auto", 0.9)


@pytest.mark.parametrize(
    ("older", "name", "value"),
    [
        ("training.memory_share", "memory_share", 0.5),
        ("data.prefetch_batches", "prefetch_batches", 0),
    ],
)
def test_an_older_name_gives_its_value_to_the_new_one_and_is_told_once(
    older: str, name: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    load._tell_older_name.cache_clear()
    with caplog.at_level(logging.INFO):
        configs = [load_config(CONFIG, [f"{older}={value}"]) for _ in range(2)]
    assert getattr(configs[0].resources, name) == value
    told = f"{older} is an older name of resources.{name}, which has its value"
    assert [record.message for record in caplog.records] == [told]
    # There is one place for the value, and a run that goes on has it there.
    section, key = older.split(".")
    assert getattr(getattr(configs[0], section), key) is None
    values = parse_yaml(snapshot_yaml(configs[0]), place="snapshot")
    assert values["resources"][name] == value
    assert resolve(values, [f"resources.{name}=auto"], place="snapshot").resources.share == 0.9
    assert changed_keys(configs[0], load_config(CONFIG, [f"resources.{name}={value}"])) == []


def test_two_values_for_one_thing_are_refused_by_name_and_equal_ones_are_not() -> None:
    both = ["data.prefetch_batches=3", "resources.prefetch_batches=4"]
    with pytest.raises(ConfigError) as refused:
        load_config(CONFIG, both)
    assert "data.prefetch_batches = 3 and resources.prefetch_batches = 4 are two" in str(
        refused.value
    )
    assert load_config(CONFIG, [both[0], "resources.prefetch_batches=3"])
    assert load_config(CONFIG, [*both, "data.prefetch_batches=null"])


@pytest.mark.parametrize(
    ("setting", "allowed"),
    [
        ("resources.prefetch_batches=-1", "allowed is a whole number from 0 or auto"),
        ("resources.reader_threads=many", "given 'many', allowed is a whole number from 1 or auto"),
        ("resources.queue_size=0", "allowed is a whole number from 1 or auto"),
        ("resources.memory_share=1.5", "allowed is a number above 0 and up to 1 or auto"),
        ("training.micro_batch_size=0", "allowed is a whole number from 1 or auto, or null"),
        ("data.prefetch_batches=-2", "data.prefetch_batches: given -2, allowed"),
        ("resources.probe=allways", "allowed is one of cached, again"),
    ],
)
def test_a_wrong_value_is_told_once_with_what_is_allowed(setting: str, allowed: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(CONFIG, [setting])
    text = str(refused.value)
    assert allowed in text
    assert len(text.splitlines()) == 1
