"""Lessons: pure functions of their number, whose evidence is where they say; losses of phases."""

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from cdrmix.checkpoint.fragments import part_of
from cdrmix.config.model_parts import MoEConfig
from cdrmix.config.reasoning import SMALLEST_WINDOW, Phase
from cdrmix.config.schema import Config
from cdrmix.errors import DataError
from cdrmix.models.backbone import Backbone
from cdrmix.models.initialize import normal_
from cdrmix.models.moe import Router
from cdrmix.models.state_rows import select
from cdrmix.planning.lesson_sizes import trained_segments
from cdrmix.reasoning.lessons import Lessons
from cdrmix.reasoning.policy import Action, step_by_branches
from cdrmix.reasoning.reading_environment import ReadingEpisodes, ReadingState
from cdrmix.stage_b.phases import (
    Collected,
    Course,
    StepMean,
    drawn_budgets,
    make_course,
    phase_loss,
    stage_b_section,
)
from tests.unit.reasoning.small_reader import (
    TASKS,
    WINDOW_TOKENS,
    small_config,
    small_lessons,
    small_reader,
    tokenizer,
)


def test_a_lesson_follows_from_seed_phase_and_number() -> None:
    lessons = small_lessons(small_config())
    first, again = (lessons.lesson("joint", 3) for _ in range(2))
    assert torch.equal(first.texts.tokens, again.texts.tokens)
    assert (first.found, first.gathered, first.seed) == (again.found, again.gathered, again.seed)
    others = [lessons.lesson("joint", 4), lessons.lesson("memory", 3)]
    assert len({first.examples, *(other.examples for other in others)}) == 3


def test_what_is_sought_is_evidence_and_what_is_gathered_all_of_it() -> None:
    lessons = small_lessons(small_config(texts_per_lesson=16, tasks=TASKS))
    lesson = lessons.lesson("joint", 0)
    for row, example in enumerate(lesson.examples):
        said = [
            tokenizer().decode(lesson.texts.segment(row, place)) for place in lesson.gathered[row]
        ]
        assert all(any(line in text for text in said) for line in example.evidence)
        assert (lesson.sought[row] >= 0) == bool(example.evidence)
        assert set(lesson.evidence[row]) <= set(lesson.gathered[row])
        if example.evidence:
            sought = tokenizer().decode(lesson.texts.segment(row, int(lesson.sought[row])))
            assert any(line in sought for line in example.evidence)
            assert int(lesson.sought[row]) not in lesson.found[row]


@pytest.mark.parametrize("task", ["needle_values", "common_words"])
def test_a_text_whose_answer_has_no_room_gives_way_to_the_next(task: str) -> None:
    config = small_config(texts_per_lesson=16, tasks=(task,))
    lesson = small_lessons(config).lesson("memory", 0)
    longest = max(map(len, lesson.answers))
    assert min(map(len, lesson.answers)) < longest
    config = small_config(texts_per_lesson=16, tasks=(task,), answer_tokens=longest - 1)
    narrow = small_lessons(config).lesson("memory", 0)
    assert max(map(len, narrow.answers)) < longest
    for answer, example in zip(narrow.answers, narrow.examples, strict=True):
        assert tokenizer().decode(list(answer[:-1])).split() == list(example.answers)
    with pytest.raises(DataError, match=rf"{task}: an answer takes \d+ tokens.*answer_tokens"):
        small_lessons(small_config(tasks=(task,), answer_tokens=3)).lesson("memory", 0)


