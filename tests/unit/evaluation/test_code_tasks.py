"""Code tasks: those that ship, files as they are published, answers cut out, and scores."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from cdrmix.errors import DataError
from cdrmix.evaluation.code_tasks.extraction import STYLES, answer_of, program_of, stops_of
from cdrmix.evaluation.code_tasks.files import TaskSet, read_sets
from cdrmix.evaluation.code_tasks.judging import (
    JudgedSample,
    Sample,
    checked_tasks,
    counted,
    judge,
    pass_at_k,
    rows_of,
)
from cdrmix.evaluation.code_tasks.task import CodeTask, limits_of
from cdrmix.evaluation.sandbox.program import Case, Verdict
from tests.sandboxed import needs_sandbox

# Rows as they are published, with tasks of our own.
HUMAN_EVAL = {
    "task_id": "HumanEval/0",
    "prompt": "from math import floor\n\n\ndef halved(x: int) -> int:\n"
    '    """Return half of x, rounded down."""\n',
    "canonical_solution": "    return floor(x / 2)\n",
    "test": "\n\nMETADATA = {'author': 'x'}\n\n\ndef check(candidate):\n"
    "    assert candidate(4) == 2\n    assert candidate(-3) == -2\n",
    "entry_point": "halved",
}
MBPP = {
    "text": "Write a function to join the keys of a dictionary.",
    "code": "def sep(d):\r\n  return ','\r\ndef joined(d):\r\n  return sep(d).join(d)",
    "task_id": 601,
    "test_setup_code": "",
    "test_list": [
        'assert joined({"a": 1}) == "a"',
        'assert joined({"a": 1, "b": 2}) == "a,b"',
        'assert joined({}) == ""',
    ],
    "challenge_test_list": [],
}
SANITIZED_MBPP = {
    "source_file": "Benchmark Questions Verification V2.ipynb",
    "task_id": 602,
    "prompt": "Write a function to find the area of a circle.",
    "code": "import math\ndef area(r):\n  return math.pi * r ** 2",
    "test_imports": ["import math"],
    "test_list": ["assert math.isclose(area(1), math.pi)", "assert area(0) == 0"],
}
MBPP_PLUS = {
    "task_id": 603,
    "code": "\ndef larger(a, b):\n  return a if a > b else b\n",
    "prompt": "Write a function to find the larger number.",
    "source_file": "Benchmark Questions Verification V2.ipynb",
    "test_imports": [],
    "test_list": ["assert larger(1, 2) == 2"],
    "test": "import numpy as np\n\ndef assertion(out, exp, atol):\n"
    "    assert np.allclose(out, exp)\n"
    "\nfor inp, exp in zip([[1, 2], [5, 3]], [2, 5]):\n    assertion(larger(*inp), exp, 0)\n",
}
HUMAN_EVAL_PLUS = {
    "task_id": "HumanEval/700",
    "prompt": 'def spread(values):\n    """Return the least and the greatest, as a tuple."""\n',
    "contract": "\n    assert type(values) == list\n",
    "canonical_solution": "    return (min(values), max(values)) if values else ()\n",
    "entry_point": "spread",
    "base_input": [[[1, 2, 3]], [[]]],
    "plus_input": [[[0.1, 0.3]], [[float("inf"), 1]]],
    "atol": 0,
}
OWN = {
    "name": "twice",
    "prompt": "def twice(x):\n",
    "entry_point": "twice",
    "solution": "def twice(x):\n    return 2 * x\n",
    "cases": [[[3], 6], [["a"], "aa"]],
}
CLOSE_BODY = "    return (min(values) + 1e-9, max(values)) if values else ()\n"


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def without(row: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != name}


def task(prompt: str = 'def f(x):\n    """Doc."""\n', **more: Any) -> CodeTask:
    return CodeTask("t", "here", prompt, "f", "def f(x):\n    return x\n", **more)


@pytest.fixture(scope="module")
def own() -> list[CodeTask]:
    (tasks,) = read_sets(None)
    return tasks.tasks


def test_forty_tasks_ship_ten_of_each_grade(own: list[CodeTask]) -> None:
    assert [each.grade for each in own] == [1] * 10 + [2] * 10 + [3] * 10 + [4] * 10
    for each in own:
        assert len(each.cases) >= 10, each.name
        assert len(each.wrong) == 2, each.name
        assert each.is_open, each.name
        assert each.is_defined_in(each.solution), each.name
        assert '"""' in each.prompt, each.name


