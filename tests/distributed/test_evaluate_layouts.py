"""`launch/evaluate.py`: scores of a trained model in any layout are those of one process."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cdrmix.evaluation.suite import Request
from cdrmix.monitoring.suite_results import SuiteResult
from cdrmix.sessions.evaluation import Asked, evaluate_whole
from tests import tiny_suite
from tests.harness import run_ranks
from tests.hf_models import make_folder
from tests.made_run import made_run
from tests.small_run import overrides, refused
from tests.unit.evaluation.test_judged import TEXT, held_out

# Of sums in float32 over other parts; a fault is off by 1e-3 and more.
TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run with experts, one without, and a Hugging Face model."""
    folder = tmp_path_factory.mktemp("models")
    made_run(folder / "experts")
    made_run(folder / "dense", "model.moe=null", "model.mtp.num_tokens=2")
    make_folder(folder / "llama", "llama")
    return {name: folder / name for name in ("experts", "dense", "llama")}


@pytest.fixture(scope="module")
def data(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return held_out(tmp_path_factory.mktemp("data") / "data", models["experts"])


@pytest.fixture(scope="module")
def expected(models: dict[str, Path], data: Path) -> dict[str, SuiteResult]:
    """Results of one process, by model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny_suite.SUITES, "perplexity", (tiny_suite.__name__, "TinySuite"))
        results = {}
        for name, source in models.items():
            given = None if name == "llama" else str(data)
            request = Request(data=given, options={"text": TEXT})
            results[name] = evaluate_whole(Asked("perplexity", request, source)).result
        return results


def evaluate(argv: list[str], broken: str = "") -> Any:
    """Does what one rank of launch/evaluate.py does; gives its exit code, and its JSON."""
    import launch.evaluate

    tiny_suite.register()
    if broken:
        _plant(broken)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = launch.evaluate.main(argv)
    return code, json.loads(out.getvalue() or "null")


def code_of(argv: list[str]) -> int:
    return evaluate(argv)[0]


def _plant(broken: str) -> None:
    """Reads the first part of a tensor on every rank, where parts differ."""
    from cdrmix.checkpoint import module_part
    from cdrmix.parallel.topology import Topology

    faults: dict[str, Callable[[], None]] = {}

    def first_shard() -> None:
        original = module_part.shard_of

        def shard_of(tensor: Any) -> Any:
            shard = original(tensor)
            return shard and replace(shard, offset=tuple(0 for _ in shard.offset))

        module_part.shard_of = shard_of  # type: ignore[assignment]

    def first_experts() -> None:
        Topology.expert_rank = 0  # type: ignore[assignment, misc]

    def first_share() -> None:
        original = module_part.zero3_share
        module_part.zero3_share = lambda parameter: (0, original(parameter)[1])  # type: ignore[assignment]

    faults |= {"tensor": first_shard, "expert": first_experts, "zero3": first_share}
    faults[broken]()


def scores(result: dict[str, Any]) -> dict[str, tuple[float, int]]:
    return {row["task"]: (row["score"], row["n"]) for row in result["rows"]}


CASES: tuple[tuple[str, int, tuple[str, ...]], ...] = (
    ("experts", 2, ()),
    ("experts", 2, ("--set", "parallel.pipeline=2")),
    ("experts", 2, ("--set", "parallel.tensor=2")),
    ("experts", 2, ("--set", "parallel.expert=2")),
    ("experts", 4, ("--set", "parallel.pipeline=2", "--set", "parallel.tensor=2")),
    ("dense", 2, ("--profile", "zero3")),
    ("dense", 2, ("--set", "parallel.pipeline=2")),
    ("dense", 2, ("--set", "parallel.sequence=2")),
    ("llama", 2, ("--profile", "zero3")),
)


@pytest.mark.parametrize(("name", "ranks", "flags"), CASES)
def test_a_layout_has_the_scores_of_one_process(
    name: str,
    ranks: int,
    flags: tuple[str, ...],
    models: dict[str, Path],
    data: Path,
    expected: dict[str, SuiteResult],
) -> None:
    argv = [str(models[name]), "--json", "--option", f"text={TEXT}", "--batch-size", "2", *flags]
    argv += [] if name == "llama" else ["--data", str(data)]
    outcomes = run_ranks(evaluate, ranks, argv)
    assert [code for code, _ in outcomes] == [0] * ranks
    (found, *others) = (result for _, result in outcomes)
    assert others == [None] * (ranks - 1)  # one rank prints
    whole = scores(expected[name].as_json())
    for task, (score, n) in scores(found).items():
        assert (score, n) == (pytest.approx(whole[task][0], rel=TOLERANCE), whole[task][1])
    assert scores(found).keys() == whole.keys()
    stored = sorted(models[name].glob("evaluations/*.json"))
    assert bool(stored) == (name != "llama")


@pytest.mark.parametrize(
    ("broken", "name", "flag"),
    [
        ("tensor", "experts", ("--set", "parallel.tensor=2")),
        ("expert", "experts", ("--set", "parallel.expert=2")),
        ("zero3", "dense", ("--profile", "zero3")),
    ],
)
def test_a_part_that_is_read_to_the_wrong_place_shows(
    broken: str,
    name: str,
    flag: tuple[str, ...],
    models: dict[str, Path],
    expected: dict[str, SuiteResult],
) -> None:
    argv = [str(models[name]), "--json", "--option", f"text={TEXT}", *flag]
    ((code, found), _) = run_ranks(evaluate, 2, argv, broken)
    assert code == 0
    whole, _ = scores(expected[name].as_json())["text"]
    assert abs(scores(found)["text"][0] - whole) > 1e-3


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (overrides(["parallel.tensor=3"]), "parallel.data * tensor * pipeline"),
        (overrides(["training.seed=3"]), "--set training.seed: a trained model is evaluated as it"),
        (["--profile", "zero3"], "zero_optimization.stage = 3 cannot run with model.moe"),
        (["--checkpoint", "5"], "has no checkpoint of step 5; it has checkpoints of steps 7"),
        (["--data", "/nowhere"], "/nowhere"),
        (["--colour"], "unrecognized arguments: --colour. Try --help"),
    ],
)
def test_an_error_is_told_once_by_all_ranks(
    words: list[str], told: str, models: dict[str, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    text = refused([str(models["experts"]), *words], capfd, run=code_of)
    assert told in text
