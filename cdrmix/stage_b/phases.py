"""Losses and rollouts of the phases of Stage B, means over a lesson but for the policy's.

memory    retrieval encoder (InfoNCE) and slots (text after a window that is gone)
adapters  plastic adapters, on text and on answers
policy    the memory agent, by GRPO on whole episodes
joint     all except the policy, and the backbone where it is trained; plain text without memory
          then preserves its language modelling
"""

# N texts, L segments, D hidden, K key dimensions, n windows or rows, T tokens

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cdrmix import runtime
from cdrmix.checkpoint.fragments import Part
from cdrmix.config.model import ModelConfig
from cdrmix.config.reasoning import Phase, PolicyConfig, StageBConfig
from cdrmix.config.schema import Config
from cdrmix.data.tokenizer import Tokenizer
from cdrmix.engines.routing import router_parts
from cdrmix.engines.training_data import Corpus
from cdrmix.models.backbone import Backbone, Output
from cdrmix.models.moe import rows_of
from cdrmix.models.state_rows import moved, select
from cdrmix.objectives import grpo
from cdrmix.objectives.language_model import IGNORED_LABEL, linear_cross_entropy
from cdrmix.objectives.router import router_losses
from cdrmix.parallel.frozen_stages import chained
from cdrmix.planning.lesson_sizes import trained_segments
from cdrmix.reasoning.lessons import Lesson, Lessons
from cdrmix.reasoning.memory_reader import MemoryReader, Reading
from cdrmix.reasoning.own_tasks import OwnTasks
from cdrmix.reasoning.policy import (
    Action,
    Advantages,
    Rollouts,
    advantages_of,
    policy_loss,
    roll_out,
)
from cdrmix.reasoning.reading_environment import Grade, ReadingEpisodes, ReadingState
from cdrmix.reasoning.recall import Samples
from cdrmix.reasoning.tasks import Example, score
from cdrmix.stage_b.answer_rows import rows_with_answers
from cdrmix.stage_b.likelihood import preferences


class StepMean(NamedTuple):
    """Mean over the steps of episodes, which differ in number from lesson to lesson."""

    total: Tensor  # sum over a lesson
    steps: Tensor  # of the lesson


# A mean over the lesson, or sum and count of a mean over steps.
LessonMetrics = dict[str, Tensor | StepMean]


def phase_loss(
    reader: MemoryReader, phase: Phase, lesson: Lesson, config: Config
) -> tuple[Tensor, LessonMetrics]:
    """Scalar loss of a lesson in a phase without rollouts (memory, adapters or joint), and metrics:
    detached scalars, means over the lesson.

    The reader has gradients enabled for the parts that the phase trains.
    """
    weights = stage_b_section(config).losses
    # Memory is trained without adapters, and adapters without slots; the joint phase has both.
    plastic = phase != "memory" and reader.has("plastic")
    slots = phase != "adapters" and reader.has("slots")
    retrieves = phase != "adapters" and reader.has("episodic")
    tasks, metrics = _task_losses(reader, lesson, plastic=plastic, slots=slots, retrieves=retrieves)
    losses: dict[str, Tensor] = {}
    if retrieves:
        losses["retrieval"] = tasks["retrieval"]
    if phase != "memory":
        losses["answer"] = weights.ce * tasks["answer"]
    if plastic:
        losses["correlation"] = weights.hebbian * tasks["correlation"]
    if len(lesson.plain):
        text = text_loss(reader, lesson.plain, plastic=plastic, slots=slots)
        losses["text"] = weights.ce * text
    if phase == "joint" and stage_b_section(config).training.backbone_lr_scale > 0:
        # Plain text preserves the language modelling of a backbone that learns.
        alone, router = _backbone_losses(reader, lesson, config.model)
        losses |= {name: weights.ce * loss for name, loss in alone.items()}
        if router is not None:
            losses["router"] = weights.moe_aux * router
    metrics |= {f"{name}_loss": loss.detach() for name, loss in losses.items()}
    # Losses have the types of their models: their sum is taken in float32.
    return torch.stack([loss.float() for loss in losses.values()]).sum(), metrics


