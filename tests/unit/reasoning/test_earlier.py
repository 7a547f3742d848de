"""What earlier texts left in an index: read by later calls, kept whole, and never another's."""

import dataclasses
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from cdrmix import cli
from cdrmix.cli import main
from cdrmix.errors import ConfigError, DataError, StateError
from cdrmix.evaluation.trained import TrainedModel
from cdrmix.reasoning.earlier import Earlier
from cdrmix.reasoning.episodic_index import EpisodicIndex
from cdrmix.reasoning.memory_reader import NUM_FEATURES
from cdrmix.reasoning.policy import NUM_ACTIONS, Action, roll_out
from cdrmix.reasoning.reading_environment import ReadingEpisodes
from cdrmix.stage_b import long_context
from cdrmix.stage_b.answering import Answered, Lasting, answer_with
from cdrmix.stage_b.long_context import TrainedReader
from tests.full_disk import file_size_limit
from tests.unit.reasoning.small_reader import small_config, small_lessons, small_reader, tokenizer

ONE = "The code of bami is 1234. It rained in lolo again. They spoke of dudu for an hour. "
TWO = "Nobody asked about zuzu. A letter from tete came late. The way to rara is long. "
QUESTION = "What is the code of bami?"


def loaded(folder: Path, *, max_tokens: int = 4096, seed: int = 0) -> TrainedReader:
    """A reader that writes every segment, fetches once what is alike, and answers."""
    config = small_config()
    reader = small_reader(config, seed=seed)
    memory = reader.config.memory.model_copy(update={"max_tokens": max_tokens})
    reader.config = reader.config.model_copy(update={"memory": memory})
    with torch.no_grad():
        # a query is compared with keys as what it is made of, not as random projections of both
        reader.retrieval.to_query.weight.copy_(reader.retrieval.to_key.weight)
        reader.policy.feature_policy.bias[Action.CACHE_WRITE] = 10.0
        reader.policy.feature_policy.bias[Action.RETRIEVE] = 5.0
        last = NUM_FEATURES - NUM_ACTIONS + Action.SPLICE_WINDOW
        reader.policy.feature_policy.weight[Action.RETRIEVE, last] = -50.0
    trained = TrainedModel(config, reader.backbone, tokenizer(), "1" * 64, folder, 1)
    return TrainedReader(trained, reader, small_lessons(config))


def told(
    reader: TrainedReader, folder: Path, text: str = "", question: str = "", *, faiss: bool = False
) -> Answered:
    lasting = Lasting(folder / "index", "a text", faiss)
    return answer_with(reader, text, question, lasting=lasting)


def of(answered: Answered, *kinds: str) -> list[str]:
    return [event.text for event in answered.events if event.kind in kinds]


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in (folder / "index").rglob("*")
        if path.is_file()
    }


def test_a_question_alone_is_answered_from_what_was_read_before(tmp_path: Path) -> None:
    first = told(loaded(tmp_path), tmp_path, ONE)
    assert first.answer == "" and first.index.startswith(f"{len(of(first, 'written'))} added, 0 ")
    before = files(tmp_path)
    later = told(loaded(tmp_path), tmp_path, question=QUESTION)
    recalled = [event for event in later.events if event.kind == "recalled"]
    assert recalled and {event.text for event in recalled} <= set(of(first, "written"))
    assert later.memory_lines().count("' from a text") == len(recalled)
    assert not of(later, "written", "retrieved", "dropped")
    assert files(tmp_path) != before, "what was read is noted"
    assert later == told(loaded(tmp_path), tmp_path, question=QUESTION)


def test_another_text_is_read_beside_what_was_read_before(tmp_path: Path) -> None:
    first = told(loaded(tmp_path), tmp_path, ONE)
    later = told(loaded(tmp_path), tmp_path, TWO, QUESTION)
    assert "".join(of(later, "written")) == TWO
    assert set(of(later, "recalled")) <= set(of(first, "written"))
    assert of(later, "recalled", "retrieved")
    assert set(of(later, "retrieved")) <= set(of(later, "written"))


def test_a_text_that_is_read_again_refreshes_and_is_fetched_once(tmp_path: Path) -> None:
    first = told(loaded(tmp_path), tmp_path, ONE, QUESTION)
    again = told(loaded(tmp_path), tmp_path, ONE, QUESTION)
    assert of(again, "refreshed") == of(again, "written") == of(first, "written")
    assert not of(again, "recalled"), "the text at hand says the same"
    assert again.index.split("; ")[1] == first.index.split("; ")[1]
    assert again.answer == first.answer


