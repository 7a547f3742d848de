"""What each phase of Stage B learns from a lesson.

    memory    retrieval encoder (InfoNCE) and slots (text after a window that is gone)
    adapters  plastic adapters, on text and on answers
    policy    the memory agent, by GRPO on whole episodes
    joint     all but the policy, and the backbone where it is trained; then plain text without any
              memory keeps its language modelling

Losses are means over the lesson, so that the mean over the lessons of a step does not depend on how
ranks share them out.
"""

# N texts, L segments, D hidden, K key dimensions, n windows or rows, T tokens

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from cdrmix.checkpoint.fragments import Part
from cdrmix.config.model import ModelConfig
from cdrmix.config.reasoning import Phase, PolicyConfig, StageBConfig
from cdrmix.config.schema import Config
from cdrmix.data.tokenizer import Tokenizer
from cdrmix.models.backbone import Output
from cdrmix.objectives.grpo import (
    explained_variance,
    group_advantages,
    lambda_returns,
    zero_variance_groups,
)
from cdrmix.objectives.language_model import IGNORED_LABEL, linear_cross_entropy
from cdrmix.objectives.router import router_losses
from cdrmix.reasoning.episodes import Rollouts, policy_loss, roll_out
from cdrmix.reasoning.hebbian import EpisodeState
from cdrmix.reasoning.lessons import Lesson
from cdrmix.reasoning.memory_reader import MemoryReader, Reading, Windows, plastic_rows
from cdrmix.reasoning.policy import Action, MemoryPolicy
from cdrmix.reasoning.reading_environment import Grade, ReadingEpisodes, ReadingState
from cdrmix.reasoning.tasks import Example, score

Metrics = dict[str, Tensor]


def learning(phase: Phase, *, with_backbone: bool) -> frozenset[Part]:
    """Parts that learn in a phase; the others have no gradient.

    Args:
        phase: that is to run.
        with_backbone: whether the joint phase trains the backbone too.
    """
    parts: dict[Phase, frozenset[Part]] = {
        "memory": frozenset({"memory"}),
        "adapters": frozenset({"adapters"}),
        "policy": frozenset({"policy"}),
        "joint": frozenset({"memory", "adapters"}),
    }
    also: frozenset[Part] = frozenset({"backbone"} if with_backbone and phase == "joint" else ())
    return parts[phase] | also


def phase_loss(
    reader: MemoryReader, phase: Phase, lesson: Lesson, config: Config
) -> tuple[Tensor, Metrics]:
    """Loss of a lesson in one of the phases without rollouts.

    Args:
        reader: learns; only what is `learning` should have gradients.
        phase: memory, adapters or joint; for the policy see `collect`.
        lesson: on the reader's device.
        config: weights of the losses.
    Returns:
        Scalar loss, and metrics, detached scalars: means over the lesson.
    """
    weights = metrics_section(config).losses
    plastic = phase != "memory"
    slots = phase != "adapters"
    tasks, metrics = _task_losses(reader, lesson, plastic=plastic, slots=slots)
    losses: dict[str, Tensor] = {}
    if phase != "adapters":
        losses["retrieval"] = tasks["retrieval"]
    if phase != "memory":
        losses["answer"] = weights.ce * tasks["answer"]
        losses["correlation"] = weights.hebbian * tasks["correlation"]
    if len(lesson.plain):
        text = text_loss(reader, lesson.plain, plastic=plastic, slots=slots)
        losses["text"] = weights.ce * text
    if phase == "joint" and metrics_section(config).training.backbone_lr_scale > 0:
        alone, router = _backbone_losses(reader, lesson, config.model)
        losses |= {name: weights.ce * loss for name, loss in alone.items()}
        if router is not None:
            losses["router"] = weights.moe_aux * router
    metrics |= {f"{name}_loss": loss.detach() for name, loss in losses.items()}
    return torch.stack([loss.float() for loss in losses.values()]).sum(), metrics


