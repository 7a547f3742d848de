"""The shipped recipes of Stage B, shrunk: what their own numbers teach around a frozen backbone.

A recipe's backbone can look things up in its window before Stage B begins, and stays as it is. So
does the one here: of the tiny variant's size, it learns that in Stage B once, and is frozen for all
recipes. Of a recipe all counts are kept: segments of a window and of a text, operations, segments
of a retrieval, rollouts, and all numbers of the policy. All lengths in tokens are divided by
`LENGTHS`, as sentences here are so much shorter than a segment there; steps are divided by `STEPS`,
and rates multiplied by it; and a step has `TEXTS` texts. The policy's steps are divided by
`POLICY_STEPS`, and its rate is that of the tiny variant: what an update moves an agent's
preferences by is its rate times the width of the hidden state.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from cdrmix.config.load import shipped
from cdrmix.network import free_port
from cdrmix.stage_b.long_context import load_reader, score_examples, suite
from tools.benchmark.reasoning_table import LENGTH_RATIO, TASKS
from tools.benchmark.timing import report

RECIPES = ("1b", "4b", "40b", "200b")
LENGTHS = 4
STEPS = 20
POLICY_STEPS = 10
TEXTS = 16
NUM_EVALUATED = 32
TINY = "cdrmix-reason-tiny.yaml"
WINDOW = 256  # of the backbone that is frozen, as many tokens as its Stage A reads
SEGMENT = 16
MOST_FETCHED = 8  # segments of a retrieval, of the recipes with the most
COPYING_STEPS = 500
COPYING_RATE = 5e-3  # half of the reader's, which can copy already
NO_TABLE = ("evaluation.reasoning_examples=0",)


def shrunk(recipe: str, backbone: Path) -> dict[str, Any]:
    """The configuration of a recipe, shrunk, around the backbone of a run."""
    shapes = shipped("model_configs")
    config = yaml.safe_load((shapes / TINY).read_text())
    stage_b = yaml.safe_load((shapes / f"cdrmix-reason-{recipe}.yaml").read_text())["stage_b"]
    training = stage_b["training"]
    adapters = stage_b["adapters"]
    adapters["half_life_tokens"] = [each // LENGTHS for each in adapters["half_life_tokens"]]
    stage_b["memory"]["max_tokens"] //= LENGTHS
    # A width, which goes with the backbone's.
    stage_b["memory"]["summary_dim"] = config["stage_b"]["memory"]["summary_dim"]
    training["window_tokens"] //= LENGTHS
    training["segment_tokens"] = SEGMENT
    for name in ("memory_steps", "adapter_steps", "joint_steps", "warmup_steps"):
        training[name] //= STEPS
    training["policy_steps"] //= POLICY_STEPS
    for part in ("memory", "adapter"):
        training[f"{part}_learning_rate"] *= STEPS
    training["policy_learning_rate"] = config["stage_b"]["training"]["policy_learning_rate"]
    training["lessons_per_step"] = TEXTS // training["texts_per_lesson"]
    training["tasks"] = list(TASKS)
    config["name"] = f"cdrmix-reason-{recipe}-shrunk"
    config["training"]["stage"] = "b"
    config["evaluation"] = {"reasoning_examples": 0}
    config["stage_b"] = stage_b | {"run": str(backbone)}
    return config


def copying_backbone(place: Path, *, seed: int) -> Path:
    """Trains the backbone, and returns the run of a Stage A that ends with it.

    The tiny variant learns to answer first; then its backbone learns to do so from windows of 256
    tokens, in which up to seven segments stand beside the evidence, as a retrieval of several
    brings them.
    """
    reader = place / "reader"
    without_agent = (f"training.seed={seed}", "stage_b.training.policy_steps=0", *NO_TABLE)
    _train(reader, shipped("model_configs") / TINY, *without_agent)
    taught = place / "taught"
    settings = {
        "window_tokens": WINDOW,
        "segment_tokens": SEGMENT,
        "joint_steps": COPYING_STEPS,
        "adapter_learning_rate": COPYING_RATE,
        "memory_steps": 0,
        "adapter_steps": 0,
        "policy_steps": 0,
    }
    _train(
        taught,
        shipped("model_configs") / TINY,
        *(f"stage_b.training.{key}={value}" for key, value in settings.items()),
        *("training.stage=b", f"stage_b.run={_as_stage_a(reader, place / 'short', seed=seed)}"),
        *(f"stage_b.memory.top_k={MOST_FETCHED}", f"training.seed={seed}", *NO_TABLE),
    )
    return _as_stage_a(taught, place / "backbone", seed=seed)


def _as_stage_a(run: Path, place: Path, *, seed: int) -> Path:
    """A finished Stage A with the backbone of `run`, which is what Stage B begins from.

    It takes a single step from there, at a rate that leaves the weights as they are.
    """
    _train(
        place,
        shipped("model_configs") / TINY,
        *("training.stage=a", "training.max_steps=1", "training.warmup_steps=0"),
        *("training.learning_rate=1.0e-12", "training.min_learning_rate=1.0e-12"),
        *(f"training.start_from={run}", f"training.seed={seed}", "evaluation.baselines=false"),
    )
    return place


def _train(run_dir: Path, config: Path, *settings: str) -> float:
    """Runs the launcher on two ranks; returns the seconds of wall time."""
    command = [
        str(Path(sys.executable).with_name("deepspeed")),
        *("--num_gpus", "2", "--master_port", str(free_port())),
        *("--log_level", "error", "launch/train.py"),
        *("--config", str(config), "--run-dir", str(run_dir)),
    ]
    for setting in settings:
        command += ["--set", setting]
    began = time.monotonic()
    subprocess.run(command, check=True, stdout=sys.stderr)
    return time.monotonic() - began


def learn(recipe: str, backbone: Path, place: Path, *, seed: int) -> dict[str, Any]:
    """Trains a recipe, shrunk, and scores it on texts of eight windows beside its controls."""
    file = place / f"{recipe}.yaml"
    file.write_text(yaml.safe_dump(shrunk(recipe, backbone)))
    seconds = _train(place / recipe, file, f"training.seed={seed}")
    return {"recipe": recipe, "seconds": seconds, "scores": scores(place / recipe)}


def scores(run: Path, *, num_evaluated: int = NUM_EVALUATED) -> dict[str, Any]:
    """Task -> column -> score, interval and operations of a text, at eight windows."""
    loaded = load_reader(run)
    ratios = (LENGTH_RATIO,)
    examples = suite(loaded.lessons, TASKS, length_ratios=ratios, num_examples=num_evaluated)
    rows = score_examples(loaded.reader, loaded.lessons, examples, controls=True).rows
    return {row.task: row.as_json()["controls"] for row in rows}


def measure(rounds: int) -> dict[str, Any]:
    """All recipes, around one backbone; `rounds` is the number of seeds."""
    found = []
    for seed in range(rounds):
        with tempfile.TemporaryDirectory() as name:
            backbone = copying_backbone(Path(name), seed=seed)
            found += [learn(each, backbone, Path(name), seed=seed) for each in RECIPES]
    return {"rounds": rounds, "recipes": found}


def show(result: dict[str, Any]) -> None:
    """Print the scores."""
    for row in result["recipes"]:
        print(row["recipe"], f"{row['seconds']:.0f} s")
        for task, columns in row["scores"].items():
            said: Sequence[str] = [f"{name} {each['score']:.2f}" for name, each in columns.items()]
            print(" ", task, ", ".join(said))


if __name__ == "__main__":
    report(measure, show, rounds=1, description=__doc__)