@pytest.mark.parametrize(
    ("top_k", "max_spliced", "most"), [(1, 8, 2), (3, 8, 4), (6, 8, 7), (6, 7, 6), (6, 4, 5)]
)
def test_windows_hold_the_strays_that_a_retrieval_of_so_many_segments_brings(
    top_k: int, max_spliced: int, most: int
) -> None:
    config = small_config(texts_per_lesson=16, tasks=("needle_keys",), segment_tokens=24)
    stage_b = stage_b_section(config)
    memory = stage_b.memory.model_copy(update={"top_k": top_k})
    policy = stage_b.policy.model_copy(update={"max_spliced": max_spliced})
    stage_b = stage_b.model_copy(update={"memory": memory, "policy": policy})
    # A window of more segments than a text is thinned out to.
    lessons = Lessons(
        *(stage_b.training, 0, 512, tokenizer()),
        top_k=top_k,
        num_segments=trained_segments(stage_b),
    )
    beside = set()
    for number in range(4):
        lesson = lessons.lesson("joint", number)
        for evidence, gathered in zip(lesson.evidence, lesson.gathered, strict=True):
            beside.add(len(set(gathered) - set(evidence)))
    assert beside == set(range(most + 1))


def test_of_a_long_text_the_likest_segments_stay_beside_the_evidence() -> None:
    """They are what a retrieval brings: another needle stayed in less than half of such texts."""
    config = small_config(texts_per_lesson=16, tasks=("needle_keys",), segment_tokens=24)
    lessons = Lessons(stage_b_section(config).training, 0, 1024, tokenizer())
    lesson = lessons.lesson("joint", 0)
    others = []
    for row, evidence in enumerate(lesson.evidence):
        texts = [
            tokenizer().decode(lesson.texts.segment(row, place))
            for place in torch.nonzero(lesson.texts.lengths[row]).flatten().tolist()
            if place not in evidence
        ]
        assert len(texts) == 5
        others.append(sum(any(map(str.isdigit, text)) for text in texts))
    assert sum(number > 0 for number in others) >= 12
    assert min(others) < 3, "the rest are any segments"


def test_drills_fit_into_the_window_and_come_where_a_backbone_learns() -> None:
    lessons = small_lessons(small_config(tasks=TASKS))
    drills = lessons.lesson("joint", 0).drills
    # Fewer than texts: those that their window does not answer are left out.
    assert 0 < len(drills) < 16 and not lessons.lesson("memory", 0).drills
    for window, answer in drills:
        assert window[-1] == lessons.marks.answer and answer[-1] == lessons.marks.stop
        assert len(window) + len(answer) <= WINDOW_TOKENS


def test_the_policy_reads_whole_texts() -> None:
    lessons = small_lessons(small_config(length_ratios=(8,), tasks=("needle_keys",)))
    joint, policy = lessons.lesson("joint", 0), lessons.lesson("policy", 0)
    assert joint.texts.tokens.shape[1] <= 10 < policy.texts.tokens.shape[1]


def test_each_phase_gives_gradients_to_what_learns_in_it_and_to_nothing_else() -> None:
    config = small_config(backbone_lr_scale=1.0)
    for phase in ("memory", "adapters", "joint"):
        reader = small_reader(config)
        course = Course(reader, small_lessons(config), config)
        learning = course.learning(phase)
        for name, parameter in reader.named_parameters():
            parameter.requires_grad_(part_of(name) in learning)
        loss, metrics = course.loss(phase, course.lesson(phase, 0))
        loss.backward()
        assert loss.isfinite() and all(value.isfinite() for value in metrics.values())
        with_gradient = {
            part_of(name)
            for name, parameter in reader.named_parameters()
            if parameter.grad is not None and bool(parameter.grad.any())
        }
        assert with_gradient == learning, phase


def test_a_lesson_that_asks_for_nothing_has_no_recall_and_its_graph() -> None:
    config = small_config(tasks=("common_words",), texts_per_lesson=1)
    reader, lesson = small_reader(config), small_lessons(config).lesson("memory", 0)
    assert lesson.sought.tolist() == [-1]
    loss, metrics = Course(reader, small_lessons(config), config).loss("memory", lesson)
    assert loss == 0 and "recall" not in metrics and "answered" in metrics
    loss.backward()
    gradients = [p.grad for p in reader.retrieval.parameters() if p.grad is not None]
    assert gradients and not any(gradient.any() for gradient in gradients)