def _task_losses(
    reader: MemoryReader, lesson: Lesson, *, plastic: bool, slots: bool, retrieves: bool
) -> tuple[dict[str, Tensor], LessonMetrics]:
    """Losses of retrieving the next piece of evidence, and of the answer from all evidence."""
    count = len(lesson.examples)
    rows = list(range(count))
    reading = reader.read(lesson.texts, plastic=plastic, with_correlation=plastic)
    seeking = reader.windows(lesson.texts, rows, lesson.found)
    answering = reader.windows(lesson.texts, rows, lesson.gathered)
    windows = zip(answering.tokens.tolist(), answering.lengths.tolist(), strict=True)
    tokens, labels = rows_with_answers(
        [ids[:length] for ids, length in windows], lesson.answers, answering.tokens.device
    )
    # Both kinds of windows pass through the reader at once, padded to one width.
    width = max(tokens.shape[1], seeking.tokens.shape[1])
    both = torch.cat([F.pad(ids, (0, width - ids.shape[1])) for ids in (seeking.tokens, tokens)])
    index = torch.arange(count, device=both.device).repeat(2)
    memory = reader.summarise(reading, index[:count], lesson.summarised) if slots else None
    recalled = reader.recalled(reading, index[:count], lesson.summarised)
    output, _ = reader.look(
        both,
        slots=None if memory is None else memory.repeat(2, 1, 1),
        plastic=select(recalled, index),
    )
    hidden = output.hidden
    _, queries = reader.question_state(seeking, hidden[:count, : seeking.tokens.shape[1]])
    preferred = preferences(reader, reading, lesson) if retrieves else None
    retrieval, recall = retrieval_loss(
        reading,
        queries,
        lesson,
        preferred=preferred,
        temperature=reader.config.memory.contrastive_temperature,
    )
    chosen = hidden[count:, : labels.shape[1]]
    answer = answer_loss(reader, chosen, labels)
    with torch.no_grad():
        answered = labels != IGNORED_LABEL
        guesses = torch.full_like(labels, IGNORED_LABEL)
        guesses[answered] = reader.backbone.logits(chosen[answered]).argmax(-1)
        right = (guesses == labels).all(1).float().mean()
    losses = {"retrieval": retrieval, "answer": answer}
    if reading.correlation is not None:
        losses["correlation"] = reading.correlation / count
    metrics = {"answered": right, **recall}
    return losses, metrics


def answer_loss(reader: MemoryReader, hidden: Tensor, labels: Tensor) -> Tensor:
    """Nats per label of windows, [n, T, D] and [n, T].

    Few tokens have a label: only their hidden states meet the vocabulary.
    """
    answered = labels != IGNORED_LABEL
    weight = reader.backbone.embedding.weight
    return linear_cross_entropy(hidden[answered], weight, labels[answered]) / answered.sum()


