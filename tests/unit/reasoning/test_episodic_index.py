"""Episodic memory: search, proposals, eviction, duplicates, and what is on disk."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from cdrmix.config.reasoning import EvictionConfig
from cdrmix.errors import StateError
from cdrmix.reasoning.earlier import load_index, save_index
from cdrmix.reasoning.episodic_index import Entry, EpisodicIndex, best_of
from cdrmix.reasoning.working_memory import RetrievalEncoder, weights_digest
from tests.harness import ROOT

SIZE = 16


def unit(*shape: int) -> torch.Tensor:
    return F.normalize(torch.randn(*shape), dim=-1)


def empty(max_tokens: int = 1024) -> EpisodicIndex:
    return EpisodicIndex(key_size=SIZE, max_tokens=max_tokens, encoder="e" * 64, tokenizer="t" * 64)


def entry_of(index: EpisodicIndex, id: int) -> Entry:
    return next(entry for entry in index.entries if entry.id == id)


def write(index: EpisodicIndex, key: torch.Tensor, *tokens: int, score: float = 0.0) -> None:
    index.propose(key, tokens or (1, 2, 3), offset=0, source="text", score=score)


def filled(count: int, **settings: int) -> EpisodicIndex:
    index = empty(**settings)
    for number, key in enumerate(unit(count, SIZE)):
        write(index, key, *range(number, number + 3))
    index.commit(step=0)
    return index


def test_the_nearest_entries_are_found_best_first() -> None:
    index, queries = filled(50), unit(4, SIZE)
    found = index.search(queries, top_k=5)
    cosines = queries @ index.keys.T
    expected = cosines.sort(dim=1, descending=True).indices[:, :5]
    shown = found.places >= 0
    assert torch.equal(found.places[shown], expected[shown])
    assert (found.scores[shown] >= 0.2).all()
    assert (cosines.sort(dim=1, descending=True).values[:, :5] < 0.2).equal(~shown)


def test_what_leaves_first_is_weighed_as_the_configuration_says() -> None:
    recency = EvictionConfig(score_weight=0, recency_weight=1, reads_weight=0, half_life_actions=2)
    index = EpisodicIndex(key_size=SIZE, max_tokens=99, encoder="", tokenizer="", eviction=recency)
    for number, key in enumerate(unit(2, SIZE)):
        write(index, key, 1, score=number)
        index.commit(step=2 * number)
    assert index.utility(step=4).tolist() == [0.25, 0.5]
    by_score = filled(0)
    for number, key in enumerate(unit(2, SIZE)):
        write(by_score, key, 1, score=number)
    by_score.commit(step=0)
    assert by_score.utility(step=1024).tolist() == [0.3 / 2, 0.5 + 0.3 / 2]


def test_equal_scores_go_to_the_older_entry() -> None:
    assert best_of(torch.tensor([0.1, 0.5, 0.9, 0.5, 0.5]), 3).tolist() == [2, 1, 3]
    assert best_of(torch.zeros(100), 4).tolist() == [0, 1, 2, 3]
    assert best_of(torch.zeros(2), 4).tolist() == [0, 1]


def test_an_empty_memory_finds_nothing() -> None:
    found = empty().search(unit(3, SIZE), top_k=4)
    assert found.places.shape == (3, 0)


def test_only_what_is_accepted_can_be_found() -> None:
    index, key = empty(), unit(SIZE)
    write(index, key, 7)
    assert index.search(key.unsqueeze(0), top_k=1).places.shape == (1, 0)
    assert index.commit(step=0).added == [0]
    assert index.search(key.unsqueeze(0), top_k=1).places.item() == 0
    assert entry_of(index, 0).tokens == (7,)


def test_a_duplicate_refreshes_the_entry_it_repeats() -> None:
    index = filled(5)
    again = F.normalize(index.keys[2] + 0.05 * unit(SIZE), dim=-1)
    write(index, again, 99, score=0.5)
    assert index.commit(step=10) == ([], [2], [])
    entry = entry_of(index, 2)
    assert (entry.tokens, entry.score, entry.last_used) == ((99,), 0.5, 10)
    assert torch.equal(index.keys[2], again) and len(index) == 5


def test_the_least_useful_entries_give_way_in_a_fixed_order() -> None:
    def run() -> tuple[list[int], list[int]]:
        torch.manual_seed(3)
        index = empty(max_tokens=30)  # ten entries of three tokens
        for key, score in zip(unit(10, SIZE), (0, 1, 0, 0, 1, 0, 0, 0, 0, 1), strict=True):
            write(index, key, score=score)
        index.commit(step=0)
        index.touch([0, 5, 5], step=500)
        for key in unit(4, SIZE):
            write(index, key)
        evicted = index.commit(step=1000).evicted
        return evicted, [entry.id for entry in index.entries]

    evicted, kept = run()
    # neither those worth a score (1, 4, 9), nor those read (0, 5), nor the new ones (10 to 13)
    assert evicted == [2, 3, 6, 7]
    assert kept == [0, 1, 4, 5, 8, 9, 10, 11, 12, 13]
    assert run() == (evicted, kept)


def test_an_evicted_id_is_gone_and_never_given_again() -> None:
    index = filled(3, max_tokens=6)
    assert [entry.id for entry in index.entries] == [1, 2]
    write(index, unit(SIZE))
    assert index.commit(step=1).added == [3]


@pytest.mark.parametrize(
    ("key", "tokens", "message"),
    [
        (torch.ones(SIZE), (1,), "a key of length 4; keys are unit vectors"),
        (torch.full((SIZE,), torch.nan), (1,), "a key of length nan"),
        (unit(3), (1,), "a key of shape .3., keys here are .16."),
        (unit(SIZE), (), "a segment of 0 tokens; 1 to 1024 fit"),
        (unit(SIZE), (1,) * 1025, "a segment of 1025 tokens"),
    ],
)
def test_what_cannot_be_stored_is_refused(
    key: torch.Tensor, tokens: tuple[int, ...], message: str
) -> None:
    index = empty()
    with pytest.raises(ValueError, match=message):
        index.propose(key, tokens, offset=0, source="text", score=0.0)
    assert index.commit(step=0) == ([], [], [])


def loaded(folder: Path, **changed: object) -> EpisodicIndex:
    settings = {
        "encoder": "e" * 64,
        "tokenizer": "t" * 64,
        "key_size": SIZE,
        "max_tokens": 1024,
    } | changed
    index = EpisodicIndex(**settings)
    assert load_index(index, folder, vocab_size=100)
    return index


def test_a_loaded_memory_answers_as_the_saved_one(tmp_path: Path) -> None:
    index, queries = filled(40, max_tokens=90), unit(6, SIZE)
    index.touch([5], step=4)
    save_index(index, tmp_path / "episodic")
    again = loaded(tmp_path / "episodic", max_tokens=90)
    ours, theirs = (memory.search(queries, top_k=4) for memory in (index, again))
    assert torch.equal(ours.places, theirs.places) and torch.equal(ours.scores, theirs.scores)
    assert again.entries == index.entries and again.next_id == 40
    write(index, queries[0])
    write(again, queries[0])
    assert index.commit(step=9) == again.commit(step=9)


def test_an_empty_memory_is_saved_too(tmp_path: Path) -> None:
    save_index(empty(), tmp_path)
    assert len(loaded(tmp_path)) == 0


def test_a_save_replaces_the_one_before(tmp_path: Path) -> None:
    for count in (3, 4):
        save_index(filled(count), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["00000002"]
    assert len(loaded(tmp_path)) == 4


def test_equal_memories_are_equal_files(tmp_path: Path) -> None:
    contents = []
    for name in ("a", "b"):
        torch.manual_seed(1)
        save = save_index(filled(9), tmp_path / name)
        contents.append({path.name: path.read_bytes() for path in save.iterdir()})
    assert contents[0] == contents[1] and len(contents[0]) == 4


def test_entries_of_another_encoder_tokenizer_or_size_are_refused(tmp_path: Path) -> None:
    save_index(filled(2), tmp_path)
    with pytest.raises(StateError, match="encoder is 'eee.* mean nothing to this model"):
        loaded(tmp_path, encoder="f" * 64)
    with pytest.raises(StateError, match="key_size is 16, but the model's is 32: its"):
        loaded(tmp_path, key_size=32)
    with pytest.raises(StateError, match="tokenizer is 'ttt.*; encoder is 'eee.* mean nothing"):
        loaded(tmp_path, tokenizer="u" * 64, encoder="f" * 64)


def test_a_digest_tells_encoders_apart() -> None:
    encoders = [RetrievalEncoder(8, 4) for _ in range(3)]
    for encoder, seed in zip(encoders, (0, 0, 1), strict=True):
        encoder.initialize(seed=seed)
    first, same, other = (weights_digest(encoder.named_parameters()) for encoder in encoders)
    assert first == same != other


@pytest.mark.parametrize("name", ["keys.safetensors", "values.safetensors", "entries.jsonl"])
def test_an_altered_file_is_named(tmp_path: Path, name: str) -> None:
    file = save_index(filled(5), tmp_path) / name
    content = bytearray(file.read_bytes())
    content[-2] ^= 1
    file.write_bytes(content)
    with pytest.raises(StateError, match=f"{name} changed since it was written"):
        loaded(tmp_path)
    file.unlink()
    with pytest.raises(StateError, match=f"{name}: No such file"):
        loaded(tmp_path)


def test_a_missing_or_foreign_memory_is_refused(tmp_path: Path) -> None:
    assert not load_index(empty(), tmp_path / "nowhere", vocab_size=100)
    save = save_index(filled(5), tmp_path)
    (save / "manifest.json").write_text('{"format": 9}')
    with pytest.raises(StateError, match="not a manifest .format 9, this version reads 2"):
        loaded(tmp_path)


SAVE_FOREVER = """
import sys, torch
from pathlib import Path
from cdrmix.reasoning.episodic_index import EpisodicIndex
from cdrmix.reasoning.earlier import save_index
index = EpisodicIndex(key_size=16, max_tokens=10**6, encoder="e" * 64, tokenizer="t" * 64)
while True:
    key = torch.nn.functional.normalize(torch.randn(16), dim=0)
    index.propose(key, range(50), offset=len(index), source="text", score=0.0)
    index.commit(step=len(index))
    save_index(index, Path(sys.argv[1]))
    print(len(index), flush=True)
