"""Answers from long texts and from an index of earlier ones, with the fate of every segment."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

import torch

from cdrmix.errors import DataError
from cdrmix.reasoning.earlier import Earlier, Kept, Writing, keep, opened
from cdrmix.reasoning.episodic_index import EpisodicIndex
from cdrmix.reasoning.policy import Action, check_decision, step_by_branches
from cdrmix.reasoning.reading_environment import ReadingEpisodes, ReadingState
from cdrmix.reasoning.segments import Texts
from cdrmix.reasoning.state_rows import moved
from cdrmix.stage_b.long_context import TrainedReader, check_room, load_reader

# Summarising and writing alone keep a segment: one that `retrieve` looks for is dropped, too.
_WHILE_READING = {
    Action.SUMMARIZE: "summarised",
    Action.RETRIEVE: "dropped",
    Action.SPLICE_WINDOW: "dropped",
    Action.CACHE_WRITE: "written",
}


@dataclass(frozen=True)
class ReadingEvent:
    """Event of a segment.

    Its kind: written, summarised or dropped during reading; evicted, because more was written than
    memory holds; retrieved for the answer. Of the index: recalled from it; refreshed by a
    repetition of its content; expired, because the index was full.
    """

    kind: str
    text: str
    source: str = ""  # text that a recalled segment is from

    def line(self) -> str:
        """One line for a person."""
        # An index that was handed over may name sources that would move a terminal's cursor.
        shown = "".join(c if c.isprintable() else "?" for c in self.source)
        source = f" from {shown}" if shown else ""
        return f"{self.kind:<11} {self.text.strip()!r}{source}"


@dataclass(frozen=True)
class Answered:
    """An answer, empty without a question, and its events in order of time."""

    answer: str
    events: tuple[ReadingEvent, ...]
    accepted: tuple[int, int] | None = None  # decisions that accepted a branch, and all of them
    index: str = ""  # summary of the index for a person

    def memory_lines(self) -> str:
        """Events as lines for a person."""
        lines = [event.line() for event in self.events]
        if self.accepted is not None:
            lines.append("branches    {} of {} decisions accepted one".format(*self.accepted))
        if self.index:
            lines.append(f"index       {self.index}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Lasting:
    """An index that outlives a text."""

    folder: Path
    source: str  # name of the text in the index
    faiss: bool = False  # search through FAISS


def read_question_text(path: Path) -> str:
    """Content of a text file. Raises DataError if it cannot be read, or is not UTF-8."""
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
    """Answers a question from a text of any length, with a trained reader.

    Args:
        source, accept_threshold: see `load_reader`.
        text: to read; may be empty with an index.
        question: asked after it; may be empty with an index and a text.
        branches: whether the agent acts by branches instead of its likeliest action.
        lasting: index that stores the segments written, and that the answer may come from.
    Raises:
        DataError: if text and question are missing, the question leaves no room, or the agent's
            numbers are not finite.
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
    """Answers as `answer_from` does, with a reader that is loaded."""
    lessons = loaded.lessons
    decode = lessons.tokenizer.decode
    segments = lessons.segments(text)
    question_ids = lessons.tokenizer.encode(question)
    if lasting is None and not (segments and question_ids):
        raise DataError(
            "reading with memory takes a text and a question: give --prompt or --file, and "
            "--question. With --index one of the two is enough"
        )
    if not segments and not question_ids:
        raise DataError(
            "an index takes a text to read, a question, or both: give --prompt or --file, or "
            "--question"
        )
    try:
        check_room(lessons, question)  # before the text is read, which may be long
    except ValueError as error:
        raise DataError(f"the {error}. Ask a shorter one") from None
    # Without a text a segment without tokens is read, which stores nothing.
    texts = lessons.texts([segments or [[]]], [question])
    texts = moved(texts, loaded.reader.backbone.device)
    if lasting is None:
        return _answered(loaded, _play(loaded, texts, None, branches=branches))
    tokenizer = loaded.trained.tokenizer_digest
    # A question alone makes no index: there would be nothing to store.
    with opened(lasting.folder, loaded.reader, tokenizer=tokenizer, make=bool(segments)) as index:
        earlier = Earlier(index, faiss=lasting.faiss)
        played = _play(loaded, texts, earlier, branches=branches)
        answered = _answered(loaded, played)
        # Only now: a call that fails before leaves the index as it was.
        outcome = _store(index, played, lasting.source)
    events = [ReadingEvent("refreshed", decode(list(ids))) for ids in outcome.refreshed]
    events += [ReadingEvent("expired", decode(list(ids))) for ids in outcome.evicted]
    summary = (
        f"{outcome.num_added} added, {len(outcome.refreshed)} refreshed, "
        f"{len(outcome.evicted)} expired; now {len(index)} segments of {index.num_tokens} tokens, "
        f"at most {index.max_tokens}"
    )
    return dataclasses.replace(answered, events=(*answered.events, *events), index=summary)


