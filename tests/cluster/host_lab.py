"""Hosts of a test's own on one machine: network namespaces with names, addresses and sshd.

Names of hosts and their addresses live inside the namespaces. What this machine sees, namespaces
and folders in /etc/netns, has the owner in its name: labs at the same time do not meet, and one
removes what killed ones left.
"""

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

from tests.cluster.lab_names import is_dead, new_name

_PROGRAMS = ("ip", "unshare", "sshd", "ssh", "ssh-keygen", "pdsh")
_NETWORK = "10.213.77"
_PREFIX = "cdrmix-lab"
_SWITCH = "switch"
_NAMESPACES, _SETTINGS = Path("/run/netns"), Path("/etc/netns")
_SECONDS_TO_START = 10
_SECONDS_TO_DIE = 10
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
        self._prefix = f"{_PREFIX}.{new_name()}"

    def command(self, name: str) -> list[str]:
        """Prefix of a command that runs on a host, under its name."""
        entered = ["ip", "netns", "exec", self._namespace(name), "unshare", "-u", "sh", "-c"]
        return [*entered, f'hostname {name}; exec "$@"', "sh"]

    def hostfile(self, path: Path) -> Path:
        """A hostfile of all hosts, one slot each."""
        path.write_text("".join(f"{name} slots=1\n" for name in self.names))
        return path

    def cut(self, name: str) -> None:
        """Take a host off the network."""
        _run("ip", "-n", self._namespace(name), "link", "set", "eth0", "down")

    def start_host(self, name: str) -> None:
        """Connect a host and start its sshd, at first or after its end."""
        _run("ip", "-n", self._namespace(name), "link", "set", "eth0", "up")
        sshd = shutil.which("sshd", path=_path())
        assert sshd is not None, "looked for before"
        _run(*self.command(name), sshd)

    def end_host(self, name: str) -> None:
        """Take a host off the network and kill all of its processes, as a power cut does."""
        self.cut(name)
        _end_processes(self._namespace(name))

    @contextlib.contextmanager
    def closed_ports(self, name: str) -> Iterator[None]:
        """Let nothing out of a host's ephemeral ports, as a firewall that only knows ssh does."""
        rule = ["ipproto", "tcp", "sport", "32768-60999", "prohibit"]
        _run("ip", "-n", self._namespace(name), "rule", "add", *rule)
        try:
            yield
        finally:
            _run("ip", "-n", self._namespace(name), "rule", "del", *rule)

    def start(self) -> None:
        """Make the hosts and their sshd."""
        for key in ("id", "host_key"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self._folder / key))
        Path("/run/sshd").mkdir(exist_ok=True)
        switch = self._namespace(_SWITCH)
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "br0", "up")
        addresses = {name: f"{_NETWORK}.{n}" for n, name in enumerate(self.names, start=11)}
        lines = ["127.0.0.1 localhost", *(f"{a} {name}" for name, a in addresses.items())]
        for name, address in addresses.items():
            self._connect(name, address)
            settings = _SETTINGS / self._namespace(name)
            ssh = settings / "ssh"
            ssh.mkdir(parents=True)
            (settings / "hosts").write_text("\n".join(lines) + "\n")
            (ssh / "ssh_config").write_text(_SSH.format(folder=self._folder))
            (ssh / "sshd_config").write_text(_SSHD.format(folder=self._folder, name=name))
        for name in self.names:
            self.start_host(name)
        for name in self.names:
            self._await_ssh(name)

    def stop(self) -> None:
        """End what lives on the hosts, and only that, and remove them."""
        with contextlib.ExitStack() as removals:  # all of them, should one fail
            for name in (_SWITCH, *self.names):
                removals.callback(_remove, self._namespace(name))

    def _namespace(self, name: str) -> str:
        return f"{self._prefix}.{name}"

    def _connect(self, name: str, address: str) -> None:
        host, switch = self._namespace(name), self._namespace(_SWITCH)
        _run("ip", "netns", "add", host)
        _run("ip", "-n", host, "link", "set", "lo", "up")
        peer = f"port{self.names.index(name)}"
        veth = ("type", "veth", "peer", "name", peer, "netns", switch)
        _run("ip", "link", "add", "name", "eth0", "netns", host, *veth)
        _run("ip", "-n", switch, "link", "set", peer, "master", "br0")
        _run("ip", "-n", switch, "link", "set", peer, "up")
        _run("ip", "-n", host, "addr", "add", f"{address}/24", "dev", "eth0")

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
    trial = f"{_PREFIX}.{new_name()}.trial"
    made = subprocess.run(["ip", "netns", "add", trial], capture_output=True, check=False)
    _remove(trial)
    failed = made.returncode != 0
    return f"cannot make network namespaces: {made.stderr.decode().strip()}" if failed else None


@contextlib.contextmanager
def host_lab(folder: Path, *names: str) -> Iterator[HostLab]:
    """Running hosts of these names; skips the test where there can be none."""
    reason = missing()
    if reason:
        pytest.skip(reason)
    _remove_dead_labs()
    lab = HostLab(folder, names)
    try:
        lab.start()
        yield lab
    finally:
        lab.stop()


def _remove_dead_labs() -> None:
    """Remove the hosts of labs whose owner did not come to its end."""
    for path in (*_NAMESPACES.glob(f"{_PREFIX}.*"), *_SETTINGS.glob(f"{_PREFIX}.*")):
        if is_dead(path.name.split(".")[1]):
            _remove(path.name)


def _remove(namespace: str) -> None:
    """Remove a namespace with all that lives in it, and its settings; there may be none."""
    _end_processes(namespace)
    subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(_SETTINGS / namespace)


def _end_processes(namespace: str) -> None:
    """Kill what lives in a namespace, with what it starts meanwhile."""
    listing = ["ip", "netns", "pids", namespace]
    deadline = time.monotonic() + _SECONDS_TO_DIE
    while alive := subprocess.run(listing, capture_output=True, check=False).stdout.split():
        for process in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        assert time.monotonic() < deadline, f"do not die on {namespace}: {alive}"
        time.sleep(0.02)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
