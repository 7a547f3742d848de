"""Shipped recipes of Stage B, shrunk for a run on CPUs, keep what they are told to keep."""

import itertools
import random
import re
from pathlib import Path

import pytest
import yaml

from cdrmix.config.load import load_config, shipped
from cdrmix.config.reasoning import StageBConfig
from cdrmix.planning.lesson_sizes import most_steps, segment_tokens
from cdrmix.reasoning.tasks import TRAINED
from tools.benchmark.learn_recipes import LENGTHS, RECIPES, STEPS, chains, codes, shrunk


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


def words_of(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


@pytest.mark.parametrize("seed", range(20))
def test_answers_of_the_documents_follow_from_their_statements(seed: int) -> None:
    said, questions = codes(random.Random(seed), TRAINED, 4)
    stated = [line for line in said if re.search(r"\d", line)]
    assert len(stated) == 4
    assert len(questions) == 5
    for question, code in questions:
        (line,) = [line for line in stated if code in words_of(line)]
        of_others = set[str]().union(*(words_of(other) for other in stated if other != line))
        assert len(words_of(question) & words_of(line) - of_others) == 1  # the key

    said, questions = chains(random.Random(seed), TRAINED, 3)
    assert len(questions) == 3
    for question, names in questions:
        chain = [*re.findall(r"\d+", question), *names.split()]
        lines = [
            next(place for place, line in enumerate(said) if {*pair} <= words_of(line))
            for pair in itertools.pairwise(chain)
        ]
        assert len(lines) == 3
        assert lines == sorted(lines)
