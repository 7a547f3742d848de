"""Zero-shot rows and texts of a model in any layout are those of one process."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cdrmix import runtime
from cdrmix.evaluation import scoring
from cdrmix.evaluation.scoring import Prompt, Sampling, Scorer
from cdrmix.evaluation.suite import SUITES, Judged, Request
from cdrmix.evaluation.suites.zero_shot import ZeroShot
from cdrmix.monitoring.suite_results import SuiteResult
from cdrmix.sessions.evaluation import Asked, evaluate_whole
from tests.harness import run_ranks
from tests.hf_models import make_folder
from tests.made_run import made_run
from tests.published_tasks import write_published

# Of sums in float32 over other parts.
TOLERANCE = 1e-6
GREEDY = Sampling(max_new_tokens=5)
DRAWN = Sampling(max_new_tokens=5, until=("q",), temperature=1.0, top_p=0.9, seed=2)


class WithTexts(ZeroShot):
    """The suite, and continuations of five prompts of unequal length beside its rows."""

    def measure(self, judged: Judged, request: Request) -> SuiteResult:
        result = super().measure(judged, request)
        scorer = Scorer.of(judged)
        prompts = [Prompt([0, *range(20, 21 + n)], f"task {n}") for n in (4, 0, 11, 2, 7)]
        texts = [scorer.continue_prompts(prompts, each) for each in (GREEDY, DRAWN)]
        return replace(result, details={"texts": texts})


def register() -> None:
    SUITES["zero-shot"] = (__name__, WithTexts.__name__)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run with experts, one of blocks that take some tokens, and a Hugging Face model."""
    folder = tmp_path_factory.mktemp("models")
    made_run(folder / "experts", "model.init_std_scale=4")
    made_run(folder / "depths", "model.mod.capacity=0.5", "model.mod.mode=topk")
    make_folder(folder / "llama", "llama")
    return {name: folder / name for name in ("experts", "depths", "llama")}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    for name in ("lambada", "winogrande", "arc"):
        write_published(folder, only=name)
    return folder


@pytest.fixture(scope="module")
def expected(models: dict[str, Path], tasks: Path) -> dict[str, SuiteResult]:
    """Results of one process, by model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SUITES, "zero-shot", (__name__, WithTexts.__name__))
        request = Request(tasks=tasks)
        return {
            name: evaluate_whole(Asked("zero-shot", request, source)).result
            for name, source in models.items()
        }


def evaluate(argv: list[str], broken: bool = False) -> Any:
    """Does what one rank of launch/evaluate.py does; gives its exit code, and its JSON."""
    import launch.evaluate

    register()
    if broken:  # what is of one rank alone
        scoring._draws = lambda seed, prompt: np.random.default_rng(runtime.rank())
        Scorer._shared = (  # type: ignore[method-assign]
            lambda self, found, count: [next(iter(found.values()))] * count
        )
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = launch.evaluate.main(argv)
    return code, json.loads(out.getvalue() or "null")


def found_by(
    source: Path, tasks: Path, ranks: int, *flags: str, broken: bool = False
) -> dict[str, Any]:
    argv = [str(source), "--suite", "zero-shot", "--tasks", str(tasks), "--json"]
    argv += ["--batch-size", "3", *flags]
    outcomes = run_ranks(evaluate, ranks, argv, broken)
    assert [code for code, _ in outcomes] == [0] * ranks
    result: dict[str, Any] = outcomes[0][1]
    return result


def scores(result: dict[str, Any]) -> dict[tuple[str, str], list[Any]]:
    names = ("score", "low", "high", "n")
    return {(row["task"], row["metric"]): [row[name] for name in names] for row in result["rows"]}


CASES: tuple[tuple[str, int, tuple[str, ...]], ...] = (
    ("experts", 2, ()),
    ("experts", 2, ("--set", "parallel.pipeline=2")),
    ("experts", 2, ("--set", "parallel.tensor=2")),
    ("experts", 2, ("--set", "parallel.sequence=2")),
    ("depths", 2, ("--set", "parallel.expert=2")),
    ("llama", 2, ("--profile", "zero3")),
)


@pytest.mark.parametrize(("name", "ranks", "flags"), CASES)
def test_a_layout_has_the_rows_and_texts_of_one_process(
    name: str,
    ranks: int,
    flags: tuple[str, ...],
    models: dict[str, Path],
    tasks: Path,
    expected: dict[str, SuiteResult],
) -> None:
    found = found_by(models[name], tasks, ranks, *flags)
    whole = json.loads(json.dumps(expected[name].as_json()))
    ours, theirs = scores(found), scores(whole)
    assert ours.keys() == theirs.keys() and len(ours) >= 5
    for key, values in theirs.items():
        assert ours[key] == pytest.approx(values, rel=TOLERANCE), key
    assert found["texts"] == whole["texts"]
    assert len({text for text, *_ in found["texts"][1]}) > 2
    assert found["settings"]["tasks"] == whole["settings"]["tasks"]


def test_what_ranks_do_not_share_shows(
    models: dict[str, Path], tasks: Path, expected: dict[str, SuiteResult]
) -> None:
    found = found_by(models["experts"], tasks, 2, broken=True)
    whole = json.loads(json.dumps(expected["experts"].as_json()))
    assert all(a != b for a, b in zip(found["texts"], whole["texts"], strict=True))
    ours, theirs = scores(found), scores(whole)
    assert any(ours[key] != pytest.approx(theirs[key], rel=1e-3) for key in theirs)
