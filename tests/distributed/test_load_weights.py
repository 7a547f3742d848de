"""Weights alone, from a checkpoint or a folder of safetensors, into engines of any layout.

The weights in use are seen by the loss of the first step, the masters by what a save would hold.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from cdrmix import runtime
from cdrmix.checkpoint import engine_state
from cdrmix.checkpoint.checkpoint_file import CheckpointFile
from cdrmix.checkpoint.fragments import Box
from cdrmix.checkpoint.weight_folder import Piece, WeightFolder
from cdrmix.checkpoint.weight_source import CheckpointWeights
from cdrmix.config.safetensors_headers import WEIGHTS_FILE
from cdrmix.errors import StateError
from cdrmix.models.backbone import logical_name
from tests.checkpoints import save_checkpoint
from tests.distributed.test_layouts import CUT, ON_HOST
from tests.distributed.test_partitioned_checkpoints import embedding_of, start_frozen
from tests.harness import run_ranks
from tests.layouts import Case, _held, _whole, deviation, run_steps, start, wake_blocks

# Layouts by name of the group: DeepSpeed keeps the kind of layout in its modules for good.
CASES = {
    "alone": [
        Case(moe=False, profile="zero3_offload", zero=CUT),
        Case(profile="zero2", zero=ON_HOST),
        Case(training={"precision": "bf16"}),
    ],
    "data": [
        Case(data=2, expert=2, profile="zero2"),
        Case(data=2, sequence=2),
        Case(data=2, moe=False, profile="zero3", zero=CUT),
        Case(data=2, moe=False, profile="zero3"),  # with small parameters whole on each rank
    ],
    "tensor": [Case(tensor=2, expert=2), Case(tensor=2, moe=False)],
    "pipeline": [Case(pipeline=2, profile="pipeline")],
}
# Of the run that is the source: its weights are far from any initial ones.
FAST = {"learning_rate": 0.05, "min_learning_rate": 0.05}
EXPERTS_AXIS = ("experts.up", "experts.down")


def make_sources(root: str) -> list[float]:
    """Writes a checkpoint after two steps, of experts and of a dense model, and the weights of each
    as safetensors; gives their losses of step 2."""
    runtime.initialize_distributed()
    wake_blocks()
    losses = []
    for case in (Case(training=FAST), Case(moe=False, training=FAST)):
        folder = Path(root) / str(case.moe)
        started = start(case, seed=1)
        run_steps(started, count=2)
        held = engine_state.fragments(started.engine, logical_name)
        state = {"engine": engine_state.counters(started.engine)}
        save_checkpoint(folder, 2, held, state=state, rank_state={}, keep=1)
        with CheckpointFile(folder / "2") as reader:
            tensors: dict[str, torch.Tensor] = {}
            for name in reader.names():
                whole = reader.full(name)
                is_packed = name.endswith(EXPERTS_AXIS)
                rows = dict(enumerate(whole)) if is_packed else {}
                tensors |= {f"{name}.{e}": row.clone() for e, row in rows.items()}
                tensors |= {} if is_packed else {name: whole}
        save_file(tensors, folder / WEIGHTS_FILE)
        losses += run_steps(started, first=2, count=1)[0]
    runtime.destroy_distributed()
    return losses


def pieces_of(checkpoint: CheckpointFile) -> dict[str, list[Piece]]:
    """Tensors of `make_sources`: packed ones of one tensor for each expert."""
    pieces = {}
    for name in checkpoint.names():
        shape = checkpoint.shape(name)
        pieces[name] = [Piece(name, Box.whole(shape))]
        if name.endswith(EXPERTS_AXIS):
            rest = shape[1:]
            pieces[name] = [
                Piece(f"{name}.{e}", Box((e, 0, 0), (1, *rest))) for e in range(shape[0])
            ]
    return pieces


def take(root: str, cases: list[Case]) -> list[tuple[list[Any], list[Any], bool, float, float]]:
    """Of each case: shares of the masters after either source, whether the optimizer is as new, and
    the loss of its own weights and of those taken."""
    runtime.initialize_distributed()
    wake_blocks()
    found = []
    for case in cases:
        folder = Path(root) / str(case.moe)
        ours = run_steps(start(case, seed=2), first=2, count=1)[0][0]
        started = start(case, seed=2)
        with CheckpointFile(folder / "2") as checkpoint:
            with WeightFolder(folder, pieces_of(checkpoint)) as weights:
                engine_state.load_weights(started.engine, weights, logical_name)
            from_folder = _held(started.engine, "param")
            source = CheckpointWeights(checkpoint)
            engine_state.load_weights(started.engine, source, logical_name)
        held = list(engine_state.fragments(started.engine, logical_name))
        moments = [float(each.values.abs().max()) for each in held if each.kind != "param"]
        counts = engine_state.counters(started.engine)
        is_new = not any(moments) and counts["global_steps"] == 0
        masters = _held(started.engine, "param")
        (loss,) = run_steps(started, first=2, count=1)[0]
        found.append((from_folder, masters, is_new, ours, loss))
    runtime.destroy_distributed()
    return found


@pytest.fixture(scope="module")
def sources() -> Iterator[tuple[str, dict[bool, float]]]:
    """Folder of the sources, and the loss of step 2 by whether there are experts."""
    with tempfile.TemporaryDirectory() as root:
        ((with_experts, dense),) = run_ranks(make_sources, 1, root)
        yield root, {True: with_experts, False: dense}


@pytest.mark.parametrize("group", CASES)
def test_any_layout_takes_the_same_weights_from_either_source(
    group: str, sources: tuple[str, dict[bool, float]]
) -> None:
    root, losses = sources
    cases = CASES[group]
    by_rank = run_ranks(take, cases[0].world_size, root, cases, timeout=300)
    for number, case in enumerate(cases):
        of_ranks = [rank[number] for rank in by_rank]
        with CheckpointFile(Path(root) / str(case.moe) / "2") as checkpoint:
            expected = {name: checkpoint.full(name) for name in checkpoint.names()}
        for place in (0, 1):
            weights = _whole([each[place] for each in of_ranks])
            assert weights.keys() == expected.keys(), case
            assert all(torch.equal(weights[name], expected[name]) for name in expected), case
        for _, _, is_new, ours, loss in of_ranks:
            assert is_new, case
            tolerance = 2e-3 if case.training else 1e-5
            assert deviation([loss], [losses[case.moe]]) < tolerance, case
            assert deviation([ours], [losses[case.moe]]) > 1e-2, "control: not taken"


def refuse(root: str) -> tuple[str, str, bool]:
    """Messages where one rank misses a tensor and where one cannot read, and whether a tensor that
    the source need not have keeps its values."""
    runtime.initialize_distributed()
    started = start(Case(data=2), seed=2)
    engine = started.engine

    def embedding() -> torch.Tensor:
        values: torch.Tensor = engine.module.embedding.weight.detach().clone()
        return values

    before = embedding()
    folder = Path(root) / "True"
    with CheckpointFile(folder / "2") as checkpoint:
        source = CheckpointWeights(checkpoint)
        names = source.names()
        if runtime.rank() == 1:
            source.names = lambda: names[1:]  # type: ignore[method-assign]
        with pytest.raises(StateError) as missing:
            engine_state.load_weights(engine, source, logical_name)
        # only rank 1 has not read it, which keeps its values
        engine_state.load_weights(engine, _Unread(checkpoint), logical_name, fresh={names[0]})
        with pytest.raises(StateError) as unread:
            engine_state.load_weights(engine, _Failing(checkpoint), logical_name)
    is_kept = names[0] == "embedding.weight" and torch.equal(embedding(), before)
    runtime.destroy_distributed()
    return str(missing.value), str(unread.value), is_kept


class _Unread(CheckpointWeights):
    """A checkpoint without its first tensor."""

    def names(self) -> list[str]:
        return super().names()[1:]


class _Failing(CheckpointWeights):
    """A checkpoint that rank 1 cannot read."""

    def read(self, *arguments: Any) -> torch.Tensor:
        if runtime.rank() == 1:
            raise StateError("file: cannot be read")
        return super().read(*arguments)


def test_all_ranks_refuse_what_one_cannot_take(sources: tuple[str, dict[bool, float]]) -> None:
    first, second = run_ranks(refuse, 2, sources[0])
    assert first == second
    missing, unread, is_kept = first
    assert "embedding.weight: missing" in missing
    assert unread.startswith("[rank 1] file: cannot be read")
    assert is_kept


def take_frozen(root: str, cases: list[Case]) -> list[torch.Tensor]:
    """An embedding that is not trained, after the weights were taken, of each case."""
    runtime.initialize_distributed()
    taken = []
    for case in cases:
        started = start_frozen(case, seed=2)
        with CheckpointFile(Path(root) / "False" / "2") as checkpoint:
            source = CheckpointWeights(checkpoint)
            engine_state.load_weights(started.engine, source, logical_name)
        taken.append(embedding_of(started))
    runtime.destroy_distributed()
    return taken


def test_what_is_not_trained_is_taken_too(sources: tuple[str, dict[bool, float]]) -> None:
    cases = [Case(data=2, moe=False), Case(data=2, moe=False, profile="zero3", zero=CUT)]
    with CheckpointFile(Path(sources[0]) / "False" / "2") as checkpoint:
        expected = checkpoint.full("embedding.weight")
    for of_rank in run_ranks(take_frozen, 2, sources[0], cases):
        assert all(torch.equal(taken, expected) for taken in of_rank)
