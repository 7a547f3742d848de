import platform
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from cdrmix.errors import PlanError
from cdrmix.evaluation.sandbox import landlock, levels, seccomp
from cdrmix.evaluation.sandbox.host import (
    Program,
    available_levels,
    require_level,
    run_programs,
    self_test,
)
from tests.harness import ROOT

RIGHT = Program("x = 1", tests="assert x")


@pytest.mark.parametrize("level", ["kernel", "bwrap"])
def test_another_architecture_is_refused(level, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(PlanError, match="made for Linux on x86_64, not for linux on aarch64"):
        run_programs([RIGHT], level=level)
    with pytest.raises(PlanError, match="aarch64"):
        self_test(level)


def test_a_machine_without_landlock_is_refused_with_one_message(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(levels, "landlock_version", lambda: 0)
    with pytest.raises(PlanError) as refused:
        run_programs([RIGHT])
    assert len(str(refused.value).splitlines()) == 1
    assert "no program is run here: the kernel has no Landlock" in str(refused.value)
    assert "Use the level bwrap" in str(refused.value)


def test_a_machine_without_seccomp_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(levels, "has_seccomp", lambda: False)
    with pytest.raises(PlanError, match="no seccomp filters"):
        require_level("kernel")


def test_bubblewrap_that_is_missing_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(levels.shutil, "which", lambda name: None)
    with pytest.raises(PlanError, match="bubblewrap is not installed: on Debian, apt-get install"):
        require_level("bwrap")


def test_bubblewrap_that_does_not_start_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    failing = tmp_path / "bwrap"
    failing.write_text("#!/bin/sh\necho 'No permissions to create new namespace' >&2; exit 1\n")
    failing.chmod(0o755)
    monkeypatch.setattr(levels.shutil, "which", lambda name: str(failing))
    with pytest.raises(PlanError, match="does not start here: No permissions.*user namespaces"):
        require_level("bwrap")


def test_the_command_line_of_bubblewrap(tmp_path: Path):
    reach = levels.interpreter_reach(("numpy",))
    command = levels.zygote_command("bwrap", tmp_path, reach)
    assert command[0].endswith("bwrap")
    assert {"--unshare-all", "--die-with-parent", "--new-session"} <= set(command)
    assert command[command.index("--cap-drop") + 1] == "ALL"
    writable = [
        command[at + 1] for at, part in enumerate(command) if part in ("--bind", "--dev-bind")
    ]
    assert writable == [str(tmp_path)]
    shown = {command[at + 1] for at, part in enumerate(command) if part.startswith("--ro-bind")}
    assert not shown & {"/", "/home", "/root", "/tmp", "/etc", str(ROOT)}
    assert str(Path(levels.__file__).parent) in shown
    assert any(path.endswith("/numpy") for path in shown)
    assert command[command.index("--") + 1] == levels.INTERPRETER


@pytest.mark.skipif(
    bool(missing := available_levels()["bwrap"].missing), reason=f"level bwrap: {missing}"
)
def test_programs_run_in_bubblewrap():
    assert "namespaces" in self_test("bwrap").description
    alone = Program("import os\nassert len([n for n in os.listdir('/proc') if n.isdigit()]) < 5",
                    tests="assert True")  # fmt: skip
    outside = Program(f"import os\nos.stat({str(ROOT)!r} + '/README.md')", tests="assert True")
    right, here, beyond = run_programs([RIGHT, alone, outside], level="bwrap", workers=1)
    assert right.passed
    assert here.passed or here.error == "PermissionError"  # Landlock refuses /proc too
    assert beyond.error == "FileNotFoundError"


def test_installed_packages_and_this_one_are_out_of_reach():
    reach = levels.interpreter_reach(())
    for path in [*reach.folders, *reach.files]:
        assert not re.search(r"/(site|dist)-packages(/|$)", path)
        assert not ROOT.is_relative_to(path)


def test_the_rights_of_each_version_of_landlock():
    bits = {version: landlock.handled_rights(version) for version in range(1, 8)}
    assert [files.bit_length() for files, _, _ in bits.values()] == [13, 14, 15, 15, 16, 16, 16]
    assert [network for _, network, _ in bits.values()] == [0, 0, 0, 3, 3, 3, 3]
    assert [scopes for _, _, scopes in bits.values()] == [0, 0, 0, 0, 0, 3, 3]


@pytest.mark.skipif(not landlock.landlock_version(), reason="level kernel: no Landlock")
def test_rules_can_be_made_for_older_versions(tmp_path: Path):
    for version in range(1, landlock.landlock_version() + 1):
        rules = landlock.Ruleset(version)
        rules.allow(["/etc/passwd", "/nowhere"], landlock.READ_FILE | landlock.READ_DIR)
        rules.allow_own_folder(str(tmp_path))
        landlock.os.close(rules.descriptor)


def test_the_numbers_of_system_calls_are_those_of_the_kernel():
    headers = [Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
               Path("/usr/include/asm/unistd_64.h")]  # fmt: skip
    header = next((path for path in headers if path.is_file()), None)
    assert header is not None, "no headers of the kernel: apt-get install linux-libc-dev"
    lines = re.findall(r"#define __NR_(\w+) (\d+)", header.read_text())
    numbers = {name: int(number) for name, number in lines}
    named = {**seccomp.REFUSED, **seccomp.CONDITIONAL}
    known = {name: number for name, number in named.items() if name in numbers}
    assert len(known) >= len(named) - 10  # those that are newer than the header
    assert known == {name: numbers[name] for name in known}
    assert len(set(named.values())) == len(named)


def decided(number: int, *arguments: int, architecture: int = 0xC000003E) -> int:
    """Action of the filter for a system call, by running its instructions."""
    padded = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("=iIQ6Q", number, architecture, 0, *(each % 2**64 for each in padded))
    instructions, at, value = seccomp.filter_of(own_process=77), 0, 0
    while True:
        code, if_true, if_false, operand = instructions[at]
        at += 1
        if code == 0x06:
            return operand
        if code == 0x20:
            (value,) = struct.unpack_from("=I", data, operand)
        elif code == 0x54:
            value &= operand
        else:
            tests = {0x15: value == operand, 0x35: value >= operand, 0x45: value & operand}
            at += if_true if tests[code] else if_false


ALLOWED, REFUSED, NOT_THERE, KILLED = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000


@pytest.mark.parametrize("name", seccomp.REFUSED)
def test_the_filter_refuses(name: str):
    assert decided(seccomp.REFUSED[name]) == REFUSED


@pytest.mark.parametrize(
    ("name", "arguments", "action"),
    [
        ("clone", (0x003D0F00,), ALLOWED),  # a thread of glibc's
        ("clone", (0x01200011,), REFUSED),  # fork
        ("clone", (0x00010000 | 0x10000000,), REFUSED),  # a thread in a user namespace
        ("clone", (0x4111,), REFUSED),  # vfork
        ("clone3", (), NOT_THERE),
        ("kill", (77, 9), ALLOWED),
        ("kill", (78, 9), REFUSED),
        ("kill", (0, 9), REFUSED),
        ("kill", (-1, 9), REFUSED),
        ("kill", (2**32 + 78, 9), REFUSED),
        ("tgkill", (77, 78, 9), ALLOWED),
        ("tgkill", (78, 78, 9), REFUSED),
        ("tkill", (78, 9), REFUSED),
        ("prlimit64", (0, 7, 0, 1), ALLOWED),
        ("prlimit64", (0, 7, 1, 0), REFUSED),
        ("prlimit64", (0, 7, 2**32, 0), REFUSED),
        ("prlimit64", (1, 7, 0, 1), REFUSED),
        ("fcntl", (3, 8, 1), REFUSED),
        ("fcntl", (3, 2**32 + 8, 1), REFUSED),
        ("fcntl", (3, 15, 1), REFUSED),
        ("fcntl", (3, 1, 0), ALLOWED),
        ("ioctl", (0, 0x5412), REFUSED),
        ("ioctl", (0, 0x5401), ALLOWED),
        ("socketpair", (1, 1 | 0o2000000), ALLOWED),
        ("socketpair", (1, 2), REFUSED),
        ("socketpair", (2, 1), REFUSED),
    ],
)
def test_the_filter_decides_by_arguments(name: str, arguments: tuple[int, ...], action: int):
    assert decided(seccomp.CONDITIONAL[name], *arguments) == action


def test_the_filter_allows_what_programs_need():
    for number in (0, 1, 2, 3, 9, 12, 13, 39, 202, 228, 257, 262, 332):
        assert decided(number) == ALLOWED


def test_the_filter_ends_what_speaks_another_architecture():
    assert decided(0, architecture=0x40000003) == KILLED  # i386
    assert decided(0x40000000) == KILLED  # x32
    assert [decided(number) for number in (450, 451, 600)] == [ALLOWED, NOT_THERE, NOT_THERE]


def test_the_sandbox_imports_no_torch():
    script = (
        "import sys, cdrmix.evaluation.sandbox.host, cdrmix.evaluation.sandbox.zygote\n"
        "print({'torch', 'numpy', 'pydantic'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", script]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert out.stdout == "set()\n"