def retrieval_loss(
    reading: Reading,
    queries: Tensor,
    lesson: Lesson,
    *,
    preferred: Tensor | None,
    temperature: float,
) -> tuple[Tensor, LessonMetrics]:
    """InfoNCE of the segments sought among all segments of the lesson, and shares of texts whose
    nearest segment is the right one: `recall` by labels, `agreement` by `preferences`.

    Segments already in the window are excluded, as when memory is read, and so are those of other
    rows with the same text. Without a task that looks for something, the loss is 0.

    Args:
        preferred: soft targets of texts without labels, [N, L]; None without such texts.
    """
    length = reading.keys.shape[1]
    is_sought = lesson.sought >= 0
    if preferred is not None:
        is_sought = is_sought | preferred.any(1)
    seekers = torch.nonzero(is_sought).flatten()
    if len(seekers) == 0:
        return queries.sum() * 0.0, {}  # zero, and still a part of the graph
    scores = queries[seekers] @ reading.keys.flatten(0, 1).transpose(0, 1) / temperature
    # Empty segments pad the shorter texts of a lesson.
    is_segment = reading.texts.lengths.flatten() > 0
    allowed = is_segment.expand(len(seekers), -1).clone()
    texts = [example.text for example in lesson.examples]
    for place, row in enumerate(seekers.tolist()):
        for segment in lesson.found[row]:
            allowed[place, row * length + segment] = False
        # Other questions about one text have the segments sought here, too, which are not wrong.
        for other, text in enumerate(texts):
            if other != row and text == texts[row]:
                allowed[place, other * length : (other + 1) * length] = False
    scores = scores.masked_fill(~allowed, -torch.inf)
    # Measured as memory is read: among the segments of one text.
    in_own_text = scores.view(len(seekers), -1, length)[torch.arange(len(seekers)), seekers]
    nearest = in_own_text.argmax(1)
    sought = lesson.sought[seekers]
    labelled = sought >= 0
    right = (nearest == sought).float()
    metrics: LessonMetrics = {}
    if bool(labelled.any()):
        metrics["recall"] = right[labelled].mean().detach()
    if preferred is None:
        return F.cross_entropy(scores, seekers * length + sought), metrics
    wanted = preferred[seekers]
    agrees = (nearest == wanted.argmax(1)).float()
    metrics["agreement"] = agrees[~labelled].mean().detach()
    one_hot = F.one_hot(sought.clamp(min=0), length).to(wanted.dtype)
    wanted = torch.where(labelled.unsqueeze(1), one_hot, wanted)
    target = wanted.new_zeros(len(seekers), scores.shape[1])
    target.view(len(seekers), -1, length)[torch.arange(len(seekers)), seekers] = wanted
    # Of a segment that may not be found the target is 0, and 0 times -inf is no number.
    nats = scores.log_softmax(1).masked_fill(~allowed, 0.0)
    return -(target * nats).sum(1).mean(), metrics


def text_loss(reader: MemoryReader, plain: Tensor, *, plastic: bool, slots: bool) -> Tensor:
    """Nats per token of text, `plain` [n, T + 1], read window by window with memory across them.

    Memory is the fast weights if `plastic`, and slots with every window folded in if `slots`.
    """
    state = reader.plastic.start(len(plain))
    memory = reader.memory.start(len(plain))
    nats = []
    step = reader.window_tokens
    for start in range(0, plain.shape[1] - 1, step):
        inputs = plain[:, start : min(start + step, plain.shape[1] - 1)]
        labels = plain[:, start + 1 : start + 1 + inputs.shape[1]]
        with reader.memory.reading(reader.backbone, memory if slots else None):
            if plastic:
                episode = reader.plastic(inputs, state=state)
                hidden = episode.output.hidden
                state = episode.state
            else:
                hidden = reader.backbone(inputs).hidden
        nats.append(linear_cross_entropy(hidden, reader.backbone.embedding.weight, labels))
        if slots:
            # After the loss: slots stand for text that is no longer in the window.
            memory = reader.memory.write(memory, hidden)
    # Every token except the first of each text is predicted.
    return torch.stack(nats).sum() / (plain.numel() - len(plain))


def _backbone_losses(
    reader: MemoryReader, lesson: Lesson, model: ModelConfig
) -> tuple[dict[str, Tensor], Tensor | None]:
    """Losses of the backbone without memory, on drills and plain text (nats per label), and the
    router's on plain text; None without experts."""
    losses = {}
    router: Tensor | None = None
    weight = reader.backbone.embedding.weight
    if lesson.drills:
        questions, answers = zip(*lesson.drills, strict=True)
        tokens, labels = rows_with_answers(questions, answers, weight.device)
        losses["drill"] = answer_loss(reader, reader.backbone(tokens).hidden, labels)
    if len(lesson.plain):
        output: Output = reader.backbone(lesson.plain[:, :-1])
        labels = lesson.plain[:, 1:]
        nats = linear_cross_entropy(output.hidden, weight, labels)
        losses["replay"] = nats / labels.numel()
        if output.router_statistics is not None:
            per_token = output.router_statistics / labels.numel()
            for part, sizes in router_parts(model).items():
                rows = rows_of(per_token, model, part)
                parts = router_losses(rows, num_experts=sizes.num_experts, top_k=sizes.top_k)
                balance = sizes.load_balance_weight * parts.load_balance
                of_part = balance + sizes.z_loss_weight * parts.z
                router = of_part if router is None else router + of_part
    return losses, router


