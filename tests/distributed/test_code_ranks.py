"""Suite `code` on two ranks: the rows of one process, and the first rank alone runs programs."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from pathlib import Path
from typing import Any

from cdrmix.evaluation.code_tasks import judging
from cdrmix.evaluation.suite import Request
from cdrmix.sessions.evaluation import Asked, evaluate_whole
from tests.harness import run_ranks
from tests.made_run import made_run
from tests.sandboxed import needs_sandbox

pytestmark = needs_sandbox

TASK = {
    "name": "double",
    "prompt": "def double(x):\n",
    "entry_point": "double",
    "solution": "def double(x):\n    return 2 * x\n",
    "cases": [[[3], 6]],
}
OPTIONS = {"samples": 3, "k": 1, "max_new_tokens": 6, "temperature": 1, "style": "fenced"}


def evaluate(argv: list[str]) -> Any:
    """Does what one rank of launch/evaluate.py does; gives its exit code, its JSON, its messages,
    and how often it ran programs."""
    import launch.evaluate

    runs: list[int] = []
    run_programs = judging.run_programs

    def counted(*args: Any, **more: Any) -> Any:
        runs.append(1)
        return run_programs(*args, **more)

    judging.run_programs = counted
    out = io.StringIO()
    with tempfile.TemporaryFile("w+") as told:  # a file, as the end of a rank writes stacks there
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(told):
            code = launch.evaluate.main(argv)
        told.seek(0)
        return code, json.loads(out.getvalue() or "null"), told.read(), len(runs)


def write(path: Path, task: dict[str, Any]) -> Path:
    path.write_text(json.dumps(task) + "\n")
    return path


def flags(run: Path, tasks: Path) -> list[str]:
    given = [f"--option={name}={value}" for name, value in OPTIONS.items()]
    return [str(run), "--suite", "code", "--tasks", str(tasks), "--execute-code", "--json", *given]


def test_ranks_have_the_rows_of_one_process(tmp_path: Path) -> None:
    made_run(tmp_path / "run")
    tasks = write(tmp_path / "tasks.jsonl", TASK)
    request = Request(tasks=tasks, execute_code=True, options=OPTIONS)
    alone = evaluate_whole(Asked("code", request, tmp_path / "run")).result
    expected = json.loads(json.dumps(alone.as_json()))
    outcomes = run_ranks(evaluate, 2, flags(tmp_path / "run", tasks))
    assert [code for code, *_ in outcomes] == [0, 0]
    found = outcomes[0][1]
    for name in ("rows", "verdicts", "passed"):
        assert found[name] == expected[name], name
    assert found["settings"] == expected["settings"] | {"layout": found["settings"]["layout"]}
    # solutions, and samples
    assert [runs for *_, runs in outcomes] == [2, 0]

    failing = write(tmp_path / "failing.jsonl", TASK | {"cases": [[[3], 7]]})
    outcomes = run_ranks(evaluate, 2, flags(tmp_path / "run", failing))
    assert [code for code, *_ in outcomes] == [2, 2], "both end, and none waits for the other"
    told = "".join(told for _, _, told, _ in outcomes)
    assert told.count("the solution of double fails its own tests") == 1
