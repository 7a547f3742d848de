"""Choices of the memory agent's learning: baseline, clip, order of lengths, credit, entropy.

Baselines and clips learn the task of `learn_policy` with two steps after the question, where a
random agent succeeds once in a hundred episodes. Success is that of greedy actions on unseen
episodes.

The order of lengths is asked where a cold start earns nothing: a text has 1, 2, 4 or 8 windows of
24 segments, what is asked for stands before the last window, and retrievals and writes have a
budget that a random agent has spent by the second window, as at the settings of the large variants.

Credit and the weight of the entropy are asked of the reader of `learn_system`, by the policy of the
1B recipe, with its budget of 64 operations, in texts of up to half as many segments. On a segment
that changes no answer, an operation loses `latency_penalty`, and a policy that maximises return and
entropy takes it with odds of exp(-latency_penalty / entropy_weight).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from cdrmix.config.reasoning import StageBTraining
from cdrmix.models.state_rows import branch
from cdrmix.planning.autosize import variant
from cdrmix.reasoning.policy import Action, MemoryPolicy, Observation, roll_out
from cdrmix.stage_b.phases import stage_b_section
from tools.benchmark.learn_policy import (
    GROUP_SIZE,
    LEARNING_RATE,
    NUM_ENTRIES,
    NUM_SEGMENTS,
    environment,
    evaluate,
    fresh_policy,
    learn_from,
    make_streams,
    train,
)
from tools.benchmark.learn_system import (
    fetched,
    lessons_of,
    small_reader,
    train_joint,
    train_policy,
)
from tools.benchmark.segment_stream import SegmentStream, Streams, StreamState
from tools.benchmark.timing import report

# name: settings of stage_b.policy
CHOICES: dict[str, dict[str, Any]] = {
    "group": {"baseline": "group"},
    "leave one out": {"baseline": "leave_one_out"},
    "critic": {"baseline": "critic"},
    "group, clip .28 above": {"baseline": "group", "clip_ratio_high": 0.28},
}
STEPS_AFTER_QUESTION = 2
CHECKED_AT = (20, 40)  # iterations
RATIOS = (1, 2, 4, 8)
BUDGET = 16  # retrievals and writes of an episode
LONG_PROMPTS = 8
LONG_ITERATIONS = 50
NUM_EVALUATED = 256
# name: settings of stage_b.policy
CREDITS: dict[str, dict[str, Any]] = {
    f"{credit}, entropy {weight}": {"credit": credit, "entropy_weight": weight}
    for credit in ("episode", "segment")
    for weight in (0.02, 0.002)
}
# Windows of 64 tokens hold some five segments, of a sentence or two each, so that these are 30 to
# 260; the longest, with half a thousand as 8 windows of the 1B recipe, are for evaluation alone.
READ_RATIOS = (6, 12, 24, 48)
LONGEST_READ = 96
JOINT_STEPS = 100
READ_ITERATIONS = 24


def learn_with(settings: dict[str, Any], *, seed: int) -> list[float]:
    """Success after each number of iterations of `CHECKED_AT`."""
    stream = environment(steps_after_question=STEPS_AFTER_QUESTION)
    stream.config = stream.config.model_copy(update=settings)
    found: list[float] = []

    def check(done: int, policy: MemoryPolicy) -> None:
        if done in CHECKED_AT:
            found.append(evaluate(stream, policy)["success"])

    train(stream, iterations=max(CHECKED_AT), seed=seed, after=check)
    return found


class LongStream(SegmentStream):
    """A stream of any length whose budget limits retrievals and writes, as a reader's does."""

    def __init__(self) -> None:
        config = variant("reason", "1b").stage_b
        assert config is not None, "a reasoning variant has this section"
        # The stream's own budget is of steps.
        policy = config.policy.model_copy(update={"step_budget": 10**6})
        super().__init__(policy, num_entries=NUM_ENTRIES, top_k=4, steps_after_question=4)

    def observe(self, state: StreamState) -> Observation:
        """Returns the agent's view, where a spent budget leaves splicing alone."""
        view = super().observe(state)
        features, legal = view.features.clone(), view.legal.clone()
        features[:, 1] = state.operations / BUDGET
        legal[state.operations >= BUDGET] = False
        legal[:, Action.SPLICE_WINDOW] = True
        return Observation(view.hidden, features, legal)


def long_streams(count: int, ratio: int, generator: torch.Generator) -> Streams:
    """Prompts of so many windows, in which what matters stands before the last."""
    ahead = NUM_SEGMENTS if ratio > 1 else 2
    return make_streams(count, generator, num_segments=ratio * NUM_SEGMENTS, ahead=ahead)


