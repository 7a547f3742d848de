"""Shipped recipes of Stage B, shrunk for a run on CPUs, keep what they are told to keep."""

from pathlib import Path

import pytest
import yaml

from cdrmix.config.load import load_config, shipped
from cdrmix.config.reasoning import StageBConfig
from cdrmix.planning.lesson_sizes import most_steps, segment_tokens
from tools.benchmark.learn_recipes import LENGTHS, RECIPES, STEPS, shrunk


def stage_b_of(path: Path) -> StageBConfig:
    section = load_config(path).stage_b
    assert section is not None
    return section


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_shrunk_recipe_has_the_counts_of_the_whole(recipe: str, tmp_path: Path) -> None:
    small_file = tmp_path / "small.yaml"
    small_file.write_text(yaml.safe_dump(shrunk(recipe, tmp_path / "backbone")))
    whole = stage_b_of(shipped("model_configs") / f"cdrmix-reason-{recipe}.yaml")
    small = stage_b_of(small_file)
    window, small_window = whole.training.window_tokens, small.training.window_tokens
    assert window is not None and small_window == window // LENGTHS
    # segments of a window and of the longest text, and what an agent may do with them
    assert small_window // segment_tokens(small_window, small.training.segment_tokens) == (
        window // segment_tokens(window, whole.training.segment_tokens)
    )
    assert most_steps(small, small_window) == most_steps(whole, window)
    assert small.policy == whole.policy
    assert small.training.group_size == whole.training.group_size
    assert small.memory.top_k == whole.memory.top_k
    assert small.training.joint_steps == whole.training.joint_steps // STEPS
