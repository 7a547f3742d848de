"""Recurrent state carried across segments: through all of them, or those that an agent commits.

Segments are 12 tokens. Four of a text state [fact, key, value]; of the others half state [decoy,
key, value], often of the same keys, and half are noise. The question names a key, and is answered
from the state alone. One backbone learned to carry its state through whole texts of up to eight
windows, the rival. Another learned from facts among two other segments, as lessons are, and goes on
from what is committed: by an agent, which learned on the same lengths by GRPO from right answers
alone. A second agent sees the segments whitened: what tells a fact from a decoy is one token of
twelve, in a direction along which segments vary a hundred times less than along the first.
"""

# N texts, L segments, S tokens of a segment, D hidden, A actions

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cdrmix.config.model import ModelConfig
from cdrmix.models.backbone import Backbone
from cdrmix.models.state_rows import branch, merge, select
from cdrmix.planning.autosize import variant
from cdrmix.reasoning.policy import (
    NUM_ACTIONS,
    Action,
    EpisodeOutcome,
    MemoryPolicy,
    Observation,
    Transition,
    roll_out,
)
from tools.benchmark.learn_policy import learn_from
from tools.benchmark.timing import report

FACT, DECOY, QUERY = range(3)
NUM_KEYS, NUM_VALUES, NUM_NOISE = 16, 8, 16
KEYS = QUERY + 1
VALUES = KEYS + NUM_KEYS
NOISE = VALUES + NUM_VALUES
SEGMENT_TOKENS = 12
NUM_FACTS = 4
NUM_OTHERS = 2  # among which facts are learned from, as in lessons
SEGMENTS_PER_WINDOW = 4
TRAINED_WINDOWS = (2, 4, 8)
WINDOWS = (8, 32)  # of texts that are evaluated
HIDDEN_SIZE = 64
BATCH_SIZE = 64
LEARNING_RATE = 3e-3
WARMUP_STEPS = 20
NUM_TEXTS = 32  # of an iteration of the agent
GROUP_SIZE = 8
POLICY_RATE = 1e-2
NUM_EVALUATED = 512
NUM_WHITENED = 256  # texts, of `SEGMENTS_PER_WINDOW` times the most windows trained on
STEPS = 600
ITERATIONS = 120


class Facts(NamedTuple):
    """Texts with a question each."""

    segments: Tensor  # [N, L, S]
    is_fact: Tensor  # [N, L]
    question: Tensor  # [N, 2]
    value: Tensor  # answer, from 0, [N]


def make_texts(count: int, num_segments: int, generator: torch.Generator) -> Facts:
    """Facts about four keys, at any four of the segments."""

    def drawn(most: int, *shape: int) -> Tensor:
        return torch.randint(most, shape, generator=generator)

    order = torch.rand(count, num_segments, generator=generator).argsort(1)
    is_fact = order < NUM_FACTS
    is_decoy = ~is_fact & (drawn(2, count, num_segments) == 0)
    asked_for = torch.rand(count, NUM_KEYS, generator=generator).argsort(1)[:, :NUM_FACTS]
    keys = torch.where(
        drawn(2, count, num_segments) == 0,
        drawn(NUM_KEYS, count, num_segments),
        asked_for.gather(1, drawn(NUM_FACTS, count, num_segments)),
    )
    # Each fact is about another key; decoys are about any, as often as not one of these.
    keys = torch.where(is_fact, asked_for.gather(1, order.clamp(max=NUM_FACTS - 1)), keys)
    values = drawn(NUM_VALUES, count, num_segments)
    said = torch.stack([torch.where(is_fact, FACT, DECOY), KEYS + keys, VALUES + values], dim=2)
    begin = drawn(SEGMENT_TOKENS - 2, count, num_segments).unsqueeze(2)
    noise = NOISE + drawn(NUM_NOISE, count, num_segments, SEGMENT_TOKENS)
    spoken = noise.scatter(2, begin + torch.arange(3), said)
    segments = torch.where((is_fact | is_decoy).unsqueeze(2), spoken, noise)
    place = (order == drawn(NUM_FACTS, count, 1)).int().argmax(1, keepdim=True)
    key = KEYS + keys.gather(1, place)
    question = torch.cat([torch.full_like(key, QUERY), key], dim=1)
    return Facts(segments, is_fact, question, values.gather(1, place).squeeze(1))


