"""Retrieval without labels: targets from the reader's answers, and that they teach to retrieve."""

import dataclasses
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from cdrmix.config.schema import Config
from cdrmix.models.state_rows import select
from cdrmix.reasoning.lessons import Lesson, Lessons
from cdrmix.reasoning.memory_reader import MemoryReader
from cdrmix.reasoning.own_tasks import read_own_tasks
from cdrmix.stage_b.answer_rows import rows_with_answers
from cdrmix.stage_b.likelihood import preferences
from cdrmix.stage_b.phases import Course, retrieval_loss
from tests.unit.reasoning.own_rows import write_rows
from tests.unit.reasoning.small_reader import (
    WINDOW_TOKENS,
    small_config,
    small_lessons,
    small_reader,
    tokenizer,
)


def unlabelled(tmp_path: Path, **changed: object) -> tuple[Config, Lessons]:
    path = write_rows(tmp_path / "tasks.jsonl", evidence=None, **changed)
    config = small_config(task_file=str(path), task_file_share=1.0)
    assert config.stage_b is not None
    own = read_own_tasks(
        config.stage_b.training, window_tokens=WINDOW_TOKENS, encode=tokenizer().encode
    )
    return config, dataclasses.replace(small_lessons(config), own=own)


@torch.no_grad()
def test_targets_are_shares_of_the_answers_likelihood_with_each_candidate(tmp_path: Path) -> None:
    config, lessons = unlabelled(tmp_path)
    reader = small_reader(config)
    lesson = lessons.lesson("joint", 1)
    reading = reader.read(lesson.texts)
    found = preferences(reader, reading, lesson)
    assert found is not None
    again = preferences(reader, reader.read(lesson.texts), lesson)
    assert again is not None and torch.equal(found, again)
    for row, options in enumerate(lesson.candidates):
        # one window at a time, token by token
        nats = []
        for place in options:
            windows = reader.windows(lesson.texts, [row], [(place, *lesson.found[row])])
            tokens, _ = rows_with_answers(
                windows.tokens.tolist(), [lesson.answers[row]], windows.tokens.device
            )
            state = select(reading.plastic, torch.tensor([row]))
            output, _ = reader.look(tokens, slots=None, plastic=state)
            logprobs = reader.backbone.logits(output.hidden[0]).log_softmax(-1)
            start = windows.tokens.shape[1] - 1
            nats.append(
                sum(logprobs[start + n, id].item() for n, id in enumerate(lesson.answers[row]))
            )
        shares = torch.tensor(nats).softmax(0)
        torch.testing.assert_close(found[row, list(options)], shares, atol=1e-5, rtol=1e-3)
        assert found[row].sum().item() == pytest.approx(1, abs=1e-5)


def test_labelled_texts_cost_no_window_and_have_no_targets(tmp_path: Path) -> None:
    config = small_config()
    reader, lesson = small_reader(config), small_lessons(config).lesson("memory", 0)
    assert preferences(reader, reader.read(lesson.texts, plastic=False), lesson) is None


def test_the_loss_is_the_cross_entropy_of_soft_targets_beside_hard_ones(tmp_path: Path) -> None:
    config, lessons = unlabelled(tmp_path)
    reader = small_reader(config)
    lesson = lessons.lesson("memory", 0)
    length = lesson.texts.tokens.shape[1]
    # the first text has a label, the others have not
    sought = next(n for n in range(length) if n not in lesson.found[0])
    lesson = dataclasses.replace(
        lesson,
        sought=torch.tensor([sought, -1, -1, -1]),
        candidates=((), *lesson.candidates[1:]),
    )
    with torch.no_grad():
        reading = reader.read(lesson.texts, plastic=False)
        soft = preferences(reader, reading, lesson)
    assert soft is not None and not soft[0].any()
    queries = F.normalize(torch.randn(4, reading.keys.shape[2]), dim=1)
    loss, metrics = retrieval_loss(reading, queries, lesson, preferred=soft, temperature=0.5)
    every = (queries @ reading.keys.flatten(0, 1).T / 0.5).view(4, 4, length)
    expected, near = [], []
    for row in range(4):
        scores = every[row].clone()
        scores[row, list(lesson.found[row])] = -torch.inf
        scores[lesson.texts.lengths == 0] = -torch.inf
        for other in range(4):  # the same text asked about twice is no wrong answer
            same = lesson.examples[other].text == lesson.examples[row].text
            if other != row and same:
                scores[other] = -torch.inf
        logs = scores.flatten().log_softmax(0).view(4, length)[row]
        target = F.one_hot(torch.tensor(sought), length).float() if row == 0 else soft[row]
        expected.append(-sum(t * g for t, g in zip(target, logs, strict=True) if t > 0))
        near.append(int(scores[row].argmax()) == int(target.argmax()))
    assert loss.item() == pytest.approx(sum(expected).item() / 4, rel=1e-5)
    assert float(metrics["recall"]) == near[0]
    assert float(metrics["agreement"]) == pytest.approx(sum(near[1:]) / 3)


