"""Answers from texts longer than the window, with what happened to every segment on the way."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from cdrmix.errors import DataError
from cdrmix.evaluation.readers import TrainedReader, load_reader
from cdrmix.reasoning.branches import step_by_branches
from cdrmix.reasoning.policy import Action
from cdrmix.reasoning.reader import segment_room
from cdrmix.reasoning.reading import ReadingEpisodes, ReadingState

_WHILE_READING = {
    Action.SUMMARIZE: "summarised",
    Action.RETRIEVE: "dropped",
    Action.SPLICE_WINDOW: "dropped",
    Action.CACHE_WRITE: "written",
}


@dataclass(frozen=True)
class Event:
    """What became of a segment.

    Attributes:
        kind: written, summarised or dropped while it was read; evicted; retrieved for the answer.
        text: of the segment.
    """

    kind: str
    text: str


@dataclass(frozen=True)
class Answered:
    """An answer, and how it came about.

    Attributes:
        answer: text.
        events: in their order.
        accepted: of the agent's decisions, those that accepted a branch, and all of them; None
            where it took its likeliest action.
    """

    answer: str
    events: tuple[Event, ...]
    accepted: tuple[int, int] | None = None

    def memory_lines(self) -> str:
        """The events as lines for a person."""
        lines = [f"{event.kind:<11} {event.text.strip()!r}" for event in self.events]
        if self.accepted is not None:
            lines.append("branches    {} of {} decisions accepted one".format(*self.accepted))
        return "\n".join(lines)


def read_text(path: Path) -> str:
    """A text file.

    Raises:
        DataError: if it cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise DataError(f"{path}: {reason}") from None


def answer_from(
    source: Path,
    text: str,
    question: str,
    *,
    branches: bool = False,
    accept_threshold: float | None = None,
) -> Answered:
    """What a trained reader answers from a text of any length.

    Args:
        source: a run directory or a checkpoint.
        text: to read.
        question: asked behind it.
        branches: have the agent act by branches, instead of taking its likeliest action.
        accept_threshold: of these; None: the run's.
    Raises:
        StateError: if there is no checkpoint, or it has not come to Stage B.
        DataError: if there is nothing to read or to ask, or the question leaves no room.
    """
    loaded = load_reader(source, accept_threshold=accept_threshold)
    return answer_with(loaded, text, question, branches=branches)


@torch.no_grad()
def answer_with(
    loaded: TrainedReader, text: str, question: str, *, branches: bool = False
) -> Answered:
    """As `answer_from`, of a reader that is loaded."""
    reader, lessons = loaded.reader, loaded.lessons
    segments = lessons.segments(text)
    asked = lessons.tokenizer.encode(question)
    if not segments or not asked:
        raise DataError(
            "reading with memory takes a text and a question: give --prompt or --file, and "
            "--question"
        )
    room = segment_room(reader.window_tokens, len(asked))
    if room < 0:
        raise DataError(
            f"the question takes {len(asked)} tokens, {-room} more than a window of "
            f"{reader.window_tokens} tokens has room for. Ask a shorter one"
        )
    texts = lessons.as_texts([segments], [asked]).to(reader.backbone.device)
    episodes = ReadingEpisodes(reader, reader.read(texts), lambda _, __: 0.0)
    state, events, accepted = episodes.start(), list[Event](), list[bool]()
    while not bool(state.solved.all()):
        action, is_accepted, after = _step(episodes, state, branches=branches)
        accepted.append(is_accepted)
        for kind, place in _changes(episodes, action, state, after):
            said = lessons.tokenizer.decode(texts.segment(0, place))
            events.append(Event(kind, said))
        state = after
    return Answered(
        lessons.tokenizer.decode(episodes.answers(state)[0]),
        tuple(events),
        (sum(accepted), len(accepted)) if branches else None,
    )


def _step(
    episodes: ReadingEpisodes, state: ReadingState, *, branches: bool
) -> tuple[Action, bool, ReadingState]:
    """The action of a single episode, whether a branch with it was accepted, the state after it."""
    if branches:
        after = step_by_branches(episodes, episodes.reader.policy, state)
        return Action(int(after.actions)), bool(after.accepted), after.state
    actions = episodes.reader.policy(*episodes.observe(state)).logprobs.argmax(-1)
    return Action(int(actions)), False, episodes.step(state, actions).state


def _changes(
    episodes: ReadingEpisodes, action: Action, before: ReadingState, after: ReadingState
) -> list[tuple[str, int]]:
    """What a step did to which segments."""
    place = episodes.segment_read(before)
    if place is None:
        found = set(after.fetched[0].tolist()) - set(before.fetched[0].tolist()) - {-1}
        return [("retrieved", segment) for segment in sorted(found)]
    changes = [(_WHILE_READING[action], place)]
    gone = set(before.memory[0].tolist()) - set(after.memory[0].tolist()) - {-1}
    return changes + [("evicted", segment) for segment in sorted(gone)]