def test_the_smallest_window_has_segments_that_hold_the_evidence_of_every_task() -> None:
    lessons = small_lessons(small_config(tasks=TASKS, texts_per_lesson=len(TASKS)))
    lessons = dataclasses.replace(lessons, window_tokens=SMALLEST_WINDOW)
    lesson = lessons.lesson("memory", 0)
    assert [bool(places) for places in lesson.evidence] == [
        bool(example.evidence) for example in lesson.examples
    ]


def earning(monkeypatch: pytest.MonkeyPatch, *scores: float) -> None:
    """Gives any answer the score of its text."""
    grade_by = "cdrmix.stage_b.phases.grade_by"
    monkeypatch.setattr(grade_by, lambda *_: lambda row, tokens: scores[row])


def mean(metric: object) -> float:
    assert isinstance(metric, StepMean)
    return float(metric.total / metric.steps)


def test_the_policy_learns_from_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    earning(monkeypatch, 1.0, 1.0)  # less what an episode costs: no two episodes earn alike
    config = small_config(texts_per_lesson=2, length_ratios=(2,))
    reader = small_reader(config)
    course = Course(reader, small_lessons(config), config)
    phase: Phase = "policy"
    lesson = course.lesson(phase, 0)
    collected, again = course.collect(lesson), course.collect(lesson)
    assert torch.equal(collected.rollouts.actions, again.rollouts.actions)
    assert collected.rollouts.final.solved.all(), "every episode ends with an answer"
    loss, metrics = course.rollout_loss(collected)
    loss.backward()
    assert reader.policy.feature_policy.weight.grad.any()
    assert mean(metrics["kl"]) == 0 and mean(metrics["entropy"]) > 0
    assert set(metrics) == {"loss", "kl", "clip_fraction", "entropy", "value_loss"}
    steps = int(collected.rollouts.taken.sum())
    assert collected.num_learned == steps
    assert {int(metric.steps) for metric in metrics.values() if isinstance(metric, StepMean)} == {
        steps
    }
    assert isinstance(metrics["loss"], StepMean) and metrics["loss"].total == loss
    # as if the policy had halved the probability of each action since it took them
    halved = replaced(collected, logprobs=collected.rollouts.logprobs + math.log(2))
    _, metrics = course.rollout_loss(halved)
    assert mean(metrics["kl"]) == pytest.approx(math.log(2) - 0.5)
    assert mean(metrics["clip_fraction"]) == 1


def replaced(collected: Collected, **changed: torch.Tensor) -> Collected:
    rollouts = dataclasses.replace(collected.rollouts, **changed)
    return dataclasses.replace(collected, rollouts=rollouts)


def with_policy(config: Config, **changed: float) -> Config:
    assert config.stage_b is not None
    policy = config.stage_b.policy.model_copy(update=changed)
    return config.model_copy(
        update={"stage_b": config.stage_b.model_copy(update={"policy": policy})}
    )


def test_weights_of_the_policy_are_the_configurations(monkeypatch: pytest.MonkeyPatch) -> None:
    earning(monkeypatch, 1.0)
    config = small_config(texts_per_lesson=1, length_ratios=(1,))
    reader = small_reader(config)
    course = Course(reader, small_lessons(config), config)
    collected = course.collect(course.lesson("policy", 0))
    base, metrics = course.rollout_loss(collected)
    for name, metric, sign in (
        ("entropy_weight", "entropy", -1),
        ("value_weight", "value_loss", 1),
    ):
        assert config.stage_b is not None
        raised = with_policy(config, **{name: getattr(config.stage_b.policy, name) + 1})
        loss, _ = dataclasses.replace(course, config=raised).rollout_loss(collected)
        measured = metrics[metric]
        assert isinstance(measured, StepMean)
        assert (loss - base).item() == pytest.approx(sign * float(measured.total), rel=1e-4)