def test_other_questions_about_one_text_are_not_pushed_away(tmp_path: Path) -> None:
    _, lessons = unlabelled(tmp_path)
    lesson = lessons.lesson("memory", 0)
    one = lesson.examples[0]
    same = dataclasses.replace(lesson, examples=(one,) * 4)
    config, _ = unlabelled(tmp_path)
    reader = small_reader(config)
    reading = reader.read(lesson.texts, plastic=False)
    soft = preferences(reader, reading, lesson)
    queries = F.normalize(torch.randn(4, reading.keys.shape[2]), dim=1)
    found = [
        retrieval_loss(reading, queries, each, preferred=soft, temperature=0.5)[0].item()
        for each in (lesson, same)
    ]
    assert found[1] < found[0]


def is_answered_by_candidates(lesson: Lesson) -> bool:
    """Whether each text has a candidate that holds its answer."""
    return all(
        any(
            example.answers[0] in tokenizer().decode(lesson.texts.segment(row, place))
            for place in lesson.candidates[row]
        )
        for row, example in enumerate(lesson.examples)
    )


def test_likelihoods_alone_teach_the_encoder_to_fetch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, lessons = unlabelled(tmp_path)
    # of the first seed the untrained queries happen to find most
    reader = small_reader(config, seed=1)
    course = Course(reader, lessons, config)

    def knows(
        reader: MemoryReader, reading: object, lesson: Lesson, rows: list[int], places: list[int]
    ) -> torch.Tensor:
        """Likelihoods of a reader that can copy an answer, and guesses without it."""
        said = [
            tokenizer().decode(lesson.texts.segment(row, place))
            for row, place in zip(rows, places, strict=True)
        ]
        answers = [lesson.examples[row].answers[0] for row in rows]
        return torch.tensor([-0.1 if a in s else -9.0 for a, s in zip(answers, said, strict=True)])

    monkeypatch.setattr("cdrmix.stage_b.likelihood._log_likelihoods", knows)
    learning = list(reader.retrieval.parameters())
    optimizer = torch.optim.Adam(learning, lr=1e-2)

    def agreement() -> float:
        """Share of 24 other texts whose nearest segment is the likeliest one."""
        return sum(float(course.loss("memory", each)[1]["agreement"]) for each in unseen) / 6

    # of texts whose answer does not stand in the window already, so that one segment is likeliest
    every = (course.lesson("memory", number) for number in range(100, 200))
    unseen = list(islice(filter(is_answered_by_candidates, every), 6))
    before = agreement()
    for number in range(20):
        loss, _ = course.loss("memory", course.lesson("memory", number))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    after = agreement()
    assert before <= 0.5 and after > 0.9, (before, after)


@pytest.mark.parametrize("parts", [("episodic",), ("plastic", "episodic")])
def test_a_reader_without_slots_learns_from_its_answers_too(
    parts: tuple[str, ...], tmp_path: Path
) -> None:
    config, lessons = unlabelled(tmp_path)
    assert config.stage_b is not None
    memory = config.stage_b.memory.model_copy(update={"parts": parts})
    config = config.model_copy(
        update={"stage_b": config.stage_b.model_copy(update={"memory": memory})}
    )
    course = Course(small_reader(config), lessons, config)
    loss, metrics = course.loss("memory", course.lesson("memory", 0))
    assert "agreement" in metrics
    loss.backward()
    gradient = course.model.retrieval.to_key.weight.grad
    assert gradient is not None and gradient.any()
