import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cdrmix.errors import DataError, InfrastructureError, PlanError
from cdrmix.evaluation.sandbox import probes, worker
from cdrmix.evaluation.sandbox.folder import empty_folder, is_folder_larger
from cdrmix.evaluation.sandbox.host import (
    Case,
    Limits,
    Program,
    run_programs,
    self_test,
    values_of,
    wall_limit,
)
from cdrmix.evaluation.sandbox.levels import INTERPRETER
from cdrmix.evaluation.sandbox.probes import PROBE_LIMITS, check_probes
from cdrmix.evaluation.sandbox.runner import GUARDS
from cdrmix.evaluation.sandbox.worker import Worker
from tests.harness import ROOT
from tests.sandboxed import needs_sandbox

pytestmark = needs_sandbox
LIMITS = Limits(cpu_seconds=1, memory_bytes=1 << 28)
ADD = "def add(a, b):\n    return a + b\n"
RIGHT = Program(ADD, tests="assert add(1, 2) == 3")


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Folders and processes of each test are gone at its end."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    before = set(psutil.Process().children(recursive=True))
    yield
    assert list((tmp_path / "temporary").iterdir()) == []
    assert set(psutil.Process().children(recursive=True)) <= before


def sleep(seconds: float) -> Program:
    return Program(f"import time\ntime.sleep({seconds})", tests="assert True")


# Of each kind: their order tells whether verdicts come in the order of the programs.
MIXED = [
    RIGHT,
    Program(ADD, tests="assert add(1, 2) == 4"),
    sleep(0.05),
    Program("def add(", tests="assert add(1, 2) == 4"),
    Program("raise KeyError", tests="assert True"),
    Program("import sys\nsys.exit()", tests="assert True"),
    Program("x = bytearray(2 << 30)", tests="assert True"),
    Program(ADD, cases=(Case("add(1, 2)", 3), Case("add('a', 1)", raises="TypeError"))),
    Program(ADD, cases=(Case("add(1, 2)", 4),)),
    # The message tells the order of a set and a random number, which must not change either.
    Program("import random", tests="assert False, (list(set('abcdefgh')), random.random())"),
    Program("import random", tests="assert random.random() < 0.5"),
] * 2


def outcomes(programs: list[Program], **options) -> list[tuple]:
    verdicts = run_programs(programs, limits=options.pop("limits", LIMITS), **options)
    return [(v.kind, v.error, v.message, v.answers) for v in verdicts]


def test_verdicts_are_the_same_with_one_and_four_workers():
    alone = outcomes(MIXED, workers=1)
    assert [kind for kind, *_ in alone[:9]] == [
        "passed",
        "wrong",
        "passed",
        "not_compiled",
        "error",
        "escaped_exit",
        "memory",
        "passed",
        "wrong",
    ]
    assert alone[:11] == alone[11:]
    assert outcomes(MIXED, workers=4) == alone


def test_processor_time_decides_where_time_on_the_clock_flips():
    program = Program("import time\ntime.sleep(0.15)", tests="assert True")
    assert outcomes([program], workers=1)[0][0] == "passed"
    short = Limits(cpu_seconds=1, memory_bytes=1 << 28, wall_seconds=0.05)
    assert outcomes([program], workers=1, limits=short)[0][0] == "timeout_wall"


def test_the_clock_runs_longer_on_a_crowded_machine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    monkeypatch.setattr(os, "getloadavg", lambda: (1.0, 1.0, 1.0))
    assert wall_limit(Limits(cpu_seconds=3), workers=3) == 32
    monkeypatch.setattr(os, "getloadavg", lambda: (30.0, 1.0, 1.0))
    assert wall_limit(Limits(cpu_seconds=3), workers=2) == 32 * 8
    assert wall_limit(Limits(wall_seconds=5.0), workers=2) == 5


def test_one_slow_program_lets_others_go_on():
    began = time.monotonic()
    verdicts = run_programs([sleep(0.4), *[RIGHT] * 5], limits=LIMITS, workers=2)
    assert [each.kind for each in verdicts] == ["passed"] * 6
    assert time.monotonic() - began < 30


