"""Stage B over a pipeline: equal to one process, resumed bit by bit, and at another degree."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from cdrmix.cli import main
from tests.distributed.test_stage_b import (
    assert_equal_within_rounding,
    lines_of,
    stage_b_of,
    tensors_of,
)
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

JOINT = STAGE_A_STEPS + 2 * PHASE_STEPS  # the last step before the joint phase


@pytest.fixture(scope="module")
def alone(small_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directory of both stages in one process."""
    folder = tmp_path_factory.mktemp("alone")
    assert run_ranks(start, 1, arguments(small_corpus, folder / "run", folder)) == [0]
    return folder / "run"


def staged(alone: Path, data: Path, folder: Path, *more: str, profile: str = "zero1") -> list[str]:
    """Command line of Stage B on two stages, in a run directory of its own."""
    return [*stage_b_of(alone, data, folder, profile), *overrides(["stage_b.pipeline=2", *more])]


@pytest.fixture(scope="module")
def on_two_stages(
    alone: Path, small_corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Run directory of Stage B on two stages, on the same backbone."""
    folder = tmp_path_factory.mktemp("on_two_stages")
    evaluated = ("evaluation.reasoning_examples=1", "evaluation.reasoning_controls=false")
    argv = staged(alone, small_corpus, folder, *evaluated)
    assert run_ranks(start, 2, argv) == [0, 0]
    return folder / "run"


def test_two_stages_equal_one_process(alone: Path, on_two_stages: Path) -> None:
    assert_equal_within_rounding(on_two_stages, alone)


def test_two_pipelines_under_zero2_equal_one_process(
    alone: Path, small_corpus: Path, tmp_path: Path
) -> None:
    more = "stage_b.training.policy_steps=0"
    argv = staged(alone, small_corpus, tmp_path, more, profile="zero2")
    assert run_ranks(start, 4, argv) == [0] * 4
    assert_equal_within_rounding(tmp_path / "run", alone)


def test_a_checkpoint_holds_what_that_of_one_process_does(alone: Path, on_two_stages: Path) -> None:
    found, wanted = tensors_of(on_two_stages), tensors_of(alone)
    assert found.keys() == wanted.keys()
    backbone = [name for name in wanted if "stage_b." not in name]
    assert backbone and all(torch.equal(found[name], wanted[name]) for name in backbone)
    index = on_two_stages / "checkpoints" / str(STEPS) / "index.json"
    for name, kinds in json.loads(index.read_text(encoding="utf-8"))["tensors"].items():
        rank = 1 if "blocks.1." in name else 0
        files = {part["file"] for kind in kinds.values() for part in kind["fragments"]}
        assert files == {f"rank-{rank:05d}.safetensors"}, "each stage saves what it holds"


def test_killed_and_resumed_in_every_phase_it_ends_the_same_bit_by_bit(
    alone: Path, on_two_stages: Path, small_corpus: Path, tmp_path: Path
) -> None:
    argv = staged(alone, small_corpus, tmp_path)
    for place in range(1, NUM_PHASES + 1):
        step = STAGE_A_STEPS + 2 * place - 1  # the second of its phase
        with pytest.raises(RanksFailed) as failed:
            run_ranks(start_and_be_killed, 2, argv, step)
        assert failed.value.outcomes[1].value == "SIGKILL"
        argv = [*argv, "--resume", "auto"]
    assert run_ranks(start, 2, argv) == [0, 0]
    assert lines_of(tmp_path / "run") == lines_of(on_two_stages)
    found, wanted = tensors_of(tmp_path / "run"), tensors_of(on_two_stages)
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def start_and_be_killed(argv: list[str], step: int) -> int:
    """What one rank does; the last stage is killed before it trains `step`."""
    if os.environ["RANK"] == "1":
        before_step(step, lambda: os.kill(os.getpid(), signal.SIGKILL))
    return start(argv)


@pytest.mark.parametrize(("source", "ranks"), [("on_two_stages", 1), ("alone", 2)])
def test_it_goes_on_at_another_pipeline_degree(
    source: str,
    ranks: int,
    alone: Path,
    request: pytest.FixtureRequest,
    small_corpus: Path,
    tmp_path: Path,
) -> None:
    run_dir: Path = request.getfixturevalue(source)
    target = tmp_path / "run"
    shutil.copytree(run_dir, target, ignore=shutil.ignore_patterns("checkpoints"))
    place = f"checkpoints/{JOINT - 1}"  # in the middle of the adapters' phase
    shutil.copytree(run_dir / place, target / place)
    more = [f"stage_b.pipeline={ranks}", "stage_b.training.policy_steps=0"]
    argv = [*stage_b_of(alone, small_corpus, tmp_path, "zero1"), *overrides(more)]
    assert run_ranks(start, ranks, [*argv, "--resume", "auto"]) == [0] * ranks
    assert_equal_within_rounding(target, alone)


def test_its_end_evaluates_what_one_process_evaluates(
    on_two_stages: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at_the_end = json.loads((on_two_stages / "reasoning.json").read_text(encoding="utf-8"))
    verb = ["evaluate", "--suite", "reasoning", str(on_two_stages), "--examples", "1", "--json"]
    assert main(verb) == 0
    assert at_the_end["rows"]
    rows = json.loads(capsys.readouterr().out)["rows"]
    columns = at_the_end["rows"][0]
    assert [{name: row[name] for name in columns} for row in rows] == at_the_end["rows"]


def test_bf16_learns_on_a_rounded_backbone(alone: Path, small_corpus: Path, tmp_path: Path) -> None:
    lengths = [f"stage_b.training.{phase}_steps=1" for phase in ("memory", "adapter", "joint")]
    more = ["training.precision=bf16", "stage_b.training.policy_steps=0", *lengths]
    assert run_ranks(start, 2, staged(alone, small_corpus, tmp_path, *more)) == [0, 0]
    before = tensors_of(alone, STAGE_A_STEPS)
    after = tensors_of(tmp_path / "run", STAGE_A_STEPS + len(lengths))
    for name in (name for name in before if name.startswith("param ")):
        assert torch.equal(after[name], before[name].bfloat16().float()), name


@pytest.mark.parametrize("pipeline_of_stage_a", [1, 2])
def test_it_follows_on_stage_a_in_the_same_processes(
    pipeline_of_stage_a: int, small_corpus: Path, tmp_path: Path
) -> None:
    none = [f"stage_b.training.{phase}_steps=0" for phase in ("memory", "joint", "policy")]
    degrees = [f"parallel.pipeline={pipeline_of_stage_a}", "stage_b.pipeline=2"]
    argv = arguments(small_corpus, tmp_path / "run", tmp_path, *overrides([*degrees, *none]))
    assert run_ranks(start, 2, argv) == [0, 0]
    steps = [line["step"] for line in lines_of(tmp_path / "run")]
    assert steps == [STAGE_A_STEPS + 1, STAGE_A_STEPS + PHASE_STEPS]


def test_more_stages_than_blocks_are_refused_before_stage_a(
    small_corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    argv = arguments(small_corpus, tmp_path / "run", tmp_path, "--set", "stage_b.pipeline=3")
    assert "stage_b.pipeline = 3 is more than model.num_layers = 2" in refused(argv, capfd)
