# SPDX-License-Identifier: Apache-2.0
"""Addresses of this machine, on the loopback interface, which every machine has."""

import socket

import pytest

from dschat.base.network import address_of_hostname, interface_of, is_reachable, route_to


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1", "127.0.0.2", "::1", "fe80::1%eth0", "169.254.3.4"])
def test_addresses_that_mean_another_machine_elsewhere(address):
    assert not is_reachable(address)


@pytest.mark.parametrize("address", ["10.0.0.1", "192.168.1.2", "172.17.0.2", "8.8.8.8", "fd00::2", "2001:db8::1"])
def test_addresses_that_mean_this_machine_elsewhere(address):
    assert is_reachable(address)


@pytest.mark.parametrize(
    ("hostname", "address"),
    [
        ("127.0.1.1", "127.0.1.1"),
        ("0.0.0.0", "0.0.0.0"),
        ("192.0.2.99", "127.0.0.1"),  # another machine's
        ("no such name", "127.0.0.1"),
    ],
)
def test_the_address_of_the_hostname(hostname, address, monkeypatch):
    """Names that need no resolver stand for hostnames."""
    monkeypatch.setattr(socket, "gethostname", lambda: hostname)
    assert address_of_hostname() == address


def test_interfaces_and_routes():
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.99") is None
    assert route_to("127.0.0.1") == ("127.0.0.1", "127.0.0.1")
    assert route_to("no such name") is None
