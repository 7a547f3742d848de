"""The loader in live ranks that are killed and started again at other sizes."""

from __future__ import annotations

import itertools
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from cdrmix import runtime
from cdrmix.data.loader import Loader
from cdrmix.data.shards import write_file
from cdrmix.data.token_dataset import TokenDataset
from tests.harness import RanksFailed, run_ranks
from tests.unit.data.token_folder import write_counting_folder

LENGTH = 4
NUM_SAMPLES = 1003
GLOBAL_BATCH = 16
STEPS = NUM_SAMPLES // GLOBAL_BATCH
SAVE_EVERY = 4


def consume(folder: Path, logs: Path, life: int, killed_at: int | None) -> int:
    """Go on from the newest saved position to the end of the epoch, as a training run does.

    Each rank writes down, durably, which samples it has at which position. Ranks step together,
    rank 0 saves the position at its cadence, and one rank kills itself with -9.
    """
    runtime.initialize_distributed()
    rank, size = runtime.rank(), runtime.world_size()
    loader = Loader(
        TokenDataset(folder, "train", LENGTH),
        global_batch_size=GLOBAL_BATCH,
        micro_batch_size=1,
        data_rank=rank,
        data_size=size,
        seed=5,
        shuffle=True,
    )
    saved = logs / "position.json"
    if saved.exists():
        loader.load_state_dict(json.loads(saved.read_text()))
    began = loader.samples_consumed
    with (logs / f"{life}-{rank}.jsonl").open("w") as log:
        for step in range(began // GLOBAL_BATCH, STEPS):
            position = loader.samples_consumed
            assert position == step * GLOBAL_BATCH
            samples = loader.next()["input_ids"][..., 0] // LENGTH
            log.write(json.dumps([position, samples.flatten().tolist()]) + "\n")
            log.flush()
            os.fsync(log.fileno())
            if step == killed_at and rank == size // 2:
                os.kill(os.getpid(), signal.SIGKILL)
            runtime.all_reduce_sum(torch.ones(1))  # as for the gradients
            if rank == 0 and (step + 1) % SAVE_EVERY == 0:
                write_file(logs / "new.json", json.dumps(loader.state_dict()).encode())
                (logs / "new.json").replace(saved)
    return began


def lines_of(logs: Path, life: int) -> list[tuple[int, list[int]]]:
    return [
        json.loads(line)
        for file in logs.glob(f"{life}-*.jsonl")
        for line in file.read_text().splitlines()
    ]


def test_ranks_8_4_16_2_killed_in_between_read_an_epoch_exactly_once(tmp_path: Path) -> None:
    folder = write_counting_folder(tmp_path / "tokens", NUM_SAMPLES * LENGTH + 1, max_tokens=600)
    logs = tmp_path / "logs"
    logs.mkdir()
    begins = [0]
    for life, (size, killed_at) in enumerate([(8, 14), (4, 27), (16, 41), (2, None)]):
        arguments: tuple[Any, ...] = (folder, logs, life, killed_at)
        if killed_at is None:
            assert run_ranks(consume, size, *arguments) == size * [begins[-1]]
            break
        with pytest.raises(RanksFailed) as failed:
            run_ranks(consume, size, *arguments)
        assert all(outcome.kind != "result" for outcome in failed.value.outcomes)
        *_, last = (logs / f"{life}-{size // 2}.jsonl").read_text().splitlines()
        assert json.loads(last)[0] == killed_at * GLOBAL_BATCH, "it died where it was to"
        begins.append(json.loads((logs / "position.json").read_text())["samples_consumed"])
    assert begins == [GLOBAL_BATCH * step for step in (0, 12, 24, 40)]

    # What was trained on since the last save went with the model; the next life does it again.
    kept, redone = [], []
    for life, (begin, end) in enumerate(itertools.pairwise([*begins, STEPS * GLOBAL_BATCH])):
        for position, samples in lines_of(logs, life):
            assert position >= begin
            (kept if position < end else redone).append((position, samples))
    drawn = sorted(sample for _, samples in kept for sample in samples)
    expected = reading_alone(folder)
    assert len(drawn) == len(set(drawn)) == STEPS * GLOBAL_BATCH, "repeats, or misses"
    assert drawn == sorted(itertools.chain(*expected))
    for position, step in zip(range(0, len(drawn), GLOBAL_BATCH), expected, strict=True):
        shares = [samples for at, samples in kept if at == position]
        assert sorted(itertools.chain(*shares)) == sorted(step)
    assert redone, "the kills came between two saves"
    for position, samples in redone:
        assert set(samples) <= set(expected[position // GLOBAL_BATCH])


def reading_alone(folder: Path) -> list[list[int]]:
    """The samples of each step, by one process that nothing befalls."""
    rows = Loader(
        TokenDataset(folder, "train", LENGTH),
        global_batch_size=GLOBAL_BATCH,
        micro_batch_size=GLOBAL_BATCH,
        data_rank=0,
        data_size=1,
        seed=5,
        shuffle=True,
        prefetch=0,
    ).sample_rows(0, STEPS * GLOBAL_BATCH)
    return (rows[:, 0] // LENGTH).reshape(STEPS, GLOBAL_BATCH).tolist()
