"""Stage B on ranks: equal to one process in every layout, and resumed in each phase bit by bit."""

import hashlib
import json
import os
import shutil
import signal
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from cdrmix.checkpoint.checkpoint_file import CheckpointFile
from cdrmix.data.shards import read_manifest, write_manifest
from cdrmix.monitoring.metrics import deterministic_part
from cdrmix.monitoring.sinks import read_metrics
from tests.checkpoints import copy_late
from tests.harness import RanksFailed, run_ranks
from tests.small_reasoning_run import (
    NUM_PHASES,
    PHASE_STEPS,
    STAGE_A_STEPS,
    STEPS,
    arguments,
    before_step,
    start,
)
from tests.small_run import overrides, refused

TOLERANCE = 1e-5  # relative, as of Stage A's layouts


@pytest.fixture(scope="module")
def alone(small_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directory of both stages in one process."""
    folder = tmp_path_factory.mktemp("alone")
    argv = arguments(small_corpus, folder / "run", folder)
    assert run_ranks(start, 1, argv) == [0]
    return folder / "run"


def lines_of(run_dir: Path) -> list[dict[str, float]]:
    """Deterministic metrics of every step of Stage B."""
    lines = [deterministic_part(line) for line in read_metrics(run_dir / "metrics.jsonl")]
    return [line for line in lines if line["step"] > STAGE_A_STEPS]


def tensors_of(run_dir: Path, step: int = STEPS) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint."""
    with CheckpointFile(run_dir / "checkpoints" / str(step)) as reader:
        return {
            f"{kind} {name}": reader.full(name, kind)
            for name in reader.names()
            for kind in reader.kinds(name)
        }


def test_every_phase_moves_its_parts_and_no_other(alone: Path) -> None:
    learning = [{"memory"}, {"adapters"}, {"memory", "adapters"}, {"policy"}]
    for number, parts in enumerate(learning):
        second = STAGE_A_STEPS + 2 * number + 2  # of the two steps of a phase
        before, after = tensors_of(alone, second - 1), tensors_of(alone, second)
        names = [name for name in after if name.startswith("param ")]
        moved = {part_of_name(n) for n in names if not torch.equal(after[n], before[n])}
        assert moved == parts, second


def part_of_name(name: str) -> str:
    """Part of Stage B, or backbone, by the name in a checkpoint."""
    if "stage_b." not in name:
        return "backbone"
    words = name.split(".")
    return next((part for part in ("adapters", "policy") if part in words), "memory")


def start_with_late_copies(argv: list[str]) -> int:
    copy_late()
    return start(argv)


def test_copies_beside_a_step_of_any_phase_are_of_the_state_before_it(
    alone: Path, small_corpus: Path, tmp_path: Path
) -> None:
    argv = stage_b_of(alone, small_corpus, tmp_path, "zero1")
    assert run_ranks(start_with_late_copies, 1, argv) == [0]
    for step in range(STAGE_A_STEPS + 1, STEPS + 1):
        name = f"checkpoints/{step}/rank-00000.safetensors"
        assert (tmp_path / "run" / name).read_bytes() == (alone / name).read_bytes(), step


def left_of_stage_a(argv: list[str]) -> list[str]:
    """What is still there of Stage A's engine where Stage B begins."""
    from cdrmix.sessions import session
    from cdrmix.stage_b import stage_b_session

    held: dict[str, weakref.ref[Any]] = {}
    left: list[str] = []
    start_engine, train_stage_b = session.start_engine, stage_b_session.train_stage_b

    def watched(*args: Any) -> Any:
        engine = start_engine(*args)
        (held["engine"], held["model"]) = (weakref.ref(engine), weakref.ref(engine.module))
        held["weights"] = weakref.ref(next(engine.module.parameters()))
        held["optimizer"] = weakref.ref(engine.optimizer)
        return engine

    def noted(*args: Any) -> bool:
        left.extend(name for name, reference in held.items() if reference() is not None)
        return train_stage_b(*args)

    session.start_engine, stage_b_session.train_stage_b = watched, noted
    assert start(argv) == 0 and held
    return left


@pytest.mark.parametrize(
    ("profile", "precision"), [("zero1", "fp32"), ("zero2", "fp32"), ("zero1", "bf16")]
)
def test_nothing_of_stage_as_engine_is_held_through_stage_b(
    profile: str, precision: str, small_corpus: Path, tmp_path: Path
) -> None:
    argv = arguments(small_corpus, tmp_path / "run", tmp_path, "--profile", profile)
    argv += ["--set", f"training.precision={precision}"]
    for phase in ("adapter", "joint", "policy"):
        argv += ["--set", f"stage_b.training.{phase}_steps=0"]
    assert run_ranks(left_of_stage_a, 1, argv) == [[]]


def test_the_backbone_is_that_of_stage_a_bit_by_bit(alone: Path) -> None:
    before, after = tensors_of(alone, STAGE_A_STEPS), tensors_of(alone)
    names = [name for name in before if name.startswith("param ")]
    assert names
    for name in names:
        assert torch.equal(before[name], after[name]), name


@pytest.fixture(scope="module")
def in_company(alone: Path, small_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directory of Stage B on two ranks, on the same backbone."""
    folder = tmp_path_factory.mktemp("in_company")
    assert run_ranks(start, 2, stage_b_of(alone, small_corpus, folder, "zero1")) == [0, 0]
    return folder / "run"


def stage_b_of(alone: Path, data: Path, folder: Path, profile: str) -> list[str]:
    """Command line of Stage B alone, in a run directory of its own."""
    source = alone / "checkpoints" / str(STAGE_A_STEPS)
    more = ("--profile", profile, "--set", "training.stage=b", "--set", f"stage_b.run={source}")
    return arguments(data, folder / "run", folder, *more)


def assert_equal_within_rounding(run_dir: Path, expected: Path) -> None:
    """The same metrics in every step, and parameters that moved to the same place.

    Up to the policy's phase: an agent that earns nothing learns from rounding alone. That of
    test_stage_b_policy.py earns.
    """
    last = STEPS - PHASE_STEPS
    found, wanted = lines_of(run_dir)[: last - STAGE_A_STEPS], lines_of(expected)
    wanted = wanted[: last - STAGE_A_STEPS]
    assert [line["step"] for line in found] == list(range(STAGE_A_STEPS + 1, last + 1))
    for line, other in zip(found, wanted, strict=True):
        assert line == pytest.approx(other, rel=TOLERANCE, abs=1e-7), line["step"]
    begun = tensors_of(expected, STAGE_A_STEPS + 1)
    there, here = tensors_of(run_dir, last), tensors_of(expected, last)
    names = [name for name in here if name.startswith("param ")]
    # all together: Adam makes a step of its rate of a gradient that is nothing but rounding
    apart = sum(float((there[name] - here[name]).square().sum()) for name in names)
    moved = sum(float((here[name] - begun[name]).square().sum()) for name in names)
    assert apart <= (1e-3**2) * moved


def test_two_ranks_with_lessons_that_they_do_not_divide_equal_one(
    alone: Path, in_company: Path
) -> None:
    assert_equal_within_rounding(in_company, alone)


@pytest.mark.parametrize("ranks", [1, 2])
def test_zero2_equals_zero1(alone: Path, ranks: int, small_corpus: Path, tmp_path: Path) -> None:
    argv = stage_b_of(alone, small_corpus, tmp_path, "zero2")
    argv += ["--set", "stage_b.training.policy_steps=0"]
    assert run_ranks(start, ranks, argv) == [0] * ranks
    assert_equal_within_rounding(tmp_path / "run", alone)


def test_killed_and_resumed_in_every_phase_it_ends_the_same_bit_by_bit(
    alone: Path, in_company: Path, small_corpus: Path, tmp_path: Path
) -> None:
    argv = stage_b_of(alone, small_corpus, tmp_path, "zero1")
    for place in range(1, NUM_PHASES + 1):
        step = STAGE_A_STEPS + 2 * place - 1  # the second of its phase
        with pytest.raises(RanksFailed) as failed:
            run_ranks(start_and_be_killed, 2, argv, step)
        assert failed.value.outcomes[0].value == "SIGKILL"
        argv = [*argv, "--resume", "auto"]
    assert run_ranks(start, 2, argv) == [0, 0]
    assert lines_of(tmp_path / "run") == lines_of(in_company)
    found, wanted = tensors_of(tmp_path / "run"), tensors_of(in_company)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def start_and_be_killed(argv: list[str], step: int) -> int:
    """What one rank does; the first is killed before it trains `step`."""
    if os.environ["RANK"] == "0":
        before_step(step, lambda: os.kill(os.getpid(), signal.SIGKILL))
    return start(argv)


def copy_of(alone: Path, folder: Path, step: int) -> Path:
    """A run directory with one checkpoint of another."""
    target = folder / "source" / "checkpoints" / str(step)
    shutil.copytree(alone / "checkpoints" / str(step), target)
    return folder / "source"


def refusal(
    data: Path, folder: Path, source: Path, capfd: pytest.CaptureFixture[str], *more: str, code: int
) -> str:
    """What Stage B from `source` says when it is refused, with nothing of a run left behind."""
    settings = ("--set", "training.stage=b", "--set", f"stage_b.run={source}", *more)
    text = refused(arguments(data, folder / "run", folder, *settings), capfd, code=code)
    assert {path.name for path in (folder / "run").iterdir()} <= {".lock", "train.log"}
    return text


def test_a_stage_a_of_another_architecture_is_refused_by_the_keys_that_differ(
    alone: Path, small_corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    more = ("--set", "model.num_layers=4", "--set", "model.moe.top_k=1")
    text = refusal(small_corpus, tmp_path, alone, capfd, *more, code=2)
    assert "its backbone has another architecture" in text
    assert "model.moe.top_k: 2 there, 1 here; model.num_layers: 2 there, 4 here" in text


def test_an_altered_backbone_is_refused_by_its_digest(
    alone: Path, small_corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = copy_of(alone, tmp_path, STAGE_A_STEPS)
    file = source / "checkpoints" / str(STAGE_A_STEPS) / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    text = refusal(small_corpus, tmp_path, source, capfd, code=3)
    assert f"{source}: every checkpoint is damaged" in text
    assert "rank-00000.safetensors" in text


def test_an_unfinished_stage_a_is_refused(
    alone: Path, small_corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = copy_of(alone, tmp_path, STAGE_A_STEPS - 1)
    text = refusal(small_corpus, tmp_path, source, capfd, code=2)
    assert f"Stage A stopped at step {STAGE_A_STEPS - 1} of {STAGE_A_STEPS}" in text
    assert "Finish it first" in text


def test_a_checkpoint_of_stage_b_gives_its_backbone_where_that_is_all_there_is(
    alone: Path, small_corpus: Path, tmp_path: Path
) -> None:
    source = copy_of(alone, tmp_path, STEPS)
    phases = ("adapter_steps", "joint_steps", "policy_steps")
    short = [word for name in phases for word in ("--set", f"stage_b.training.{name}=0")]
    settings = ("--set", "training.stage=b", "--set", f"stage_b.run={source}", *short)
    argv = arguments(small_corpus, tmp_path / "run", tmp_path, *settings)
    assert run_ranks(start, 1, argv) == [0]
    assert lines_of(tmp_path / "run") == lines_of(alone)[:PHASE_STEPS]


def test_another_tokenizer_is_refused(
    alone: Path, small_corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data"
    shutil.copytree(small_corpus, data)
    manifest = read_manifest(data)
    file = data / manifest.tokenizer.file
    file.write_bytes(file.read_bytes() + b"\n")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    tokenizer = manifest.tokenizer.model_copy(update={"sha256": digest})
    write_manifest(data, manifest.model_copy(update={"tokenizer": tokenizer}))
    text = refusal(data, tmp_path, alone, capfd, code=2)
    assert "its backbone has another tokenizer" in text
    assert f"sha256 {manifest.tokenizer.sha256} there, {digest} here" in text


def test_a_run_in_stage_b_does_not_go_on_without_it(
    alone: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = copy_of(alone, tmp_path, STEPS)
    argv = ["--run-dir", str(source), "--resume", "auto", "--set", "stage_b=null"]
    text = refused(argv, capfd)
    assert "stage_b: " in text
    assert "cannot change when the run of" in text
    assert "but null is refused for a checkpoint of Stage B" in text


def start_with_a_broken_checker(argv: list[str]) -> int:
    """What one rank does whose checker gives no number in the second step of the policy."""
    from cdrmix.reasoning import reading_environment

    def spoil() -> None:
        original = reading_environment.ReadingEpisodes._earned
        reading_environment.ReadingEpisodes._earned = lambda *args: original(*args) * float("nan")

    if os.environ["RANK"] == "1":
        before_step(STEPS - 2, spoil)
    return start(argv)


def test_a_reward_that_is_not_finite_ends_all_ranks_and_loses_nothing(
    alone: Path,
    in_company: Path,
    small_corpus: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    argv = stage_b_of(alone, small_corpus, tmp_path, "zero1")
    argv += ["--set", "checkpoint.every_steps=1000"]
    text = refused(argv, capfd, run=start_with_a_broken_checker)
    assert "the reward of episode 0 is nan; a checker gives finite numbers" in text
    assert (tmp_path / "run" / "checkpoints" / str(STEPS - 1)).is_dir()
    assert run_ranks(start, 2, [*argv, "--resume", "auto"]) == [0, 0]
    assert lines_of(tmp_path / "run") == lines_of(in_company)


def test_bf16_goes_through_every_phase_on_a_rounded_backbone(
    alone: Path, small_corpus: Path, tmp_path: Path
) -> None:
    argv = stage_b_of(alone, small_corpus, tmp_path, "zero1")
    lengths = [f"stage_b.training.{phase}_steps=1" for phase in ("memory", "adapter", "joint")]
    settings = ["training.precision=bf16", "stage_b.training.policy_steps=1", *lengths]
    assert run_ranks(start, 1, [*argv, *overrides(settings)]) == [0]
    before, after = tensors_of(alone, STAGE_A_STEPS), tensors_of(tmp_path / "run", STEPS - 4)
    names = [name for name in before if name.startswith("param ")]
    for name in names:
        assert torch.equal(after[name], before[name].bfloat16().float()), name


def test_rows_of_a_user_without_evidence_are_learned_from(
    small_corpus: Path, tmp_path: Path
) -> None:
    text = "It rained. " * 20 + "The code of bami is 12. " + "It rained. " * 20
    rows = [
        {"task": "notes", "length_ratio": 2, "text": f"Day {number}. {text}", "match": "any"}
        | {"question": "What is the code of bami?", "answers": ["12"]}
        for number in range(12)
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = [f"stage_b.training.task_file={file}", "stage_b.training.task_file_share=1"]
    own += [f"stage_b.training.{phase}_steps=1" for phase in ("memory", "adapter", "joint")]
    own += ["stage_b.training.policy_steps=1"]
    run_dir = tmp_path / "run"
    argv = arguments(small_corpus, run_dir, tmp_path, *overrides(own))
    assert run_ranks(start, 1, argv) == [0]
    lines = [line for line in read_metrics(run_dir / "metrics.jsonl") if "stage_b/loss" in line]
    told = [line for line in lines if "stage_b/agreement" in line]
    assert len(told) >= 2 and all(0 <= line["stage_b/agreement"] <= 1 for line in told)
    assert not any("stage_b/recall" in line for line in lines), "nothing is labelled"
