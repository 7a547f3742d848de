"""Every part of Stage B learns what it is for, and its controls do not.

Seed 0 and as few steps as it takes; three seeds and longer runs are in `make bench`, by the same
functions.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from cdrmix.evaluation.trained import TrainedModel
from cdrmix.stage_b.long_context import TrainedReader
from tests.unit.reasoning.small_reader import small_config, small_lessons, small_reader
from tools.benchmark import learn_binding as binding
from tools.benchmark import learn_gate as gate
from tools.benchmark import learn_haystack as haystack
from tools.benchmark import learn_policy as policy
from tools.benchmark import learn_registers as registers
from tools.benchmark import learn_retrieval as retrieval
from tools.benchmark import learn_system as system
from tools.benchmark import policy_choices as choices
from tools.benchmark import reasoning_table as table


@pytest.mark.parametrize(("rank", "steps"), [(min(binding.ROWS), 300), (max(binding.ROWS), 200)])
def test_adapters_bind_what_has_left_the_window(rank: int, steps: int) -> None:
    found = binding.learn(rank, seed=0, steps=steps)
    assert found["trained"] >= 0.90
    assert found["gap x8"] >= 0.80
    by_chance = 1 / binding.NUM_VALUES
    assert found["plastic off"] <= by_chance + 0.05
    assert found["weights of another"] <= by_chance + 0.05
    assert found["largest weight"] <= binding.adapter_config(rank).clamp


def test_registers_are_tracked_beyond_the_window() -> None:
    found = registers.learn(seed=0, steps=200)
    assert found["trained"] >= 0.95
    assert found["4x longer"] >= 0.80
    # by chance 1 in 8
    assert found["window alone"] <= 0.20
    assert found["slots of another"] <= 0.20


def test_a_question_that_is_read_first_tells_which_of_many_needles_to_keep() -> None:
    found = haystack.learn(0, "first", steps=60, iterations=12, num_lessons=2)
    assert found["kept at most"] <= 0.25
    assert found["found"] >= 0.60


def test_a_state_answers_from_the_segments_that_an_agent_commits() -> None:
    backbone = gate.train_backbone(0, whole=False, steps=120)
    texts = gate.make_texts(256, 6, torch.Generator().manual_seed(1))
    every = torch.ones_like(texts.is_fact)
    with torch.no_grad():
        at_once = gate.value_logits(backbone, texts)
        torch.testing.assert_close(gate.value_logits(backbone, texts, every), at_once)
        facts = gate.is_right(backbone, texts, texts.is_fact).mean()
        others = gate.is_right(backbone, texts, ~texts.is_fact).mean()
    assert facts >= 0.50
    assert others <= 0.25  # by chance 1 in 8
    see = gate.whitening(backbone, 0)
    agent = gate.train_agent(backbone, see, 0, iterations=16)
    found = gate.evaluate(backbone, {"agent": agent}, windows=4)
    assert found["agent"] >= found["agent, shuffled"] + 0.05
    assert found["agent, committed"] <= 0.70


def test_trained_keys_are_found_among_distractors_and_raw_ones_are_not() -> None:
    found = retrieval.learn(0, steps=150, num_distractors=2048)
    assert found["trained"] >= 0.95
    assert found["among distractors"] >= 0.90
    assert found["untrained"] <= 0.15
    assert found["raw"] <= 0.15


def test_the_agent_learns_to_store_retrieve_and_splice() -> None:
    found = policy.learn(0, iterations=100)
    assert found["trained"]["success"] >= 0.90
    assert found["trained"]["operations"] <= 8
    assert found["random"]["success"] <= 0.15
    assert found["cache_write masked"]["success"] <= 0.02
    assert found["lenient branches"]["success"] >= 0.90
    assert found["lenient branches"]["accepted"] >= 0.70
    assert found["largest kl"] <= 1.5 * policy.environment().config.kl_target


def test_only_division_and_costs_for_failures_together_teach_to_do_nothing() -> None:
    cells = policy.two_by_two(iterations=50)
    nothing = cells.pop("costs for failures too, divided")
    assert (nothing["success"], nothing["operations"]) == (0.0, 0.0)
    assert len(cells) == 3
    for name, cell in cells.items():
        assert cell["success"] >= 0.90, name


def test_lengths_that_enter_one_by_one_teach_what_the_longest_alone_do_not() -> None:
    alone = choices.learn_lengths((4, 8), 0.0, iterations=10, seed=0)
    assert (alone["earning"], alone["success"]["8"]) == (0.0, 0.0)
    entering = choices.learn_lengths(choices.RATIOS, 0.5, iterations=50, seed=0)
    assert entering["success"]["8"] >= 0.80


def test_the_whole_learns_to_fetch_what_its_question_asks_for() -> None:
    found = system.learn(0, steps=60, iterations=15)
    assert found["trained"] >= 0.90
    assert found["untrained"] <= 0.20
    assert found["cache_write masked"] == 0
    # texts of a hundred segments more than those of training: what changes nothing is passed by
    assert found["longer"]["found"] >= 0.90
    assert found["longer"]["segments"] >= 100
    assert found["longer"]["operations"] <= 20


@pytest.mark.parametrize("rival", table.RIVALS)
def test_a_trained_rival_learns_and_the_reader_stays(
    rival: table.Rival, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers over two windows become likelier than after its first steps; nothing else moves."""
    for name, value in (("RATIOS", (2,)), ("RIVAL_BATCH", 8), ("RIVAL_WARMUP", 1)):
        monkeypatch.setattr(table, name, value)
    monkeypatch.setattr(table, "RIVAL_RATE", 5e-3)
    reader, lessons, config = system.small_reader(0)
    trained = TrainedModel(config, reader.backbone, lessons.tokenizer, "0" * 64, Path("1"), 1)
    loaded = TrainedReader(trained, reader, lessons)
    before = {name: tensor.clone() for name, tensor in reader.state_dict().items()}
    losses: list[float] = []
    original = table.rival_loss

    def noted(*arguments: Any) -> tuple[torch.Tensor, int]:
        loss, tokens = original(*arguments)
        losses.append(loss.item())
        return loss, tokens

    monkeypatch.setattr(table, "rival_loss", noted)
    learned = table.train_rival(loaded, rival, num_tokens=120_000, seed=0)
    assert losses[-1] < 0.6 * losses[0]
    moved = {name for name, each in learned.state_dict().items() if not each.equal(before[name])}
    assert moved and all(name.startswith("plastic.backbone") for name in moved)
    assert all(each.equal(before[name]) for name, each in reader.state_dict().items())


def test_a_rival_with_carried_state_is_corrected_through_all_windows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = small_config()
    reader, lessons = small_reader(config), small_lessons(config)
    examples = [lessons.example("needle_keys", "0", number, 3) for number in range(2)]

    def gradient() -> torch.Tensor:
        reader.zero_grad()
        table.rival_loss(reader, lessons, "state", examples)[0].backward()
        found = reader.backbone.embedding.weight.grad
        assert found is not None
        return found.clone()

    through_all = gradient()
    monkeypatch.setattr(table, "carry", torch.no_grad()(table.carry))
    last_alone = gradient()
    assert (through_all - last_alone).norm() > 0.1 * last_alone.norm()
