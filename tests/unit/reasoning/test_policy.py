"""The memory agent: legality, rewards, rollouts and branches."""

import dataclasses
import math

import pytest
import torch

from cdrmix.errors import DataError
from cdrmix.models.state_rows import branch, map_tensors, select
from cdrmix.reasoning.policy import (
    Action,
    Advantages,
    EpisodeOutcome,
    Idle,
    MemoryPolicy,
    Rollouts,
    advantages_of,
    policy_loss,
    roll_out,
    roll_out_branches,
    step_by_branches,
)
from tools.benchmark.learn_policy import (
    HIDDEN,
    NUM_SEGMENTS,
    environment,
    fresh_policy,
    make_streams,
)
from tools.benchmark.segment_stream import NUM_FEATURES, SegmentStream, StreamState

SUMMARIZE, RETRIEVE, SPLICE, WRITE = Action


def started(count: int = 8) -> tuple[SegmentStream, StreamState]:
    stream = environment()
    return stream, stream.start(make_streams(count, torch.Generator().manual_seed(0)))


def play(stream: SegmentStream, state: StreamState, plan: list[Action]):
    """The last transition of a plan that all episodes follow."""
    for action in plan:
        assert stream.observe(state).legal[:, action].all(), f"{action!r} is illegal here"
        transition = stream.step(state, torch.full((len(state.time),), int(action)))
        state = transition.state
    return transition


def random_policy(seed: int = 0) -> MemoryPolicy:
    policy = fresh_policy()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.normal_(generator=generator)
    return policy


def with_budget(budget: int, **changed: float) -> SegmentStream:
    stream = environment()
    stream.config = stream.config.model_copy(update={"step_budget": budget, **changed})
    return stream


def test_what_was_written_is_retrieved_and_spliced() -> None:
    stream, state = started()
    plan = [WRITE] * NUM_SEGMENTS + [RETRIEVE, SPLICE]
    last = play(stream, state, plan)
    kept = state.streams.asked >= NUM_SEGMENTS - 6  # the others gave way
    assert torch.equal(last.state.solved, kept) and kept.any() and not kept.all()
    assert torch.equal(last.done, kept)


def test_a_success_pays_for_its_operations_and_a_failure_for_nothing() -> None:
    stream, state = started()
    last = play(stream, state, [WRITE] * NUM_SEGMENTS + [RETRIEVE, SPLICE])
    config, lost = stream.config, state.streams.live[:, : NUM_SEGMENTS - 6].sum(1)
    worth = 1 + config.stability_bonus * (1 - lost / 28) - config.latency_penalty * 25
    reward = stream.settle(last.state).reward
    torch.testing.assert_close(reward, torch.where(last.state.solved, worth, 0.0))
    idle = play(stream, state, [SPLICE] * 28)
    assert idle.done.all() and not stream.settle(idle.state).reward.any()


def test_splicing_nothing_or_before_the_question_solves_nothing() -> None:
    stream, state = started()
    early = [WRITE] * (NUM_SEGMENTS - 2) + [RETRIEVE, SPLICE]
    assert not play(stream, state, early).state.solved.any()
    assert not play(stream, state, [WRITE] * NUM_SEGMENTS + [SPLICE]).state.solved.any()


def test_retrieving_before_the_question_does_not_know_it() -> None:
    stream, state = started(64)
    state = play(stream, state, [WRITE] * (NUM_SEGMENTS - 1)).state
    other = make_streams(64, torch.Generator().manual_seed(1)).query
    streams = dataclasses.replace(state.streams, query=other)
    changed = dataclasses.replace(state, streams=streams)
    ours, theirs = (play(stream, start, [RETRIEVE]).state for start in (state, changed))
    assert torch.equal(ours.buffer, theirs.buffer)
    asked = [play(stream, start, [WRITE, RETRIEVE]).state.buffer for start in (state, changed)]
    assert not torch.equal(*asked)


