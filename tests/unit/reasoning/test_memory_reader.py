"""Reading beyond the window: what is kept, what is forgotten, and whose it is."""

import dataclasses

import pytest
import torch

from cdrmix.config.reasoning import ANSWER_TOKENS, MemoryPart
from cdrmix.errors import DataError
from cdrmix.models.state_rows import select
from cdrmix.reasoning import memory_reader
from cdrmix.reasoning.lessons import Lesson
from cdrmix.reasoning.memory_reader import AT_QUESTION, NEARNESS, NUM_FEATURES, MemoryReader
from cdrmix.reasoning.policy import NUM_ACTIONS, Action, Decision, roll_out
from cdrmix.reasoning.reading_environment import ReadingEpisodes
from cdrmix.reasoning.segments import Texts, ask_first, cut_segments, make_texts
from cdrmix.stage_b.phases import stage_b_section
from tests.unit.reasoning.small_reader import (
    WINDOW_TOKENS,
    small_config,
    small_lessons,
    small_reader,
    tokenizer,
)


@pytest.fixture(scope="module")
def reader() -> MemoryReader:
    return small_reader(small_config())


@pytest.fixture(scope="module")
def lesson() -> Lesson:
    return small_lessons(small_config(tasks=("needle_keys", "variable_tracking"))).lesson(
        "joint", 0
    )


def one(texts: Texts, row: int) -> Texts:
    chosen = slice(row, row + 1)
    return Texts(
        *(texts.tokens[chosen], texts.lengths[chosen], texts.questions[chosen]),
        *(texts.words[chosen], texts.asked[chosen]),
    )


def test_segments_are_whole_sentences_and_lose_nothing() -> None:
    marks = small_lessons(small_config()).marks
    ids = tokenizer().encode("The code of bami is 1234. It rained. It rained in lolo again. " * 3)
    segments = cut_segments(ids, marks, most=32)
    assert [id for segment in segments for id in segment] == ids
    assert all(len(segment) <= 32 for segment in segments)
    assert all(marks.ends[segment[-1]] for segment in segments[:-1])
    assert [len(part) for part in cut_segments(ids[:5] * 8, marks, most=16)] == [16, 16, 8]


def test_reading_one_by_one_equals_reading_together(reader: MemoryReader, lesson: Lesson) -> None:
    together = reader.read(lesson.texts)
    for row in range(len(lesson.examples)):
        alone = reader.read(one(lesson.texts, row))
        torch.testing.assert_close(alone.pooled[0], together.pooled[row], atol=1e-5, rtol=0)
        for name, weights in alone.plastic.layers.items():
            mine = together.plastic.layers[name].weights[row]
            torch.testing.assert_close(weights.weights[0], mine, atol=1e-5, rtol=0)


def test_other_rows_never_matter(reader: MemoryReader, lesson: Lesson) -> None:
    before = reader.read(lesson.texts)
    tokens = lesson.texts.tokens.clone()
    tokens[1:] = tokens[1:].roll(1, dims=0)
    lengths = lesson.texts.lengths.clone()
    lengths[1:] = lengths[1:].roll(1, dims=0)
    after = reader.read(dataclasses.replace(lesson.texts, tokens=tokens, lengths=lengths))
    assert torch.equal(before.hidden[0], after.hidden[0])
    assert not torch.equal(before.hidden[1], after.hidden[1])


def test_filling_stores_nothing(reader: MemoryReader, lesson: Lesson) -> None:
    tokens = lesson.texts.tokens.clone()
    tokens[~lesson.texts.mask] = 7
    other = dataclasses.replace(lesson.texts, tokens=tokens)
    first, second = reader.read(lesson.texts), reader.read(other)
    assert torch.equal(first.pooled, second.pooled)
    for name, weights in first.plastic.layers.items():
        assert torch.equal(weights.weights, second.plastic.layers[name].weights)


def test_a_segment_sees_nothing_of_those_before_but_by_fast_weights(
    reader: MemoryReader, lesson: Lesson
) -> None:
    tokens = lesson.texts.tokens.clone()
    tokens[:, 0] = tokens[:, 0].roll(1, dims=0)
    other = dataclasses.replace(lesson.texts, tokens=tokens)
    plain = [reader.read(texts, plastic=False).pooled for texts in (lesson.texts, other)]
    assert torch.equal(plain[0][:, 1:], plain[1][:, 1:])
    plastic = [reader.read(texts).pooled for texts in (lesson.texts, other)]
    assert not torch.equal(plastic[0][:, 1:], plastic[1][:, 1:])


