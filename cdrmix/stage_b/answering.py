"""Answers from long texts and from an index of earlier ones, with the fate of every segment."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch

from cdrmix.errors import DataError
from cdrmix.models.state_rows import moved
from cdrmix.reasoning.earlier import Earlier, Kept, Writing, keep, opened
from cdrmix.reasoning.episodic_index import EpisodicIndex
from cdrmix.reasoning.policy import Action, check_decision, step_by_branches
from cdrmix.reasoning.reading_environment import ReadingEpisodes, ReadingState
from cdrmix.reasoning.segments import Texts
from cdrmix.stage_b.long_context import TrainedReader, check_room

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


@dataclass(frozen=True)
class Answered:
    """An answer, empty without a question, and its events in order of time."""

    answer: str
    events: tuple[ReadingEvent, ...]
    accepted: tuple[int, int] | None = None  # decisions that accepted a branch, and all of them
    index: str = ""  # summary of the index for a person

    def memory_lines(self) -> str:
        """Events as lines for a person."""
        lines = []
        for event in self.events:
            # An index that was handed over may name sources that would move a terminal's cursor.
            shown = "".join(c if c.isprintable() else "?" for c in event.source)
            source = f" from {shown}" if shown else ""
            lines.append(f"{event.kind:<11} {event.text.strip()!r}{source}")
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


@torch.no_grad()
def answer_with(
    loaded: TrainedReader,
    text: str,
    question: str,
    *,
    branches: bool = False,
    lasting: Lasting | None = None,
) -> Answered:
    """Answers a question from a text of any length, with a trained reader.

    Args:
        text: to read; may be empty with an index.
        question: asked after it; may be empty with an index and a text.
        branches: whether the agent acts by branches instead of its likeliest action.
        lasting: index that stores the segments written, and that the answer may come from.
    Raises:
        DataError: if text and question are missing, the question leaves no room, or the agent's
            numbers are not finite.
    """
    lessons = loaded.lessons
    decode = lessons.tokenizer.decode
    segments = lessons.segments(text)
    question_ids = lessons.tokenizer.encode(question)
    if lasting is None and not (segments and question_ids):
        raise DataError(
            "reading with memory takes a text and a question: give --prompt or --file, and "
            "--question. With --index one of the two is enough"
        )
    if lasting is not None and loaded.reader.asks_first:
        raise DataError(
            "this model reads the question before the text (stage_b.training.question = first): "
            "what it writes is of use to that question alone. Leave --index out"
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
        return _play(loaded, texts, None, branches=branches).answered
    tokenizer = loaded.trained.tokenizer_digest
    # A question alone makes no index: there would be nothing to store.
    with opened(lasting.folder, loaded.reader, tokenizer=tokenizer, make=bool(segments)) as index:
        earlier = Earlier(index, faiss=lasting.faiss, decode=decode)
        played = _play(loaded, texts, earlier, branches=branches)
        # Only now: a call that fails before leaves the index as it was.
        outcome = _store(index, played, lasting.source)
    events = [ReadingEvent("refreshed", decode(list(ids))) for ids in outcome.refreshed]
    events += [ReadingEvent("expired", decode(list(ids))) for ids in outcome.evicted]
    summary = (
        f"{outcome.num_added} added, {len(outcome.refreshed)} refreshed, "
        f"{len(outcome.evicted)} expired; now {len(index)} segments of {index.num_tokens} tokens, "
        f"at most {index.max_tokens}"
    )
    events = [*played.answered.events, *events]
    return dataclasses.replace(played.answered, events=tuple(events), index=summary)


@dataclass
class _Played:
    """A single episode: its rules, its last state, and what came of it."""

    episodes: ReadingEpisodes
    state: ReadingState
    write_probability: dict[int, float]  # of the action that writes it, for each segment read
    answered: Answered


def _play(
    loaded: TrainedReader, texts: Texts, earlier: Earlier | None, *, branches: bool
) -> _Played:
    """Reads a text to its end, and to an answer if there is a question."""
    reader = loaded.reader
    policy = reader.policy
    # Nobody knows the right answer here, so that no answer earns a reward.
    episodes = ReadingEpisodes(reader, reader.read(texts), lambda _, __: 0.0, earlier=earlier)
    has_question = bool(texts.questions[0])
    events: list[ReadingEvent] = []
    write_probability: dict[int, float] = {}
    accepted: list[bool] = []  # of each decision by branches
    state = episodes.start()
    while not bool(state.solved.all()):
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
            write_probability[place] = float(probability)
        if branches:
            branched = step_by_branches(episodes, policy, state)
            action = Action(int(branched.actions))
            accepted.append(bool(branched.accepted))
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
            events.append(ReadingEvent(kind, text, source))
        state = after
    ids = episodes.answers(state)[0] if bool(state.solved[0]) else []
    counts = (sum(accepted), len(accepted)) if accepted else None
    answered = Answered(loaded.lessons.tokenizer.decode(ids), tuple(events), counts)
    return _Played(episodes, state, write_probability, answered)


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
