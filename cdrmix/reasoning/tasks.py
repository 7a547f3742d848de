"""Reasoning tasks as texts of a given length, and the checker of answers; files: `task_files`.

Needles, variable tracking, common words and look-ups follow the kinds of RULER (2404.06654), with
words made of syllables instead of essays, so that no data set is needed. A task is statements and a
question; its text puts sentences without meaning between them. The checker is both the reward of
training and the score of evaluation.
"""

from __future__ import annotations

import itertools
import random
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Literal, NamedTuple

from cdrmix.errors import DataError
from cdrmix.reasoning.answers import exact_match, token_f1

# all, any: single words, each with its share, or one enough. exact, f1: phrases, the best of them.
Match = Literal["all", "any", "exact", "f1"]
# Task made from text of the corpus (`recall`), which the kinds here do not need.
RECALL = "recall"
# Of the texts that a task and its number lead to: runs that began with another are told.
TEXT_VERSION = 8
CountTokens = Callable[[str], int]
# A consonant and a vowel, in both orders, so that names begin and end in either. Readers that learn
# from names of one shape alone copy no others: of two hops in names that begin with a vowel they
# answered none, having learned from names that begin with a consonant.
_SYLLABLES = tuple(
    "".join(order)
    for pair in itertools.product("bdfgklmnprstvz", "aeiou")
    for order in (pair, pair[::-1])
)


class Wording(NamedTuple):
    """Names, forms of statements and questions, and sentences between the statements.

    A text says all of one kind in one form. Fillers and decoys have a `{word}`, and some have
    `{digits}`. Decoys are as long as a needle, with a number, and with words of the question.
    """

    has_held_out_names: bool
    needles: tuple[str, ...]  # statements of the code `{digits}` of `{word}`
    ask_needles: tuple[tuple[str, str], ...]  # for one code and for several, of `{words}`
    copies: tuple[str, ...]  # statements that `{new}` holds what `{old}` does, or is
    ask_copies: tuple[str, ...]  # for all that hold `{value}`
    fillers: tuple[str, ...]
    decoys: tuple[str, ...]

    def words(self, rng: random.Random, *, num_syllables: int = 3) -> Iterator[str]:
        """Generates made-up words, none twice; a fifth of all words is held out."""
        seen: set[str] = set()
        while True:
            word = "".join(rng.choices(_SYLLABLES, k=num_syllables))
            is_held_out = zlib.crc32(word.encode()) % 5 == 0
            if word not in seen and is_held_out is self.has_held_out_names:
                seen.add(word)
                yield word


# Hundreds of forms, as an agent that learns from five takes every other sentence for a statement,
# and writes it (docs/reasoning.md).
_TRAINED_FILLERS = tuple(
    " ".join(part for part in parts if part) + "."
    for parts in (
        *itertools.product(
            ("Nobody", "A child", "Some men", "They", "We", "Many"),
            ("asked about {word}", "came from {word}", "spoke of {word}", "go to {word}")
            + ("dream of {word}", "wrote to {word}", "like {word}", "saw {word}"),
            ("", "again", "late", "for an hour", "at night"),
        ),
        *itertools.product(
            ("{word}", "The road to {word}", "A letter from {word}", "All of {word}"),
            ("was", "is", "seems", "gets"),
            ("long", "far", "under water", "old", "too high"),
        ),
        *itertools.product(
            ("It rained in", "There is no way to", "Little is in", "Wind is in"),
            ("{word}", "the north of {word}"),
            ("", "today", "again", "all year"),
        ),
    )
)

