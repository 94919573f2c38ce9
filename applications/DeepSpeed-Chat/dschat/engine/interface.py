# SPDX-License-Identifier: Apache-2.0
"""The network interface by which the processes of several machines reach each other."""

import logging
import os
import socket

from dschat.base.errors import UserError
from dschat.base.network import (
    address_of_hostname,
    address_towards,
    describe_interfaces,
    is_reachable,
    outside_interfaces,
)

logger = logging.getLogger(__name__)


def choose_interface() -> None:
    """Sets GLOO_SOCKET_IFNAME if this machine's hostname resolves to an address that other machines cannot reach.

    gloo would give that address to the other ranks; with Debian's /etc/hosts it is 127.0.1.1. Instead it uses the
    interface on the way to MASTER_ADDR or, if that is such a hostname of this machine, too, the only interface.

    Raises:
        UserError: the interface cannot be found.
    """
    hostname_address = address_of_hostname()
    if "GLOO_SOCKET_IFNAME" in os.environ or is_reachable(hostname_address):
        return
    own_address = address_towards(os.environ["MASTER_ADDR"])
    names = set()
    for name, address in outside_interfaces():
        if address == own_address or not is_reachable(own_address):
            names.add(name)
    reason = f"the hostname {socket.gethostname()} resolves to {hostname_address}, which other machines cannot reach"
    if len(names) != 1:
        raise UserError(
            f"{reason}, and the network interface by which they reach this one is not known: set GLOO_SOCKET_IFNAME to"
            f" it, of {describe_interfaces()}."
        )
    interface = names.pop()
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    if os.environ.get("LOCAL_RANK", "0") == "0":
        logger.warning("GLOO_SOCKET_IFNAME=%s is used, since %s", interface, reason)
