# SPDX-License-Identifier: Apache-2.0
"""Addresses of this machine, on the loopback interface, which every machine has."""

import socket

import pytest

from dschat.base.network import address_of_hostname, address_towards, is_reachable, outside_interfaces


@pytest.mark.parametrize("address", ["127.0.1.1", "::1", "fe80::1%eth0"])
def test_addresses_that_mean_another_machine_elsewhere(address):
    assert not is_reachable(address)


@pytest.mark.parametrize("address", ["10.0.0.1", "2001:db8::1"])
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
    assert all(is_reachable(address) for _, address in outside_interfaces())
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert address_towards("no such name") == "127.0.0.1"