def _task_losses(
    reader: MemoryReader, lesson: Lesson, *, plastic: bool, slots: bool
) -> tuple[dict[str, Tensor], Metrics]:
    """Retrieval of the next piece of evidence, and the answer once all of it is there."""
    count = len(lesson.examples)
    rows = list(range(count))
    reading = reader.read(lesson.texts, plastic=plastic, with_correlation=plastic)
    seeking = reader.windows(lesson.texts, rows, lesson.found)
    answering = reader.windows(lesson.texts, rows, lesson.gathered)
    tokens, labels = _with_answers(answering, lesson)
    width = max(tokens.shape[1], seeking.tokens.shape[1])
    both = torch.cat([_widened(seeking.tokens, width), _widened(tokens, width)])
    index = torch.arange(count, device=both.device).repeat(2)
    memory = reader.summarise(reading, index[:count], lesson.summarised).repeat(2, 1, 1)
    output, _ = reader.look(
        both, slots=memory if slots else None, plastic=plastic_rows(reading.plastic, index)
    )
    hidden = output.hidden
    _, queries = reader.question_state(seeking, hidden[:count, : seeking.tokens.shape[1]])
    retrieval, recall = retrieval_loss(
        reading, queries, lesson, temperature=reader.config.memory.contrastive_temperature
    )
    chosen = hidden[count:, : labels.shape[1]]
    answer = _answer_loss(reader, chosen, labels)
    with torch.no_grad():
        answered = labels != IGNORED_LABEL
        guesses = torch.full_like(labels, IGNORED_LABEL)
        guesses[answered] = reader.backbone.logits(chosen[answered]).argmax(-1)
        right = (guesses == labels).all(1).float().mean()
    losses = {"retrieval": retrieval, "answer": answer}
    if reading.correlation is not None:
        losses["correlation"] = reading.correlation / count
    metrics = {"answered": right}
    if recall is not None:
        metrics["recall"] = recall
    return losses, metrics


def _answer_loss(reader: MemoryReader, hidden: Tensor, labels: Tensor) -> Tensor:
    """Nats per label of windows, [n, T, D] and [n, T]; few of their tokens have one."""
    answered = labels != IGNORED_LABEL
    weight = reader.backbone.embedding.weight
    return linear_cross_entropy(hidden[answered], weight, labels[answered]) / answered.sum()


def retrieval_loss(
    reading: Reading, queries: Tensor, lesson: Lesson, *, temperature: float
) -> tuple[Tensor, Tensor | None]:
    """InfoNCE of the segments sought, among all segments of the lesson; and recall at 1.

    What already stands in the window is no choice, as when memory is read. Where no task has
    evidence to look for, the loss is 0 and there is no recall.
    """
    length = reading.keys.shape[1]
    asked = torch.nonzero(lesson.sought >= 0).flatten()
    if len(asked) == 0:
        return queries.sum() * 0.0, None
    scores = queries[asked] @ reading.keys.flatten(0, 1).transpose(0, 1) / temperature
    there = reading.texts.lengths.flatten() > 0
    allowed = there.expand(len(asked), -1).clone()
    for place, row in enumerate(asked.tolist()):
        for segment in lesson.found[row]:
            allowed[place, row * length + segment] = False
    target = asked * length + lesson.sought[asked]
    scores = scores.masked_fill(~allowed, -torch.inf)
    own = scores.view(len(asked), -1, length)[torch.arange(len(asked)), asked]
    recall = (own.argmax(1) == lesson.sought[asked]).float().mean()
    return F.cross_entropy(scores, target), recall.detach()