# Dozens: with three forms an agent takes no other sentence for a statement of a code. In held-out
# wording it then wrote .77 of them down, in one of three seeds (docs/reasoning.md). Digits stand
# behind the word "code" and before it: who learned from the former alone read none of the latter.
_TRAINED_NEEDLES = tuple(
    " ".join(parts) + "."
    for parts in (
        *itertools.product(
            ("The code of {word}", "The code at {word}", "{word}: its code", "The {word} code"),
            ("is {digits}", "was {digits}", "must be {digits}", "is now {digits}"),
        ),
        *itertools.product(
            ("{word}",),
            ("has", "got", "took", "keeps", "needs", "uses", "found", "lost"),
            ("the code {digits}", "code {digits}"),
        ),
        *itertools.product(
            ("Code {digits}", "The code {digits}"),
            ("was given to", "went to", "is that of", "opens", "is on"),
            ("{word}",),
        ),
        *itertools.product(
            ("In", "At", "By", "With", "On"),
            ("{word}",),
            ("the code is", "the code was", "they use code", "one reads code"),
            ("{digits}",),
        ),
        *itertools.product(
            ("They gave", "We told", "Somebody sent", "You find"),
            ("{word}",),
            ("the code {digits}", "code {digits}"),
        ),
        *itertools.product(
            ("{word}",),
            ("starts with", "is known by", "answers to", "is marked with", "was sold under"),
            ("the code {digits}",),
        ),
        *itertools.product(
            ("{word}",),
            ("has", "got", "took", "keeps", "needs", "uses"),
            ("{digits} for its code", "{digits} for a code"),
        ),
        *itertools.product(
            ("{digits}",),
            ("is the code of", "was the code at", "is a code of", "is now the code of"),
            ("{word}",),
        ),
        *itertools.product(
            ("{digits}",),
            ("was given to", "went to", "is on", "opens"),
            ("{word} for a code", "{word}: its code"),
        ),
        *itertools.product(
            ("In", "At", "By", "With", "On"),
            ("{word}",),
            ("{digits} is the code", "they use {digits} for code"),
        ),
    )
)
# As many words between two names as may be, and both orders about as often. Who learned from eight
# forms followed two hops in .19 to .52 of texts in another one; who learned from 40 that name the
# new variable first and eight that do not, in .23 of texts that do not. Short, so that two hops fit
# a window of 64 tokens.
_TRAINED_COPIES = (
    *(
        f"{{new}} {verb} {{old}}."
        for verb in ("takes", "gets", "equals", "was", "has", "means", "copies", "follows")
        + ("becomes", "keeps", "shows", "uses", "repeats", "=", "is like", "stands for")
    ),
    *("Let {new} = {old}.", "Set {new} to {old}.", "Make {new} from {old}.", "Call {new} {old}."),
    *("Fill {new} with {old}.", "Give {new} {old}.", "Read {new} as {old}.", "Tie {new} to {old}."),
    *("Put {old} in {new}.", "Copy {old} to {new}.", "Move {old} into {new}."),
    *(f"{{old}} {verb} {{new}}." for verb in ("is in", "moves to", "fills", "makes", "feeds")),
    *(
        f"{verb} {{new}} {preposition} {{old}}."
        for verb in ("Fix", "Join", "Start", "Hold")
        for preposition in ("to", "by", "from", "with", "at")
    ),
    *(
        f"{verb} {{old}} {preposition} {{new}}."
        for verb in ("Lay", "Send", "Bring", "Write")
        for preposition in ("on", "to", "under", "by", "with")
    ),
    *(f"{{old}} {verb} {{new}}." for verb in ("goes to", "gives", "became", "turns into")),
)

TRAINED = Wording(
    has_held_out_names=False,
    needles=_TRAINED_NEEDLES,
    ask_needles=(
        ("What is the code of {words}?", "What are the codes of {words}?"),
        ("Which code has {words}?", "Which codes have {words}?"),
        ("Tell the code of {words}.", "Tell the codes of {words}."),
        ("What code was given to {words}?", "What codes were given to {words}?"),
        ("Say which code {words} has.", "Say which codes {words} have."),
        ("What code does {words} have?", "What codes do {words} have?"),
        ("Name the code of {words}.", "Name the codes of {words}."),
        ("Which code belongs to {words}?", "Which codes belong to {words}?"),
        ("{words} has which code?", "{words} have which codes?"),
        ("Find out what code {words} got.", "Find out what codes {words} got."),
    ),
    copies=_TRAINED_COPIES,
    ask_copies=(
        "Which variables hold {value}?",
        "What holds {value}?",
        "Which of them have {value}?",
        "What equals {value}?",
        "Which words mean {value}?",
        "Who takes {value}?",
        "Say what has {value}.",
        "List all that get {value}.",
        "Find all with {value}.",
        "Which ones keep {value}?",
        "What was made {value}?",
        "Where is {value}?",
        "Name whatever shows {value}.",
        "{value} is in what?",
        "What comes from {value}?",
        "What goes with {value}?",
        "What starts with {value}?",
        "Show what belongs to {value}.",
        "Which words follow {value}?",
        "Tell what copies {value}.",
        "What ends in {value}?",
        "{value} went where?",
    ),
    fillers=_TRAINED_FILLERS,
    decoys=(
        "The room of {word} is {digits}.",
        "The code was sent to {word}.",
        "{word} has {digits} letters.",
        "Nobody knows the code of {word}.",
        "What is in {word} is lost.",
    ),
)
# Nothing of it is in texts of training.
HELD_OUT = Wording(
    has_held_out_names=True,
    needles=("{word} goes by the code {digits}.",),
    ask_needles=(("By which code goes {words}?", "By which codes go {words}?"),),
    copies=("Let {new} be {old}.",),
    ask_copies=("Which names are {value}?",),
    fillers=(
        "Two ships left {word} at dawn.",
        "We heard a song about {word}.",
        "Snow fell on the hills near {word}.",
        "No bridge leads over to {word}.",
        "Once {word} was a quiet place.",
    ),
    decoys=(
        "The number on {word} is {digits}.",
        "A code was found beside {word}.",
        "{word} lost {digits} coins.",
        "Somebody wrote the code of {word}.",
        "What {word} keeps is a secret.",
    ),
)