def test_windows_hold_what_was_fetched_and_the_question(
    reader: MemoryReader, lesson: Lesson
) -> None:
    last = lesson.texts.tokens.shape[1] - 1
    fetched = [[last], [], [last, last - 1], []]
    windows = reader.windows(lesson.texts, range(4), fetched)
    for row, example in enumerate(lesson.examples):
        text = tokenizer().decode(windows.tokens[row, : windows.lengths[row]].tolist())
        segments = [lesson.texts.segment(row, place) for place in sorted(fetched[row])]
        held = [f"<|memory|>{tokenizer().decode(segment)}" for segment in segments]
        assert text == "".join(held) + f"<|memory|>{example.question}<|answer|>"
    # the question's tokens are told by their states: of each, the number of its place
    places = torch.arange(windows.tokens.shape[1]).view(1, -1, 1).expand(4, -1, 64).float()
    pooled, _ = reader.question_state(windows, places)
    middle = windows.lengths - (windows.question_lengths + 1) / 2
    torch.testing.assert_close(pooled[:, 0], middle)


def test_no_window_is_longer_than_the_backbones(reader: MemoryReader, lesson: Lesson) -> None:
    length = lesson.texts.tokens.shape[1]
    windows = reader.windows(lesson.texts, range(4), [range(length)] * 4)
    for row in range(4):
        held = int((windows.tokens[row] == reader.marks.memory).sum()) - 1
        assert windows.lengths[row] <= WINDOW_TOKENS - ANSWER_TOKENS
        assert windows.lengths[row] + windows.room[row] == WINDOW_TOKENS - ANSWER_TOKENS
        there = lesson.texts.lengths[row][lesson.texts.lengths[row] > 0]
        assert held == len(there) or windows.room[row] <= there[held], "the next one did not fit"


def test_alone_the_backbone_has_the_end_of_the_text(
    reader: MemoryReader, lesson: Lesson, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "answer", lambda windows, **_: windows)
    windows = reader.answer_alone(lesson.texts)
    for row, example in enumerate(lesson.examples):
        text = tokenizer().decode(windows.tokens[row, : windows.lengths[row]].tolist())
        last = tokenizer().decode(lesson.texts.segment(row, lesson.texts.tokens.shape[1] - 1))
        assert text.endswith(f"{last}<|memory|>{example.question}<|answer|>")


def test_without_memory_it_is_the_backbone_bit_by_bit(reader: MemoryReader, lesson: Lesson) -> None:
    windows = reader.windows(lesson.texts, range(4), [()] * 4)
    alone = reader.backbone(windows.tokens).hidden
    off, _ = reader.look(windows.tokens, slots=None, plastic=None)
    assert torch.equal(alone, off.hidden)
    reading = reader.read(lesson.texts)
    slots = reader.summarise(reading, torch.arange(4), lesson.summarised)
    with_slots, _ = reader.look(windows.tokens, slots=slots, plastic=None)
    with_weights, _ = reader.look(windows.tokens, slots=None, plastic=reading.plastic)
    assert not torch.equal(alone, with_slots.hidden)
    assert not torch.equal(alone, with_weights.hidden)
    assert torch.equal(alone, reader.backbone(windows.tokens).hidden)


def test_fresh_fast_weights_and_slots_leave_the_backbones_numbers(lesson: Lesson) -> None:
    fresh = small_reader(small_config())
    fresh.memory.up.weight.data.zero_()
    windows = fresh.windows(lesson.texts, range(4), [()] * 4)
    slots, plastic = fresh.memory.start(4), fresh.plastic.start(4)
    found, _ = fresh.look(windows.tokens, slots=slots, plastic=plastic)
    assert torch.equal(found.hidden, fresh.backbone(windows.tokens).hidden)


def test_answers_come_token_by_token_as_from_whole_windows(
    reader: MemoryReader, lesson: Lesson
) -> None:
    reading = reader.read(lesson.texts)
    slots = reader.summarise(reading, torch.arange(4), lesson.summarised)
    windows = reader.windows(lesson.texts, range(4), lesson.gathered)
    assert len(windows.lengths.unique()) > 1, "answers of windows of different lengths"
    answers = reader.answer(windows, slots=slots, plastic=reading.plastic)
    for row, answer in enumerate(answers):
        ids = windows.tokens[row, : windows.lengths[row]].tolist()
        mine, rows = [], torch.tensor([row])
        for _ in range(ANSWER_TOKENS):
            output, _ = reader.look(
                torch.tensor([ids + mine]), slots=slots[rows], plastic=select(reading.plastic, rows)
            )
            token = int(reader.backbone.logits(output.hidden[0, -1]).argmax())
            if token == reader.marks.stop:
                break
            mine.append(token)
        assert answer == mine


