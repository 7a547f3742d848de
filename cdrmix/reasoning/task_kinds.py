"""What reasoning tasks say: statements that matter, and a question with its answers.

Needles, variable tracking, common words and look-ups follow the tasks of RULER (2404.06654) in
kind, with words made of syllables instead of essays, so that they are generated anywhere. Where
statements stand in a text, and what stands between them, is for `cdrmix.reasoning.tasks`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"


class Puzzle(NamedTuple):
    """A task without its haystack.

    Attributes:
        statements: sentences that matter or mislead, in the order in which they must be read.
        question: asked behind the text.
        answers: words that answer it.
        evidence: statements from which the answer follows, in the order in which one leads to the
            next; none where it takes the whole text.
        match: all: every answer counts its share; any: one is enough.
    """

    statements: list[str]
    question: str
    answers: list[str]
    evidence: list[str]
    match: Literal["all", "any"] = "all"


def words(rng: random.Random, *, num_syllables: int = 3) -> Iterator[str]:
    """Made-up words, none twice."""
    syllables = ["".join(pair) for pair in itertools.product(_CONSONANTS, _VOWELS)]
    seen: set[str] = set()
    while True:
        word = "".join(rng.choices(syllables, k=num_syllables))
        if word not in seen:
            seen.add(word)
            yield word


def needle(rng: random.Random, *, num_keys: int, num_values: int, num_queries: int) -> Puzzle:
    """Codes of keys hidden in a text; some keys are asked for, with all their codes."""
    fresh = words(rng)
    keys = [next(fresh) for _ in range(num_keys)]
    codes = {key: [str(rng.randrange(1000, 10_000)) for _ in range(num_values)] for key in keys}
    statements = [f"The code of {key} is {code}." for key in keys for code in codes[key]]
    rng.shuffle(statements)
    asked = rng.sample(keys, num_queries)
    what = "What is the code" if num_queries * num_values == 1 else "What are the codes"
    question = f"{what} of {' and '.join(asked)}?"
    answers = [code for key in asked for code in codes[key]]
    evidence = [f"The code of {key} is {code}." for key in asked for code in codes[key]]
    return Puzzle(statements, question, answers, evidence)


def variable_tracking(rng: random.Random, *, hops: int, num_chains: int = 2) -> Puzzle:
    """Variables that take each other's value; all of one chain are asked for.

    Their names are short: what holds a chain of two hops, the question and its answer then stand in
    a window of 64 tokens.
    """
    fresh = words(rng, num_syllables=2)
    values = [str(value) for value in rng.sample(range(1000, 10_000), num_chains)]
    chains = [[next(fresh) for _ in range(hops + 1)] for _ in values]
    queues = []
    for value, names in zip(values, chains, strict=True):
        copies = [f"Let {b} = {a}." for a, b in itertools.pairwise(names)]
        queues.append([f"Let {names[0]} = {value}.", *copies])
    question = f"Which variables hold {values[0]}?"
    return Puzzle(_interleaved(rng, queues), question, chains[0], queues[0])


def common_words(rng: random.Random, *, num_common: int = 3, repeats: int = 6) -> Puzzle:
    """A list in which some words come up more often than all others."""
    fresh = words(rng)
    common = [next(fresh) for _ in range(num_common)]
    rare = [next(fresh) for _ in range(2 * num_common)]
    listed = common * repeats + rare
    rng.shuffle(listed)
    statements = [f"Listed: {word}." for word in listed]
    question = f"Which {num_common} words are listed most often?"
    return Puzzle(statements, question, common, evidence=[])


def look_up(rng: random.Random, *, num_people: int = 6) -> Puzzle:
    """Where the friend of somebody lives, among facts about others."""
    fresh = words(rng)
    people = [next(fresh).capitalize() for _ in range(num_people)]
    cities = [next(fresh).capitalize() for _ in range(num_people)]
    statements = [f"{p} lives in {c}." for p, c in zip(people, cities, strict=True)]
    friends = people[1:] + people[:1]
    statements += [f"The friend of {p} is {f}." for p, f in zip(people, friends, strict=True)]
    rng.shuffle(statements)
    asked = rng.randrange(num_people)
    friend, city = friends[asked], cities[(asked + 1) % num_people]
    question = f"Where does the friend of {people[asked]} live?"
    evidence = [f"The friend of {people[asked]} is {friend}.", f"{friend} lives in {city}."]
    return Puzzle(statements, question, [city], evidence, "any")


def arithmetic(rng: random.Random, *, steps: int) -> Puzzle:
    """A chain of at most nine sums and differences, each of the value before; none is negative."""
    fresh = words(rng)
    name, value = next(fresh), rng.randrange(10 * steps, 100)
    statements = [f"{name} is {value}."]
    for _ in range(steps):
        earlier, name = name, next(fresh)
        amount = rng.randrange(1, 10)
        if rng.random() < 0.5:
            value, what = value + amount, f"{earlier} plus {amount}"
        else:
            value, what = value - amount, f"{earlier} minus {amount}"
        statements.append(f"{name} is {what}.")
    return Puzzle(statements, f"What is {name}?", [str(value)], statements[::-1], "any")


def logic(rng: random.Random, *, steps: int) -> Puzzle:
    """A chain of implications from something true, and one that begins nowhere; half are true."""
    fresh = words(rng)
    chains = [[next(fresh) for _ in range(steps + 1)] for _ in range(2)]
    queues = [[f"If {a} then {b}." for a, b in itertools.pairwise(names)] for names in chains]
    queues[0].insert(0, f"It holds that {chains[0][0]}.")
    holds = rng.random() < 0.5
    asked = 0 if holds else 1
    statements = _interleaved(rng, queues)
    question = f"Does {chains[asked][-1]} hold?"
    return Puzzle(statements, question, ["yes" if holds else "no"], queues[asked][::-1], "any")


def _interleaved(rng: random.Random, queues: list[list[str]]) -> list[str]:
    """One list in which each queue keeps its order."""
    turns = [place for place, queue in enumerate(queues) for _ in queue]
    rng.shuffle(turns)
    rests = [iter(queue) for queue in queues]
    return [next(rests[place]) for place in turns]


KINDS: dict[str, Callable[[random.Random], Puzzle]] = {
    "needle_keys": lambda rng: needle(rng, num_keys=4, num_values=1, num_queries=1),
    "needle_values": lambda rng: needle(rng, num_keys=2, num_values=3, num_queries=1),
    "needle_queries": lambda rng: needle(rng, num_keys=4, num_values=1, num_queries=2),
    "variable_tracking": lambda rng: variable_tracking(rng, hops=2),
    "common_words": common_words,
    "look_up": look_up,
    "arithmetic": lambda rng: arithmetic(rng, steps=3),
    "logic": lambda rng: logic(rng, steps=3),
}