Between = Literal["fillers", "decoys", "needles"]  # of `Wording`


class Puzzle(NamedTuple):
    """Task without the sentences between its statements; fields as of `Example`.

    Statements are sentences that matter or mislead, in the order of the text. There is no evidence
    where the answer takes the whole text.
    """

    statements: list[str]
    question: str
    answers: list[str]
    evidence: list[str]
    match: Match = "all"
    between: tuple[str, ...] = ()  # sentences between the statements; () for the fillers


def needle(
    rng: random.Random,
    wording: Wording,
    *,
    num_keys: int,
    num_values: int,
    num_queries: int,
    between: Between = "fillers",
) -> Puzzle:
    """Hides codes of keys, and asks for all codes of some keys."""
    fresh = wording.words(rng)
    keys = [next(fresh) for _ in range(num_keys)]
    codes = {key: [str(rng.randrange(1000, 10_000)) for _ in range(num_values)] for key in keys}
    form = rng.choice(wording.needles)
    said = {key: [form.format(word=key, digits=code) for code in codes[key]] for key in keys}
    statements = [line for key in keys for line in said[key]]
    rng.shuffle(statements)
    targets = rng.sample(keys, num_queries)
    ask_one, ask_several = rng.choice(wording.ask_needles)
    ask = ask_one if num_queries * num_values == 1 else ask_several
    question = ask.format(words=" and ".join(targets))
    answers = [code for key in targets for code in codes[key]]
    evidence = [line for key in targets for line in said[key]]
    templates = {"fillers": wording.fillers, "decoys": wording.decoys, "needles": (form,)}[between]
    return Puzzle(statements, question, answers, evidence, between=templates)


def registers(
    rng: random.Random, wording: Wording, *, num_registers: int, num_updates: int
) -> Puzzle:
    """Overwrites a few registers again and again, and asks for what one holds at the end."""
    fresh = wording.words(rng, num_syllables=2)
    names = [next(fresh) for _ in range(num_registers)]
    updates = [rng.choice(names) for _ in range(num_updates)]
    updates[: len(names)] = names  # each is set once at least
    values = rng.sample(range(1000, 10_000), num_updates)  # no value twice
    statements = [f"Set {name} to {value}." for name, value in zip(updates, values, strict=True)]
    name = rng.choice(names)
    last = max(place for place, each in enumerate(updates) if each == name)
    answer = str(values[last])
    return Puzzle(statements, f"What does {name} hold?", [answer], [statements[last]])


def variable_tracking(
    rng: random.Random, wording: Wording, *, hops: int, num_chains: int = 2
) -> Puzzle:
    """Chains variables that copy the value of the one before, and asks for all of one chain.

    Names are short, so that the evidence of two hops, the question and its answer fit a window of
    64 tokens.
    """
    fresh = wording.words(rng, num_syllables=2)
    values = [str(value) for value in rng.sample(range(1000, 10_000), num_chains)]
    chains = [[next(fresh) for _ in range(hops + 1)] for _ in values]
    form = rng.choice(wording.copies)
    queues = [
        [form.format(new=b, old=a) for a, b in itertools.pairwise([value, *names])]
        for value, names in zip(values, chains, strict=True)
    ]
    question = rng.choice(wording.ask_copies).format(value=values[0])
    return Puzzle(interleaved(rng, queues), question, chains[0], queues[0])