def test_a_group_whose_episodes_all_earn_the_same_counts_as_one_that_teaches_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Nothing for any answer from the first text; from the second all, less what an episode costs.
    earning(monkeypatch, 0.0, 1.0)
    config = small_config(texts_per_lesson=2, length_ratios=(2,))
    course = Course(small_reader(config), small_lessons(config), config)
    collected = course.collect(course.lesson("policy", 0))
    nothing, something = collected.rollouts.returns.view(2, -1)
    assert not nothing.any() and len(something.unique()) > 1
    assert float(collected.metrics["zero_variance_groups"]) == 0.5
    # the loss is the second text's alone
    taken = collected.rollouts.taken.view(2, -1)
    assert collected.num_learned == int(taken[1].sum()) and taken[0].any()
    loss, metrics = course.rollout_loss(collected)
    second = collected.advantages.is_learned.nonzero().flatten()
    alone = Collected(
        select(collected.rollouts, second), select(collected.advantages, second), collected.metrics
    )
    torch.testing.assert_close(loss, course.rollout_loss(alone)[0])
    assert isinstance(metrics["loss"], StepMean) and isinstance(metrics["kl"], StepMean)
    assert int(metrics["loss"].steps) == collected.num_learned < int(metrics["kl"].steps)


def test_a_lesson_that_says_nothing_has_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    earning(monkeypatch, 0.0)
    config = small_config(texts_per_lesson=1, length_ratios=(1,))
    course = Course(small_reader(config), small_lessons(config), config)
    collected = course.collect(course.lesson("policy", 0))
    loss, _ = course.rollout_loss(collected)
    loss.backward()
    assert loss == 0 and collected.num_learned == 0
    assert float(collected.metrics["zero_variance_groups"]) == 1
    gradients = [p.grad for p in course.model.policy.parameters() if p.grad is not None]
    assert gradients and not any(gradient.any() for gradient in gradients)


def test_the_temperature_of_retrieval_is_the_configurations() -> None:
    config = small_config(texts_per_lesson=4, length_ratios=(4,))
    assert config.stage_b is not None
    memory = config.stage_b.memory.model_copy(update={"contrastive_temperature": 1e6})
    hot = config.model_copy(
        update={"stage_b": config.stage_b.model_copy(update={"memory": memory})}
    )
    losses = []
    for each in (config, hot):
        course = Course(small_reader(each), small_lessons(each), each)
        lesson = course.lesson("memory", 0)
        _, metrics = phase_loss(course.model, "memory", lesson, each)
        losses.append(float(metrics["retrieval_loss"]))
    # all segments that may be found are equally likely: between two of them and all four texts'
    assert math.log(2) < losses[1] < math.log(4 * 4 * 4) and abs(losses[0] - losses[1]) > 1e-3


@torch.no_grad()
def test_the_divergence_that_ends_epochs_is_a_mean_over_the_steps_taken() -> None:
    config = small_config(texts_per_lesson=2, length_ratios=(2,))
    reader = small_reader(config)
    course = Course(reader, small_lessons(config), config)
    collected = course.collect(course.lesson("policy", 0))
    normal_(reader.policy.feature_policy.weight, 0.5, seed=3, name="moved on")
    _, metrics = course.rollout_loss(collected)
    played, divergence, entropy, count = collected.rollouts, 0.0, 0.0, 0
    for row, step in played.taken.nonzero().tolist():
        seen = (played.hidden, played.features, played.legal)
        decision = reader.policy(*(part[row, step].unsqueeze(0) for part in seen))
        present = decision.logprobs[0, played.actions[row, step]].item()
        ratio = math.exp(present - played.logprobs[row, step].item())
        divergence += ratio - 1 - math.log(ratio)
        entropy += decision.entropy.item()
        count += 1
    assert count > len(played.taken) and divergence / count > 1e-3
    assert mean(metrics["kl"]) == pytest.approx(divergence / count, rel=1e-4)
    assert mean(metrics["entropy"]) == pytest.approx(entropy / count, rel=1e-5)