def test_illegal_actions_are_never_taken() -> None:
    stream, state = started(64)
    rollouts = roll_out(stream, random_policy(), state, generator=torch.Generator().manual_seed(0))
    legal = rollouts.legal.gather(2, rollouts.actions.unsqueeze(2)).squeeze(2)
    assert legal[rollouts.taken].all()
    first, after = stream.observe(state).legal, play(stream, state, [SUMMARIZE] * NUM_SEGMENTS)
    assert not first[:, RETRIEVE].any()  # memory is empty
    assert not stream.observe(after.state).legal[:, WRITE].any()  # the question is no segment


def test_the_step_budget_leaves_only_splicing_and_ends_the_episode() -> None:
    stream, (_, state) = with_budget(10), started()
    rollouts = roll_out(stream, random_policy(), state, generator=torch.Generator().manual_seed(0))
    assert rollouts.taken.sum(1).tolist() == [10] * 8
    assert stream.observe(rollouts.final).legal.tolist() == [[False, False, True, False]] * 8


def test_a_horizon_shortens_no_episode() -> None:
    whole, cut = (
        roll_out(
            with_budget(64, horizon=horizon),
            random_policy(),
            started()[1],
            generator=torch.Generator().manual_seed(0),
        )
        for horizon in (64, 5)
    )
    assert whole.taken.sum(1).min() >= NUM_SEGMENTS
    assert torch.equal(whole.taken, cut.taken)
    assert torch.equal(whole.final.solved, cut.final.solved)
    assert torch.equal(whole.returns, cut.returns)


def test_what_is_kept_are_the_last_steps_of_each_episode() -> None:
    stream, state = started(64)
    whole = roll_out(stream, fresh_policy(), state, generator=torch.Generator().manual_seed(0))
    kept, ends = whole.last(5), whole.taken.sum(1).tolist()
    assert len(set(ends)) > 1, "episodes of different lengths"
    assert kept.taken.all() and torch.equal(kept.returns, whole.returns)
    for row, end in enumerate(ends):
        for name in ("hidden", "features", "legal", "actions", "logprobs", "rewards"):
            mine = getattr(whole, name)[row, end - 5 : end]
            assert torch.equal(getattr(kept, name)[row], mine), name
        assert torch.equal(kept.values[row], whole.values[row, end - 5 : end + 1])
        assert kept.values[row, -1] == 0
    assert whole.last(1000) is whole and whole.last(None) is whole


def test_a_policy_that_knows_nothing_is_uniform_over_what_is_legal() -> None:
    legal = torch.tensor([[True, False, True, True], [False, False, True, False]])
    decision = fresh_policy()(torch.randn(2, HIDDEN), torch.rand(2, NUM_FEATURES), legal)
    assert decision.entropy.tolist() == pytest.approx([math.log(3), 0.0])
    torch.testing.assert_close(decision.logprobs.exp().sum(1), torch.ones(2))
    assert decision.logprobs[1, SPLICE] == 0


def test_gradients_are_finite_where_actions_are_illegal() -> None:
    stream, state = started()
    policy = random_policy()
    rollouts = roll_out(stream, policy, state, generator=torch.Generator().manual_seed(0))
    advantages = Advantages(torch.randn(8), torch.ones(8, dtype=torch.bool))
    loss, _ = policy_loss(policy, rollouts, advantages, stream.config)
    loss.backward()
    for name, parameter in policy.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name


def test_advantages_are_those_of_the_baseline_and_leave_out_what_says_nothing() -> None:
    stream, state = started(4)
    policy = random_policy()
    generator = torch.Generator().manual_seed(0)
    rollouts = roll_out(stream, policy, branch(state, 2), generator=generator)
    returns = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.5, 0.5, 1.0, 1.1])
    rollouts = dataclasses.replace(rollouts, returns=returns)
    found = {
        baseline: advantages_of(
            rollouts, stream.config.model_copy(update={"baseline": baseline}), group_size=2
        )
        for baseline in ("group", "leave_one_out", "critic")
    }
    expected = torch.tensor([0.5, -0.5, 0.0, 0.0, 0.0, 0.0, -0.05, 0.05])
    torch.testing.assert_close(found["group"].values, expected)
    torch.testing.assert_close(found["leave_one_out"].values, 2 * expected)
    spread = [True, True, False, False, False, False, True, True]
    assert found["group"].is_learned.tolist() == spread
    assert found["leave_one_out"].is_learned.tolist() == spread
    # the critic's is what is behind its targets, and learns from failures as well
    assert found["critic"].is_learned.all()
    error = rollouts.value_targets(stream.config) - rollouts.values[:, :-1]
    torch.testing.assert_close(found["critic"].values, error * rollouts.taken)
    assert found["critic"].values.any()


