"""Addresses and interfaces of this host, and names in lists of SLURM's."""

from __future__ import annotations

import socket
import subprocess

import psutil
import pytest

from cdrmix.network import (
    address_towards,
    family_of,
    first_host,
    free_port,
    interface_towards,
    is_loopback,
    port_of_step,
    shell_port_of_first_step,
)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node1", "node1"),
        ("a,b[1-2]", "a"),
        ("gpu[007-009,12]-ib,login", "gpu007-ib"),
        ("n[3,5]", "n3"),
        ("rack1-[12-13]", "rack1-12"),
    ],
)
def test_the_first_host_of_a_list_is_found(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


def test_a_free_port_can_be_bound() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", free_port()))


def test_ranks_that_meet_on_loopback_need_no_interface() -> None:
    assert interface_towards("127.0.0.1") is None


@pytest.mark.parametrize(
    ("address", "family"),
    [
        ("127.0.0.1", socket.AF_INET),
        ("::1", socket.AF_INET6),
        ("2001:db8::1", socket.AF_INET6),
        ("no-such-host.invalid", socket.AF_INET),
    ],
)
def test_a_host_is_called_in_the_family_of_its_address(
    address: str, family: socket.AddressFamily
) -> None:
    assert family_of(address) is family


def test_the_interface_is_also_known_by_its_address_of_ipv6() -> None:
    assert interface_towards("::1") is None, "loopback"
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            is_known_alone = "%" not in each.address  # a link-local one needs its interface too
            if each.family == socket.AF_INET6 and is_known_alone and not is_loopback(each.address):
                assert interface_towards(each.address) in (None, name)


def test_the_interface_is_the_one_that_has_our_address_on_the_way_there() -> None:
    try:
        own = address_towards()
    except OSError:
        pytest.skip("this machine has no way to the outside")
    interface = interface_towards("192.0.2.1")
    assert interface is not None
    assert own in [address.address for address in psutil.net_if_addrs()[interface]]


@pytest.mark.parametrize("restart", [None, 3])
def test_a_batch_script_and_its_ranks_name_the_same_port(restart: int | None) -> None:
    variables = {"SLURM_JOB_ID": "4711", "PATH": "/usr/bin:/bin"}
    if restart is not None:
        variables["SLURM_RESTART_COUNT"] = str(restart)
    command = ["bash", "-c", f"echo {shell_port_of_first_step()}"]
    told = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    assert int(told.stdout) == port_of_step(4711, step=0, restart=restart or 0)