def text_loss(reader: MemoryReader, plain: Tensor, *, plastic: bool, slots: bool) -> Tensor:
    """Nats per token of text that is read window by window, with what outlives a window.

    Args:
        reader: whose memory.
        plain: [n, T + 1].
        plastic: with fast weights.
        slots: with every window folded into the slots.
    """
    state = reader.plastic.start(len(plain)).plastic
    memory = reader.memory.start(len(plain))
    nats = []
    step = reader.window_tokens
    for start in range(0, plain.shape[1] - 1, step):
        inputs = plain[:, start : min(start + step, plain.shape[1] - 1)]
        labels = plain[:, start + 1 : start + 1 + inputs.shape[1]]
        with reader.remembering(memory if slots else None):
            if plastic:
                found = reader.plastic(inputs, state=EpisodeState(None, state))
                hidden = found.output.hidden
                state = found.state.plastic
            else:
                hidden = reader.backbone(inputs).hidden
        nats.append(linear_cross_entropy(hidden, reader.backbone.embedding.weight, labels))
        if slots:
            memory = reader.memory.write(memory, hidden)
    return torch.stack(nats).sum() / (plain.numel() - len(plain))


def _backbone_losses(
    reader: MemoryReader, lesson: Lesson, model: ModelConfig
) -> tuple[dict[str, Tensor], Tensor | None]:
    """Of the backbone alone, nats per label: drills, and plain text; and its router's losses."""
    losses = {}
    router = None
    weight = reader.backbone.embedding.weight
    if lesson.drills:
        tokens, labels = _rows_with_answers(*zip(*lesson.drills, strict=True))
        tokens = tokens.to(weight.device)
        labels = labels.to(weight.device)
        losses["drill"] = _answer_loss(reader, reader.backbone(tokens).hidden, labels)
    if len(lesson.plain):
        output: Output = reader.backbone(lesson.plain[:, :-1])
        labels = lesson.plain[:, 1:]
        nats = linear_cross_entropy(output.hidden, weight, labels)
        losses["replay"] = nats / labels.numel()
        router = _router_loss(output, labels.numel(), model)
    return losses, router


def _router_loss(output: Output, num_tokens: int, model: ModelConfig) -> Tensor | None:
    if model.moe is None or output.router_statistics is None:
        return None
    losses = router_losses(
        output.router_statistics / num_tokens,
        num_experts=model.moe.num_experts,
        top_k=model.moe.top_k,
    )
    balance = model.moe.load_balance_weight * losses.load_balance
    return balance + model.moe.z_loss_weight * losses.z


def _with_answers(windows: Windows, lesson: Lesson) -> tuple[Tensor, Tensor]:
    """Windows with the right answers behind them, and labels at the answers alone, [n, T]."""
    rows = zip(windows.tokens.tolist(), windows.lengths.tolist(), strict=True)
    tokens, labels = _rows_with_answers([ids[:length] for ids, length in rows], lesson.answers)
    return tokens.to(windows.tokens.device), labels.to(windows.tokens.device)


