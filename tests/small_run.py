"""A training run of seconds: the tiny variant made smaller, as ranks and launchers start it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.harness import run_ranks

CONFIG = "model_configs/cdrmix-core-tiny.yaml"
STEPS = 8
SMALL = (
    "model.num_layers=2",
    "model.transformer_fraction=0.5",
    "model.hidden_size=64",
    "model.num_heads=2",
    "model.moe.expert_hidden_size=64",
    "training.sequence_length=64",
    "training.learning_rate=3e-3",
    "training.warmup_steps=2",
    "checkpoint.every_steps=3",
    "evaluation.every_steps=4",
    "evaluation.final_tokens=1000",
    "evaluation.sample_tokens=4",
    "evaluation.baselines=false",
    "monitoring.log_every_steps=1",
    "monitoring.trackers=[]",
)


def overrides(settings: Sequence[str]) -> list[str]:
    """Settings PATH=VALUE as flags of a command line."""
    return [word for setting in settings for word in ("--set", setting)]


def arguments(
    data: Path, run_dir: Path | None, *more: str, config: Path | str = CONFIG
) -> list[str]:
    """Command line of launch/train.py for a small run of STEPS steps on a built folder."""
    settings = [*SMALL, f"data.path={data}", f"training.max_steps={STEPS}"]
    folder = ["--run-dir", str(run_dir)] if run_dir else []
    return ["--config", str(config), *overrides(settings), *folder, *more]


def start(argv: list[str]) -> int:
    """Do what one rank of launch/train.py does, without drawing; returns its exit code.

    The report is written with frames in place of curves. tests/unit/monitoring/test_report.py draws
    them, and so does every run under the launcher.
    """
    import launch.train
    from cdrmix.monitoring import page, plots

    plots.line_plot = lambda *_, **__: page.Drawing(
        "", "0 0 1 1", ""
    )  # nine plots: a third of a short run
    return launch.train.main(argv)


def before_step(step: int, act: Callable[[], Any]) -> None:
    """Have this rank do something of the test's own just before it trains step `step`."""
    from cdrmix.engines import stage_a

    original = stage_a.train_step

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if kwargs["step"] == step:
            act()
        return original(*args, **kwargs)

    stage_a.train_step = wrapped


def refused(
    argv: list[str],
    capfd: pytest.CaptureFixture[str],
    *fault: Any,
    run: Callable = start,
    code: int = 2,
) -> str:
    """What two ranks wrote that must both end with `code`, with one message between them.

    Args:
        argv: command line of launch/train.py.
        capfd: shows what the harness passes on of the ranks' output.
        fault: further arguments of `run`.
        run: what each rank does.
        code: exit code of every rank.
    """
    capfd.readouterr()
    assert run_ranks(run, 2, argv, *fault) == [code, code]
    text = capfd.readouterr().out
    assert text.count("error: ") == 1, f"one message, not one per rank:\n{text}"
    assert "Traceback" not in text
    return text