@pytest.mark.parametrize("baseline", ["group", "critic"])
def test_idle_steps_learn_from_what_their_operations_cost(baseline: str) -> None:
    stream, state = started(2)
    config = stream.config.model_copy(update={"baseline": baseline})
    generator = torch.Generator().manual_seed(0)
    played = roll_out(stream, random_policy(), branch(state, 4), generator=generator)
    count, length = played.actions.shape
    steps = torch.rand(count, length, generator=generator) < 0.5
    prices = torch.rand(count, generator=generator)
    of_all = advantages_of(played, config, group_size=4)
    played = dataclasses.replace(played, idle=Idle(steps, prices))
    found = advantages_of(played, config, group_size=4)
    assert torch.equal(found.is_learned, of_all.is_learned)
    operates = torch.isin(played.actions, torch.tensor([RETRIEVE, WRITE])).float()
    seen = set()
    for row in range(count):
        group = slice(row // 4 * 4, row // 4 * 4 + 4)
        for step in range(length):
            expected = of_all.values[row] if of_all.values.dim() == 1 else of_all.values[row, step]
            if steps[row, step]:
                own = operates[row, step] - operates[group, step].mean()
                expected = -prices[row] * own
                seen.add(float(own) > 0)
            torch.testing.assert_close(found.values[row, step], expected)
    assert seen == {True, False}
    # cut to their last steps, episodes keep which of those are idle
    cut = played.last(3)
    first = (played.taken.sum(1) - 3).clamp(min=0)
    for row in range(count):
        assert torch.equal(cut.idle.steps[row], steps[row, first[row] : first[row] + 3])


def test_rolling_out_twice_with_one_seed_gives_equal_bits() -> None:
    stream, state = started()

    def run() -> Rollouts:
        generator = torch.Generator().manual_seed(3)
        return roll_out(stream, random_policy(), state, generator=generator)

    ours, theirs = run(), run()
    for name in ("actions", "logprobs", "values", "returns", "taken"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


class Broken(SegmentStream):
    def settle(self, state: StreamState) -> EpisodeOutcome[StreamState]:
        reward = super().settle(state).reward
        reward[3] = torch.nan
        return EpisodeOutcome(state, reward)


def test_a_reward_that_is_not_finite_is_reported() -> None:
    _, state = started()
    with pytest.raises(DataError, match="the reward of episode 3 is nan.*Nothing was learned"):
        roll_out(environment(Broken), fresh_policy(), state, generator=None)


@pytest.mark.parametrize("head", ["policy", "value"])
@pytest.mark.parametrize("generator", [None, torch.Generator()])
def test_numbers_of_the_agent_that_are_not_finite_are_reported(
    head: str, generator: torch.Generator | None
) -> None:
    stream, state = started()
    policy = fresh_policy()
    with torch.no_grad():
        getattr(policy, head).weight.fill_(torch.nan)
    with pytest.raises(DataError, match="agent's numbers are not finite in episode 0.*Nothing was"):
        roll_out(stream, policy, state, generator=generator)


def halfway() -> tuple[SegmentStream, StreamState]:
    stream, state = started(6)
    return stream, play(stream, state, [WRITE] * NUM_SEGMENTS + [RETRIEVE]).state


def test_branches_are_isolated_and_leave_the_state_as_it_was() -> None:
    stream, state = halfway()
    before = branch(state, 1)
    together = step_by_branches(stream, random_policy(), state)
    for row in range(6):
        alone = step_by_branches(stream, random_policy(), select(state, torch.tensor([row])))
        assert alone.actions.item() == together.actions[row].item()
        torch.testing.assert_close(alone.advantages[0], together.advantages[row])
        assert torch.equal(alone.state.buffer[0], together.state.buffer[row])
    pairs: list[torch.Tensor] = []
    for one in (state, before):
        map_tensors(one, lambda tensor: pairs.append(tensor) or tensor)
    half = len(pairs) // 2
    assert all(torch.equal(a, b) for a, b in zip(pairs[:half], pairs[half:], strict=True))


def test_a_branch_below_the_threshold_is_rolled_back() -> None:
    stream, state = halfway()
    stream.config = stream.config.model_copy(update={"accept_threshold": 1e6})
    after = step_by_branches(stream, random_policy(), state)
    assert not after.accepted.any() and (after.actions == SPLICE).all()
    passed = stream.step(state, after.actions)
    assert torch.equal(after.done, passed.done)
    assert torch.equal(after.state.operations, passed.state.operations)
    assert torch.equal(after.state.time, state.time + 1)


def test_of_the_branches_that_are_good_enough_the_likeliest_is_kept() -> None:
    stream, state = halfway()
    policy = random_policy()
    tried = step_by_branches(stream, policy, state)
    decision = policy(*stream.observe(state))
    order = decision.logprobs.argsort(dim=1, descending=True)
    good = tried.advantages >= 0
    assert good.any() and not good[:, 0].all()
    for row in range(6):
        kept = [int(order[row, k]) for k in range(3) if good[row, k]]
        assert tried.accepted[row] == bool(kept)
        assert tried.actions[row] == (kept[0] if kept else SPLICE)


def test_where_no_branch_is_good_enough_the_agent_passes() -> None:
    stream, state = halfway()
    policy = random_policy()
    tried = step_by_branches(stream, policy, state)
    threshold = float(tried.advantages.amax(1).median())
    stream.config = stream.config.model_copy(update={"accept_threshold": threshold + 1e-6})
    after = step_by_branches(stream, policy, state)
    rejected = tried.advantages.amax(1) < threshold + 1e-6
    assert rejected.any() and not rejected.all()
    assert torch.equal(after.accepted, ~rejected)
    assert (after.actions[rejected] == SPLICE).all()
    taken = stream.step(state, after.actions).state
    assert torch.equal(after.state.buffer, taken.buffer)


def test_branches_that_are_all_accepted_act_as_the_policy_does() -> None:
    stream, state = started(16)
    stream.config = stream.config.model_copy(update={"accept_threshold": -1e6})
    policy = random_policy()
    played = roll_out_branches(stream, policy, state)
    greedy = roll_out(stream, policy, state, generator=None)
    assert played.num_accepted == played.num_decisions == int(greedy.taken.sum())
    for name in ("memory", "operations", "solved", "time"):
        assert torch.equal(getattr(played.final, name), getattr(greedy.final, name)), name


def test_branches_that_are_all_rejected_pass_to_the_end() -> None:
    stream, state = started()
    stream.config = stream.config.model_copy(update={"accept_threshold": 1e6})
    played = roll_out_branches(stream, random_policy(), state)
    assert (played.num_accepted, played.num_decisions) == (0, 8 * 28)
    assert not played.final.operations.any() and not played.final.solved.any()


class Unasked(SegmentStream):
    """Whose checker must not be asked."""

    def settle(self, state: StreamState) -> EpisodeOutcome[StreamState]:
        raise AssertionError("nobody knows what an answer earns before it is given")


def test_no_branch_asks_the_checker() -> None:
    stream, state = started(64)
    state = play(stream, state, [WRITE] * NUM_SEGMENTS + [RETRIEVE]).state
    tried = step_by_branches(environment(Unasked), random_policy(), state)
    actions = random_policy()(*stream.observe(state)).logprobs.argsort(dim=1, descending=True)
    ends = torch.stack([stream.step(state, actions[:, k]).done for k in range(3)], dim=1)
    assert ends.any() and (tried.advantages[ends] == 0).all()
