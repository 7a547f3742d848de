"""Addresses, interfaces and ports of this host, and the names in a list of SLURM's."""

from __future__ import annotations

import platform
import re
import socket

# For documentation only (RFC 5737), so that the way there is the way to the outside.
_OUTSIDE = "192.0.2.1"
_DISCARD_PORT = 9
# Of the ranks of SLURM jobs: below those that Linux hands out to whoever asks for any.
_FIRST_PORT = 20_000
_NUM_PORTS = 12_000


def free_port() -> int:
    """A TCP port that was free a moment ago on this host."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def port_of_step(job: int, *, step: int, restart: int) -> int:
    """The port of a step of a SLURM job, which another step on its hosts is unlikely to take."""
    return _FIRST_PORT + (job * 61 + step * 7 + restart) % _NUM_PORTS


def shell_port_of_first_step() -> str:
    """The same of a job's first step, for bash to work out in a batch script."""
    number = "SLURM_JOB_ID * 61 + ${SLURM_RESTART_COUNT:-0}"
    return f"$(({_FIRST_PORT} + ({number}) % {_NUM_PORTS}))"


def family_of(address: str) -> socket.AddressFamily:
    """IPv4 or IPv6: the family in which a host is called; IPv4 for a name that has no address."""
    try:
        return socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][0]
    except OSError:
        return socket.AF_INET


def address_towards(address: str = _OUTSIDE) -> str:
    """Local IP address used to reach `address`. Sends no packet.

    Raises:
        OSError: if there is no way there.
    """
    with socket.socket(family_of(address), socket.SOCK_DGRAM) as probe:
        probe.connect((address, _DISCARD_PORT))
        return str(probe.getsockname()[0])


def address_of_this_host() -> str:
    """The address at which other hosts reach this one.

    Debian lets a host's own name mean a loopback address: then that of the way to the outside.
    """
    address = socket.gethostbyname(platform.node())
    return address_towards() if is_loopback(address) else address


def is_loopback(address: str) -> bool:
    """Whether only this host can reach it."""
    return address.startswith("127.") or address == "::1"


def interface_towards(address: str) -> str | None:
    """Name of the interface on the way to a host; None on loopback, or where there is no way."""
    import psutil

    try:
        own = address_towards(address)
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        # psutil writes a link-local address of IPv6 with its interface, fe80::1%eth0
        local = [each.address.partition("%")[0] for each in addresses]
        if not is_loopback(own) and own.partition("%")[0] in local:
            return name
    return None


def first_host(hosts: str) -> str:
    """First name of a list of SLURM's, such as gpu[007-009,12]-ib,login."""
    match = re.match(r"([^\[,]*)(?:\[([^\],-]+)[^\]]*\])?([^,\[]*)", hosts)
    assert match is not None, "the pattern also fits nothing"
    return "".join(part or "" for part in match.groups())
