# SPDX-License-Identifier: Apache-2.0
"""Addresses and network interfaces of this machine."""

import ipaddress
import socket
from contextlib import suppress

import psutil

LOOPBACK = "127.0.0.1"


def address_of_hostname() -> str:
    """The address of this machine to which its hostname resolves; without one a loopback address.

    The communication library gloo gives it to the other ranks, unless GLOO_SOCKET_IFNAME names an interface.
    """
    with suppress(OSError):
        for *kind, _, address in socket.getaddrinfo(socket.gethostname(), 0, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(*kind) as probe:
                probe.bind(address)  # fails with an address of another machine
                return str(address[0])
    return LOOPBACK


def address_towards(host: str) -> str:
    """This machine's address on the way to another machine; without a way a loopback address. Nothing is sent."""
    with suppress(OSError):
        for *kind, _, address in socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(*kind) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    return LOOPBACK


def is_reachable(address: str) -> bool:
    """Whether an address means this machine on other machines, too: 127.0.1.1, ::1 and fe80::1%eth0 do not."""
    parsed = ipaddress.ip_address(address)
    return not (parsed.is_loopback or parsed.is_link_local)


def outside_interfaces() -> list[tuple[str, str]]:
    """Names of network interfaces, with their addresses that mean this machine on other machines, too."""
    interfaces: list[tuple[str, str]] = []
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family in (socket.AF_INET, socket.AF_INET6) and is_reachable(entry.address):
                interfaces.append((name, entry.address))
    return interfaces


def describe_interfaces() -> str:
    """Interfaces that other machines may reach, as in "eth0 (10.0.0.1), ib0 (10.1.0.1)"."""
    return ", ".join(f"{name} ({address})" for name, address in outside_interfaces()) or "none"