@dataclass(frozen=True)
class Collected:
    """Episodes of a lesson, played by the present policy; those of one text are neighbours.

    In the memory of the host: a rank plays all its lessons of a step before it learns from them.
    """

    rollouts: Rollouts[ReadingState]  # the last steps of each, up to the policy's horizon
    advantages: Advantages
    metrics: LessonMetrics  # means over the episodes

    @property
    def num_learned(self) -> int:
        """Number of steps that the loss is a sum over."""
        return int((self.rollouts.taken & self.advantages.is_learned.unsqueeze(1)).sum())


def grade_by(examples: Sequence[Example], tokenizer: Tokenizer) -> Grade:
    """Returns the checker of a batch's tasks: (text, answer tokens) -> 0 to 1."""
    return lambda row, tokens: score(examples[row], tokenizer.decode(tokens))


def drawn_budgets(config: PolicyConfig, count: int, *, seed: int) -> list[int]:
    """Retrievals and writes of so many texts of a lesson."""
    rng = random.Random(seed)
    shares = (config.smallest_budget ** rng.random() for _ in range(count))
    return [max(2, round(share * config.step_budget)) for share in shares]


@dataclass(frozen=True)
class Course:
    """A reader with its lessons and their losses."""

    model: MemoryReader  # with its backbone
    lessons: Lessons
    config: Config

    def learning(self, phase: Phase) -> set[Part]:
        """Parts that a phase trains; the others have no gradient."""
        if phase != "joint":
            return {phase}
        with_backbone = stage_b_section(self.config).training.backbone_lr_scale > 0
        return {"memory", "adapters", "backbone"} if with_backbone else {"memory", "adapters"}

    def lesson(self, phase: Phase, number: int, *, lengths: Sequence[int] | None = None) -> Lesson:
        """Lesson `number` of a phase, from 0; `lengths` of its texts in the policy's phase, in
        windows, are all of the configuration if None. Raises DataError if a shard is damaged."""
        lesson = self.lessons.lesson(phase, number, lengths=lengths)
        return moved(lesson, self.model.backbone.device)

    def loss(self, phase: Phase, lesson: Lesson) -> tuple[Tensor, LessonMetrics]:
        """Scalar loss of a lesson in a phase without rollouts, and metrics."""
        return chained(
            self.model.backbone,
            partial(phase_loss, self.model, phase, lesson, self.config),
            # Stages of a pipeline must start the backward pass together.
            learning=(p for p in self.model.parameters() if p.requires_grad),
            learns_inside="adapters" in self.learning(phase),
        )

    @torch.no_grad()
    def collect(self, lesson: Lesson) -> Collected:
        """Plays `group_size` episodes of each text. Raises DataError if a number is not finite."""
        stage_b = stage_b_section(self.config)
        reader = self.model
        group = stage_b.training.group_size
        reading = reader.read(lesson.texts)
        grade = grade_by(lesson.examples, self.lessons.tokenizer)
        budgets = drawn_budgets(stage_b.policy, len(lesson.examples), seed=lesson.seed)
        episodes = ReadingEpisodes(reader, reading, grade, budgets=budgets)
        # Actions follow from the lesson's seed, not from the rank that plays it.
        generator = torch.Generator(reading.keys.device).manual_seed(lesson.seed)
        rollouts = roll_out(episodes, reader.policy, episodes.start(group), generator=generator)
        if stage_b.policy.credit == "segment":
            idle = episodes.idle(rollouts, lesson.evidence)
            rollouts = dataclasses.replace(rollouts, idle=idle)
        returns = rollouts.returns.view(-1, group)
        # The return stays that of the whole episode; only the steps that learn are bounded.
        last = rollouts.last(stage_b.policy.horizon)
        per_episode = {
            "return": rollouts.returns,
            "success": rollouts.final.earned,
            "memory_fill": (rollouts.final.memory >= 0).sum(1) / reader.capacity,
        }
        for action in Action:
            is_taken = (rollouts.actions == action) & rollouts.taken
            per_episode[f"operations/{action.name.lower()}"] = is_taken.sum(1)
        metrics: LessonMetrics = {
            name: values.float().mean() for name, values in per_episode.items()
        }
        metrics["zero_variance_groups"] = grpo.are_alike(returns).float().mean()
        targets = last.value_targets(stage_b.policy)
        explained = grpo.explained_variance(last.values[:, :-1], targets, last.taken)
        # Targets that do not vary leave nothing to explain, and no number.
        metrics["explained_variance"] = explained.nan_to_num(0, 0, 0)
        per_retrieval = episodes.retrieval_seconds / max(episodes.num_retrievals, 1)
        metrics["retrieval_milliseconds"] = torch.tensor(1e3 * per_retrieval)
        advantages = advantages_of(last, stage_b.policy, group_size=group)
        # As the heads take it: no bit of what they compute differs.
        seen = last.hidden.to(reader.policy.policy.weight.dtype)
        last = dataclasses.replace(last, hidden=seen)
        return moved(Collected(last, advantages, metrics), torch.device("cpu"))

    def rollout_loss(self, collected: Collected) -> tuple[Tensor, LessonMetrics]:
        """GRPO loss of the present policy on played episodes, summed over the steps learned from,
        and metrics.

        Divide it by `num_learned` of all lessons of the optimizer step, on all ranks.
        """
        stage_b = stage_b_section(self.config)
        policy = self.model.policy
        played = moved(collected, self.model.backbone.device)
        loss, sums = policy_loss(policy, played.rollouts, played.advantages, stage_b.policy)
        loss = stage_b.losses.rl * loss
        metrics: LessonMetrics = {
            "loss": StepMean(loss.detach(), sums.learned),
            "kl": StepMean(sums.kl, sums.steps),
            "clip_fraction": StepMean(sums.clipped, sums.steps),
            "entropy": StepMean(sums.entropy, sums.steps),
            "value_loss": StepMean(sums.value_loss, sums.steps),
        }
        return loss, metrics


