"""Addresses, interfaces and ports of this host; first name of a SLURM node list. No torch."""

from __future__ import annotations

import re
import socket

# Reserved for documentation (RFC 5737): no host has it, so it is routed like any outside address.
_OUTSIDE = "192.0.2.1"
# For the ranks of SLURM jobs: below Linux's ephemeral ports (from 32,768), which any program takes.
_FIRST_PORT = 20_000
_NUM_PORTS = 12_000


def free_port() -> int:
    """Returns a TCP port that was free on this host a moment ago."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def port_of_step(job: int, *, step: int, restart: int) -> int:
    """Port for a step of a SLURM job that other steps on its hosts are unlikely to use."""
    return _FIRST_PORT + (job * 61 + step * 7 + restart) % _NUM_PORTS


def shell_port_of_first_step() -> str:
    """`port_of_step` of a job's first step, as a bash expression for a batch script."""
    number = "SLURM_JOB_ID * 61 + ${SLURM_RESTART_COUNT:-0}"
    return f"$(({_FIRST_PORT} + ({number}) % {_NUM_PORTS}))"


def family_of(address: str) -> socket.AddressFamily:
    """Address family (IPv4 or IPv6) to call a host in; IPv4 for a name without an address."""
    try:
        return socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][0]
    except OSError:
        return socket.AF_INET


def address_towards(address: str = _OUTSIDE) -> str:
    """Local IP address used to reach `address`; sends no packet. OSError if there is no route."""
    with socket.socket(family_of(address), socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # the port that discards
        return str(probe.getsockname()[0])


def is_loopback(address: str) -> bool:
    """True if only this host can reach `address`."""
    return address.startswith("127.") or address == "::1"


def interface_towards(address: str) -> str | None:
    """Name of the interface used to reach a host; None for loopback, or without a route."""
    import psutil

    try:
        local_address = address_towards(address).partition("%")[0]
    except OSError:
        return None
    if is_loopback(local_address):
        return None
    for name, addresses in psutil.net_if_addrs().items():
        # psutil writes a link-local address of IPv6 with its interface, fe80::1%eth0
        if local_address in [each.address.partition("%")[0] for each in addresses]:
            return name
    return None


def first_host(hosts: str) -> str:
    """First name of a SLURM node list, such as gpu[007-009,12]-ib,login."""
    match = re.match(r"([^\[,]*)(?:\[([^\],-]+)[^\]]*\])?([^,\[]*)", hosts)
    assert match is not None, "the pattern also fits nothing"
    return "".join(part or "" for part in match.groups())
