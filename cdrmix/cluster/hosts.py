"""The hosts of a run: their file, their addresses, and commands on them."""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cdrmix import network
from cdrmix.errors import ConfigError, InfrastructureError
from cdrmix.network import address_towards, is_loopback

_SECONDS_TO_CONNECT = 5
_SECONDS_TO_ANSWER = 20.0
# Excludes whatever ssh, pdsh or a shell would read as an option, a list, a user or a command.
_NAME = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?"
_UNREACHABLE = 255  # of ssh
_PRINT_FREE_PORT = "import socket; s = socket.socket(); s.bind(('', 0)); print(s.getsockname()[1])"


@dataclass(frozen=True)
class Host:
    """A line of a hostfile: the host's name for ssh, and its number of ranks."""

    name: str
    slots: int


def read_hostfile(path: Path) -> list[Host]:
    """Reads lines `NAME slots=N`, blank ones and comments; ConfigError names each wrong line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text ({error.reason} at {error.start})") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    hosts: dict[str, Host] = {}
    problems = []
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = re.fullmatch(rf"({_NAME})\s+slots=([1-9]\d{{0,4}})", text, re.ASCII)
        if match is None:
            problems.append(
                f"{path}:{number}: {text[:80]!r} is not NAME slots=N, such as node-1 slots=8. A "
                "name has letters, digits, and . _ - inside"
            )
        elif match[1] in hosts:
            problems.append(
                f"{path}:{number}: {match[1]} is there twice; give it all its slots once"
            )
        else:
            hosts[match[1]] = Host(match[1], int(match[2]))
    if not hosts and not problems:
        problems.append(f"{path}: names no host. Give lines NAME slots=N")
    if problems:
        raise ConfigError("\n".join(problems))
    return list(hosts.values())


def is_this_machine(name: str) -> bool:
    """True if a host's name means this machine."""
    if name in ("localhost", socket.gethostname(), socket.getfqdn()):
        return True
    try:
        address = socket.gethostbyname(name)
        with socket.socket() as probe:
            probe.bind((address, 0))  # only an address of this machine can be bound
    except OSError:
        return False
    return True


def run_on(
    name: str, command: Sequence[str], *, timeout_seconds: float = 60, over_ssh: bool = False
) -> subprocess.CompletedProcess[str]:
    """Runs a command on a host, by ssh unless it is this machine; never asks for a password.

    If the host cannot be reached or does not answer in time, the exit code is 255, as of ssh.
    `over_ssh` takes ssh to this machine too: its limits and variables are others than a shell's.
    """
    is_here = not over_ssh and is_this_machine(name)
    words = list(command) if is_here else ssh_command(name, command)
    return _completed(words, timeout_seconds)


def why_out_of_reach(name: str, *, is_first: bool, with_pdsh: bool) -> str | None:
    """Reason why the deepspeed launcher cannot start ranks on a host of a hostfile, or None.

    Asks in its ways (0.19.8: runner.py, multinode_runner.py): by ssh for the first host, also if it
    is this machine, and `with_pdsh` by pdsh, which it takes for all hosts unless there is only
    this machine. Without a terminal, ssh cannot ask for a password or for a new key.
    """
    options = ("-o", "PasswordAuthentication=no", "-o", f"ConnectTimeout={_SECONDS_TO_CONNECT}")
    commands = [["ssh", *options, "--", name, "hostname"]] if is_first or not with_pdsh else []
    if with_pdsh:
        commands.append(["pdsh", "-S", "-w", name, "true"])
    ssh = " ".join((os.environ.get("PDSH_SSH_ARGS_APPEND", ""), *options)).strip()
    variables = {"PDSH_RCMD_TYPE": "ssh", "PDSH_SSH_ARGS_APPEND": ssh}
    for command in commands:
        done = _completed(command, _SECONDS_TO_ANSWER, variables)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            # pdsh's own line tells only that ssh has failed; ssh's has the host's name before it
            told = [line for line in lines if "exited with exit code" not in line] or lines
            text = told[-1] if told else f"{command[0]} ended with code {done.returncode}"
            return re.sub(rf"^({re.escape(name)}|{re.escape(name.partition('.')[0])}): ", "", text)
    return None


def _completed(
    words: Sequence[str], timeout_seconds: float, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a program without a terminal; 255 if it is not there or takes longer."""
    try:
        with subprocess.Popen(
            words,
            env={**os.environ, **(variables or {})},
            start_new_session=True,  # else ssh opens the terminal and asks there
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        ) as process:
            try:
                output, message = process.communicate(timeout=timeout_seconds)
            except BaseException:
                # with its children: the ssh of a killed pdsh would wait for its host forever
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                raise
        return subprocess.CompletedProcess(words, process.returncode, output, message)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(words, 255, "", f"no answer in {timeout_seconds:.0f} s")
    except FileNotFoundError as error:
        return subprocess.CompletedProcess(words, 255, "", f"{error.filename}: no such program")
    except OSError as error:
        return subprocess.CompletedProcess(words, 255, "", f"{words[0]}: {error.strerror}")


def ssh_command(name: str, command: Sequence[str]) -> list[str]:
    """Command line that runs a command on another host."""
    # BatchMode: ssh fails instead of asking for a password on a terminal that nobody watches
    options = ("-o", "BatchMode=yes", "-o", f"ConnectTimeout={_SECONDS_TO_CONNECT}")
    return ["ssh", *options, "--", name, shlex.join(command)]


def free_port_on(name: str = "localhost") -> int:
    """Returns a TCP port that was free on the host a moment ago.

    Raises InfrastructureError if the host cannot be reached for now, and ConfigError if it has no
    interpreter at the path of this one.
    """
    if is_this_machine(name):
        return network.free_port()
    done = run_on(name, [sys.executable, "-c", _PRINT_FREE_PORT])
    if done.returncode:
        output = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()
        raise (InfrastructureError if done.returncode == _UNREACHABLE else ConfigError)(
            f"{name}: cannot run {sys.executable} there: {output[-1]}. The hosts need passwordless "
            "ssh and the same environment at the same path; `cdrmix doctor` tells more"
        )
    return int(done.stdout.split()[-1])  # a shell may have printed something when it started


def address_for_others(name: str, others: Sequence[str]) -> str:
    """Address of host `name` at which the other hosts reach it.

    A name that means a loopback address here (Debian's 127.0.1.1) is useless to others: then it is
    the address of the interface that leads to the first of them. Raises ConfigError if a name has
    no address.
    """
    address = _resolved(name)
    if not is_loopback(address) or not others:
        return address
    return address_towards(_resolved(others[0]))


def _resolved(name: str) -> str:
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        raise ConfigError(f"{name}: has no address here ({error}). Is the name right?") from None