def test_programs_are_taken_as_workers_become_free():
    taken = 0

    def endless() -> Iterator[Program]:
        nonlocal taken
        while True:
            taken += 1
            yield RIGHT

    verdicts = run_programs(endless(), limits=LIMITS, workers=1)
    assert next(verdicts).passed
    verdicts.close()
    assert taken < 20


def test_a_failing_source_of_programs_leaves_nothing_behind():
    def failing() -> Iterator[Program]:
        yield sleep(60)
        raise KeyError("task")

    began = time.monotonic()
    with pytest.raises(KeyError):
        list(run_programs(failing(), limits=Limits(), workers=1))
    assert time.monotonic() - began < 25


def test_a_lost_zygote_is_started_again():
    sandbox = Worker("kernel", LIMITS)
    try:
        assert sandbox.run(RIGHT, 30).passed
        os.kill(sandbox.process, signal.SIGKILL)
        assert sandbox.run(RIGHT, 30).passed
    finally:
        sandbox.close()


def test_an_interpreter_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(worker, "zygote_command", lambda *_: ["/nowhere/python"])
    with pytest.raises(InfrastructureError, match="no process could be started: .*/nowhere"):
        list(run_programs([RIGHT], limits=LIMITS, workers=1))


def test_an_interpreter_that_does_not_start_is_told(monkeypatch: pytest.MonkeyPatch):
    command = [sys.executable, "-c", "import sys; sys.stdin.read(1); sys.exit('no library')"]
    monkeypatch.setattr(worker, "zygote_command", lambda *_: command)
    with pytest.raises(InfrastructureError, match="exit status 1: no library. Evaluate again"):
        list(run_programs([RIGHT], limits=LIMITS, workers=1))


@pytest.mark.parametrize("is_killed", [True, False])
def test_no_process_outlives_the_host(is_killed: bool, tmp_path: Path):
    # Where the suite runs in the background, a shell has the interrupt ignored.
    script = (
        "import signal, sys, tempfile\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from cdrmix.evaluation.sandbox.host import *\n"
        f"tempfile.tempdir = {str(tmp_path / 'temporary')!r}\n"
        "programs = [Program('print(1)', tests='assert 1'),\n"
        "    Program('import time; open(\"started\", \"w\"); time.sleep(60)', tests='assert 1')]\n"
        "for verdict in run_programs(programs, workers=1): print(verdict.kind, flush=True)\n"
    )
    running = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT
    )
    assert running.stdout
    until = time.monotonic() + 30
    while not list((tmp_path / "temporary").glob("*/started")):
        assert time.monotonic() < until
        time.sleep(0.02)
    started = psutil.Process(running.pid).children(recursive=True)
    assert len(started) == 2
    running.send_signal(signal.SIGKILL if is_killed else signal.SIGINT)
    running.wait(30)
    running.stdout.close()
    _, alive = psutil.wait_procs(started, timeout=10)
    assert not alive
    assert list((tmp_path / "temporary").iterdir()) == []


def test_values_cross_and_are_compared_here():
    expressions = ["add(1, 2)", "{'a': (1, [2.5, None])}", "1 / 0", "object()"]
    answers = values_of(ADD, expressions, limits=LIMITS)
    assert [each.value for each in answers] == [3, {"a": (1, [2.5, None])}, None, None]
    assert [each.error for each in answers] == ["", "", "ZeroDivisionError", "NotPlain"]


def test_values_of_a_program_that_does_not_end_are_refused():
    with pytest.raises(DataError, match="0 of 1 values: not_compiled SyntaxError"):
        values_of("def (", ["1"], limits=LIMITS)


def test_answers_up_to_a_timeout_are_kept():
    cases = (Case("1", 1), Case("next(n for n in iter(int, 1) if n)"))
    (verdict,) = run_programs([Program("", cases=cases)], limits=LIMITS, workers=1)
    assert (verdict.kind, len(verdict.answers)) == ("timeout_cpu", 1)


def test_a_long_answer_is_no_answer():
    cases = (Case("'x' * 1000", "x" * 1000), Case("'x' * 2000", "x" * 2000))
    limits = Limits(memory_bytes=1 << 28, answer_bytes=2000)
    (verdict,) = run_programs([Program("", cases=cases)], limits=limits, workers=1)
    assert (verdict.kind, verdict.error) == ("error", "NotPlain")
    assert verdict.answers[0].value == "x" * 1000


