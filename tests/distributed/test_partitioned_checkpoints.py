"""Checkpoints of ZeRO-3 and of offloaded optimizers, into the same layout and into others.

Each run trains, saves, and goes on; a fresh process that starts from other weights loads and goes
on too. Runs of one world size share their processes.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cdrmix import runtime
from cdrmix.checkpoint import engine_state
from cdrmix.checkpoint.checkpoint_file import CheckpointFile
from cdrmix.checkpoint.fragments import Fragment
from cdrmix.models.backbone import logical_name
from tests.checkpoints import save_checkpoint
from tests.distributed.test_layouts import AVERAGED, CUT, ON_HOST, ROUTED
from tests.harness import run_ranks
from tests.layouts import STEPS, Case, Started, deviation, run_steps, start

BEFORE = 3  # steps done when a run is saved
BF16 = {"precision": "bf16"}

# a sub-group per parameter: each has an optimizer step count of its own
IN_SUB_GROUPS = Case(data=2, moe=False, profile="zero3", zero=CUT | {"sub_group_size": 1},
                     training=AVERAGED)  # fmt: skip
SAVED = {
    "zero1": Case(data=2, moe=False),
    "zero1 averaged in bf16": Case(data=2, expert=2, training=BF16 | AVERAGED),
    "zero2": Case(data=2, moe=False, profile="zero2"),
    "zero3": Case(data=2, moe=False, profile="zero3", zero=CUT),
    "zero3 in sub-groups": IN_SUB_GROUPS,
    "zero3_offload": Case(data=2, moe=False, profile="zero3_offload", zero=CUT),
    "zero3_offload in bf16": Case(data=2, moe=False, profile="zero3_offload", training=BF16),
    "zero2_offload": Case(data=2, profile="zero2_offload", expert=2, training=AVERAGED),
    "zero2_offload in bf16": Case(data=2, profile="zero2_offload", expert=2, training=BF16),
    "zero1 with thresholds": Case(data=2, moe=False, model=ROUTED),
    "zero1 offloaded": Case(data=2, zero=ON_HOST, accumulation=2),
}
# which run goes on where
MOVES = [
    ("zero1", Case(data=4, moe=False, profile="zero3", zero=CUT)),
    ("zero2", Case(data=2, moe=False, profile="zero3_offload", zero=CUT)),
    ("zero3", Case(moe=False, profile="zero2_offload")),
    ("zero3", Case(data=4, moe=False, profile="zero1", accumulation=2)),
    ("zero3", Case(data=4, moe=False, profile="zero3", zero=CUT | {"sub_group_size": 1})),
    ("zero3 in sub-groups", Case(moe=False, profile="zero3", training=AVERAGED)),
    ("zero3_offload", Case(data=2, moe=False, profile="zero2")),
    ("zero2_offload", Case(data=1, profile="zero1")),
    ("zero1 with thresholds", Case(moe=False, model=ROUTED)),
]

Ending = tuple[list[float], list[float], dict[str, float]]


def write(started: Started, folder: Path) -> None:
    held = engine_state.fragments(started.engine, logical_name)
    state = {"engine": engine_state.counters(started.engine)}
    save_checkpoint(folder, BEFORE, held, state=state, rank_state={}, keep=1)


def load(started: Started, folder: Path) -> None:
    with CheckpointFile(folder / str(BEFORE)) as reader:
        averages = "ema_decay" in started.case.training
        engine_state.load_engine(started.engine, reader, logical_name, averages=averages)


def go_on(started: Started) -> Ending:
    """Ten more steps: losses, gradient norms, and the sum of every piece that this rank saves."""
    losses, norms = run_steps(started, first=BEFORE, count=STEPS)
    sums: dict[str, float] = {}
    for piece in engine_state.fragments(started.engine, logical_name):
        # of the bits, so that any that differs shows
        bits = piece.values.contiguous().view(torch.uint8).long()
        weighted = bits * torch.arange(1, len(bits) + 1)
        sums[f"{piece.kind} {piece.name} {piece.span}"] = int(weighted.sum())
    return losses, norms, sums


def save_and_go_on(root: str, names: list[str]) -> list[Ending]:
    runtime.initialize_distributed()
    endings = []
    for name in names:
        started = start(SAVED[name], seed=1)
        run_steps(started, count=BEFORE)
        write(started, Path(root) / name)
        endings.append(go_on(started))
    runtime.destroy_distributed()
    return endings


def load_and_go_on(scenarios: list[tuple[str, Case]]) -> list[Ending]:
    runtime.initialize_distributed()
    endings = []
    for folder, case in scenarios:
        started = start(case, seed=2)
        load(started, Path(folder))
        endings.append(go_on(started))
    runtime.destroy_distributed()
    return endings


@pytest.fixture(scope="module")
def saved() -> Iterator[tuple[str, dict[str, list[Ending]]]]:
    """Folder of the checkpoints, and how their runs went on, by name and rank."""
    with tempfile.TemporaryDirectory() as root:
        names = list(SAVED)
        by_rank = run_ranks(save_and_go_on, 2, root, names, timeout=300)
        yield root, dict(zip(names, map(list, zip(*by_rank, strict=True)), strict=True))


def test_resuming_at_the_same_layout_is_bitwise_the_uninterrupted_run(
    saved: tuple[str, dict[str, list[Ending]]],
) -> None:
    root, expected = saved
    scenarios = [(f"{root}/{name}", case) for name, case in SAVED.items()]
    by_rank = run_ranks(load_and_go_on, 2, scenarios, timeout=300)
    for rank, endings in enumerate(by_rank):
        for name, ending in zip(SAVED, endings, strict=True):
            assert ending == expected[name][rank], f"rank {rank}, {name}"


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_resuming_at_another_stage_or_size_equals_not_having_moved(
    ranks: int, saved: tuple[str, dict[str, list[Ending]]]
) -> None:
    root, expected = saved
    moves = [(name, case) for name, case in MOVES if case.world_size == ranks]
    scenarios = [(f"{root}/{name}", case) for name, case in moves]
    endings = run_ranks(load_and_go_on, ranks, scenarios, timeout=300)[0]
    for (name, case), (losses, norms, _) in zip(moves, endings, strict=True):
        unmoved_losses, unmoved_norms, _ = expected[name][0]
        assert deviation(losses, unmoved_losses) < 1e-5, f"{name} to {case}"
        assert deviation(norms, unmoved_norms) < 1e-4, f"{name} to {case}"


def watch_reads() -> list[int]:
    """Bytes that readers have handed out and nobody has let go of yet, after each read."""
    alive, seen = [0], []
    original = CheckpointFile.read

    def release(size: int) -> None:
        alive[0] -= size

    def watched(self: CheckpointFile, *args: Any, **given: Any) -> torch.Tensor:
        values = original(self, *args, **given)
        size = values.numel() * values.element_size()
        alive[0] += size
        seen.append(alive[0])
        weakref.finalize(values, release, size)
        return values

    CheckpointFile.read = watched  # type: ignore[method-assign]
    return seen


def states(engine: Any) -> list[torch.Tensor]:
    """Live memory that a checkpoint is written from."""
    inner = engine.optimizer.optimizer
    moments = [value for state in inner.state.values() for value in state.values()]
    masters = [master for master, _ in engine_state._masters(engine)]
    return [*masters, *(value for value in moments if torch.is_tensor(value))]


def measure(folder: str, case: Case) -> tuple[int, int, int, int]:
    """Most bytes read and not yet let go, of the largest parameter's share, of all that is read,
    and elements that a save copies beside single numbers."""
    runtime.initialize_distributed()
    started = start(case, seed=2)
    seen = watch_reads()
    load(started, Path(folder))
    held: list[Fragment] = list(engine_state.fragments(started.engine, logical_name))
    shares = [4 * piece.values.numel() for piece in held if piece.kind == "param"]
    known = {state.untyped_storage().data_ptr() for state in states(started.engine)}
    copied = sum(
        piece.values.numel()
        for piece in held
        if piece.shape and piece.values.untyped_storage().data_ptr() not in known
    )
    runtime.destroy_distributed()
    return max(seen), max(shares), 3 * sum(shares), copied


@pytest.mark.parametrize("profile", ["zero2", "zero3", "zero3_offload"])
def test_one_parameters_share_is_in_memory_at_a_time_beside_the_engines_own(
    profile: str, saved: tuple[str, dict[str, list[Ending]]]
) -> None:
    case = Case(data=2, moe=False, profile=profile)
    for most, largest, total, copied in run_ranks(measure, 2, f"{saved[0]}/zero3", case):
        assert 0 < most <= largest < total / 10
        assert copied == 0, "a save reads the states themselves"


def start_frozen(case: Case, *, seed: int) -> Started:
    """As `start`, with an embedding that is not trained."""
    from cdrmix.parallel import apply

    build = apply.build_model

    def build_frozen(*args: Any) -> Any:
        model = build(*args)
        model.embedding.weight.requires_grad_(False)
        return model

    apply.build_model = build_frozen
    started = start(case, seed=seed)
    apply.build_model = build
    return started


def move_a_frozen_parameter(folder: str, before: Case, after: Case) -> list[torch.Tensor]:
    """The embedding's rows where a run was saved, and at two stages once it was loaded there."""
    runtime.initialize_distributed()
    first = start_frozen(before, seed=1)
    run_steps(first, count=BEFORE)
    write(first, Path(folder))
    rows = [embedding_of(first)]
    for case in (before, after):
        started = start_frozen(case, seed=2)
        load(started, Path(folder))
        run_steps(started, first=BEFORE, count=1)
        rows.append(embedding_of(started))
    runtime.destroy_distributed()
    return rows


