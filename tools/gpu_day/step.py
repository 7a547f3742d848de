"""Whole training steps in variants, each a run of launch/train.py with overrides."""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from cdrmix.config.load import load_config
from cdrmix.errors import EXIT_USER_ERROR
from cdrmix.planning.cluster import GIB, make_cluster
from cdrmix.planning.counts import count
from cdrmix.planning.profile import choose
from tools.benchmark.run import ROOT

H200_BF16_FLOPS = 989e12
_WARM_UP_STEPS = 2
_SECONDS_A_VARIANT = 240.0  # compiling takes one to three minutes of it


@dataclass(frozen=True)
class Variant:
    """One row of the table: overrides of the configuration."""

    name: str
    overrides: tuple[str, ...] = ()
    profile: str | None = None


VARIANTS = (
    Variant("as it is, micro batch 2", ("training.micro_batch_size=2",)),
    Variant(
        "blocks compiled, dropless",
        ("training.micro_batch_size=2", "training.compile=blocks", "model.moe.drop_tokens=false"),
    ),
    Variant(
        "selective recomputation, micro batch 4",
        ("training.micro_batch_size=4", "training.activation_checkpointing=selective"),
    ),
    Variant(
        "blocks recomputed, micro batch 16",
        ("training.micro_batch_size=16", "training.activation_checkpointing=block"),
    ),
    Variant("micro batch 4", ("training.micro_batch_size=4",)),
    Variant("ZeRO-2, micro batch 2", ("training.micro_batch_size=2",), "zero2"),
    Variant(
        "not deterministic, micro batch 2",
        ("training.micro_batch_size=2", "training.deterministic=false"),
    ),
)
_SAMPLES = 16  # of a step: whole micro batches in every variant
_COMMON = (
    "data.path=sample",
    f"training.global_batch_size={_SAMPLES}",
    "training.max_steps=100",
    "training.warmup_steps=2",
    "monitoring.log_every_steps=1",
    "monitoring.trackers=[]",
    "evaluation.baselines=false",
    "evaluation.every_steps=null",
    "checkpoint.every_steps=100",
)
_SMALL = ("training.sequence_length=64",)


def planned(variant: Variant) -> dict[str, float]:
    """Plans a variant on one H200 as `cdrmix plan` does, with the day's steps of few samples.

    A step of 16 samples ends eight times as often as one of 128, and its optimizer counts more.
    """
    config_file = ROOT / "model_configs/cdrmix-core-1b.yaml"
    config = load_config(config_file, [*_COMMON, *variant.overrides])
    cluster = make_cluster(nodes=1, gpus_per_node=1, gpu="h200-141")
    plan = choose(config, cluster, profile=variant.profile)
    memory, cost = plan.estimates()
    return {
        "us_a_token": 1e6 / cost.tokens_per_second,
        "mfu": cost.mfu,
        "planned_gib": memory.total / GIB,
    }


def step_rows(variants: Sequence[Variant], *, steps: int, smoke: bool) -> Any:
    """Yields a row for each variant; one that is refused or fails says so."""
    for variant in variants:
        yield {"name": variant.name, **measure(variant, steps=steps, smoke=smoke)}


def measure(variant: Variant, *, steps: int, smoke: bool) -> dict[str, Any]:
    """Speed and memory of a variant from its metrics.jsonl, the first steps left out.

    The run is killed after `steps` of them: at its end it would save 50 GB of a 1B.
    """
    config_file = ROOT / f"model_configs/cdrmix-core-{'tiny' if smoke else '1b'}.yaml"
    overrides = [*_COMMON, *(_SMALL if smoke else ()), *variant.overrides]
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as told:
        run_dir = Path(folder) / "run"
        words = [sys.executable, "launch/train.py", "--config", str(config_file)]
        words += ["--run-dir", str(run_dir)]
        words += [word for each in overrides for word in ("--set", each)]
        words += [] if variant.profile is None else ["--profile", variant.profile]
        # in the process group of the stage, which ends with it
        process = subprocess.Popen(words, cwd=ROOT, stdout=told, stderr=told)
        try:
            lines = _first_lines(run_dir / "metrics.jsonl", process, steps)
            code = process.poll()
        finally:
            _kill(process)
        if len(lines) < steps:
            told.seek(0)
            errors = [line for line in told.read().splitlines() if "rror" in line]
            why = (errors[-1] if errors else "no reason told")[:300]
            kind = "refused" if code == EXIT_USER_ERROR else "failed"
            return {kind: f"{why} (exit code {code}, {len(lines)} steps)"}
        plan = json.loads((run_dir / "plan.json").read_text(encoding="utf-8"))
    model = load_config(config_file, overrides).model
    length = 64 if smoke else 4096
    speed = statistics.median(line["tokens_per_second"] for line in lines[_WARM_UP_STEPS:])
    flops = count(model, length).train_flops_per_token
    peak = max(line["memory_peak_bytes"] for line in lines)
    found: dict[str, Any] = {
        "tokens_per_second": float(speed),
        "us_a_token": 1e6 / speed,
        "mfu": flops * speed / H200_BF16_FLOPS,
        "peak_gib": peak / GIB,
        "loss": float(lines[-1]["loss"]),
    }
    planned = (plan["memory_per_rank_bytes"] or {}).get("total")
    if planned:
        found |= {"planned_gib": planned / GIB, "peak_of_planned": peak / planned}
    return found


def _kill(process: subprocess.Popen[Any]) -> None:
    """Kills a run with its watchdog and whatever else it has started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for each in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
    process.kill()
    process.wait()


def _first_lines(file: Path, process: subprocess.Popen[Any], steps: int) -> list[dict[str, Any]]:
    """Lines of a growing metrics.jsonl, until there are so many or its run is over or late."""
    deadline = time.monotonic() + _SECONDS_A_VARIANT
    while True:
        is_over = process.poll() is not None
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        lines = text.rpartition("\n")[0].splitlines()
        if len(lines) >= steps or is_over or time.monotonic() > deadline:
            return [json.loads(line) for line in lines[:steps]]
        time.sleep(0.1)