def test_a_horizon_shorter_than_the_text_leaves_episodes_whole_and_their_last_steps() -> None:
    config = small_config(texts_per_lesson=2, length_ratios=(2,))
    section = config.stage_b
    assert section is not None
    policy = section.policy.model_copy(update={"horizon": 3})
    short = config.model_copy(update={"stage_b": section.model_copy(update={"policy": policy})})
    found = []
    for each in (config, short):
        course = Course(small_reader(each), small_lessons(each), each)
        found.append(course.collect(course.lesson("policy", 0)))
    whole, cut = found
    assert whole.rollouts.taken.sum(1).min() > 3, "a segment is a step"
    assert cut.rollouts.taken.shape[1] == 3 and cut.rollouts.final.solved.all()
    assert torch.equal(whole.rollouts.final.earned, cut.rollouts.final.earned)
    assert torch.equal(whole.rollouts.returns, cut.rollouts.returns)
    assert whole.metrics["operations/splice_window"] == cut.metrics["operations/splice_window"]


def test_texts_of_training_have_budgets_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    config = with_policy(small_config(texts_per_lesson=8, length_ratios=(8,)), step_budget=16)
    earning(monkeypatch, *[1.0] * 8)
    reader = small_reader(config)
    with torch.no_grad():
        reader.policy.feature_policy.bias[Action.CACHE_WRITE] = 100.0  # whatever is legal, write
    lesson = small_lessons(config).lesson("policy", 0)
    collected = Course(reader, small_lessons(config), config).collect(lesson)
    writes = (collected.rollouts.actions == Action.CACHE_WRITE) & collected.rollouts.taken
    written = writes.sum(1).view(8, -1)  # texts, episodes
    assert (written == written[:, :1]).all(), "those of one text are compared with each other"
    budgets = drawn_budgets(config.stage_b.policy, 8, seed=lesson.seed)
    assert written[:, 0].tolist() == [budget - 1 for budget in budgets], "one for the question"
    many = drawn_budgets(config.stage_b.policy, 1000, seed=0)
    assert min(many) == 2 and max(many) == 16
    assert 0.4 < sum(budget <= 16 * 0.125**0.5 for budget in many) / 1000 < 0.6
    always = config.stage_b.policy.model_copy(update={"smallest_budget": 1.0})
    assert drawn_budgets(always, 3, seed=0) == [16] * 3


def test_an_episode_writes_fetches_and_answers() -> None:
    config = small_config(tasks=("needle_keys",), length_ratios=(1,))
    reader, lessons = small_reader(config), small_lessons(config)
    lesson = lessons.lesson("policy", 0)
    seen: list[tuple[int, list[int]]] = []

    def grade(row: int, answer: list[int]) -> float:
        seen.append((row, list(answer)))
        return 1.0

    episodes = ReadingEpisodes(reader, reader.read(lesson.texts), grade)
    state = episodes.start()
    count = int(lesson.texts.num_segments.max())
    for _ in range(count):
        actions = torch.full((4,), int(Action.CACHE_WRITE))
        legal = episodes.observe(state).legal
        actions = torch.where(legal[:, Action.CACHE_WRITE], actions, int(Action.RETRIEVE))
        state = episodes.step(state, actions).state
    assert (state.memory >= 0).sum(1).tolist() == lesson.texts.num_segments.tolist()
    for action in (Action.RETRIEVE, Action.SPLICE_WINDOW):
        state = episodes.step(state, torch.full((4,), int(action))).state
    assert (state.fetched >= 0).any(1).all() and not state.solved.any()
    best = reader.config.memory.top_k
    assert (state.fetched >= 0).sum(1).max() <= 2 * best
    after = episodes.step(state, torch.full((4,), int(Action.SPLICE_WINDOW)))
    assert after.done.all() and not seen, "episodes are graded together, once they are over"
    reward = episodes.settle(after.state).reward
    assert len(seen) == 4
    policy = config.stage_b.policy
    operations = state.operations * policy.latency_penalty
    assert (reward <= 1 + policy.stability_bonus - operations + 1e-6).all()
    assert (reward > 0.5).all()


