"""Hugging Face models on two ranks, against plain torch, and through whole runs."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from cdrmix import runtime
from cdrmix.checkpoint import store
from cdrmix.checkpoint.files import read_json
from cdrmix.monitoring.sinks import read_metrics
from tests.checked_step import checked_step
from tests.distributed import test_resume
from tests.equal_runs import assert_equal_runs
from tests.harness import RanksFailed, run_ranks
from tests.hf_models import make_folder
from tests.hf_runs import CLIPPING, Case, make_config, plain_steps, run_steps, start
from tests.small_run import before_step
from tests.small_run import start as start_run

LOSS_TOLERANCE = 5e-6  # nats per token
NORM_TOLERANCE = 1e-5  # relative
# Of transformers, seconds of CPU that each rank would pay.
MODULES = (
    "transformers.models.auto.modeling_auto",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "mixtral", "nemotron_h")),
)
# Every family, and every kind of layout with a dense family and one with experts. `make layouts`
# has no part in it: all 20 pairs take a minute more, and have been run so (docs/models.md).
CASES = [
    Case("llama"),
    Case("llama", profile="zero3", recompute=True),
    Case("llama-tied", profile="zero2_offload"),
    Case("llama-tied", profile="zero3"),
    Case("qwen3", profile="zero3_offload"),
    Case("qwen3", profile="zero1", recompute=True),
    Case("qwen2", profile="zero2"),
    Case("mistral", profile="zero3"),
    Case("mixtral", profile="zero2", recompute=True),
    Case("mixtral", profile="zero3"),
    Case("qwen3_moe", profile="zero2"),
    Case("nemotron_h", profile="zero2_offload"),
    Case("nemotron_h", profile="zero3", recompute=True),
    # A loss of several means, and a z-loss.
    Case("llama", profile="zero3", objectives=True),
    # Not tested elsewhere: its check runs in the engine, before training.
    Case("olmo2", profile="zero2"),
    Case("olmo2", profile="zero3"),
]


def quiet() -> None:
    """Leaves out transformers' bars and advice."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def folder_of(root: Path, family: str) -> Path:
    return root / family


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with that of each family."""
    quiet()
    root = tmp_path_factory.mktemp("models")
    for family in dict.fromkeys(case.family for case in CASES + FAULTS):
        make_folder(folder_of(root, family), family)
    return root


# What must be noticed: the comparison fails by an order of magnitude and more.
FAULTS = [
    Case("mixtral", broken="local statistics"),
    Case("llama", profile="zero3", broken="head not counted"),
    Case("nemotron_h", broken="one document in mixers"),
    Case("mistral", broken="one document in attention"),
    Case("qwen2", broken="all parameters decayed"),
]


def plant(broken: str) -> None:
    """Put a fault into this process, in place of an earlier one."""
    from cdrmix.engines import routing
    from cdrmix.hf import model
    from cdrmix.hf.packing import Documents
    from cdrmix.optimizers import adamw

    faults: dict[str, tuple[Any, str, Any]] = {
        "local statistics": (routing, "mean_over_ranks", lambda x, _: x),
        "head not counted": (
            *(model.Head, "forward"),
            lambda self, hidden, score: score(hidden, self._weight().detach()),
        ),
        "one document in mixers": (Documents, "keep_apart_in", lambda *_: None),
        "one document in attention": (
            *(model, "document_positions"),
            lambda ids: torch.arange(ids.shape[1]).expand(ids.shape),
        ),
        "all parameters decayed": (
            *(adamw, "parameter_groups"),
            lambda model, weight_decay: [
                {"params": list(model.parameters()), "weight_decay": 500 * weight_decay}
            ],
        ),
    }
    for owner, name, original in _WHOLE:
        setattr(owner, name, original)
    _WHOLE.clear()
    if broken:
        owner, name, value = faults[broken]
        _WHOLE.append((owner, name, owner.__dict__[name]))
        setattr(owner, name, value)


_WHOLE: list[tuple[Any, str, Any]] = []  # what a fault has replaced


def train_each(root: Path, cases: list[Case]) -> list[list[tuple[float, float]]]:
    """Losses and gradient norms of each case on this rank, with its fault."""
    quiet()
    runtime.initialize_distributed()
    found = []
    for case in cases:
        plant(case.broken)
        started = start(case, folder_of(root, case.family))
        found.append(run_steps(started))
        started.engine.destroy()
    runtime.destroy_distributed()
    return found


@pytest.fixture(scope="module")
def trained(models: Path) -> dict[Case, list[tuple[float, float]]]:
    """Losses and norms of all cases, from one pair of ranks."""
    cases = CASES + FAULTS
    ours, theirs = run_ranks(train_each, 2, models, cases, timeout=300, preloaded=MODULES)
    assert ours == theirs
    return dict(zip(cases, ours, strict=True))


@pytest.fixture(scope="module")
def plain(models: Path) -> Callable[[Case], list[tuple[float, float]]]:
    """Losses and norms of a family by plain torch, computed once."""
    done: dict[str, Any] = {}

    def steps(case: Case) -> Any:
        plainly = Case(case.family, objectives=case.objectives)
        if str(plainly) not in done:
            folder = folder_of(models, case.family)
            done[str(plainly)] = plain_steps(folder, make_config(plainly, folder))
        return done[str(plainly)]

    return steps


def deviations(found: Any, expected: Any) -> tuple[float, float]:
    """Largest difference of losses, and of norms relative to what they should be."""
    pairs = list(zip(found, expected, strict=True))
    loss = max(abs(ours[0] - plain[0]) for ours, plain in pairs)
    return loss, max(abs(ours[1] - plain[1]) / plain[1] for ours, plain in pairs)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_plain_torch(case: Case, trained: Any, plain: Any) -> None:
    expected = plain(case)
    assert min(norm for _, norm in expected) > CLIPPING, "clipping must be active"
    loss, norm = deviations(trained[case], expected)
    assert loss < LOSS_TOLERANCE
    assert norm < NORM_TOLERANCE


@pytest.mark.parametrize("case", FAULTS, ids=lambda case: case.broken)
def test_the_comparison_notices(case: Case, trained: Any, plain: Any) -> None:
    loss, norm = deviations(trained[case], plain(case))
    assert loss > 10 * LOSS_TOLERANCE or norm > 10 * NORM_TOLERANCE


def types(root: Path, cases: list[Case]) -> list[dict[str, str]]:
    """Types of parameters, of their shares and of buffers in engines of each case."""
    quiet()
    runtime.initialize_distributed()
    found = []
    for case in cases:
        started = start(case, folder_of(root, case.family))
        (loss, _), *_ = run_steps(started, count=1)
        module = started.engine.module
        seen = {"loss is finite": str(loss < 100)}
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            seen[name] = str(getattr(tensor, "ds_tensor", tensor).dtype)
        found.append(seen)
        started.engine.destroy()
    runtime.destroy_distributed()
    return found


def test_frequencies_and_corrections_stay_float32(models: Path) -> None:
    profiles = ("zero2", "zero3")
    cases = [
        Case(family, profile=profile, precision="bf16")
        for family in ("llama", "nemotron_h")
        for profile in profiles
    ]
    (found, _) = run_ranks(types, 2, models, cases, preloaded=MODULES)
    kept = ("inv_freq", "e_score_correction_bias")
    for case, seen in zip(cases, found, strict=True):
        assert seen.pop("loss is finite") == "True"
        coarse = {name for name, kind in seen.items() if kind == "torch.bfloat16"}
        fine = {name for name, kind in seen.items() if kind == "torch.float32"}
        assert coarse | fine == set(seen), case
        assert all(name.endswith(kept) for name in fine), (case, fine)
        assert not any(name.endswith(kept) for name in coarse), case
        # Nemotron-H has no rotary positions; Llama nothing else.
        assert fine, case


# Matrices that Muon has in two layers, or in four of a kind each, by family and profile.
MUON = {
    Case("llama-tied", profile="zero3", optimizer="muon"): 2 * 7,
    Case("mixtral", profile="zero2", optimizer="muon"): 2 * (4 + 4 * 3),  # gate and up are two
    Case("nemotron_h", profile="zero3", optimizer="muon"): 2 + 2 + 4 + 4 * 2 + 2,
}


def muon_tables(root: Path, cases: list[Case]) -> list[dict[str, Any]]:
    """Table of parameters of each case, behind a checked first step."""
    from cdrmix.engines.stage_a_optimizer import parameter_table

    quiet()
    runtime.initialize_distributed()
    found = []
    for case in cases:
        started = start(case, folder_of(root, case.family))
        with checked_step(started.engine, started.config):
            run_steps(started, count=1)
        found.append(parameter_table(started.engine, started.config))
        started.engine.destroy()
    runtime.destroy_distributed()
    return found


def test_muon_takes_the_hidden_matrices_of_each_family(models: Path) -> None:
    tables, _ = run_ranks(muon_tables, 2, models, list(MUON), preloaded=MODULES)
    for (case, number), table in zip(MUON.items(), tables, strict=True):
        matrices = sum(row.get("matrices", 0) for row in table.values())
        assert matrices == number, (case, table)
        words = ("embed", "lm_head", "norm", "gate.weight", "conv1d", "A_log", "bias")
        others = {name for name in table if any(word in name for word in words)}
        assert {table[name]["optimizer"] for name in others} == {"adamw"}, case


LAST = 6
SETTINGS = {
    "training": {
        "max_steps": LAST,
        "global_batch_size": 4,
        "sequence_length": 48,
        "precision": "fp32",
        "learning_rate": 3e-3,
        "min_learning_rate": 1e-3,
        "warmup_steps": 2,
    },
    "checkpoint": {"every_steps": 3, "background": False},
    "evaluation": {"every_steps": 2, "final_tokens": 400, "sample_tokens": 3},
    "monitoring": {"log_every_steps": 1},
}


def run(argv: list[str], stopped_before: int = 0, killed_in_save: int = 0) -> int:
    """One rank of launch/train.py, told to stop before a step, or killed while it writes one."""
    quiet()
    if killed_in_save and int(os.environ["RANK"]) == 0:
        test_resume.FAULTS["KILL while tensors are written"](killed_in_save)
    if stopped_before:
        before_step(stopped_before, lambda: os.kill(os.getpid(), signal.SIGTERM))
    return start_run(argv)


@pytest.fixture(scope="module")
def command(
    small_corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., list[str]]:
    """Gives the command line of a run of Nemotron-H, in which one layer of four has experts."""
    quiet()
    root = tmp_path_factory.mktemp("command")
    base = make_folder(root / "base", "nemotron_h", vocab_size=4096, tokenizer=small_corpus)
    config = {
        "name": "hugging-face",
        "model": {"kind": "hf", "path": str(base), "moe": {"load_balance_weight": 0.01}},
        "data": {"path": str(small_corpus), "segment_documents": True},
        **SETTINGS,
    }
    (root / "run.yaml").write_text(yaml.safe_dump(config))

    def argv(run_dir: Path, *more: str) -> list[str]:
        return ["--config", str(root / "run.yaml"), "--run-dir", str(run_dir), *more]

    return argv


@pytest.fixture(scope="module")
def uninterrupted(command: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directory of a run under ZeRO-3."""
    run_dir = tmp_path_factory.mktemp("uninterrupted") / "run"
    argv = command(run_dir, "--profile", "zero3")
    assert run_ranks(run, 2, argv, preloaded=MODULES) == [0, 0]
    return run_dir