def common_words(
    rng: random.Random, wording: Wording, *, num_common: int = 3, repeats: int = 6
) -> Puzzle:
    """Lists words, some more often than all others, and asks for those."""
    fresh = wording.words(rng)
    common = [next(fresh) for _ in range(num_common)]
    rare = [next(fresh) for _ in range(2 * num_common)]
    sequence = common * repeats + rare
    rng.shuffle(sequence)
    statements = [f"Listed: {word}." for word in sequence]
    question = f"Which {num_common} words are listed most often?"
    return Puzzle(statements, question, common, evidence=[])


def look_up(rng: random.Random, wording: Wording, *, num_people: int = 6) -> Puzzle:
    """Asks for the city of somebody's friend, among facts about others."""
    fresh = wording.words(rng)
    people = [next(fresh).capitalize() for _ in range(num_people)]
    cities = [next(fresh).capitalize() for _ in range(num_people)]
    statements = [f"{p} lives in {c}." for p, c in zip(people, cities, strict=True)]
    friends = people[1:] + people[:1]
    statements += [f"The friend of {p} is {f}." for p, f in zip(people, friends, strict=True)]
    rng.shuffle(statements)
    person = rng.randrange(num_people)
    friend = friends[person]
    city = cities[(person + 1) % num_people]
    question = f"Where does the friend of {people[person]} live?"
    evidence = [f"The friend of {people[person]} is {friend}.", f"{friend} lives in {city}."]
    return Puzzle(statements, question, [city], evidence, "any")


def arithmetic(rng: random.Random, wording: Wording, *, steps: int) -> Puzzle:
    """Chains at most nine sums and differences, each of the value before; none is negative."""
    fresh = wording.words(rng)
    name = next(fresh)
    value = rng.randrange(10 * steps, 100)  # each step subtracts 9 at most
    statements = [f"{name} is {value}."]
    for _ in range(steps):
        earlier = name
        name = next(fresh)
        amount = rng.randrange(1, 10)
        plus = rng.random() < 0.5
        value += amount if plus else -amount
        statements.append(f"{name} is {earlier} {'plus' if plus else 'minus'} {amount}.")
    return Puzzle(statements, f"What is {name}?", [str(value)], statements[::-1], "any")


def logic(rng: random.Random, wording: Wording, *, steps: int) -> Puzzle:
    """Chains implications from a fact, and others from nothing; half of the answers are yes."""
    fresh = wording.words(rng)
    chains = [[next(fresh) for _ in range(steps + 1)] for _ in range(2)]
    queues = [[f"If {a} then {b}." for a, b in itertools.pairwise(names)] for names in chains]
    queues[0].insert(0, f"It holds that {chains[0][0]}.")
    holds = rng.random() < 0.5
    chain = 0 if holds else 1
    statements = interleaved(rng, queues)
    question = f"Does {chains[chain][-1]} hold?"
    return Puzzle(statements, question, ["yes" if holds else "no"], queues[chain][::-1], "any")


def interleaved(rng: random.Random, queues: list[list[str]]) -> list[str]:
    """Merges queues at random; each keeps its order."""
    turns = [place for place, queue in enumerate(queues) for _ in queue]
    rng.shuffle(turns)
    # positions are shuffled and not the sentences, whose order within a chain matters
    rests = [iter(queue) for queue in queues]
    return [next(rests[place]) for place in turns]


KINDS: dict[str, Callable[[random.Random, Wording], Puzzle]] = {
    "needle_keys": partial(needle, num_keys=4, num_values=1, num_queries=1),
    "needle_values": partial(needle, num_keys=2, num_values=3, num_queries=1),
    "needle_queries": partial(needle, num_keys=4, num_values=1, num_queries=2),
    "variable_tracking": partial(variable_tracking, hops=2),
    "common_words": common_words,
    "look_up": look_up,
    "arithmetic": partial(arithmetic, steps=3),
    "logic": partial(logic, steps=3),
    "needle_decoys": partial(needle, num_keys=4, num_values=1, num_queries=1, between="decoys"),
    # every sentence is a needle
    "needle_haystack": partial(needle, num_keys=4, num_values=1, num_queries=1, between="needles"),
    # ten updates of each register, of which the last counts: words in common find them all alike
    "registers": partial(registers, num_registers=4, num_updates=40),
}


# Their answers take the whole text: no sentence of it is evidence.
WHOLE_TEXT_TASKS = frozenset(["common_words"])


@dataclass(frozen=True)
class Example:
    """Task with its text, and a row of a file of tasks."""

    task: str  # a key of `KINDS`, or any name in a file of the user's
    length_ratio: int  # length of the text in windows
    text: str  # read before the question
    question: str  # at the end of the text
    answers: tuple[str, ...]  # right words; phrases where `match` is exact or f1
    match: Match
    # sentences of the text from which the answer follows, in the order in which one leads to the
    # next; used by training, not by evaluation
    evidence: tuple[str, ...] = ()


