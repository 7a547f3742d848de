"""A reader with some of the memories alone: what its agent may do, and what learns."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from pydantic import ValidationError

from cdrmix.config.reasoning import StageBConfig
from cdrmix.config.schema import Config
from cdrmix.reasoning.memory_reader import is_used
from cdrmix.reasoning.policy import Action, roll_out
from cdrmix.reasoning.reading_environment import ReadingEpisodes
from cdrmix.stage_b.phases import hidden_evidence_share, phase_loss, stage_b_section
from tests.unit.reasoning.small_reader import small_config, small_lessons, small_reader


def config_with(*parts: str) -> Config:
    config = small_config(backbone_lr_scale=1.0, adapter_steps=0, memory_steps=0)
    stage_b = stage_b_section(config)
    memory = stage_b.memory.model_copy(update={"parts": parts})
    return config.model_copy(update={"stage_b": stage_b.model_copy(update={"memory": memory})})


KEEPS = {
    "plastic": frozenset[Action](),
    "slots": frozenset([Action.SUMMARIZE]),
    "episodic": frozenset([Action.CACHE_WRITE, Action.RETRIEVE]),
    "state": frozenset([Action.SUMMARIZE]),
}


@pytest.mark.parametrize("part", KEEPS)
def test_one_memory_alone_learns_and_answers(part: str) -> None:
    config = config_with(part)
    reader = small_reader(config)
    lessons = small_lessons(config)
    lesson = lessons.lesson("joint", 0)
    for name, parameter in reader.named_parameters():
        parameter.requires_grad_("policy" not in name and is_used(name, (part,)))
    loss, metrics = phase_loss(reader, "joint", lesson, config)
    loss.backward()
    modules = {"plastic": "adapters.", "slots": "memory.slots", "episodic": "retrieval."}
    for other, prefix in modules.items():
        learned = [
            bool(parameter.grad is not None and parameter.grad.any())
            for name, parameter in reader.named_parameters()
            if prefix in name
        ]
        assert any(learned) == (other == part), other
    assert ("retrieval_loss" in metrics) == (part == "episodic")
    assert ("correlation_loss" in metrics) == (part == "plastic")
    with torch.no_grad():
        episodes = ReadingEpisodes(reader, reader.read(lesson.texts), lambda _, __: 1.0)
        legal = episodes.observe(episodes.start()).legal[0]
        kept = {action for action in Action if bool(legal[action])} - {Action.SPLICE_WINDOW}
        # nothing is written yet, so that there is nothing to retrieve
        assert kept == KEEPS[part] - {Action.RETRIEVE}
        final = roll_out(episodes, reader.policy, episodes.start(), generator=None).final
    assert bool(final.solved.all())


def test_a_committed_segment_goes_on_into_the_window_and_one_passed_by_does_not() -> None:
    config = config_with("state")
    reader = small_reader(config)
    texts = small_lessons(config).lesson("policy", 0).texts
    rows = torch.tensor([0, 0, 0])
    length = texts.tokens.shape[1]
    chosen = torch.zeros(3, length, dtype=torch.bool)
    chosen[1, -1] = chosen[2, -2] = True
    with torch.no_grad():
        reading = reader.read(texts)
        windows = reader.windows(texts, [0, 0, 0], [[], [], []])
        recalled = reader.recalled(reading, rows, chosen)
        hidden = reader.look(windows.tokens, slots=None, plastic=recalled)[0].hidden
        (blank,) = reader.recalled(reading, rows[:1], chosen[:1]).blocks[:1]
        mark = torch.tensor([[reader.marks.memory]])
        (alone,) = reader.backbone(mark, return_state=True).state[:1]
    assert not torch.allclose(hidden[0], hidden[1]) and not torch.allclose(hidden[1], hidden[2])
    torch.testing.assert_close(blank.channel_last, alone.channel_last)


def test_hidden_evidence_is_summarised_and_not_in_the_window() -> None:
    lessons = small_lessons(small_config(texts_per_lesson=16, tasks=("needle_keys", "look_up")))
    hiding = dataclasses.replace(lessons, hidden_evidence_share=1.0)
    shown, hidden = lessons.lesson("joint", 0), hiding.lesson("joint", 0)
    assert [each.text for each in shown.examples] == [each.text for each in hidden.examples]
    for row, pieces in enumerate(hidden.evidence):
        assert pieces and set(pieces) <= set(shown.gathered[row])
        assert not set(pieces) & set(hidden.gathered[row])
        assert bool(hidden.summarised[row, list(pieces)].all())
    half = dataclasses.replace(lessons, hidden_evidence_share=0.5)
    made = [half.lesson("joint", number) for number in range(8)]
    rows = [
        bool(set(pieces) & set(gathered))
        for lesson in made
        for pieces, gathered in zip(lesson.evidence, lesson.gathered, strict=True)
    ]
    assert 0.3 < sum(rows) / len(rows) < 0.7


def test_without_written_segments_all_answers_are_asked_from_what_is_left() -> None:
    assert hidden_evidence_share(stage_b_section(small_config())) == 0.0
    assert hidden_evidence_share(stage_b_section(config_with("slots"))) == 1.0


@pytest.mark.parametrize(
    ("parts", "training", "message"),
    [
        ((), {}, "a reader needs a memory"),
        (("slots",), {"adapter_steps": 5}, "adapter_steps = 5"),
        (("plastic",), {"memory_steps": 5}, "memory_steps = 5"),
        (("stack",), {}, "Input should be"),
    ],
)
def test_a_phase_without_its_memory_is_refused(
    parts: tuple[str, ...], training: dict[str, int], message: str
) -> None:
    values = stage_b_section(small_config()).model_dump()
    values["memory"]["parts"] = parts
    values["training"] |= {"adapter_steps": 0, "memory_steps": 0, **training}
    with pytest.raises(ValidationError, match=message):
        StageBConfig.model_validate(values)
