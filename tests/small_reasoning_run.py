"""A run of both stages in seconds: cdrmix-reason-tiny made smaller, with short texts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import small_run
from tests.harness import ROOT
from tests.small_run import SMALL, overrides

STAGE_A_STEPS = 2
NUM_PHASES, PHASE_STEPS = 4, 2
STEPS = STAGE_A_STEPS + NUM_PHASES * PHASE_STEPS
_SMALLER = (
    f"training.max_steps={STAGE_A_STEPS}",
    "training.warmup_steps=1",
    "checkpoint.every_steps=1",
    f"checkpoint.keep={STEPS}",
    "evaluation.every_steps=null",
    "evaluation.reasoning_examples=0",
    "stage_b.memory.summary_dim=64",
    "stage_b.memory.max_tokens=256",
    "stage_b.training.memory_steps=2",
    "stage_b.training.adapter_steps=2",
    "stage_b.training.policy_steps=2",
    "stage_b.training.joint_steps=2",
    "stage_b.training.warmup_steps=1",
    "stage_b.training.lessons_per_step=3",  # which two ranks do not divide
    "stage_b.training.texts_per_lesson=2",
    "stage_b.training.group_size=4",
    "stage_b.training.backbone_lr_scale=0",
)


def arguments(data: Path, run_dir: Path, folder: Path, *more: str) -> list[str]:
    """Command line of launch/train.py for a run of both stages.

    Args:
        data: a built folder.
        run_dir: of the run.
        folder: for the configuration file.
        more: flags.
    """
    text = (ROOT / "model_configs" / "cdrmix-reason-tiny.yaml").read_text(encoding="utf-8")
    short = text.replace("length_ratios: [1, 2, 4, 8]", "length_ratios: [2]")
    assert short != text, "the variant trains on several lengths"
    config = folder / "cdrmix-reason-smaller.yaml"
    config.write_text(short, encoding="utf-8")
    settings = [*SMALL, *_SMALLER, f"data.path={data}"]
    return ["--config", str(config), *overrides(settings), "--run-dir", str(run_dir), *more]


def start(argv: list[str]) -> int:
    """What one rank does, where any answer earns a reward: an untrained agent earns none, and
    nothing is learned from episodes that all earn the same. The evaluation scores as ever."""
    # imported before, so that it keeps the checker
    from cdrmix.stage_b import long_context, phases

    assert long_context.grade_by is phases.grade_by
    phases.grade_by = lambda examples, tokenizer: lambda row, tokens: 1.0
    return small_run.start(argv)


def before_step(step: int, act: Callable[[], Any]) -> None:
    """Have this rank do something of the test's own just before it trains `step` of Stage B."""
    from cdrmix.stage_b.engine import StageB

    original = StageB.train_step

    def wrapped(self: StageB, run: Any, batch: Any, *, weights: Any) -> Any:
        if run.step == step:
            act()
        return original(self, run, batch, weights=weights)

    StageB.train_step = wrapped  # type: ignore[method-assign]