@needs_sandbox
def test_solutions_that_ship_pass_and_wrong_ones_fail(own: list[CodeTask]) -> None:
    """They run in the sandbox, 120 programs: cases of a task share one."""
    checked = checked_tasks(own, level="kernel")
    # A sample is a whole program here: fenced, it takes the place of the prompt's function.
    samples = {
        each.name: [Sample(f"```python\n{program}```") for program in (each.solution, *each.wrong)]
        for each in checked
    }
    judged = judge(checked, samples, style="fenced")
    for each in checked:
        kinds = [sample.verdict.kind for sample in judged[each.name]]
        assert kinds[0] == "passed", each.name
        assert "passed" not in kinds[1:], each.name
        assert "not_compiled" not in kinds, each.name


@needs_sandbox
def test_files_are_read_as_they_are_published(tmp_path: Path) -> None:
    write(tmp_path / "human_eval.jsonl", HUMAN_EVAL)
    write(tmp_path / "mbpp.jsonl", MBPP)
    (tmp_path / "sanitized.json").write_text(json.dumps([SANITIZED_MBPP]))
    write(tmp_path / "mbpp_plus.jsonl", MBPP_PLUS)
    line = json.dumps(HUMAN_EVAL_PLUS).encode()
    (tmp_path / "HumanEvalPlus-v1.jsonl.gz").write_bytes(gzip.compress(line + b"\n"))
    write(tmp_path / "own.jsonl", OWN)
    sets = {each.name: each for each in read_sets(tmp_path)}
    assert {name: [task.name for task in each.tasks] for name, each in sets.items()} == {
        "HumanEvalPlus-v1": ["HumanEval/700"],
        "human_eval": ["HumanEval/0"],
        "mbpp": ["MBPP/601"],
        "mbpp_plus": ["MBPP/603"],
        "own": ["twice"],
        "sanitized": ["MBPP/602"],
    }
    [human], [mbpp], [plus] = (sets[n].tasks for n in ("human_eval", "mbpp", "HumanEvalPlus-v1"))
    assert human.prompt == HUMAN_EVAL["prompt"]
    assert human.preamble == "from math import floor\n\n\n"
    assert mbpp.entry_point == "joined", "not the helper before it"
    assert mbpp.prompt.startswith('"""\nWrite a function to join')
    assert mbpp.prompt.endswith('assert joined({}) == ""\n"""\n')
    assert mbpp.cases[1] == Case("joined({'a': 1, 'b': 2})", "a,b")
    assert not mbpp.tests
    [sanitized] = sets["sanitized"].tasks
    assert (sanitized.setup, sanitized.cases) == ("import math", ())
    assert limits_of(sets["mbpp_plus"].tasks).packages == ("numpy",)
    assert limits_of(sets["mbpp"].tasks).packages == ()
    assert plus.calls[:2] == ("spread([1, 2, 3])", "spread([])")
    whole = [task for each in sets.values() for task in each.tasks]
    checked = {each.name: each for each in checked_tasks(whole, level="kernel")}
    assert checked["HumanEval/700"].cases[0].expected == (1, 3)
    assert len(checked["HumanEval/700"].cases) == 4
    # Answers to them: right, close to right, and wrong ones.
    given = {
        "HumanEval/0": ["    return x // 2\n", "    return int(x / 2)\n"],
        "HumanEval/700": [CLOSE_BODY, CLOSE_BODY.replace("1e-9", "1e-3"), "    return values\n"],
        "MBPP/601": ["def joined(d):\n    return ','.join(d)\n", "def joined(d): return ''\n"],
        "MBPP/602": ["def area(r): return math.pi * r * r\n", "def area(r): return 3 * r * r\n"],
        "MBPP/603": ["def larger(a, b): return max(a, b)\n", "def larger(a, b): return b\n"],
        "twice": ["    return x + x\n", "    return x\n"],
    }
    samples = {name: [Sample(text) for text in texts] for name, texts in given.items()}
    judged = judge([checked[name] for name in given], samples)
    for name, found in judged.items():
        passed = [sample.verdict.passed for sample in found]
        assert passed == [True] + [False] * (len(passed) - 1), (name, found)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([without(HUMAN_EVAL, "test")], "line 1: has no field 'test', .* HumanEval's form"),
        ([MBPP, without(MBPP, "test_list")], "line 2: has no field 'test_list', .* MBPP's form"),
        ([without(MBPP, "text")], "has no field 'text or prompt'"),
        ([without(HUMAN_EVAL_PLUS, "atol")], "has no field 'atol', .* EvalPlus's form"),
        ([without(OWN, "cases")], "has no field 'cases', .* CDRmix's form"),
        ([{"question": "?"}], "line 1: has the fields of no known form .*HumanEval: task_id"),
        ([HUMAN_EVAL_PLUS | {"task_id": "Mbpp/2"}], "Use the data set evalplus/mbppplus instead"),
        ([HUMAN_EVAL, HUMAN_EVAL], "line 2: the task 'HumanEval/0' stands in .*line 1 too"),
        ([OWN | {"grade": 5}], "grade is 5 and not 1, 2, 3 or 4"),
        ([OWN | {"cases": [[3, 6]]}], "3 is no list of arguments"),
        ([OWN | {"cases": []}], "it has no cases"),
        ([MBPP | {"test_list": ["assert other() == 1"]}], "calls no function of its code"),
        ([MBPP | {"code": 3}], "line 1: is no task of MBPP's form .*3 is no text"),
        ([], "is empty. Give a file with one task or more"),
    ],
)
def test_a_file_that_cannot_be_used_is_told(
    tmp_path: Path, rows: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        read_sets(write(tmp_path / "tasks.jsonl", *rows))


def test_a_folder_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not there. Give --tasks with a file of HumanEval"):
        read_sets(tmp_path / "none")
    with pytest.raises(DataError, match="holds no file of code tasks"):
        read_sets(tmp_path)
    (tmp_path / "text.txt").write_text("")
    with pytest.raises(DataError, match="is no file of code tasks, which ends with .jsonl"):
        read_sets(tmp_path / "text.txt")
    write(tmp_path / "a.jsonl", HUMAN_EVAL)
    write(tmp_path / "b.jsonl", HUMAN_EVAL)
    with pytest.raises(
        DataError, match=r"b.jsonl, line 1: the task 'HumanEval/0' stands in .*a.js"
    ):
        read_sets(tmp_path)
    (tmp_path / "b.jsonl").write_text("{")
    with pytest.raises(DataError, match="b.jsonl, line 1: is no JSON"):
        read_sets(tmp_path)
    (tmp_path / "b.jsonl").rename(tmp_path / "b.jsonl.gz")
    with pytest.raises(DataError, match=r"b.jsonl.gz: cannot be read \(Not a gzipped file"):
        read_sets(tmp_path)


@needs_sandbox
@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            HUMAN_EVAL | {"canonical_solution": "    return x\n"},
            r"line 1: the solution of HumanEval/0 fails its own tests \(wrong: AssertionError",
        ),
        (OWN | {"cases": [[[3], 7]]}, r"of twice fails its own tests \(wrong: twice\(3\) is 6\)"),
        (
            HUMAN_EVAL_PLUS | {"plus_input": [[None], [3]]},
            r"of HumanEval/700 gives no value for spread\(3\) \(TypeError\)",
        ),
        (
            HUMAN_EVAL_PLUS | {"canonical_solution": "    return (\n"},
            "the solution of HumanEval/700 fails: .*not_compiled",
        ),
    ],
)
def test_a_solution_that_fails_its_own_tests_is_told(
    tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    (tasks,) = read_sets(write(tmp_path / "tasks.jsonl", row))
    with pytest.raises(DataError, match=message):
        checked_tasks(tasks.tasks, level="kernel")


def test_a_limit_takes_tasks_of_all_grades() -> None:
    (few,) = read_sets(None, limit=8)
    assert [each.grade for each in few.tasks] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert len(read_sets(None, limit=99)[0].tasks) == 40


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("    return x\n", "    return x\n"),
        ("    return x\n\ndef g():\n    pass", "    return x\n"),
        ("    return x\n\n\nclass A:\n", "    return x\n\n"),
        ("    return x\n# Next", "    return x"),
        ("    return x\nif __name__", "    return x"),
        ("    return x\nprint(f(1))", "    return x"),
        # a dedent to the margin that is none of those
        ("    y = x\n\n    return y\nassert f(1)\n    z", "    y = x\n\n    return y"),
        ("    y = (\n        x\n    )\n    return y", "    y = (\n        x\n    )\n    return y"),
        ("    y = [\n        x\n]\n    return y", "    y = [\n        x\n]\n    return y"),
        ("return x", ""),
        ("\n\n    return x", "\n\n    return x"),
        ("", ""),
    ],
)
def test_a_completion_ends_where_its_function_does(text: str, answer: str) -> None:
    assert answer_of(task(), text, "completion") == answer
    program = program_of(task(), answer, "completion")
    assert program == (task().prompt + answer if answer.strip() else "")


