"""A small reader learns, from nothing, to fetch what its question asks for.

The short form of `reasoning_table`, for the tests. An episode is worth the share of the evidence
that stands in the window when it is answered.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cdrmix.checkpoint.fragments import part_of
from cdrmix.config.load import load_config, shipped
from cdrmix.config.reasoning import ReasoningTask, StageBTraining
from cdrmix.config.schema import Config
from cdrmix.data.tokenizer import TOKENIZER_FILE, Tokenizer, load_tokenizer, train_tokenizer
from cdrmix.models.backbone import Backbone
from cdrmix.reasoning.lessons import Lesson, Lessons
from cdrmix.reasoning.memory_reader import MemoryReader
from cdrmix.reasoning.policy import Action, roll_out
from cdrmix.reasoning.reading_environment import ReadingEpisodes, ReadingState
from cdrmix.reasoning.tasks import TRAINED, generate_examples
from cdrmix.stage_b import phases
from tools.benchmark.learn_policy import learn_from

TASKS: tuple[ReasoningTask, ...] = ("needle_keys", "variable_tracking")
SMALL_WINDOW = 64
SMALL_VOCABULARY = 512
RATES = {"memory": 3e-3, "adapters": 1e-2, "backbone": 3e-3}
POLICY_RATE = 1e-2
FIRST_UNSEEN = 10_000  # lesson
NUM_LESSONS = 2  # of unseen texts
LONGER = 24  # windows, of texts much longer than those of training
# So small a reader needs longer for all forms of training, and their words more tokens.
FEW_FORMS = TRAINED._replace(
    needles=(
        "The code of {word} is {digits}.",
        "{word} has the code {digits}.",
        "Code {digits} was given to {word}.",
    ),
    ask_needles=TRAINED.ask_needles[:5],
    copies=TRAINED.copies[:8],
    ask_copies=TRAINED.ask_copies[:8],
)


class Fetching(ReadingEpisodes):
    """Episodes worth the share of the evidence in the window; nothing is answered.

    Args:
        reader: whose episodes.
        lesson: of the policy's phase.
        forbidden, budgets, keeps_one: as of `ReadingEpisodes`.
    """

    def __init__(
        self,
        reader: MemoryReader,
        lesson: Lesson,
        *,
        forbidden: frozenset[Action] = frozenset(),
        budgets: Sequence[int] | None = None,
        keeps_one: bool = True,
    ) -> None:
        with torch.no_grad():
            reading = reader.read(lesson.texts)
        super().__init__(
            *(reader, reading, lambda _, __: 0.0),
            forbidden=forbidden,
            budgets=budgets,
            keeps_one=keeps_one,
        )
        self._evidence = [set(evidence) for evidence in lesson.evidence]

    def _earned(self, state: ReadingState) -> torch.Tensor:
        earned = torch.zeros_like(state.earned)
        for place, row in enumerate(state.rows.tolist()):
            there, _ = self.reader.choose(self.reading.texts, row, self._wanted(state, place))
            earned[place] = len(self._evidence[row] & set(there)) / len(self._evidence[row])
        return earned


def small_reader(
    seed: int,
    *,
    training: Mapping[str, Any] | None = None,
    policy: Mapping[str, Any] | None = None,
    memory: Mapping[str, Any] | None = None,
) -> tuple[MemoryReader, Lessons, Config]:
    """Two dense blocks of width 64 over a tokenizer of task texts.

    `training`, `policy` and `memory` replace values of these sections of `stage_b`.
    """
    overrides = {
        "model.hidden_size": 64,
        "model.num_layers": 2,
        "model.transformer_fraction": 0.5,
        "model.num_heads": 2,
        "model.vocab_size": SMALL_VOCABULARY,
        "model.moe": "null",
        "training.seed": seed,
        "stage_b.memory.summary_dim": 64,
        "stage_b.memory.top_k": 1,
        "stage_b.training.texts_per_lesson": 16,
        "stage_b.training.group_size": 8,
    }
    config = load_config(
        shipped("model_configs") / "cdrmix-reason-tiny.yaml",
        [f"{path}={value}" for path, value in overrides.items()],
    )
    stage_b = phases.stage_b_section(config)
    usual = {"tasks": TASKS[:1], "length_ratios": (1, 2), "backbone_lr_scale": 1.0}
    changed = {
        "training": stage_b.training.model_copy(update={**usual, **(training or {})}),
        "policy": stage_b.policy.model_copy(update=policy or {}),
        "memory": stage_b.memory.model_copy(update=memory or {}),
    }
    stage_b = stage_b.model_copy(update=changed)
    config = config.model_copy(update={"stage_b": stage_b})
    lessons = lessons_of(stage_b.training, seed)
    backbone = Backbone(config.model)
    backbone.initialize(seed=seed)
    reader = MemoryReader(backbone, stage_b, window_tokens=SMALL_WINDOW, marks=lessons.marks)
    reader.initialize(seed=seed)
    return reader, lessons, config


def lessons_of(training: StageBTraining, seed: int) -> Lessons:
    """Lessons in windows of 64 tokens, without drills."""
    tokenizer = small_tokenizer()
    return Lessons(training, seed, SMALL_WINDOW, tokenizer, drills=False, wording=FEW_FORMS)


def small_tokenizer() -> Tokenizer:
    """Byte pairs of task texts."""
    texts = [
        generate_examples(
            task,
            number=n,
            seed=0,
            length_ratio=4,
            window_tokens=400,
            count_tokens=len,
            wording=FEW_FORMS,
        ).text
        for task in TASKS
        for n in range(20)
    ]
    with tempfile.TemporaryDirectory() as folder:
        trained = train_tokenizer(texts, SMALL_VOCABULARY)
        (Path(folder) / TOKENIZER_FILE).write_text(trained.to_str())
        return load_tokenizer(Path(folder))


def learn(seed: int, *, steps: int, iterations: int) -> dict[str, Any]:
    """Scores of a small reader and of its controls."""
    began = time.process_time()
    reader, lessons, config = small_reader(seed)
    untrained = fetched(reader, lessons)
    train_joint(reader, lessons, config, steps=steps)
    train_policy(reader, lessons, config, iterations=iterations)
    no_writes = frozenset({Action.CACHE_WRITE})
    return {
        "trained": fetched(reader, lessons)["found"],
        "untrained": untrained["found"],
        "cache_write masked": fetched(reader, lessons, forbidden=no_writes)["found"],
        "longer": fetched(reader, lessons, windows=LONGER),
        "seconds": time.process_time() - began,
    }


def train_joint(reader: MemoryReader, lessons: Lessons, config: Config, *, steps: int) -> None:
    """The joint phase, on one process."""
    groups: dict[str, list[nn.Parameter]] = {part: [] for part in RATES}
    for name, parameter in reader.named_parameters():
        if part_of(name) in groups:
            groups[part_of(name)].append(parameter)
    optimizer = torch.optim.AdamW(
        [{"params": groups[part], "part": part} for part in RATES], weight_decay=0
    )
    for step in range(steps):
        factor = min((step + 1) / 20, 1, max(0.05, 2 * (1 - step / steps)))
        for group in optimizer.param_groups:
            group["lr"] = factor * RATES[group["part"]]
        loss, _ = phases.phase_loss(reader, "joint", lessons.lesson("joint", step), config)
        optimizer.zero_grad()
        loss.backward()
        for parameters in groups.values():
            nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()


def train_policy(
    reader: MemoryReader,
    lessons: Lessons,
    config: Config,
    *,
    iterations: int,
    rate: float = POLICY_RATE,
    as_in_training: bool = False,
) -> None:
    """The policy's phase on episodes of fetching, on one process.

    Budgets are drawn, an operation is kept for the question, and lengths enter in turn with
    `as_in_training` alone: the few iterations of a short form have no time for that.
    """
    stage_b = phases.stage_b_section(config)
    optimizer = torch.optim.AdamW(reader.policy.parameters(), lr=rate, weight_decay=0)
    group = stage_b.training.group_size
    for number in range(iterations):
        lengths = stage_b.training.lengths_at(number, iterations) if as_in_training else None
        lesson = lessons.lesson("policy", number, lengths=lengths)
        budgets = None
        if as_in_training:
            texts = len(lesson.examples)
            budgets = phases.drawn_budgets(stage_b.policy, texts, seed=lesson.seed)
        episodes = Fetching(reader, lesson, budgets=budgets, keeps_one=as_in_training)
        generator = torch.Generator().manual_seed(lesson.seed)
        rollouts = roll_out(episodes, reader.policy, episodes.start(group), generator=generator)
        if stage_b.policy.credit == "segment":
            idle = episodes.idle(rollouts, lesson.evidence)
            rollouts = dataclasses.replace(rollouts, idle=idle)
        learn_from(reader.policy, optimizer, rollouts, stage_b.policy, group_size=group)


@torch.no_grad()
def fetched(
    reader: MemoryReader,
    lessons: Lessons,
    *,
    windows: int | None = None,
    forbidden: frozenset[Action] = frozenset(),
) -> dict[str, float]:
    """Share of the evidence that greedy episodes on unseen texts have in the window, segments of a
    text and operations; texts have so many windows, or the lengths of training."""
    columns: dict[str, list[Tensor]] = {"found": [], "segments": [], "operations": []}
    lengths = None if windows is None else (windows,)
    for number in range(FIRST_UNSEEN, FIRST_UNSEEN + NUM_LESSONS):
        lesson = lessons.lesson("policy", number, lengths=lengths)
        episodes = Fetching(reader, lesson, forbidden=forbidden)
        final = roll_out(episodes, reader.policy, episodes.start(), generator=None).final
        columns["found"].append(final.earned)
        columns["segments"].append(lesson.texts.num_segments)
        columns["operations"].append(final.operations)
    return {name: float(torch.cat(each).float().mean()) for name, each in columns.items()}