def test_an_entry_is_told_once_and_new_ones_are_not_called_refreshed(tmp_path: Path) -> None:
    reader = loaded(tmp_path)
    said = "The code of bami is 1234. "
    first = told(reader, tmp_path, 12 * said)
    assert len(of(first, "written")) == 12 and not of(first, "refreshed")
    num_added = int(first.index.split()[0])
    assert first.index.startswith(f"{num_added} added, 0 refreshed, 0 expired; now {num_added} ")
    again = told(reader, tmp_path, 12 * said)
    assert 1 <= len(of(again, "refreshed")) <= num_added < 12


def test_when_the_index_is_full_the_same_entries_give_way_each_time(tmp_path: Path) -> None:
    expired = []
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        reader = loaded(folder, max_tokens=48)
        told(reader, folder, ONE)
        expired.append(told(reader, folder, TWO))
    assert expired[0] == expired[1]
    assert of(expired[0], "expired")
    assert int(expired[0].index.split(" segments of ")[1].split()[0]) <= 48


def test_an_empty_index_changes_nothing() -> None:
    config = small_config(tasks=("needle_keys",), length_ratios=(1,))
    reader, lessons = small_reader(config), small_lessons(config)
    texts = lessons.lesson("policy", 0).texts
    empty = EpisodicIndex(
        key_size=config.stage_b.memory.summary_dim, max_tokens=99, encoder="", tokenizer=""
    )
    found = []
    for earlier in (None, Earlier(empty, faiss=False, decode=tokenizer().decode)):
        episodes = ReadingEpisodes(reader, reader.read(texts), lambda *_: 0.5, earlier=earlier)
        generator = torch.Generator().manual_seed(0)
        found.append(roll_out(episodes, reader.policy, episodes.start(2), generator=generator))
    for name in ("hidden", "features", "actions", "logprobs", "returns"):
        assert torch.equal(getattr(found[0], name), getattr(found[1], name)), name


@pytest.mark.parametrize("faiss", [False, True])
def test_what_is_nearest_is_fetched_wherever_it_is_from(faiss: bool) -> None:
    if faiss:
        pytest.importorskip("faiss", reason="faiss-cpu is not installed ([faiss] extra)")
    config = small_config(tasks=("needle_keys",), length_ratios=(1,))
    reader, lessons = small_reader(config), small_lessons(config)
    texts = lessons.lesson("policy", 0).texts
    size, top_k = config.stage_b.memory.summary_dim, 4
    memory = reader.config.memory.model_copy(update={"top_k": top_k})
    reader.config = reader.config.model_copy(update={"memory": memory})
    index = EpisodicIndex(key_size=size, max_tokens=999, encoder="", tokenizer="")
    torch.manual_seed(0)
    for number, key in enumerate(F.normalize(torch.randn(20, size), dim=-1)):
        index.propose(key, (20 + number,), offset=0, source="", score=0.0)
    index.commit(step=0)
    length = texts.tokens.shape[1]
    reading = dataclasses.replace(
        reader.read(texts), keys=F.normalize(torch.randn(4, length, size), dim=-1)
    )
    earlier = Earlier(index, faiss=faiss, decode=tokenizer().decode)
    # entries and keys are drawn at random: their words say nothing
    episodes = ReadingEpisodes(reader, reading, lambda *_: 0.5, words=False, earlier=earlier)
    state = episodes.start()
    while episodes.observe(state).legal[:, Action.CACHE_WRITE].any():
        legal = episodes.observe(state).legal[:, Action.CACHE_WRITE]
        action = torch.where(legal, int(Action.CACHE_WRITE), int(Action.SPLICE_WINDOW))
        state = episodes.step(state, action).state
    state = dataclasses.replace(state, query=F.normalize(torch.randn(4, size), dim=-1))
    every = torch.cat([index.keys.expand(4, -1, -1), reading.keys], dim=1)
    cosines = (every @ state.query.unsqueeze(2)).squeeze(2)
    there = torch.cat([cosines[:, :20] >= 0.2, texts.lengths > 0], dim=1)
    nearest = cosines.masked_fill(~there, -9.0).argsort(dim=1, descending=True)[:, :top_k]
    assert (nearest < 20).any() and (nearest >= 20).any()
    state = episodes.step(state, torch.full((4,), int(Action.RETRIEVE))).state
    assert torch.equal(state.buffer, nearest)
    state = episodes.step(state, torch.full((4,), int(Action.SPLICE_WINDOW))).state
    for row in range(4):
        held = episodes.in_window(state, row)
        assert held == sorted(held) and set(held) <= set(nearest[row].tolist())
        for place in held:
            own = texts.segment(row, place - 20) if place >= 20 else [20 + place]
            assert episodes.texts.segment(row, place) == own
    found = episodes.step(state, torch.full((4,), int(Action.RETRIEVE))).state.buffer
    assert (
        not (found.unsqueeze(2) == state.fetched.unsqueeze(1))
        .logical_and(found.unsqueeze(2) >= 0)
        .any()
    ), "what stands in the window is not fetched again"