def value_logits(backbone: Backbone, texts: Facts, committed: Tensor | None = None) -> Tensor:
    """Scores of the values, [N, 8], from the state behind the segments committed, [N, L]; None
    carries it through all of them."""
    start = torch.full_like(texts.question[:, :1], QUERY)
    if committed is None:
        ids = torch.cat([start, texts.segments.flatten(1), texts.question], dim=1)
        hidden = backbone(ids).hidden
    else:
        state = backbone(start, return_state=True).state
        # Rows read their own segments; one that has none left keeps its state.
        order = (~committed).int().argsort(dim=1, stable=True)
        rows = torch.arange(len(order))
        counts = committed.sum(1)
        for turn in range(int(counts.max())):
            segment = texts.segments[rows, order[:, turn]]
            after = backbone(segment, state=state, return_state=True).state
            state = merge(turn < counts, after, state)
        hidden = backbone(texts.question, state=state).hidden
    return backbone.logits(hidden[:, -1])[:, VALUES:NOISE]


def train_backbone(seed: int, *, whole: bool, steps: int) -> Backbone:
    """Two RWKV blocks, trained on whole texts or on facts among two other segments."""
    sizes = {"hidden_size": HIDDEN_SIZE, "num_layers": 2, "num_heads": 2, "vocab_size": 256}
    scales = {"transformer_fraction": 0.0, "init_std_scale": 2.0}
    backbone = Backbone(ModelConfig.model_validate({**sizes, **scales}))
    backbone.initialize(seed=seed)
    optimizer = torch.optim.AdamW(backbone.parameters(), weight_decay=0)
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        rate = min((step + 1) / WARMUP_STEPS, 1, max(0.05, 4 * (1 - step / steps)))
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * rate
        num_segments = NUM_FACTS + NUM_OTHERS
        if whole:
            num_segments = SEGMENTS_PER_WINDOW * TRAINED_WINDOWS[step % len(TRAINED_WINDOWS)]
        texts = make_texts(BATCH_SIZE, num_segments, generator)
        optimizer.zero_grad()
        F.cross_entropy(value_logits(backbone, texts), texts.value).backward()
        nn.utils.clip_grad_norm_(backbone.parameters(), 1.0)
        optimizer.step()
    return backbone.eval().requires_grad_(False)


@dataclass(frozen=True)
class GateState:
    """Episodes that read a text each."""

    rows: Tensor  # text, [N]
    time: Tensor  # segments decided on, [N]
    committed: Tensor  # [N, L]


See = Callable[[Tensor], Tensor]  # [N, L, D] -> [N, L, D]


def as_it_is(segments: Tensor) -> Tensor:
    """Segments as the backbone reads them."""
    return segments


def whitening(backbone: Backbone, seed: int) -> See:
    """Returns how to make what an agent sees of segments uncorrelated, each number of variance 1
    (principal components, divided by their deviations), from texts of training."""
    num_segments = SEGMENTS_PER_WINDOW * max(TRAINED_WINDOWS)
    texts = make_texts(NUM_WHITENED, num_segments, torch.Generator().manual_seed(seed))
    read = read_alone(backbone, texts).flatten(0, 1).double()
    mean = read.mean(0)
    variances, components = torch.linalg.eigh(torch.cov((read - mean).T))
    matrix = (components / variances.sqrt()).float()
    return lambda segments: (segments - mean.float()) @ matrix


@torch.no_grad()
def read_alone(backbone: Backbone, texts: Facts) -> Tensor:
    """Mean hidden state of each segment, as the backbone reads it by itself, [N, L, D]."""
    pooled = backbone(texts.segments.flatten(0, 1)).hidden.mean(1)
    return pooled.unflatten(0, texts.segments.shape[:2])


class Gate:
    """Environment of an agent that commits segments to the state, or passes them by."""

    def __init__(self, backbone: Backbone, texts: Facts, see: See = as_it_is) -> None:
        stage_b = variant("reason", "1b").stage_b
        assert stage_b is not None, "a reasoning variant has this section"
        self.config = stage_b.policy
        self._backbone = backbone
        self._texts = texts
        self._length = texts.segments.shape[1]
        self._seen = see(read_alone(backbone, texts))

    def start(self) -> GateState:
        """Returns episodes before their first segment."""
        rows = torch.arange(len(self._seen))
        return GateState(rows, torch.zeros_like(rows), torch.zeros_like(self._texts.is_fact))

    def observe(self, state: GateState) -> Observation:
        """Returns what the agent sees of a segment."""
        place = state.time.clamp(max=self._length - 1)
        legal = torch.zeros(len(place), NUM_ACTIONS, dtype=torch.bool)
        legal[:, [Action.SUMMARIZE, Action.SPLICE_WINDOW]] = True
        return Observation(self._seen[state.rows, place], torch.zeros(len(place), 1), legal)

    def step(self, state: GateState, actions: Tensor) -> Transition[GateState]:
        """Commits the segment or passes it by, and moves on."""
        place = state.time.clamp(max=self._length - 1).unsqueeze(1)
        commits = (actions == Action.SUMMARIZE).unsqueeze(1)
        committed = state.committed.scatter(1, place, commits)
        after = dataclasses.replace(state, time=state.time + 1, committed=committed)
        return Transition(after, after.time >= self._length)

    def settle(self, state: GateState) -> EpisodeOutcome[GateState]:
        """Rewards right answers; committing costs nothing."""
        right = is_right(self._backbone, select(self._texts, state.rows), state.committed)
        return EpisodeOutcome(state, right)