@pytest.mark.parametrize("parts", [["plastic", "slots", "episodic"], ["state", "episodic"]])
def test_answers_that_end_leave_those_that_go_on(
    parts: list[MemoryPart], lesson: Lesson, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config()
    assert config.stage_b is not None, "a reasoning variant has this section"
    memory = config.stage_b.memory.model_copy(update={"parts": parts})
    stage_b = config.stage_b.model_copy(update={"memory": memory})
    reader = small_reader(config.model_copy(update={"stage_b": stage_b}))
    generator = torch.Generator().manual_seed(0)
    for parameter in reader.backbone.parameters():
        # outputs of fresh blocks are zero, so that all windows would be answered alike
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    reading = reader.read(lesson.texts)
    rows = torch.tensor([2, 0, 3, 1, 0])
    chosen = lesson.summarised[rows]
    slots = reader.summarise(reading, rows, chosen)
    plastic = reader.recalled(reading, rows, chosen)
    windows = reader.windows(lesson.texts, rows.tolist(), [lesson.gathered[row] for row in rows])
    whole = reader.answer(windows, slots=slots, plastic=plastic)
    assert {len(answer) for answer in whole} == {ANSWER_TOKENS}
    # few at a time, and of one length as where a block's state cannot be joined with another's
    for together, joins in ((1, True), (32, False)):
        monkeypatch.setattr(memory_reader, "_WINDOWS_TOGETHER", together)
        monkeypatch.setattr(reader, "_joins_lengths", joins)
        batches = reader._decoded_together(windows.lengths)
        assert sorted(torch.cat(batches).tolist()) == list(range(5)) and len(batches) > 1
        assert joins or all(len(windows.lengths[batch].unique()) == 1 for batch in batches)
        assert reader.answer(windows, slots=slots, plastic=plastic) == whole
    monkeypatch.undo()
    is_uneven = False
    for stop in {id for answer in whole for id in answer}:
        reader.marks = reader.marks._replace(stop=stop)
        ends = [answer.index(stop) if stop in answer else None for answer in whole]
        is_uneven |= len(set(ends)) > 1
        cut = [answer[:end] for answer, end in zip(whole, ends, strict=True)]
        assert reader.answer(windows, slots=slots, plastic=plastic) == cut
    assert is_uneven, "some went on behind others"


def test_texts_of_other_lengths_keep_their_rows(reader: MemoryReader) -> None:
    short, long = [[20, 21, 22]], [[30, 31], [32, 33], [34]]
    sizes = {"most": 16, "decode": tokenizer().decode}
    both = make_texts([short, long], [[40], [41, 42]], reader.marks, **sizes)
    alone = make_texts([short], [[40]], reader.marks, **sizes)
    found, mine = reader.read(both), reader.read(alone)
    torch.testing.assert_close(found.pooled[0, -1], mine.pooled[0, 0], atol=1e-6, rtol=0)
    assert both.num_segments.tolist() == [1, 3]
    for name, weights in mine.plastic.layers.items():
        theirs = found.plastic.layers[name].weights[0]
        torch.testing.assert_close(weights.weights[0], theirs, atol=1e-6, rtol=0)


def asking(segments: list[list[list[int]]], questions: list[list[int]]) -> Texts:
    marks = small_lessons(small_config()).marks
    decode = tokenizer().decode
    return make_texts(segments, questions, marks, most=WINDOW_TOKENS // 4, decode=decode)


@torch.no_grad()
def test_a_question_that_is_read_first_changes_keys_and_is_not_stored() -> None:
    generator = torch.Generator().manual_seed(0)

    def ids(count: int) -> list[int]:
        return torch.randint(20, 500, (count,), generator=generator).tolist()

    text = [ids(16), ids(9), ids(16)]
    one, other = ids(6), ids(13)
    reader = small_reader(small_config(question="first"))
    last = small_reader(small_config())
    read = {}
    for name, question in (("one", one), ("other", other), ("none", [])):
        read[name] = reader.read(asking([text], [question]))
        assert read[name].hidden.shape == (1, 3, 16, 64) and read[name].keys.shape[1] == 3
    assert (read["one"].keys - read["other"].keys).abs().max() > 1e-3
    bare_keys = [each.read(asking([text], [[]]), plastic=False).keys for each in (reader, last)]
    torch.testing.assert_close(*bare_keys, atol=1e-5, rtol=0)
    # the hidden states are those behind the question, in a pass of the segment alone
    head = [reader.marks.memory, *one, reader.marks.memory]
    alone = reader.backbone(torch.tensor([[*head, *text[1]]])).hidden[0, len(head) :]
    bare = reader.read(asking([text], [one]), plastic=False)
    torch.testing.assert_close(bare.hidden[0, 1, :9], alone, atol=1e-5, rtol=0)
    # fast weights store the segments' tokens alone
    asked = ask_first(asking([text], [one]), reader.marks, room=32)
    stored = [row[mask].tolist() for row, mask in zip(asked.tokens[0], asked.mask[0], strict=True)]
    assert stored == text
    # slots keep segments: with what was read, not with what was asked
    chosen = torch.tensor([[True, False, False]])
    slots = reader.summarise(bare, torch.tensor([0]), chosen)
    mask = torch.ones(1, 16, dtype=torch.bool)
    after = reader.memory.write(reader.memory.start(1), bare.hidden[:, 0], mask)
    torch.testing.assert_close(slots, after)
    # and a text's numbers are its own, whatever is asked of the text beside it
    beside = reader.read(asking([text, text], [one, other]))
    torch.testing.assert_close(beside.keys[:1], read["one"].keys, atol=1e-5, rtol=0)
    assert beside.plastic is not None and read["one"].plastic is not None
    ours, theirs = (
        select(each.plastic, torch.tensor([0])).layers for each in (beside, read["one"])
    )
    for layer, weights in ours.items():
        for name, mine in vars(weights).items():
            torch.testing.assert_close(mine, getattr(theirs[layer], name), atol=1e-5, rtol=0)
    with pytest.raises(DataError, match=r"takes 42 tokens with its marks, .* at most 32"):
        reader.read(asking([text], [ids(40)]))


@torch.no_grad()
def test_an_agent_that_knows_the_question_sees_how_near_a_segment_is_to_it() -> None:
    score = 3  # place of the feature
    segments = [[[20, 21, 22], [30, 31], [32, 33, 34]], [[40, 41], [42, 43]]]
    texts = asking(segments, [[50, 51], [52]])
    first, last = small_reader(small_config(question="first")), small_reader(small_config())
    reading = first.read(texts)
    episodes = ReadingEpisodes(first, reading, lambda *_: 0.0)
    state = episodes.start()
    near = first.nearness(reading)
    assert near.shape == (2, 3) and near.abs().max() <= 1 + 1e-6
    windows = first.windows(texts, range(2), [(), ()])
    hidden = first.backbone(windows.tokens).hidden
    _, query = first.question_state(windows, hidden)
    torch.testing.assert_close(near[1, 2], reading.keys[1, 2] @ query[1])
    passes = torch.full((2,), int(Action.SPLICE_WINDOW))
    for places in ([0, 1], [1, 2]):  # the shorter text begins one place later
        seen = episodes.observe(state).features[:, score]
        torch.testing.assert_close(seen, near[[0, 1], places])
        state = episodes.step(state, passes).state
    # at the question it is of what was fetched
    assert episodes.observe(state).features[1, score] == 0
    asked_last = ReadingEpisodes(last, last.read(texts), lambda *_: 0.0)
    assert not asked_last.observe(asked_last.start()).features[:, score].any()


SUMMARIZE, RETRIEVE, PASS, WRITE = Action


@torch.no_grad()
def test_steps_that_cannot_have_changed_an_answer_are_those_on_segments_that_do_not_matter(
    reader: MemoryReader,
) -> None:
    asks = [RETRIEVE, PASS, PASS]
    plans = [
        # evidence is the third segment
        [PASS, WRITE, WRITE, SUMMARIZE, *asks],
        [PASS, WRITE, PASS, PASS, *asks],
        [WRITE, WRITE, PASS, PASS, PASS, PASS, PASS],  # nothing left for the evidence
        # a shorter text, whose evidence is unknown
        [WRITE, PASS, WRITE, *asks, PASS],  # the budget is spent
        [WRITE, PASS, PASS, *asks, PASS],
        [PASS, WRITE, PASS, *asks, PASS],
    ]

    def follow(hidden: torch.Tensor, features: torch.Tensor, legal: torch.Tensor) -> Decision:
        actions = torch.tensor([plan[follow.time] for plan in plans])
        follow.time += 1
        assert legal[torch.arange(6), actions].all()
        logprobs = torch.full(legal.shape, -30.0).scatter(1, actions.unsqueeze(1), 0.0)
        return Decision(logprobs, torch.zeros(6), torch.zeros(6))

    follow.time = 0
    one, other = [[20, 21], [30, 31], [32, 33], [34, 35]], [[40, 41], [42, 43], [44, 45]]
    reading = reader.read(asking([one, other], [[50, 51], [52]]))
    episodes = ReadingEpisodes(reader, reading, lambda *_: 1.0, budgets=[3, 3])
    played = roll_out(episodes, follow, episodes.start(3), generator=None)
    evidence = [(2,), ()]
    idle = episodes.idle(played, evidence)
    came = played.final.fetched.max(1).values.tolist()  # which of two written ones was nearer
    assert came[0] in (1, 2) and came[3] in (1, 3) and came[1:6:3] == [1, 1]
    expected = [[True, came[0] != 1, False, False], [True, False, False, True]]
    expected += [[True, True, False, True]]
    assert idle.steps[:3, :4].tolist() == expected
    # the last of them came into the window of the first episode, or of none
    last = came[3] != 3
    assert idle.steps[3:, :3].tolist() == [[False] * 3, [False, False, last], [False, False, last]]
    assert not idle.steps[:3, 4:].any() and not idle.steps[3:, 3:].any()
    # a wrong answer after evidence passed by with the budget spent, or with none left for the
    # question, cost a share of the budget
    earned = torch.tensor([1.0, 0.0, 0.25, 0.4, 1.0, 0.0])
    final = dataclasses.replace(played.final, earned=earned)
    prices = episodes.idle(dataclasses.replace(played, final=final), evidence).prices
    penalty = reader.config.policy.latency_penalty
    torch.testing.assert_close(prices, penalty * earned + torch.tensor([0, 0, 0.25, 0.2, 0, 0]))


@pytest.mark.parametrize(("budget", "share"), [(2, 0.25), (4, 0.5), (64, 0.5)])
def test_an_agent_begins_with_as_many_operations_as_its_budget_has_for_a_text(
    lesson: Lesson, budget: int, share: float
) -> None:
    # Texts of two windows have eight segments at least.
    config = small_config(tasks=("needle_keys",))
    stage_b = stage_b_section(config)
    policy = stage_b.policy.model_copy(update={"step_budget": budget})
    config = config.model_copy(update={"stage_b": stage_b.model_copy(update={"policy": policy})})
    reader = small_reader(config)
    reading = reader.read(lesson.texts)
    episodes = ReadingEpisodes(reader, reading, lambda *_: 0.0)
    state = episodes.start()
    hidden, features, _ = episodes.observe(state)
    every = torch.ones(len(hidden), NUM_ACTIONS, dtype=torch.bool)
    chances = reader.policy(hidden, features, every).logprobs.exp()
    operations = chances[:, [Action.RETRIEVE, Action.CACHE_WRITE]].sum(1)
    torch.testing.assert_close(operations, torch.full_like(operations, share))
    asked = features.clone()
    asked[:, AT_QUESTION] = 1
    chances = reader.policy(hidden, asked, every).logprobs.exp()
    torch.testing.assert_close(chances, torch.full_like(chances, 1 / NUM_ACTIONS))
    while not episodes._is_asked(state).all():
        assert not episodes.observe(state).features[~episodes._is_asked(state), AT_QUESTION].any()
        passing = torch.full((len(state.rows),), int(Action.SPLICE_WINDOW))
        state = episodes.step(state, passing).state
    assert episodes.observe(state).features[:, AT_QUESTION].all()


@torch.no_grad()
def test_how_near_a_segment_is_to_a_question_read_first_weighs_as_much_as_its_hidden_state() -> (
    None
):
    readers = [small_reader(small_config(question=question)) for question in ("first", "last")]
    hidden, legal = torch.zeros(1, 64), torch.ones(1, NUM_ACTIONS, dtype=torch.bool)
    near = torch.zeros(1, NUM_FEATURES)
    near[:, NEARNESS] = 0.5
    logits = []
    for reader in readers:
        policy = reader.policy
        policy.feature_policy.weight[Action.CACHE_WRITE, NEARNESS] = 0.125
        decision = policy(hidden, near, legal)
        logits.append(float(decision.logprobs[0, Action.CACHE_WRITE] - decision.logprobs[0, 0]))
        assert not any("of_features" in name for name in reader.state_dict())
    assert logits == pytest.approx([0.125 * 0.5 * 64 / 2, 0.125 * 0.5])
