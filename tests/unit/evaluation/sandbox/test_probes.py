import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest

from cdrmix.evaluation.sandbox.host import Case, Limits, Program, Verdict
from cdrmix.evaluation.sandbox.runner import GUARDS
from cdrmix.evaluation.sandbox.worker import Worker
from tests.sandboxed import needs_sandbox
from tests.unit.evaluation.sandbox import probes
from tests.unit.evaluation.sandbox.probes import Probe

pytestmark = needs_sandbox
LIMITS = Limits(cpu_seconds=1, memory_bytes=1 << 28, folder_bytes=1 << 24)
TABLE: dict[str, Probe] = {
    **probes.FILES,
    **probes.PATHS_BESIDE_LANDLOCK,
    **probes.PROCESSES,
    **probes.NETWORK_AND_KERNEL,
    **probes.RESOURCES,
    **probes.JUDGE,
}
# Long enough for a second of processor time on a crowded machine.
WALL_SECONDS, SHORT_WALL_SECONDS = 300.0, 0.3


class Sandboxes:
    """Workers by the guards that they do without, each started when it is first asked for."""

    def __init__(self) -> None:
        self._workers: dict[tuple[str, ...], Worker] = {}

    def run(self, program: Program, without: tuple[str, ...] = (), wall: float = WALL_SECONDS):
        guards = tuple(name for name in GUARDS if name not in without)
        if guards not in self._workers:
            self._workers[guards] = Worker("kernel", LIMITS, guards)
        return self._workers[guards].run(program, wall)

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()


@pytest.fixture(scope="module")
def sandboxes() -> Iterator[Sandboxes]:
    made = Sandboxes()
    yield made
    made.close()


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, object]]:
    secret = tmp_path_factory.mktemp("outside") / "secret"
    secret.write_text("secret")
    abstract = f"cdrmix-probe-{os.getpid()}"
    with (
        socket.socket(socket.AF_UNIX) as stream,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams,
    ):
        stream.bind(f"\0{abstract}")
        stream.listen(8)
        datagrams.bind(f"\0{abstract}-datagrams")
        yield {
            "secret": str(secret),
            "process": os.getpid(),
            "abstract": abstract,
            "numpy": numpy.__file__,
        }


def program_of(probe: Probe, places: dict[str, object]) -> Program:
    source = probe.source.format(**places)
    return Program(source, setup=probes.SHARED + probes.CHECKED, tests="assert reached")


def told(verdict: Verdict) -> str:
    return f"{verdict.kind} {verdict.error}".strip()


@pytest.mark.parametrize("name", TABLE)
def test_a_probe_ends_as_it_must(name: str, sandboxes: Sandboxes, places: dict[str, object]):
    probe = TABLE[name]
    before = os.stat(str(places["secret"]))
    wall = SHORT_WALL_SECONDS if probe.verdict == "timeout_wall" else WALL_SECONDS
    verdict = sandboxes.run(program_of(probe, places), wall=wall)
    assert told(verdict) == probe.verdict, verdict
    after = Path(str(places["secret"]))
    assert after.read_text() == "secret"
    assert (after.stat().st_mode, after.stat().st_mtime) == (before.st_mode, before.st_mtime)
    assert stat.S_ISREG(after.stat().st_mode)


@pytest.mark.parametrize("name", [name for name, probe in TABLE.items() if probe.without])
def test_a_probe_passes_without_its_guard(
    name: str, sandboxes: Sandboxes, places: dict[str, object]
):
    probe = TABLE[name]
    verdict = sandboxes.run(program_of(probe, places), probe.without)
    if probe.may_lack and not verdict.passed and told(verdict) in (probe.verdict, probes.REFUSED):
        pytest.skip(f"level kernel: this machine refuses it by itself: {verdict.message}")
    assert verdict.passed, verdict


@pytest.mark.parametrize("name", probes.NOT_COMPILED)
def test_text_that_is_no_program_is_not_compiled(name: str, sandboxes: Sandboxes):
    source, error = probes.NOT_COMPILED[name]
    verdict = sandboxes.run(Program(source, tests="assert True"))
    assert verdict.kind == "not_compiled"
    assert error in ("", verdict.error)  # of two, it depends on Python's version


@pytest.mark.parametrize("name", probes.RIGHT)
def test_a_right_program_passes(name: str, sandboxes: Sandboxes):
    verdict = sandboxes.run(Program(probes.RIGHT[name], tests="assert True"))
    assert verdict.passed, verdict


FORGERIES = {
    "an object equal to all": "class Any:\n    def __eq__(self, other): return True\n"
    "def add(a, b): return Any()",
    "an int equal to all": "class Any(int):\n    def __eq__(self, other): return True\n"
    "def add(a, b): return Any(0)",
    "the report in a frame below": "import sys\nframe = sys._getframe()\n"
    "while 'report' not in frame.f_locals: frame = frame.f_back\n"
    "report = frame.f_locals['report']\n{forged}report.end('done')",
}


@pytest.mark.parametrize("name", FORGERIES)
def test_only_values_compared_outside_show_a_forgery(name: str, sandboxes: Sandboxes):
    source = FORGERIES[name].replace("{forged}", "")
    assert sandboxes.run(Program(source, tests="assert add(1, 2) == 3")).passed
    forged = FORGERIES[name].replace("{forged}", "report.add({'value': 0}); ")
    verdict = sandboxes.run(Program(forged, cases=(Case("add(1, 2)", 3),)))
    assert not verdict.passed
    assert verdict.kind in ("wrong", "error"), verdict


def test_expected_values_are_nowhere_in_the_sandbox(sandboxes: Sandboxes):
    source = (
        "import gc, sys\ntexts = []\n"
        "frame = sys._getframe()\n"
        "while frame: texts.append(repr(frame.f_locals)); frame = frame.f_back\n"
        "texts += [repr(each) for each in gc.get_objects()]\n"
        "wanted = [''.join(reversed(name)) for name in ('119003917', 'deksa')]\n"
        "found = [any(name in text for text in texts) for name in wanted]"
    )
    cases = (Case("found", None), Case("'asked' and 719300911", 1))
    # The second question holds the value, so that the search is shown to find what is there.
    verdict = sandboxes.run(Program(source, cases=cases))
    assert verdict.answers[0].value == [True, True]
    cases = (Case("found", 719300911), Case("'asked'", "asked"))
    verdict = sandboxes.run(Program(source, cases=cases))
    assert verdict.answers[0].value == [False, True]


def test_root_has_no_capabilities_left(sandboxes: Sandboxes):
    ask = (
        "import ctypes, struct\n"
        "header = ctypes.create_string_buffer(struct.pack('=Ii', 0x20080522, 0))\n"
        "sets = ctypes.create_string_buffer(24)\n"
        "assert ctypes.CDLL(None).capget(header, sets) == 0\n"
        "found = any(sets.raw)"
    )
    program = Program(ask, cases=(Case("found", False),))
    assert sandboxes.run(program).passed
    if os.geteuid() == 0:
        assert sandboxes.run(program, ("capabilities",)).kind == "wrong"


def test_what_a_program_says_is_printable_and_short(sandboxes: Sandboxes):
    verdict = sandboxes.run(
        Program("raise KeyError('\\x1b[31m' + 'x' * 10**6)", tests="assert True")
    )
    assert verdict.message.isprintable()
    assert len(verdict.message) == 200