"""


def test_a_process_that_is_killed_while_saving_leaves_a_whole_memory(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SAVE_FOREVER, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(20):
            saved = int(process.stdout.readline())
        os.kill(process.pid, signal.SIGKILL)
    index = loaded(tmp_path)
    assert len(index) >= saved == 20
    assert [entry.id for entry in index.entries] == list(range(len(index)))
    save_index(index, tmp_path)  # removes what the killed process left
    assert len(list(tmp_path.iterdir())) == 1


def test_a_manifest_that_lacks_something_is_refused(tmp_path: Path) -> None:
    manifest = save_index(filled(1), tmp_path) / "manifest.json"
    told = json.loads(manifest.read_text())
    del told["tokenizer"]
    manifest.write_text(json.dumps(told))
    with pytest.raises(StateError, match="not a manifest .without tokenizer"):
        loaded(tmp_path)


def test_of_an_unfinished_and_a_finished_save_the_finished_one_is_read(tmp_path: Path) -> None:
    first = save_index(filled(2), tmp_path)
    shutil.copytree(first, tmp_path / ".00000002.building-1")  # killed before the rename
    assert len(loaded(tmp_path)) == 2
    shutil.copytree(first, tmp_path / "kept")
    save_index(filled(3), tmp_path)
    (tmp_path / "kept").rename(first)  # killed before the old save was removed
    assert len(loaded(tmp_path)) == 3
    save_index(filled(4), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["00000003"]


def test_one_commit_refreshes_adds_and_evicts() -> None:
    index = empty(max_tokens=12)
    keys = torch.eye(SIZE)
    for key in keys[:4]:  # ids 0 to 3, three tokens each: full
        write(index, key, score=0.5)
    index.commit(step=0)
    index.touch([3], step=1)
    renewed = F.normalize(keys[1] + 0.1 * keys[9], dim=0)
    write(index, renewed, 7, 7, 7, 7, 7, score=0.25)  # a duplicate of 1, two tokens longer
    write(index, keys[5], 8, 8, score=0.0)
    done = index.commit(step=2)
    # four tokens too many: of the old ones 0 and 2 go, 3 was read; of this commit none, though 4
    # is worth less than all of them
    assert done == ([4], [1], [0, 2])
    assert [entry.id for entry in index.entries] == [1, 3, 4]
    assert index.num_tokens == 5 + 3 + 2
    # keys have moved up with their entries
    torch.testing.assert_close(index.keys, torch.stack([renewed, keys[3], keys[5]]))
    assert index.search(keys[[1, 3, 5, 0]], top_k=1).places.flatten().tolist() == [0, 1, 2, -1]
    entry = entry_of(index, 1)
    assert (entry.tokens, entry.score, entry.last_used) == ((7,) * 5, 0.5, 2)


def test_an_entry_refreshed_beyond_the_capacity_takes_the_place_of_others(tmp_path: Path) -> None:
    index = empty(max_tokens=9)
    keys = torch.eye(SIZE)
    for key in keys[:3]:
        write(index, key, score=1.0)
    index.commit(step=0)
    write(index, keys[0], *range(9))
    write(index, keys[0], *range(8), score=0.5)  # twice in one commit: the later one stays
    assert index.commit(step=5) == ([], [0, 0], [1, 2])
    assert entry_of(index, 0).tokens == tuple(range(8))
    save_index(index, tmp_path)
    again = loaded(tmp_path, max_tokens=9)
    assert again.entries == index.entries and torch.equal(again.keys, index.keys)
    write(again, keys[7], 1)
    assert again.commit(step=6) == ([3], [], [])