def test_packages_are_imported_where_they_are_asked_for():
    program = Program(
        "import numpy\ndef total(n): return numpy.arange(n).sum()", cases=(Case("total(4)", 6),)
    )
    limits = Limits(memory_bytes=4 << 30, packages=("numpy",))
    (verdict,) = run_programs([program], limits=limits, workers=1)
    assert verdict.passed, verdict
    outside = Program("import pytest", tests="assert True")
    (verdict,) = run_programs([outside], limits=limits, workers=1)
    assert verdict.kind == "error", verdict


def test_a_package_that_is_not_installed_is_told_before_a_program_runs():
    with pytest.raises(DataError, match="'nopackage', which programs may import, is not installed"):
        run_programs([RIGHT], limits=Limits(packages=("nopackage",)))


def test_the_self_test_passes_here_and_tells_the_level():
    assert "Landlock ABI" in self_test("kernel").description


@pytest.mark.parametrize("guard", ["limits", "landlock", "seccomp"])
def test_the_self_test_refuses_a_sandbox_that_lacks_a_guard(guard: str):
    sandbox = Worker("kernel", PROBE_LIMITS, tuple(name for name in GUARDS if name != guard))
    try:
        with pytest.raises(PlanError, match="the sandbox does not hold here. No program is run"):
            check_probes(sandbox, 30)
    finally:
        sandbox.close()


def test_the_self_test_refuses_a_sandbox_in_which_nothing_passes(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(probes, "_TESTS", "assert not reached")
    with pytest.raises(PlanError, match="a right program does not pass here: wrong"):
        self_test("kernel")


def test_a_guard_that_the_kernel_refuses_lets_no_program_run(monkeypatch: pytest.MonkeyPatch):
    sixteen_layers = (  # more than which Landlock does not take
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from cdrmix.evaluation.sandbox import landlock, zygote\n"
        "landlock.forbid_new_privileges()\n"
        "rules = landlock.Ruleset(1)\n"
        "rules.allow(['/'], -1)\n"
        "for _ in range(16): landlock.restrict_to(rules.descriptor)\n"
        "zygote.main()"
    )
    command = [INTERPRETER, "-P", "-S", "-c", sixteen_layers]
    monkeypatch.setattr(worker, "zygote_command", lambda *_: command)
    with pytest.raises(PlanError, match="a guard could not be put on: .*landlock_restrict_self"):
        list(run_programs([RIGHT], limits=LIMITS, workers=1))


@pytest.mark.parametrize("limit", [{"cpu_seconds": 0}, {"cpu_seconds": 1.5}, {"file_bytes": -1}])
def test_limits_that_cannot_be_are_refused(limit: dict):
    with pytest.raises(ValueError, match="limits: (cpu_seconds|file_bytes) is"):
        Limits(**limit)


def test_a_program_has_tests_or_cases():
    with pytest.raises(ValueError, match="'mine': give it either tests or cases"):
        Program("", name="mine")
    with pytest.raises(ValueError, match="either"):
        Program("", tests="1", cases=(Case("1", 1),))


def test_a_folder_is_emptied_at_any_depth(tmp_path: Path):
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    (outside / "kept").mkdir(parents=True)
    (folder / "closed").mkdir(parents=True)
    (folder / "closed" / "file").write_text("")
    (folder / "closed").chmod(0)
    (folder / "link").symlink_to(outside, target_is_directory=True)
    here = os.open(folder, os.O_RDONLY)
    for _ in range(200):
        os.mkdir("d" * 100, dir_fd=here)
        inner = os.open("d" * 100, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)
    assert is_folder_larger(str(folder), 1 << 30, 10_000)  # deeper than a path can name
    empty_folder(str(folder))
    assert list(folder.iterdir()) == []
    assert (outside / "kept").is_dir()


def test_a_folder_is_measured_by_bytes_and_files(tmp_path: Path):
    folder = tmp_path / "folder"
    (folder / "inner").mkdir(parents=True)
    for name in "abc":
        (folder / "inner" / name).write_bytes(bytes(8192))
    assert not is_folder_larger(str(folder), 1 << 16, 4)
    assert is_folder_larger(str(folder), 1 << 16, 3)
    assert is_folder_larger(str(folder), 20_000, 4)