def learn_lengths(
    ratios: tuple[int, ...], curriculum: float, *, iterations: int, seed: int
) -> dict[str, Any]:
    """Success at each length of an agent that learned from `ratios`, one length an iteration.

    Beside it the CPU seconds, and the share of iterations in which any group had a success.
    """
    began = time.process_time()
    training = StageBTraining(length_ratios=ratios, curriculum=curriculum)
    stream, policy = LongStream(), fresh_policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE, weight_decay=0)
    generator = torch.Generator().manual_seed(seed)
    earning = 0
    for iteration in range(iterations):
        present = training.lengths_at(iteration, iterations)
        ratio = present[iteration % len(present)]
        streams = branch(long_streams(LONG_PROMPTS, ratio, generator), GROUP_SIZE)
        rollouts = roll_out(stream, policy, stream.start(streams), generator=generator)
        earning += bool(rollouts.returns.any())
        learn_from(policy, optimizer, rollouts, stream.config, group_size=GROUP_SIZE)
    seconds = time.process_time() - began
    success = {str(ratio): success_at(stream, policy, ratio) for ratio in RATIOS}
    return {"success": success, "earning": earning / iterations, "seconds": seconds}


def success_at(
    stream: LongStream, policy: MemoryPolicy, ratio: int, *, greedy: bool = True
) -> float:
    """Success over unseen texts of one length."""
    streams = long_streams(NUM_EVALUATED, ratio, torch.Generator().manual_seed(10_000))
    generator = None if greedy else torch.Generator().manual_seed(0)
    final = roll_out(stream, policy, stream.start(streams), generator=generator).final
    return float(final.solved.float().mean())


def learn_to_write(
    choices: Mapping[str, Mapping[str, Any]],
    *,
    seed: int,
    joint_steps: int = JOINT_STEPS,
    iterations: int = READ_ITERATIONS,
    ratios: tuple[int, ...] = READ_RATIOS,
    evaluated: tuple[int, ...] = (*READ_RATIOS, LONGEST_READ),
) -> list[dict[str, Any]]:
    """Agents of one reader, each by other settings of the policy: what their greedy episodes find
    in unseen texts, and their operations, by the length of the texts in windows."""
    recipe = variant("reason", "1b").stage_b
    assert recipe is not None, "a reasoning variant has this section"
    memory = {"top_k": recipe.memory.top_k}
    reader, lessons, config = small_reader(seed, policy=dict(recipe.policy), memory=memory)
    train_joint(reader, lessons, config, steps=joint_steps)
    changed = {"length_ratios": ratios, "group_size": recipe.training.group_size}
    training = lessons.training.model_copy(update=changed)
    lessons = lessons_of(training, seed)
    found = []
    for name, settings in choices.items():
        began = time.process_time()
        stage_b = stage_b_section(config)
        policy = stage_b.policy.model_copy(update=settings)
        stage_b = stage_b.model_copy(update={"policy": policy, "training": training})
        reader.policy.initialize(seed=seed)
        learning = config.model_copy(update={"stage_b": stage_b})
        train_policy(reader, lessons, learning, iterations=iterations, as_in_training=True)
        seconds = time.process_time() - began
        by_length = {f"{ratio}": fetched(reader, lessons, windows=ratio) for ratio in evaluated}
        found.append({"name": name, "seed": seed, "lengths": by_length, "seconds": seconds})
    return found


# name: lengths, and curriculum
ORDERS: dict[str, tuple[tuple[int, ...], float]] = {
    "4x and 8x": ((4, 8), 0.0),
    "all from the start": (RATIOS, 0.0),
    "entering over half": (RATIOS, 0.5),
}


def measure(rounds: int) -> dict[str, Any]:
    """All choices, with so many seeds each."""
    torch.set_num_threads(1)
    choices = [
        {"name": name, "seed": seed, "success": learn_with(settings, seed=seed)}
        for seed in range(rounds)
        for name, settings in CHOICES.items()
    ]
    untrained = {
        str(ratio): success_at(LongStream(), fresh_policy(), ratio, greedy=False)
        for ratio in RATIOS
    }
    lengths = [
        {"name": name, "seed": seed, **learn_lengths(*order, iterations=LONG_ITERATIONS, seed=seed)}
        for seed in range(rounds)
        for name, order in ORDERS.items()
    ]
    return {
        "rounds": rounds,
        "choices": choices,
        "checked at": CHECKED_AT,
        "untrained": untrained,
        "iterations": LONG_ITERATIONS,
        "episodes": LONG_PROMPTS * GROUP_SIZE,
        "lengths": lengths,
        "read iterations": READ_ITERATIONS,
        "credits": [row for seed in range(rounds) for row in learn_to_write(CREDITS, seed=seed)],
    }


def show(result: dict[str, Any]) -> None:
    """Print the rows."""
    rows = [*result["choices"], result["untrained"], *result["lengths"], *result["credits"]]
    for row in rows:
        print(row)


if __name__ == "__main__":
    report(measure, show, rounds=3, description=__doc__)
