"""The average of the weights: of whole weights in every layout, and from a checkpoint on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cdrmix import runtime
from cdrmix.checkpoint import engine_state
from cdrmix.checkpoint.checkpoint_file import CheckpointFile
from cdrmix.models.backbone import logical_name
from tests.checkpoints import save_checkpoint
from tests.distributed.test_layouts import CUT
from tests.harness import run_ranks
from tests.layouts import Case, Started, run_steps, start, wake_blocks

MOST = 0.4  # decay that is come up to in a few steps: (1 + n) / (10 + n) of n weights
STEPS, BEFORE = 7, 3
EMA = {"ema_decay": MOST}
HALF = EMA | {"precision": "bf16"}
CASES = [
    Case(data=2, training=EMA),
    Case(data=2, training=HALF),  # DeepSpeed's BF16_Optimizer
    Case(data=2, profile="zero2", expert=2, optimizer="muon", training=HALF),
    Case(data=2, profile="zero2_offload", moe=False, training=HALF),
    Case(data=2, profile="zero3", moe=False, zero=CUT | {"sub_group_size": 1}, training=EMA),
    Case(data=2, profile="zero3_offload", moe=False, zero=CUT, training=HALF),
    Case(tensor=2, training=EMA),
    Case(pipeline=2, profile="pipeline", training=HALF),
]


def whole_weights(engine: Any) -> list[torch.Tensor]:
    """Float32 masters of this rank's parameters, each gathered by DeepSpeed."""
    from deepspeed.utils import safe_get_full_fp32_param

    full = map(safe_get_full_fp32_param, engine.module.parameters())
    return [weight.detach().float().clone() for weight in full]


def in_use(engine: Any) -> list[torch.Tensor]:
    """What forward passes read on this rank: weights, under ZeRO-3 shares of them."""
    parameters = engine.module.parameters()
    return [getattr(p, "ds_tensor", p).detach().clone() for p in parameters]


def bits(engine: Any) -> list[torch.Tensor]:
    """Everything that a step changes on this rank."""
    held = engine_state.fragments(engine, logical_name)
    return [*(piece.values.clone() for piece in held), *in_use(engine)]


def average_of_whole_weights(case: Case) -> tuple[float, float, bool, bool, bool]:
    """Largest distance of the average from that of whole weights, and from the weights; whether
    weights in use are the average's inside of its context, and all is as it was behind it, to the
    bit; whether a loss inside is another."""
    started = start(case, seed=1)
    engine = started.engine
    expected: list[torch.Tensor] = []
    for step in range(STEPS):
        run_steps(started, first=step, count=1)
        weights = whole_weights(engine)
        if not expected:
            expected = weights
            continue
        # `step` weights have entered before: the first began it
        decay = min(MOST, (1 + step) / (10 + step))
        expected = [mean.lerp(new, 1 - decay) for mean, new in zip(expected, weights, strict=True)]
    if case.pipeline > 1 and started.topology.is_last_stage:
        # Its master of the tied embedding may part from the first stage's, which counts.
        engine.module.stage.embedding.weight._hp_mapping.hp_fragment.detach().add_(1e-2)
    before = bits(engine)
    trained = in_use(engine)
    with engine_state.averaged(engine):
        found = whole_weights(engine)
        read = in_use(engine)
    off = max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))
    moved = max(float((a - b).abs().max()) for a, b in zip(found, weights, strict=True))
    is_read = any(not torch.equal(a, b) for a, b in zip(read, trained, strict=True))
    if engine.zero_optimization_stage() < 3:
        own = zip(read, found, strict=True)
        is_read = is_read and all(torch.equal(a, b.to(a.dtype)) for a, b in own)
    is_back = all(torch.equal(a, b) for a, b in zip(bits(engine), before, strict=True))
    kept = [state["ema"].dtype for state in engine.optimizer.optimizer.state.values()]
    return off, moved, is_read, is_back, set(kept) == {torch.float32}


def average_in_each() -> list[tuple[float, float, bool, bool, bool]]:
    runtime.initialize_distributed()
    wake_blocks()
    found = [average_of_whole_weights(case) for case in CASES]
    runtime.destroy_distributed()
    return found


@pytest.fixture(scope="module")
def in_layouts() -> list[list[tuple[float, float, bool, bool, bool]]]:
    """What each rank found, by case; the ranks are the same of all cases."""
    return list(zip(*run_ranks(average_in_each, 2, timeout=300), strict=True))


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: str(CASES[number]))
def test_the_average_is_that_of_whole_weights(number: int, in_layouts: Any) -> None:
    for off, moved, is_read, is_back, is_float32 in in_layouts[number]:
        assert off == 0.0
        assert moved > 1e-3, "control: the average is not the weights"
        assert is_read, "a forward pass inside of the context reads the average"
        assert is_back, "behind it everything is as it was"
        assert is_float32