def test_a_completion_may_begin_within_a_line() -> None:
    begun = task(prompt="def f(x):\n    return")
    assert answer_of(begun, " x\nx = 1", "completion") == " x"
    assert answer_of(begun, "x", "completion") == "x"


def test_a_whole_program_may_have_several_functions() -> None:
    asked = task(prompt='"""\nWrite f.\n"""\n')
    text = "import re\n\ndef g():\n    pass\n\n# f\ndef f(x):\n    return g()\n"
    for behind in ("assert f(1)", "print(f(1))", "if True:", '"""\nWrite h.', "class A:"):
        answer = answer_of(asked, f"{text}{behind}", "completion")
        assert program_of(asked, answer, "completion") + "\n" == text
    assert "\ndef" in stops_of(task(), "completion")
    assert "\ndef" not in stops_of(asked, "completion")
    assert stops_of(asked, "fenced") == ()


@pytest.mark.parametrize(
    ("text", "program"),
    [
        (
            "Sure:\n```python\ndef f(x):\n    return x\n```\nDone.",
            "import re\ndef f(x):\n    return x\n",
        ),
        ("```\ndef f(x): return x\n```", "import re\ndef f(x): return x\n"),
        # the first one that parses, and of Python
        ("```python\ndef f(\n```\n```py\ndef f(x): pass\n```", "import re\ndef f(x): pass\n"),
        ("```bash\nls\n```\n```python\ndef f(x): pass\n```", "import re\ndef f(x): pass\n"),
        # cut off before its end
        ("```python\ndef f(x): pass\n", "import re\ndef f(x): pass\n"),
        # a body alone goes on with the prompt
        ("    return x\n", "import re\ndef f(x):\n    return x\n"),
        ("def f(x): return x", "import re\ndef f(x): return x"),
        ("```python\nx = '\\d'\ndef f(x): pass\n```", "import re\nx = '\\d'\ndef f(x): pass\n"),
        (" \n", ""),
    ],
)
def test_a_fenced_answer_takes_the_place_of_the_function(text: str, program: str) -> None:
    asked = task(prompt="import re\ndef f(x):\n")
    assert program_of(asked, answer_of(asked, text, "fenced"), "fenced") == program