def test_through_faiss_all_is_the_same(tmp_path: Path) -> None:
    pytest.importorskip("faiss", reason="faiss-cpu is not installed ([faiss] extra)")
    told(loaded(tmp_path), tmp_path, ONE)
    exact = told(loaded(tmp_path), tmp_path, TWO, QUESTION)
    folder = tmp_path / "other"
    folder.mkdir()
    told(loaded(folder), folder, ONE, faiss=True)
    assert told(loaded(folder), folder, TWO, QUESTION, faiss=True) == exact


def asked(monkeypatch: pytest.MonkeyPatch, reader: TrainedReader, *flags: str) -> int:
    """Exit code of the command, whose run holds the reader."""
    monkeypatch.setattr(long_context, "load_reader", lambda source, **_: reader)
    monkeypatch.setattr(cli, "_checkpoint_place", lambda arguments: arguments.run_dir)
    return main(["generate", "run", "--memory", *flags])


def test_the_index_of_another_model_or_tokenizer_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--index", str(tmp_path / "index"), "--question", QUESTION)
    told(loaded(tmp_path), tmp_path, ONE)
    before = files(tmp_path)
    another = loaded(tmp_path)
    with torch.no_grad():  # the keys depend on what is below the encoder too
        another.reader.backbone.embedding.weight[7] += 1e-3
    assert asked(monkeypatch, another, *flags) == StateError.exit_code
    *_, line = capsys.readouterr().err.splitlines()
    assert "00000001: encoder is '" in line and "its entries mean nothing to this model" in line
    reader = loaded(tmp_path)
    trained = dataclasses.replace(reader.trained, tokenizer_digest="2" * 64)
    other = dataclasses.replace(reader, trained=trained)
    assert asked(monkeypatch, other, *flags) == StateError.exit_code
    assert "00000001: tokenizer is '" in capsys.readouterr().err
    assert files(tmp_path) == before
    with torch.no_grad():  # slots and agent have no part in keys
        reader.reader.memory.up.weight += 1.0
        reader.reader.policy.value.weight += 1.0
    assert asked(monkeypatch, reader, *flags) == 0


def test_a_call_that_fails_leaves_the_index_as_it_was(tmp_path: Path) -> None:
    told(loaded(tmp_path), tmp_path, ONE)
    before = files(tmp_path)
    broken = loaded(tmp_path)
    with torch.no_grad():
        broken.reader.policy.value.weight.fill_(torch.nan)
    with pytest.raises(DataError, match="the agent's numbers are not finite"):
        told(broken, tmp_path, TWO, QUESTION)
    assert files(tmp_path) == before


def test_a_full_disk_is_told_in_one_message_and_leaves_the_index_as_it_was(tmp_path: Path) -> None:
    reader = loaded(tmp_path)
    told(reader, tmp_path, ONE)
    before = files(tmp_path)
    with (
        file_size_limit(100),
        pytest.raises(StateError, match="index: cannot be used: File too large. Give a folder"),
    ):
        told(reader, tmp_path, TWO)
    assert files(tmp_path) == before


HOLD = """
import fcntl, sys, time
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(60)
"""


def test_a_second_process_waits_until_the_first_is_done_or_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told(loaded(tmp_path), tmp_path, ONE)
    before = files(tmp_path)
    command = [sys.executable, "-c", HOLD, str(tmp_path / "index" / ".lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        waited: list[str] = []

        def note(message: str, *_: object) -> None:
            waited.append(message)
            assert files(tmp_path) == before
            holder.send_signal(signal.SIGKILL)

        monkeypatch.setattr("cdrmix.reasoning.earlier.logger.info", note)
        assert of(told(loaded(tmp_path), tmp_path, question=QUESTION), "recalled")
    assert waited == ["%s: another process uses it; waiting"]


def test_there_must_be_something_to_read_or_to_ask(tmp_path: Path) -> None:
    reader = loaded(tmp_path)
    with pytest.raises(DataError, match="an index takes a text to read, a question, or both"):
        told(reader, tmp_path)
    with pytest.raises(StateError, match="no episodic memory was saved here. Read a text into it"):
        told(reader, tmp_path, question=QUESTION)
    assert not (tmp_path / "index").exists()
    (tmp_path / "index").write_text("")
    with pytest.raises(StateError, match="index: cannot be used: .*Give a folder that can be"):
        told(reader, tmp_path, ONE)


def test_a_memory_without_room_for_a_segment_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_tokens = 8 of the model has no room for a segment"):
        told(loaded(tmp_path, max_tokens=8), tmp_path, ONE)


def test_flags_of_an_index_that_would_do_nothing_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for flags, message in (
        (["--index", "a"], "go with --memory"),
        (["--memory", "--faiss"], "--faiss goes with --index"),
    ):
        with pytest.raises(SystemExit):
            main(["generate", "run", *flags])
        assert message in capsys.readouterr().err
