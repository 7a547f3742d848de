"""Answers from texts longer than the window, and from what earlier texts left in an index, with
what happened to every segment on the way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from cdrmix.errors import DataError
from cdrmix.reasoning.earlier import Earlier, Kept, Writing, keep, make_earlier, opened
from cdrmix.reasoning.episodes import check_decision, step_by_branches
from cdrmix.reasoning.episodic_index import EpisodicIndex
from cdrmix.reasoning.lessons import Lessons
from cdrmix.reasoning.memory_reader import segment_room
from cdrmix.reasoning.policy import Action
from cdrmix.reasoning.reading_environment import ReadingEpisodes, ReadingState
from cdrmix.reasoning.segments import Texts
from cdrmix.stage_b.long_context import TrainedReader, load_reader

_WHILE_READING = {
    Action.SUMMARIZE: "summarised",
    Action.RETRIEVE: "dropped",
    Action.SPLICE_WINDOW: "dropped",
    Action.CACHE_WRITE: "written",
}


@dataclass(frozen=True)
class ReadingEvent:
    """What became of a segment.

    Attributes:
        kind: written, summarised or dropped while it was read; evicted, as more was written than
            memory holds; retrieved for the answer. Of the index: recalled, retrieved from it;
            refreshed, as it says what one there said; expired, as the index was full.
        text: of the segment.
        source: of a segment that was recalled, the text it is from.
    """

    kind: str
    text: str
    source: str = ""

    def line(self) -> str:
        """For a person."""
        told = f" from {self.source}" if self.source else ""
        return f"{self.kind:<11} {self.text.strip()!r}{told}"


@dataclass(frozen=True)
class Answered:
    """An answer, and how it came about.

    Attributes:
        answer: text; empty where nothing was asked.
        events: in their order.
        accepted: of the agent's decisions, those that accepted a branch, and all of them; None
            where it took its likeliest action.
        index: what the index came to, for a person; empty without one.
    """

    answer: str
    events: tuple[ReadingEvent, ...]
    accepted: tuple[int, int] | None = None
    index: str = ""

    def memory_lines(self) -> str:
        """The events as lines for a person."""
        lines = [event.line() for event in self.events]
        if self.accepted is not None:
            lines.append("branches    {} of {} decisions accepted one".format(*self.accepted))
        if self.index:
            lines.append(f"index       {self.index}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Lasting:
    """An index that outlives a text.

    Attributes:
        folder: where it is.
        source: what the text is called there.
        faiss: search through FAISS.
    """

    folder: Path
    source: str
    faiss: bool = False


def read_question_text(path: Path) -> str:
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
    lasting: Lasting | None = None,
) -> Answered:
    """What a trained reader answers from a text of any length.

    Args:
        source: a run directory or a checkpoint.
        text: to read; with an index it may be empty.
        question: asked behind it; with an index and a text it may be empty.
        branches: have the agent act by branches, instead of taking its likeliest action.
        accept_threshold: of these; None: the run's.
        lasting: index that what is written goes into, and that the answer may come from.
    Raises:
        StateError: if there is no checkpoint, it has not come to Stage B, or the index cannot be
            used with it.
        DataError: if there is nothing to read or to ask, the question leaves no room, or the
            agent's numbers are not finite.
        ConfigError: if FAISS is asked for and not installed.
    """
    loaded = load_reader(source, accept_threshold=accept_threshold)
    return answer_with(loaded, text, question, branches=branches, lasting=lasting)


@torch.no_grad()
def answer_with(
    loaded: TrainedReader,
    text: str,
    question: str,
    *,
    branches: bool = False,
    lasting: Lasting | None = None,
) -> Answered:
    """As `answer_from`, of a reader that is loaded."""
    lessons = loaded.lessons
    segments = lessons.segments(text)
    asked = lessons.tokenizer.encode(question)
    _check(lessons, has_text=bool(segments), asked=asked, has_index=lasting is not None)
    # without a text a segment without tokens is read, which stores nothing
    texts = lessons.as_texts([segments or [[]]], [asked]).to(loaded.reader.backbone.device)
    if lasting is None:
        return _told(loaded, _play(loaded, texts, None, branches=branches))
    tokenizer = loaded.trained.tokenizer_digest
    with opened(lasting.folder, loaded.reader, tokenizer=tokenizer, make=bool(segments)) as index:
        earlier = make_earlier(index, faiss=lasting.faiss)
        played = _play(loaded, texts, earlier, branches=branches)
        answered = _told(loaded, played)
        kept = _keep(index, played, lasting.source)
    return _told_of_index(loaded, answered, index, kept)


def _check(lessons: Lessons, *, has_text: bool, asked: Sequence[int], has_index: bool) -> None:
    """Raises DataError if there is too little to do, or a question too long."""
    if not has_index and not (has_text and asked):
        raise DataError(
            "reading with memory takes a text and a question: give --prompt or --file, and "
            "--question. With --index one of the two is enough"
        )
    if not has_text and not asked:
        raise DataError(
            "an index takes a text to read, a question, or both: give --prompt or --file, or "
            "--question"
        )
    room = segment_room(lessons.window_tokens, len(asked))
    if room < 0:
        raise DataError(
            f"the question takes {len(asked)} tokens, {-room} more than a window of "
            f"{lessons.window_tokens} tokens has room for. Ask a shorter one"
        )


@dataclass(frozen=True)
class _Played:
    """A single episode.

    Attributes:
        episodes: its rules.
        state: in which it ended.
        events: of its steps.
        sure: of each segment written, how likely the agent was to write it.
        accepted: of each decision by branches, whether one was accepted; empty otherwise.
    """

    episodes: ReadingEpisodes
    state: ReadingState
    events: list[ReadingEvent]
    sure: dict[int, float]
    accepted: list[bool]


def _play(
    loaded: TrainedReader, texts: Texts, earlier: Earlier | None, *, branches: bool
) -> _Played:
    """Read a text to its end, and to an answer where something is asked."""
    reader = loaded.reader
    tokenizer = loaded.lessons.tokenizer
    episodes = ReadingEpisodes(reader, reader.read(texts), lambda _, __: 0.0, earlier=earlier)
    state = episodes.start()
    is_asked = bool(texts.questions[0])
    played = _Played(episodes, state, [], {}, [])
    while not bool(state.solved.all()):
        place = episodes.segment_read(state)
        if place is None and not is_asked:
            break
        step = _step(episodes, state, branches=branches)
        if place is not None:
            played.sure[place] = step.sure
        if step.accepted is not None:
            played.accepted.append(step.accepted)
        for kind, segment in _changes(episodes, step.action, state, step.state):
            said = tokenizer.decode(episodes.texts.segment(0, segment))
            source = earlier.source(segment) if kind == "recalled" and earlier else ""
            played.events.append(ReadingEvent(kind, said, source))
        state = step.state
    return dataclasses.replace(played, state=state)


class _Step(NamedTuple):
    """What a single episode did: its action, how likely a write was, whether a branch was accepted
    (None where none was tried), and the state after it."""

    action: Action
    sure: float
    accepted: bool | None
    state: ReadingState


def _step(episodes: ReadingEpisodes, state: ReadingState, *, branches: bool) -> _Step:
    policy = episodes.reader.policy
    seen = episodes.observe(state)
    decision = policy(*seen)
    check_decision(decision, seen.legal)
    sure = float(decision.logprobs[0, Action.CACHE_WRITE].exp())
    if branches:
        after = step_by_branches(episodes, policy, state)
        return _Step(Action(int(after.actions)), sure, bool(after.accepted), after.state)
    actions = decision.logprobs.argmax(-1)
    return _Step(Action(int(actions)), sure, None, episodes.step(state, actions).state)


def _changes(
    episodes: ReadingEpisodes, action: Action, before: ReadingState, after: ReadingState
) -> list[tuple[str, int]]:
    """What a step did to which segments."""
    place = episodes.segment_read(before)
    if place is None:
        found = set(after.fetched[0].tolist()) - set(before.fetched[0].tolist()) - {-1}
        return [
            ("recalled" if segment < episodes.num_earlier else "retrieved", segment)
            for segment in sorted(found)
        ]
    changes = [(_WHILE_READING[action], place)]
    gone = set(before.memory[0].tolist()) - set(after.memory[0].tolist()) - {-1}
    return changes + [("evicted", segment) for segment in sorted(gone)]


def _told(loaded: TrainedReader, played: _Played) -> Answered:
    answer = played.episodes.answers(played.state)[0] if bool(played.state.solved[0]) else []
    accepted = (sum(played.accepted), len(played.accepted)) if played.accepted else None
    return Answered(loaded.lessons.tokenizer.decode(answer), tuple(played.events), accepted)


def _keep(index: EpisodicIndex, played: _Played, source: str) -> Kept:
    """Have an index accept what an episode wrote, and note what it read there."""
    episodes = played.episodes
    state = played.state
    reading = episodes.reading
    first = episodes.num_earlier
    lengths = reading.texts.lengths[0]
    offsets = (lengths.cumsum(0) - lengths).tolist()
    written = [
        Writing(
            key=reading.keys[0, place - first],
            tokens=episodes.texts.segment(0, place),
            offset=offsets[place - first],
            score=played.sure[place],
        )
        for place in state.memory[0].tolist()
        if place >= 0
    ]
    read = [place for place in episodes.in_window(state, 0) if place < first]
    return keep(index, written, read=read, num_steps=int(state.time[0]), source=source)


def _told_of_index(
    loaded: TrainedReader, answered: Answered, index: EpisodicIndex, kept: Kept
) -> Answered:
    decode = loaded.lessons.tokenizer.decode
    told = {"refreshed": kept.refreshed, "expired": kept.evicted}
    events = [
        ReadingEvent(kind, decode(list(tokens))) for kind, texts in told.items() for tokens in texts
    ]
    summary = (
        f"{kept.num_added} added, {len(kept.refreshed)} refreshed, {len(kept.evicted)} expired; "
        f"now {len(index)} segments of {index.num_tokens} tokens, at most {index.max_tokens}"
    )
    return dataclasses.replace(answered, events=(*answered.events, *events), index=summary)
