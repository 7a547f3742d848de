"""Hostfiles, addresses, and the environment file of DeepSpeed's launcher."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from cdrmix.cluster.handover import write_environment_file
from cdrmix.cluster.hosts import (
    Host,
    address_for_others,
    free_port_on,
    is_this_machine,
    read_hostfile,
    run_on,
)
from cdrmix.errors import ConfigError
from tests.harness import ROOT


def written(folder: Path, text: str) -> Path:
    path = folder / "hosts"
    path.write_text(text)
    return path


def test_a_hostfile_gives_its_hosts_in_order() -> None:
    assert read_hostfile(ROOT / "launch" / "hostfile.example") == [
        Host("node-1", 8),
        Host("node-2", 8),
    ]


def test_every_wrong_line_of_a_hostfile_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, "a slots=2\n\n# note\nb\nc slots=0\na slots=1\n")
    with pytest.raises(ConfigError) as error:
        read_hostfile(path)
    assert [line.split(": ")[0] for line in str(error.value).splitlines()] == [
        f"{path}:4",
        f"{path}:5",
        f"{path}:6",
    ]


def test_an_empty_hostfile_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="names no host"):
        read_hostfile(written(tmp_path, "\n# nobody\n"))


def test_this_machine_is_known_by_name_and_needs_no_ssh() -> None:
    assert is_this_machine("localhost")
    assert is_this_machine("127.0.0.1")
    assert not is_this_machine("203.0.113.7")
    assert run_on("localhost", ["echo", "a b"]).stdout == "a b\n"
    assert 1024 <= free_port_on() < 65536


def test_a_command_that_hangs_counts_as_an_unreachable_host() -> None:
    assert run_on("localhost", ["sleep", "60"], timeout_seconds=0.1).returncode == 255


def test_a_command_that_takes_too_long_is_ended_with_its_children(tmp_path: Path) -> None:
    note = tmp_path / "child"
    script = f"sleep 60 & echo $! >{shlex.quote(str(note))}; wait"
    assert run_on("localhost", ["bash", "-c", script], timeout_seconds=2).returncode == 255
    deadline = time.monotonic() + 10
    with contextlib.suppress(psutil.NoSuchProcess):  # a zombie, where nobody collects orphans
        while psutil.Process(int(note.read_text())).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, "the child goes on"
            time.sleep(0.05)


def test_a_host_without_an_address_is_an_error_of_the_users() -> None:
    with pytest.raises(ConfigError, match="has no address here"):
        address_for_others("no-such-host.invalid", [])


def test_the_environment_file_has_no_line_that_deepspeed_fails_on(tmp_path: Path) -> None:
    from deepspeed.launcher.multinode_runner import PDSHRunner

    own = tmp_path / "own"
    own.write_text("\n# proxy\nexport A=1\nB=x=y\n\n")
    awkward = {"C": 'a b "c" $HOME `d` \\e 5%', "D": ""}
    path = tmp_path / "file"
    write_environment_file(path, inherited=[own], variables=awkward)
    assert path.stat().st_mode & 0o777 == 0o600

    class Exports:
        exports: dict[str, str] = {}

    runner = Exports()
    for line in path.read_text().splitlines(keepends=True):
        key, value = line.split("=", maxsplit=1)  # as deepspeed/launcher/runner.py does
        PDSHRunner.add_export(runner, key, value)
    script = "".join(f"export {name}={value}; " for name, value in runner.exports.items())
    names = ["A", "B", *awkward]
    shown = subprocess.run(
        [
            "sh",
            "-c",
            script.replace("%%", "%") + "; ".join(f'printf "%s\\n" "${name}"' for name in names),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.splitlines() == ["1", "x=y", *awkward.values()]
    assert shlex.split(script)[:2] == ["export", "A=1;"]


def test_a_line_of_the_users_own_file_that_is_no_assignment_is_named(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("A=1\nunset B\n")
    with pytest.raises(ConfigError, match=r"own:2: not NAME=VALUE"):
        write_environment_file(tmp_path / "file", inherited=[own], variables={})