def score(example: Example, answer: str) -> float:
    """Scores an answer, 0 to 1, as reward and for evaluation.

    Words are compared whole and without case. Only twice as many words as there are right ones
    count, so that listing everything earns no more than the beginning of the list. Phrases are
    compared as `answers` says.
    """
    if example.match == "exact":
        return exact_match(example.answers, answer)
    if example.match == "f1":
        return token_f1(example.answers, answer)
    right_words = [word.lower() for word in example.answers]
    words_read = re.findall(r"\w+", answer.lower())[: 2 * len(right_words)]
    right = [word in words_read for word in right_words]
    return float(any(right)) if example.match == "any" else sum(right) / len(right)


def check_task(task: str) -> None:
    """Raises DataError if there is no such task."""
    known = (*KINDS, RECALL)
    if task not in known:
        hint = "".join(f" Did you mean {name!r}?" for name in get_close_matches(task, known, n=1))
        raise DataError(f"{task!r} is no reasoning task.{hint} Known: {', '.join(known)}")


def generate_examples(
    task: str,
    *,
    number: int,
    seed: int | str,
    length_ratio: int,
    window_tokens: int,
    count_tokens: CountTokens,
    wording: Wording = TRAINED,
) -> Example:
    """Makes example `number` of a task; equal arguments give equal examples.

    From two windows on, all statements stand before the last window, so that a reader of that one
    alone can only guess.

    Args:
        task: a key of `KINDS`.
        number, seed: of the example, and of all examples.
        length_ratio: length of the text in windows of `window_tokens`.
        count_tokens: tokens of a sentence with the space behind it.
        wording: of names, and of the sentences between statements.
    Raises:
        DataError: if the task is unknown, or its statements are longer than the text may be.
    """
    check_task(task)
    rng = random.Random(f"{seed}/{task}/{length_ratio}/{number}")
    puzzle = KINDS[task](rng, wording)
    # a text of one window has no window before the last
    last_tokens = window_tokens if length_ratio > 1 else 0
    most = length_ratio * window_tokens
    sentences = _lay_out(puzzle, wording, rng, most, last_tokens, count_tokens)
    if sentences is None:
        needed = sum(count_tokens(f"{line} ") for line in puzzle.statements)
        why = ", as whole sentences without any of them fill its last window" if last_tokens else ""
        raise DataError(
            f"{task}: its statements take {needed} tokens, but a text of {length_ratio} x "
            f"{window_tokens} tokens has room for fewer{why}. Try a longer length_ratio"
        )
    return Example(
        task=task,
        length_ratio=length_ratio,
        text=" ".join(sentences),
        question=puzzle.question,
        answers=tuple(puzzle.answers),
        match=puzzle.match,
        evidence=tuple(puzzle.evidence),
    )


def _lay_out(
    puzzle: Puzzle,
    wording: Wording,
    rng: random.Random,
    most: int,
    last_tokens: int,
    count_tokens: CountTokens,
) -> list[str] | None:
    """Puts statements in their order among fillers; None where they do not fit.

    The text ends with fillers of at least `last_tokens` tokens.
    """
    room = most - sum(count_tokens(f"{line} ") for line in puzzle.statements)
    templates = puzzle.between or wording.fillers
    # a filler that names a word of the puzzle could mislead, or answer
    statement_words = set(re.findall(r"\w+", " ".join(puzzle.statements).lower()))
    fillers = []
    spent = 0
    num_last = 0
    for word in wording.words(rng):
        if word in statement_words:
            continue
        template = rng.choice(templates)
        digits = rng.randrange(1000, 10_000) if "{digits}" in template else 0
        if str(digits) in statement_words:
            continue
        filler = template.format(word=word, digits=digits)
        cost = count_tokens(f"{filler} ")
        if spent + cost > room:
            break
        # the first fillers drawn are the last of the text: together longer than a window
        num_last += spent < last_tokens
        fillers.append(filler)
        spent += cost
    if room < 0 or spent < last_tokens:
        return None
    last = fillers[:num_last]
    before = fillers[num_last:]
    places = sorted(rng.randrange(len(before) + 1) for _ in puzzle.statements)
    for offset, (place, line) in enumerate(zip(places, puzzle.statements, strict=True)):
        before.insert(place + offset, line)
    return before + last