def embedding_of(started: Started) -> torch.Tensor:
    weight = started.engine.module.embedding.weight
    with runtime.import_deepspeed().zero.GatheredParameters([weight]):
        return weight.detach().clone()


def test_what_is_not_trained_is_saved_and_moved_too(tmp_path: Path) -> None:
    before = Case(data=2, moe=False, profile="zero3", zero=CUT)
    after = Case(data=2, moe=False)
    for original, *moved in run_ranks(move_a_frozen_parameter, 2, str(tmp_path), before, after):
        assert all(torch.equal(rows, original) for rows in moved)


def go_back_to_the_start(folder: str, case: Case) -> tuple[list[float], list[float]]:
    """Losses from a fresh engine, and from one that has trained and gone back to before."""
    runtime.initialize_distributed()
    started = start(case, seed=1)
    write(started, Path(folder))
    fresh, _ = run_steps(started, count=4)
    load(started, Path(folder))
    again, _ = run_steps(started, count=4)
    runtime.destroy_distributed()
    return fresh, again


def test_a_live_engine_goes_back_to_before_its_first_step(tmp_path: Path) -> None:
    case = Case(data=2, moe=False, profile="zero3_offload", zero=CUT)
    for fresh, again in run_ranks(go_back_to_the_start, 2, str(tmp_path), case):
        assert fresh == again