def test_whole_run(uninterrupted: Path) -> None:
    lines = read_metrics(uninterrupted / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, LAST + 1))
    assert lines[-1]["loss"] < lines[0]["loss"]
    for line in lines:
        assert 1 < line["moe/routing_entropy_bits"] <= 2  # of four experts
        assert line["moe/load_balance_loss"] >= 0.99
    assert lines[1]["eval/loss"] > 0
    summary = read_json(uninterrupted / "metrics.json")
    (layer,) = summary["evaluation"]["layers"]
    assert sum(layer["utilisation"]) == pytest.approx(1)
    assert summary["evaluation"]["tokens"] > 300
    assert len(summary["samples"]) == 3
    assert summary["samples"][-1]["text"]
    report = (uninterrupted / "report.html").read_text()
    assert "moe/" in report or "experts" in report


def test_resumed_run_is_the_uninterrupted_one(
    command: Any, uninterrupted: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    argv = command(run_dir, "--profile", "zero3")
    assert run_ranks(run, 2, argv, 4, preloaded=MODULES) == [75, 75]
    alone = tmp_path / "alone"
    shutil.copytree(run_dir, alone)
    again = [*argv, "--resume", "auto"]
    assert run_ranks(run, 2, again, preloaded=MODULES) == [0, 0]
    assert_equal_runs(run_dir, uninterrupted, steps=LAST)
    # One rank reads what two have saved, under another profile.
    again = [*command(alone, "--profile", "zero2"), "--resume", "auto"]
    assert run_ranks(run, 1, again, preloaded=MODULES) == [0]
    found, expected = (read_metrics(path / "metrics.jsonl") for path in (alone, uninterrupted))
    for ours, theirs in zip(found, expected, strict=True):
        for name in ("loss", "grad_norm", "moe/load_balance_loss"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5), name


def test_run_killed_in_the_middle_of_a_save_goes_on_from_the_one_before(
    command: Any, uninterrupted: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    argv = command(run_dir, "--profile", "zero3")
    with pytest.raises(RanksFailed, match="SIGKILL"):
        run_ranks(run, 2, argv, 0, LAST, preloaded=MODULES)
    found = store.find_newest(run_dir)
    assert found is not None
    assert (found.step, found.skipped) == (3, ())
    assert run_ranks(run, 2, [*argv, "--resume", "auto"], preloaded=MODULES) == [0, 0]
    assert_equal_runs(run_dir, uninterrupted, steps=LAST)
