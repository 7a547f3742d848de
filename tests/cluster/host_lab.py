"""Hosts of a test's own on one machine: network namespaces with names, addresses and sshd."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

_PROGRAMS = ("ip", "unshare", "sshd", "ssh", "ssh-keygen", "pdsh")
_NETWORK = "10.213.77"
_SWITCH = "cdrmix-sw"
_SECONDS_TO_START = 10
_SSH = """\
Host *
 IdentityFile {folder}/id
 IdentitiesOnly yes
 BatchMode yes
 StrictHostKeyChecking no
 UserKnownHostsFile /dev/null
 LogLevel ERROR
"""
_SSHD = """\
Port 22
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/id.pub
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
PasswordAuthentication no
PidFile {folder}/{name}.pid
MaxStartups 100
"""


class HostLab:
    """Hosts behind one switch; `ip netns exec` gives each its own /etc/hosts and /etc/ssh."""

    def __init__(self, folder: Path, names: tuple[str, ...]) -> None:
        self.names = names
        self._folder = folder

    def command(self, name: str) -> list[str]:
        """Prefix of a command that runs on a host, under its name."""
        entered = ["ip", "netns", "exec", name, "unshare", "-u", "sh", "-c"]
        return [*entered, f'hostname {name}; exec "$@"', "sh"]

    def hostfile(self, path: Path) -> Path:
        """A hostfile of all hosts, one slot each."""
        path.write_text("".join(f"{name} slots=1\n" for name in self.names))
        return path

    def cut(self, name: str) -> None:
        """Take a host off the network."""
        _run("ip", "-n", name, "link", "set", "eth0", "down")

    def start(self) -> None:
        """Make the hosts and their sshd."""
        for key in ("id", "host_key"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self._folder / key))
        Path("/run/sshd").mkdir(exist_ok=True)
        _run("ip", "netns", "add", _SWITCH)
        _run("ip", "-n", _SWITCH, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", _SWITCH, "link", "set", "br0", "up")
        addresses = {name: f"{_NETWORK}.{n}" for n, name in enumerate(self.names, start=11)}
        lines = ["127.0.0.1 localhost", *(f"{a} {name}" for name, a in addresses.items())]
        for name, address in addresses.items():
            self._connect(name, address)
            ssh = _settings(name) / "ssh"
            ssh.mkdir(parents=True)
            (_settings(name) / "hosts").write_text("\n".join(lines) + "\n")
            (ssh / "ssh_config").write_text(_SSH.format(folder=self._folder))
            (ssh / "sshd_config").write_text(_SSHD.format(folder=self._folder, name=name))
        for name in self.names:
            sshd = shutil.which("sshd", path=_path())
            assert sshd is not None, "looked for before"
            _run(*self.command(name), sshd)
        for name in self.names:
            self._await_ssh(name)

    def stop(self) -> None:
        """End what lives on the hosts, and only that, and remove them."""
        for name in (*self.names, _SWITCH):
            listed = subprocess.run(
                ["ip", "netns", "pids", name], capture_output=True, text=True, check=False
            )
            for process in listed.stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(process), signal.SIGKILL)
        for name in (*self.names, _SWITCH):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
            shutil.rmtree(_settings(name), ignore_errors=True)

    def _connect(self, name: str, address: str) -> None:
        _run("ip", "netns", "add", name)
        _run("ip", "-n", name, "link", "set", "lo", "up")
        peer = f"v-{name}"
        veth = ("type", "veth", "peer", "name", peer, "netns", _SWITCH)
        _run("ip", "link", "add", "name", "eth0", "netns", name, *veth)
        _run("ip", "-n", _SWITCH, "link", "set", peer, "master", "br0")
        _run("ip", "-n", _SWITCH, "link", "set", peer, "up")
        _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
        _run("ip", "-n", name, "link", "set", "eth0", "up")

    def _await_ssh(self, name: str) -> None:
        deadline = time.monotonic() + _SECONDS_TO_START
        command = [*self.command(self.names[0]), "ssh", name, "true"]
        while subprocess.run(command, capture_output=True, check=False).returncode:
            assert time.monotonic() < deadline, f"no sshd on {name}"
            time.sleep(0.1)


def missing() -> str | None:
    """Why there can be no such hosts here, or None."""
    if os.getuid() != 0:
        return "needs root, to make network namespaces"
    absent = [name for name in _PROGRAMS if shutil.which(name, path=_path()) is None]
    if absent:
        return f"no programs {', '.join(absent)} (apt-get install iproute2 openssh-server pdsh)"
    made = subprocess.run(["ip", "netns", "add", "cdrmix-try"], capture_output=True, check=False)
    if made.returncode:
        return f"cannot make network namespaces: {made.stderr.decode().strip()}"
    subprocess.run(["ip", "netns", "del", "cdrmix-try"], check=False)
    return None


@contextlib.contextmanager
def host_lab(folder: Path, *names: str) -> Iterator[HostLab]:
    """Running hosts of these names; skips the test where there can be none."""
    reason = missing()
    if reason:
        pytest.skip(reason)
    lab = HostLab(folder, names)
    try:
        lab.start()
        yield lab
    finally:
        lab.stop()


def _settings(name: str) -> Path:
    return Path("/etc/netns") / name


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
