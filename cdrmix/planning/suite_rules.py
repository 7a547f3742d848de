"""Rules of the suites of evaluations in a run, of `planning/rules.py`."""

from __future__ import annotations

from cdrmix.planning.layout import Combination
from cdrmix.planning.rule import THIS_VERSION, Rule


def _has(combination: Combination, name: str) -> bool:
    return any(suite.label == name for suite in combination.config.evaluation.suites)


def _missing_suite(combination: Combination) -> str | None:
    """Suite that `best_by` names and the run does not have."""
    name = combination.config.evaluation.best_suite
    return None if name is None or _has(combination, name) else name


SUITE_RULES: tuple[Rule, ...] = (
    Rule(
        "best-by-a-suite-that-is-not-there",
        _missing_suite,
        "evaluation.best_by = {x.config.evaluation.best_by}: {found} is none of evaluation.suites, "
        "and nothing would give that score. Try a suite of that name there, or "
        "evaluation.best_by = loss",
        "a row of a suite that does not run",
    ),
    Rule(
        "code-suite-without-execution",
        lambda x: _has(x, "code") and not x.config.evaluation.execute_code,
        "evaluation.suites has code, which runs the programs that the model writes, and "
        "evaluation.execute_code = false. Try evaluation.execute_code = true, or leave the suite "
        "out",
        "the tests of a program need the program to run",
    ),
    Rule(
        "reasoning-suite-in-training",
        lambda x: _has(x, "reasoning"),
        "evaluation.suites has reasoning: its suites judge the model of Stage A, which has no "
        "memory. Try leaving it out: Stage B measures reasoning at its end "
        "(evaluation.reasoning_examples), and so does `cdrmix evaluate`",
        "the suite reads through the memory that Stage B trains",
    ),
    Rule(
        "suites-in-stage-b",
        lambda x: x.training.stage == "b" and x.config.evaluation.suites,
        "evaluation.suites with training.stage = b: suites judge the model of Stage A, and are "
        "{unavailable} in Stage B. Try evaluation.suites=[], and `cdrmix evaluate` afterwards",
        THIS_VERSION,
    ),
)