def test_words_in_common_lead_where_keys_do_not_and_follow_what_was_fetched() -> None:
    config = small_config()
    reader, lessons = small_reader(config), small_lessons(config)
    sentences = ["The sun rose early.", "Let lona be tibu.", "Let mare be 17.", "Let tibu be mare."]
    segments = [lessons.tokenizer.encode(sentence) for sentence in sentences]
    texts = lessons.texts([segments], ["Where was lona?"])
    reading = reader.read(texts)
    # keys ask for the segment that has nothing to do with it
    keys = torch.zeros_like(reading.keys)
    keys[..., 0] = torch.tensor([0.9, 0.5, 0.5, 0.5])
    reading = dataclasses.replace(reading, keys=keys)

    def fetched(*, share: float, words: bool = True) -> list[int]:
        memory = reader.config.memory.model_copy(update={"words_share": share, "top_k": 1})
        reader.config = reader.config.model_copy(update={"memory": memory})
        episodes = ReadingEpisodes(reader, reading, lambda *_: 0.0, words=words)
        state = episodes.start()
        for _ in sentences:
            state = episodes.step(state, torch.tensor([Action.CACHE_WRITE])).state
        found = []
        for _ in range(3):
            state = dataclasses.replace(state, query=F.one_hot(torch.tensor([0]), 32).float())
            state = episodes.step(state, torch.tensor([Action.RETRIEVE])).state
            found.append(int(state.buffer[0, 0]))
            expected = keys[0, found[-1], 0]
            assert state.score.item() == pytest.approx(expected), "the agent sees the cosine"
            state = episodes.step(state, torch.tensor([Action.SPLICE_WINDOW])).state
        return found

    for share in (0.4, 1.0):
        assert fetched(share=share) == [1, 3, 2], "hop by hop"
    assert fetched(share=0.0) == fetched(share=0.4, words=False) == [0, 1, 2]


def test_branches_of_one_text_see_nothing_of_another() -> None:
    config = small_config(tasks=("needle_keys",), length_ratios=(1,))
    reader, lessons = small_reader(config), small_lessons(config)
    generator = torch.Generator().manual_seed(0)
    for parameter in reader.policy.parameters():
        parameter.data.normal_(generator=generator)
    texts = lessons.lesson("policy", 0).texts
    reading = reader.read(texts)

    def at_the_question() -> tuple[ReadingEpisodes, ReadingState]:
        episodes = ReadingEpisodes(reader, reading, lambda *_: 1.0)
        state = episodes.start()
        for _ in range(int(texts.num_segments.min())):
            state = episodes.step(state, torch.full((4,), int(Action.CACHE_WRITE))).state
        return episodes, state

    episodes, state = at_the_question()
    _, before = at_the_question()
    together = step_by_branches(episodes, reader.policy, state)
    for field in dataclasses.fields(state):
        assert torch.equal(getattr(state, field.name), getattr(before, field.name)), field.name
    for row in range(4):
        own, _ = at_the_question()
        alone = step_by_branches(own, reader.policy, select(state, torch.tensor([row])))
        assert alone.actions.item() == together.actions[row].item()
        torch.testing.assert_close(alone.advantages[0], together.advantages[row], atol=1e-4, rtol=0)
        for name in ("memory", "buffer", "fetched", "summarised"):
            assert torch.equal(getattr(alone.state, name)[0], getattr(together.state, name)[row])


def weighted(ce: float, hebbian: float, moe_aux: float) -> Config:
    """A reader's configuration with experts in a backbone that learns, and weights of losses."""
    config = small_config(backbone_lr_scale=1.0)
    moe = MoEConfig(
        num_experts=4, expert_hidden_size=32, load_balance_weight=0.5, z_loss_weight=0.25
    )
    losses = {"ce": ce, "hebbian": hebbian, "moe_aux": moe_aux}
    stage_b = config.stage_b.model_copy(
        update={"losses": config.stage_b.losses.model_copy(update=losses)}
    )
    model = config.model.model_copy(update={"moe": moe})
    return config.model_copy(update={"model": model, "stage_b": stage_b})