@dataclass
class _Played:
    """A single episode: its rules, its last state, and what happened on the way."""

    episodes: ReadingEpisodes
    state: ReadingState
    events: list[ReadingEvent] = field(default_factory=list)
    # Of each segment read, probability of the action that writes it.
    write_probability: dict[int, float] = field(default_factory=dict)
    accepted: list[bool] = field(default_factory=list)  # of each decision by branches


def _play(
    loaded: TrainedReader, texts: Texts, earlier: Earlier | None, *, branches: bool
) -> _Played:
    """Reads a text to its end, and to an answer if there is a question."""
    reader = loaded.reader
    policy = reader.policy
    # Nobody knows the right answer here, so that no answer earns a reward.
    episodes = ReadingEpisodes(reader, reader.read(texts), lambda _, __: 0.0, earlier=earlier)
    has_question = bool(texts.questions[0])
    played = _Played(episodes, episodes.start())
    while not bool(played.state.solved.all()):
        state = played.state
        place = episodes.segment_read(state)
        # All is read: what follows are decisions about the answer.
        if place is None and not has_question:
            break
        observation = episodes.observe(state)
        decision = policy(*observation)
        check_decision(decision, observation.legal)
        if place is not None:
            # Not only where writing is the likeliest: branches may write, too.
            probability = decision.logprobs[0, Action.CACHE_WRITE].exp()
            played.write_probability[place] = float(probability)
        if branches:
            branched = step_by_branches(episodes, policy, state)
            action = Action(int(branched.actions))
            played.accepted.append(bool(branched.accepted))
            after = branched.state
        else:
            actions = decision.logprobs.argmax(-1)
            action = Action(int(actions))
            after = episodes.step(state, actions).state
        for kind, segment in _changes(episodes, action, state, after):
            text = loaded.lessons.tokenizer.decode(episodes.texts.segment(0, segment))
            # Segments of this text need no source: it is the one that the user gave.
            source = ""
            if earlier and kind == "recalled":
                source = earlier.index.entries[segment].source
            played.events.append(ReadingEvent(kind, text, source))
        played.state = after
    return played


def _changes(
    episodes: ReadingEpisodes, action: Action, before: ReadingState, after: ReadingState
) -> list[tuple[str, int]]:
    """Event kinds of a step, with their segments."""
    place = episodes.segment_read(before)
    if place is None:
        # -1 is an empty place.
        fetched = set(after.fetched[0].tolist()) - set(before.fetched[0].tolist()) - {-1}
        return [
            ("recalled" if segment < episodes.num_earlier else "retrieved", segment)
            for segment in sorted(fetched)
        ]
    changes = [(_WHILE_READING[action], place)]
    gone = set(before.memory[0].tolist()) - set(after.memory[0].tolist()) - {-1}
    return changes + [("evicted", segment) for segment in sorted(gone)]


def _answered(loaded: TrainedReader, played: _Played) -> Answered:
    """Answer and events of an episode."""
    ids = played.episodes.answers(played.state)[0] if bool(played.state.solved[0]) else []
    accepted = (sum(played.accepted), len(played.accepted)) if played.accepted else None
    return Answered(loaded.lessons.tokenizer.decode(ids), tuple(played.events), accepted)


def _store(index: EpisodicIndex, played: _Played, source: str) -> Kept:
    """Stores the segments that an episode wrote in an index, and notes those it read there."""
    episodes = played.episodes
    state = played.state
    reading = episodes.reading
    # Places begin with the segments of the index; those of the text follow.
    first = episodes.num_earlier
    lengths = reading.texts.lengths[0]
    offsets = (lengths.cumsum(0) - lengths).tolist()
    written = [
        Writing(
            key=reading.keys[0, place - first],
            tokens=episodes.texts.segment(0, place),
            offset=offsets[place - first],
            score=played.write_probability[place],
        )
        for place in state.memory[0].tolist()
        if place >= 0
    ]
    read = [place for place in episodes.in_window(state, 0) if place < first]
    return keep(index, written, read=read, num_steps=int(state.time[0]), source=source)