def make_course(config: Config, backbone: Backbone, corpus: Corpus, own: OwnTasks | None) -> Course:
    """Builds the lessons of a configuration, for a reader with initial values around a backbone;
    `own` are the tasks of its `task_file`."""
    stage_b = stage_b_section(config)
    lessons = Lessons(
        stage_b.training,
        seed=config.training.seed,
        window_tokens=stage_b.training.window_tokens or config.training.sequence_length,
        tokenizer=corpus.tokenizer,
        rows=corpus.train.rows,
        num_rows=corpus.train.num_samples,
        hidden_evidence_share=hidden_evidence_share(stage_b),
        top_k=stage_b.memory.top_k,
        num_segments=trained_segments(stage_b),
        held_out=Samples(corpus.validation.rows, corpus.validation.num_samples),
        own=own,
    )
    window_tokens = lessons.window_tokens
    reader = MemoryReader(backbone, stage_b, window_tokens=window_tokens, marks=lessons.marks)
    # From seed and names, so that all ranks have the same values without a collective.
    reader.initialize(seed=config.training.seed)
    # Dropless, as evaluation is: a capacity would be shared by all rows of a call, padding among
    # them, and what one text is answered would depend on those beside it.
    reader.eval()
    return Course(reader.to(runtime.device()), lessons, config)


def hidden_evidence_share(stage_b: StageBConfig) -> float:
    """Share of the answers asked for without their evidence in the window."""
    share = stage_b.training.hidden_evidence_share
    if share is None:
        return 0.0 if "episodic" in stage_b.memory.parts else 1.0
    return share


def stage_b_section(config: Config) -> StageBConfig:
    """Stage B's section of a configuration that has one."""
    assert config.stage_b is not None, "Stage B has a section of its own"
    return config.stage_b
