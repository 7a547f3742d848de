"""What is copied beside the next step is what was there before it, whatever the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cdrmix import runtime
from cdrmix.checkpoint import engine_state
from cdrmix.checkpoint.saver import Saver
from cdrmix.models.backbone import logical_name
from tests.checkpoints import copy_late
from tests.distributed.test_layouts import AVERAGED, CUT, ON_HOST
from tests.harness import run_ranks
from tests.layouts import Case, Started, run_steps, start

BEFORE = 2  # steps done when a run is saved
BF16 = {"precision": "bf16"}
CASES = {
    "zero1": Case(data=2, expert=2),
    "zero1 in bf16": Case(data=2, training=BF16),
    "zero2": Case(data=2, profile="zero2", moe=False, accumulation=2, training=AVERAGED),
    "expert in bf16": Case(data=2, profile="expert", expert=2, training=BF16),
    "zero3 in sub-groups": Case(
        data=2,
        moe=False,
        profile="zero3",
        zero=CUT | {"sub_group_size": 1},
        training=AVERAGED,
    ),
    "zero3_offload in bf16": Case(data=2, moe=False, profile="zero3_offload", training=BF16),
    "zero2_offload": Case(data=2, profile="zero2_offload", expert=2),
    "zero1 offloaded": Case(data=2, zero=ON_HOST, accumulation=2),
    "pipeline": Case(pipeline=2, profile="pipeline", accumulation=2),
    "tensor": Case(tensor=2),
}


def save(started: Started, saver: Saver) -> None:
    held = engine_state.fragments(started.engine, logical_name)
    state = {"engine": engine_state.counters(started.engine)}
    saver.start(BEFORE, held, state=state, rank_state={})


def save_both_ways(root: str) -> None:
    """Save each case in front of a step and, as late as may be, beside it."""
    runtime.initialize_distributed()
    copy_late()
    for name, case in CASES.items():
        started = start(case, seed=1)
        run_steps(started, count=BEFORE)
        in_front, beside = (
            Saver([Path(root) / name / kind], keep=1, background=kind == "beside")
            for kind in ("in front", "beside")
        )
        save(started, in_front)
        in_front.wait()
        save(started, beside)
        assert beside.is_copying
        with engine_state.before_each_step(started.engine, beside.wait_for_copy):
            run_steps(started, first=BEFORE, count=1)
        assert not beside.is_copying
        beside.wait()
        beside.close()
    runtime.destroy_distributed()


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / str(BEFORE)).iterdir()}


def test_a_copy_beside_a_step_is_the_state_before_it(tmp_path: Path) -> None:
    run_ranks(save_both_ways, 2, str(tmp_path), timeout=300)
    differing: dict[str, Any] = {}
    for name in CASES:
        in_front, beside = (content(tmp_path / name / kind) for kind in ("in front", "beside"))
        assert "rank-00001.safetensors" in in_front
        if in_front != beside:
            differing[name] = [file for file in in_front if in_front[file] != beside.get(file)]
    assert differing == {}