def test_pass_at_k_has_no_bias() -> None:
    def plug_in(samples: int, passed: int, k: int) -> float:
        return 1 - (1 - passed / samples) ** k

    assert pass_at_k(10, 3, 1) == pytest.approx(0.3)
    assert pass_at_k(10, 3, 5) == pytest.approx(0.916667, abs=1e-6)
    # a control: the share put into the formula is too low
    assert plug_in(10, 3, 1) == pytest.approx(0.3)
    assert plug_in(10, 3, 5) == pytest.approx(0.83193)
    for k in (1, 5, 10):
        assert pass_at_k(10, 0, k) == 0
    assert pass_at_k(5, 5, 1) == 1
    assert pass_at_k(5, 1, 5) == 1
    assert pass_at_k(10, 8, 3) == 1, "any 3 of 10 have one of the 8"
    assert 0 < pass_at_k(100_000, 1, 1) < 2e-5


def judged(*passed: bool) -> list[JudgedSample]:
    return [
        JudgedSample(Verdict("passed" if each else "wrong"), is_empty=False, is_truncated=False)
        for each in passed
    ]


def test_intervals_are_over_tasks() -> None:
    tasks = [
        CodeTask(str(n), "", "", "f", "", cases=(Case("f()"),), grade=1 + n // 10)
        for n in range(20)
    ]
    # half of the tasks always pass, the others never do
    cold = {each.name: judged(*[int(each.name) < 10] * 4) for each in tasks}
    hot = {each.name: judged(True, False, False, False) for each in tasks}
    hot["0"][3] = JudgedSample(Verdict("not_compiled"), is_empty=False, is_truncated=True)
    found = {0.2: cold, 0.8: hot}
    rows = rows_of(TaskSet("s", tasks, ""), found, {1: 0.2, 2: 0.8}, seed=0)
    table = {(row.task, row.metric): row for row in rows}
    first = table["s", "pass@1"]
    assert (first.score, first.n) == (0.5, 20)
    # of 20 tasks: sqrt(.25 / 20) is .11; over the 80 samples it would be half of that
    assert first.low is not None
    assert first.high is not None
    assert 0.2 < first.low < 0.35
    assert 0.65 < first.high < 0.8
    assert table["s", "pass@2"].score == pytest.approx(0.5)
    assert table["s", "compile_rate"].score == pytest.approx(1 - 1 / 160)
    assert table["s", "truncated"].score == pytest.approx(1 / 160)
    assert table["s", "empty"].score == 0
    grades = {row.task: row.score for row in rows if row.metric == "pass@1"}
    assert grades == {"s": 0.5, "s grade 1": 1.0, "s grade 2": 0.0}
    assert counted(found) == {"wrong": 99, "passed": 60, "not_compiled": 1}


@needs_sandbox
def test_verdicts_of_samples_are_told_apart() -> None:
    asked = task(cases=(Case("f(2)", 4),))
    texts = {
        "passed": "    return x * x\n",
        "wrong": "    return x\n",
        "not_compiled": "    return (\n",
        "error": "    return y\n",
    }
    samples = [*map(Sample, texts.values()), Sample("x", True), Sample("    return x\n", True)]
    samples.append(Sample("    return 4\nrest that is cut off at the most tok", True))
    found = judge([asked], {"t": samples})["t"]
    assert [each.verdict.kind for each in found[:4]] == list(texts)
    assert [each.is_empty for each in found] == [False] * 4 + [True, False, False]
    assert [each.verdict.passed for each in found[4:]] == [False, False, True]
    # what stood behind a whole program was cut off, and not the program
    assert [each.is_truncated for each in found] == [False] * 5 + [True, False]
    kinds = [each.verdict.kind for each in judge([asked], {"t": samples}, workers=4)["t"]]
    assert kinds == [each.verdict.kind for each in found]
    assert STYLES == ("completion", "fenced")


@needs_sandbox
def test_an_answer_that_is_equal_to_everything_fails() -> None:
    """Values are compared outside of its process; the control compares them inside."""
    asked = task(cases=(Case("f(2)", 4),))
    inside = task(tests="assert f(2) == 4")
    samples = [Sample('    return type("A", (), {"__eq__": lambda a, b: True})()\n')]
    outside = judge([asked], {"t": samples})["t"][0].verdict
    assert (outside.kind, outside.error) == ("error", "NotPlain")
    assert judge([inside], {"t": samples})["t"][0].verdict.passed