# --- from a checkpoint on --------------------------------------------------------------------

TWO = Case(data=2, moe=False, profile="zero2", training=EMA)
ONE = Case(moe=False, training=EMA)


def averages(started: Started) -> dict[str, torch.Tensor]:
    held = engine_state.fragments(started.engine, logical_name)
    return {f"{p.kind} {p.name}": p.values.clone() for p in held if p.kind in ("param", "ema")}


def save(started: Started, root: Path) -> None:
    held = engine_state.fragments(started.engine, logical_name)
    state = {"engine": engine_state.counters(started.engine)}
    save_checkpoint(root, BEFORE, held, state=state, rank_state={}, keep=1)


def save_with_and_without(root: str) -> None:
    """Checkpoints of a run that keeps an average and of one that keeps none; then, of the first, at
    its end."""
    runtime.initialize_distributed()
    wake_blocks()
    without = start(Case(data=2, moe=False, profile="zero2"), seed=1)
    run_steps(without, count=BEFORE)
    save(without, Path(root) / "without")
    started = start(TWO, seed=1)
    run_steps(started, count=BEFORE)
    save(started, Path(root) / "with")
    run_steps(started, first=BEFORE, count=STEPS - BEFORE)
    save(started, Path(root) / "end")
    runtime.destroy_distributed()


def load(root: str, name: str, case: Case) -> Started:
    started = start(case, seed=2)
    with CheckpointFile(Path(root) / name / str(BEFORE)) as reader:
        engine_state.load_engine(
            started.engine, reader, logical_name, averages="ema_decay" in case.training
        )
    return started


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of the checkpoints."""
    root = str(tmp_path_factory.mktemp("saved"))
    run_ranks(save_with_and_without, 2, root)
    return root


def go_on_alone(root: str) -> list[float]:
    """Largest difference of the average on one rank from the uninterrupted one, beyond its last
    bit, and that of one that was lost when the run was moved."""
    runtime.initialize_distributed()
    wake_blocks()
    differences = []
    for kept in (1, 0):
        started = load(root, "with", ONE)
        for state in started.engine.optimizer.optimizer.state.values():
            state["ema"].mul_(kept)
        run_steps(started, first=BEFORE, count=STEPS - BEFORE)
        found = averages(started)
        with CheckpointFile(Path(root) / "end" / str(BEFORE), weights="ema") as end:
            assert {end.content_kind(name) for name in end.names()} == {"ema"}
            expected = {name: end.read(name, "ema") for name in end.names()}
        last_bit = torch.finfo(torch.float32).eps
        off = [
            (found[f"ema {name}"] - values).abs() - last_bit * values.abs()
            for name, values in expected.items()
        ]
        differences.append(max(float(each.max()) for each in off))
    runtime.destroy_distributed()
    return differences


def test_a_run_moved_from_two_ranks_to_one_has_the_average_of_the_uninterrupted_one(
    saved: str,
) -> None:
    ((found, lost),) = run_ranks(go_on_alone, 1, saved)
    assert found <= 1e-7
    assert lost > 1e-3, "control"


def turn_on_and_off(root: str) -> tuple[bool, int, bool, bool]:
    """Whether an average that is turned on begins at the weights, and of how many it then is; and
    whether one that is turned off is gone, also in a live engine that goes back."""
    runtime.initialize_distributed()
    on = load(root, "without", ONE)
    states = on.engine.optimizer.optimizer.state
    begun = all(torch.equal(master, state["ema"]) for master, state in states.items())
    (count,) = {state["ema_count"] for state in states.values()}
    run_steps(on, count=1)
    with CheckpointFile(Path(root) / "with" / str(BEFORE)) as reader:  # as a rollback does
        engine_state.load_engine(on.engine, reader, logical_name, averages=True)
    goes_back = all(torch.equal(values, reader_values) for values, reader_values in _both(on, root))
    off = load(root, "with", Case(moe=False))
    run_steps(off, count=1)
    gone = not any("ema" in state for state in off.engine.optimizer.optimizer.state.values())
    runtime.destroy_distributed()
    return begun, count, goes_back, gone


def _both(started: Started, root: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The average of an engine beside that of the checkpoint."""
    with CheckpointFile(Path(root) / "with" / str(BEFORE)) as reader:
        return [
            (values, reader.read(name.removeprefix("ema "), "ema"))
            for name, values in averages(started).items()
            if name.startswith("ema ")
        ]


def test_an_average_is_begun_anew_restored_or_dropped(saved: str) -> None:
    assert run_ranks(turn_on_and_off, 1, saved) == [(True, 1, True, True)]