@torch.no_grad()
def test_the_joint_loss_is_the_sum_of_its_terms_each_with_its_weight() -> None:
    found = {}
    plain = torch.randint(512, (3, 2 * WINDOW_TOKENS + 10))
    for weights in ((1.0, 1.0, 1.0), (2.0, 3.0, 5.0)):
        config = weighted(*weights)
        reader, lessons = small_reader(config), small_lessons(config)
        lesson = dataclasses.replace(lessons.lesson("joint", 0), plain=plain)
        loss, metrics = Course(reader, lessons, config).loss("joint", lesson)
        terms = {name: value.item() for name, value in metrics.items() if name.endswith("_loss")}
        assert loss.item() == pytest.approx(sum(terms.values()), rel=1e-6)
        found[weights] = terms
    one, other = found.values()
    scales = {name: other[name] / one[name] for name in one}
    assert scales == pytest.approx(
        {
            **dict.fromkeys(("answer_loss", "text_loss", "replay_loss", "drill_loss"), 2.0),
            "retrieval_loss": 1.0,
            "correlation_loss": 3.0,
            "router_loss": 5.0,
        }
    )
    # replay and router terms by their definitions, of the backbone alone
    seen: list[torch.Tensor] = []
    for module in reader.backbone.modules():
        if isinstance(module, Router):
            module.register_forward_pre_hook(
                lambda router, inputs: seen.append(inputs[0].double() @ router.weight.double().T)
            )
    hidden = reader.backbone(plain[:, :-1]).hidden.double()
    scores = (hidden @ reader.backbone.embedding.weight.double().T).flatten(0, 1)
    replay = F.cross_entropy(scores, plain[:, 1:].flatten())
    assert one["replay_loss"] == pytest.approx(replay.item(), rel=1e-5)
    balances, zs = [], []
    for logits in seen:
        fraction = F.one_hot(logits.topk(2, -1).indices, 4).sum(1).double().mean(0) / 2
        balances.append(4 * (fraction * logits.softmax(-1).mean(0)).sum().item())
        zs.append(logits.logsumexp(-1).square().mean().item())
    assert len(seen) == config.model.num_layers == 2
    router = 0.5 * sum(balances) / 2 + 0.25 * sum(zs) / 2
    assert one["router_loss"] == pytest.approx(router, rel=1e-5)


def test_a_text_is_read_alike_alone_and_beside_others_whose_tokens_would_be_dropped() -> None:
    config = small_config(texts_per_lesson=4)
    moe = MoEConfig(
        num_experts=4, expert_hidden_size=32, top_k=1, capacity_factor=1.0, drop_tokens=True
    )
    config = config.model_copy(update={"model": config.model.model_copy(update={"moe": moe})})
    samples = SimpleNamespace(rows=lambda numbers: np.zeros((len(numbers), 65), int), num_samples=1)
    corpus: Any = SimpleNamespace(tokenizer=tokenizer(), train=samples, validation=samples)
    backbone = Backbone(config.model)
    backbone.initialize(seed=0)
    with torch.no_grad():  # else the experts' outputs are zero
        for name, parameter in backbone.named_parameters():
            if parameter.dim() > 1 and "embedding" not in name:
                normal_(parameter, parameter.shape[-1] ** -0.5, seed=0, name=name)
    course = make_course(config, backbone, corpus, own=None)
    assert course.lessons.num_segments == trained_segments(stage_b_section(config))
    texts = course.lesson("policy", 0).texts
    last = torch.tensor([len(texts.tokens) - 1])  # whose tokens find experts full
    alone = course.model.read(select(texts, last))
    beside = course.model.read(texts)
    torch.testing.assert_close(alone.hidden[0], beside.hidden[-1], rtol=1e-4, atol=1e-5)
    course.model.train()
    dropped = course.model.read(texts)
    assert not torch.allclose(alone.hidden[0], dropped.hidden[-1], rtol=1e-2, atol=1e-3)