def _rows_with_answers(
    windows: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> tuple[Tensor, Tensor]:
    width = max(len(ids) + len(answer) for ids, answer in zip(windows, answers, strict=True)) - 1
    tokens = torch.zeros(len(windows), width, dtype=torch.int64)
    labels = torch.full_like(tokens, IGNORED_LABEL)
    for row, (ids, answer) in enumerate(zip(windows, answers, strict=True)):
        end = len(ids) + len(answer) - 1
        tokens[row, :end] = torch.tensor([*ids, *answer[:-1]])
        labels[row, len(ids) - 1 : end] = torch.tensor(answer)
    return tokens, labels


def _widened(tokens: Tensor, width: int) -> Tensor:
    return F.pad(tokens, (0, width - tokens.shape[1]))


@dataclass(frozen=True)
class Collected:
    """Episodes of a lesson, played by the present policy.

    Attributes:
        rollouts: those of one text beside each other, on the memory of a reader; of each the last
            steps, as many as the policy's horizon.
        advantages: of each, [N].
        metrics: detached scalars: means over the lesson's episodes.
    """

    rollouts: Rollouts[ReadingState]
    advantages: Tensor
    metrics: Metrics


def grade_by(examples: Sequence[Example], tokenizer: Tokenizer) -> Grade:
    """The checker of a batch's tasks: (text, answer tokens) -> 0 to 1."""
    return lambda row, tokens: score(examples[row], tokenizer.decode(tokens))


@torch.no_grad()
def collect(
    reader: MemoryReader, lesson: Lesson, config: Config, tokenizer: Tokenizer
) -> Collected:
    """Play `group_size` episodes of each text of a lesson.

    Raises:
        DataError: if a reward or a decision is not finite.
    """
    group = metrics_section(config).training.group_size
    reading = reader.read(lesson.texts)
    episodes = ReadingEpisodes(reader, reading, grade_by(lesson.examples, tokenizer))
    generator = torch.Generator(reading.keys.device).manual_seed(lesson.seed)
    rollouts = roll_out(episodes, reader.policy, episodes.start(group), generator=generator)
    returns = rollouts.returns.view(-1, group)
    policy = metrics_section(config).policy
    kept = rollouts.last(policy.horizon)
    metrics = _episode_metrics(rollouts, returns, capacity=reader.capacity)
    metrics["explained_variance"] = _explained(kept, policy)
    per_retrieval = episodes.retrieval_seconds / max(episodes.num_retrievals, 1)
    metrics["retrieval_milliseconds"] = torch.tensor(1e3 * per_retrieval)
    return Collected(kept, group_advantages(returns).flatten(), metrics)


def rollout_loss(
    reader: MemoryReader,
    collected: Collected,
    config: Config,
    *,
    reference: MemoryPolicy | None = None,
) -> tuple[Tensor, Metrics]:
    """GRPO loss of collected episodes, per step taken; to be called for each epoch on them.

    Args:
        reader: whose policy learns.
        collected: by an earlier state of it.
        config: clip, discount, weight.
        reference: policy that this one is kept near to; None for one that started at random.
    """
    stage_b = metrics_section(config)
    loss, sums = policy_loss(
        reader.policy,
        collected.rollouts,
        collected.advantages,
        stage_b.policy,
        reference=reference,
    )
    metrics = {
        "kl": sums.kl / sums.steps,
        "clip_fraction": sums.clipped / sums.steps,
        "entropy": sums.entropy / sums.steps,
        "value_loss": sums.value_loss / sums.steps,
    }
    detached = {name: value.detach() for name, value in metrics.items()}
    return stage_b.losses.rl * loss / sums.steps, detached


def _explained(rollouts: Rollouts[ReadingState], policy: PolicyConfig) -> Tensor:
    """Share of the variance of what is to be learned that the value head explains already."""
    targets = lambda_returns(
        rollouts.rewards,
        rollouts.values,
        rollouts.taken,
        gamma=policy.gamma,
        gae_lambda=policy.gae_lambda,
    )
    found = explained_variance(rollouts.values[:, :-1], targets, rollouts.taken)
    return found.nan_to_num(0, 0, 0)  # where targets do not vary nothing is explained


def _episode_metrics(
    rollouts: Rollouts[ReadingState], returns: Tensor, *, capacity: int
) -> Metrics:
    final = rollouts.final
    taken = rollouts.taken
    operations = {
        f"operations/{action.name.lower()}": ((rollouts.actions == action) & taken).sum(1)
        for action in Action
    }
    means = {
        "return": rollouts.returns,
        "success": final.earned,
        "memory_fill": (final.memory >= 0).sum(1) / capacity,
        **operations,
    }
    metrics = {name: values.float().mean() for name, values in means.items()}
    metrics["zero_variance_groups"] = zero_variance_groups(returns) / len(returns)
    return metrics


def metrics_section(config: Config) -> StageBConfig:
    """Stage B's section of a configuration that has one."""
    assert config.stage_b is not None, "Stage B has a section of its own"
    return config.stage_b