def is_right(backbone: Backbone, texts: Facts, committed: Tensor | None = None) -> Tensor:
    """1 for answers that are right, [N]."""
    return (value_logits(backbone, texts, committed).argmax(-1) == texts.value).float()


class Agent(NamedTuple):
    """A policy, and how it sees segments."""

    policy: MemoryPolicy
    see: See


def train_agent(backbone: Backbone, see: See, seed: int, *, iterations: int) -> Agent:
    """An agent that learned by GRPO; lengths enter one after the other over the first half."""
    policy = MemoryPolicy(HIDDEN_SIZE, 1)
    policy.initialize(seed=seed)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=POLICY_RATE, weight_decay=0)
    generator = torch.Generator().manual_seed(seed)
    for number in range(iterations):
        entered = min(2 * number * len(TRAINED_WINDOWS) // iterations, len(TRAINED_WINDOWS) - 1)
        windows = TRAINED_WINDOWS[: 1 + entered][number % (1 + entered)]
        texts = make_texts(NUM_TEXTS, windows * SEGMENTS_PER_WINDOW, generator)
        gate = Gate(backbone, texts, see)
        rollouts = roll_out(gate, policy, branch(gate.start(), GROUP_SIZE), generator=generator)
        learn_from(policy, optimizer, rollouts, gate.config, group_size=GROUP_SIZE)
    return Agent(policy, see)


@torch.no_grad()
def evaluate(
    backbone: Backbone, agents: dict[str, Agent], windows: int, *, rival: Backbone | None = None
) -> dict[str, float]:
    """Shares of unseen texts that are answered right, and of segments that agents commit; `rival`
    carries its state through all of a text."""
    generator = torch.Generator().manual_seed(10_000)
    texts = make_texts(NUM_EVALUATED, windows * SEGMENTS_PER_WINDOW, generator)
    shuffle = torch.rand(texts.is_fact.shape, generator=generator).argsort(1)

    def right(committed: Tensor | None = None) -> float:
        return float(is_right(backbone, texts, committed).mean())

    found = {"all": right(), "facts": right(texts.is_fact)}
    found["none"] = right(torch.zeros_like(texts.is_fact))
    for name, agent in agents.items():
        gate = Gate(backbone, texts, agent.see)
        committed = roll_out(gate, agent.policy, gate.start(), generator=None).final.committed
        found[name] = right(committed)
        found[f"{name}, shuffled"] = right(committed.gather(1, shuffle))
        found[f"{name}, committed"] = float(committed.float().mean())
    if rival is not None:
        found["all, learned so"] = float(is_right(rival, texts).mean())
    return found


def learn(seed: int, *, steps: int, iterations: int) -> dict[int, dict[str, float]]:
    """Windows of a text -> what answers how many; the rival takes as many steps."""
    backbone = train_backbone(seed, whole=False, steps=steps)
    ways = {"agent": as_it_is, "agent, whitened": whitening(backbone, seed)}
    agents = {
        name: train_agent(backbone, see, seed, iterations=iterations) for name, see in ways.items()
    }
    rival = train_backbone(seed, whole=True, steps=steps)
    return {windows: evaluate(backbone, agents, windows, rival=rival) for windows in WINDOWS}


def measure(rounds: int) -> dict[str, Any]:
    """So many seeds."""
    torch.set_num_threads(1)
    learned = []
    for seed in range(rounds):
        began = time.process_time()
        found = learn(seed, steps=STEPS, iterations=ITERATIONS)
        seconds = time.process_time() - began
        learned += [
            {"seed": seed, "windows": windows, **row, "seconds": seconds}
            for windows, row in found.items()
        ]
    return {"rounds": rounds, "learned": learned}


def show(result: dict[str, Any]) -> None:
    """Print the rows."""
    for row in result["learned"]:
        print(row)


if __name__ == "__main__":
    report(measure, show, rounds=3, description=__doc__)
