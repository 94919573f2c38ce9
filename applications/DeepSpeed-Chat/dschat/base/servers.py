# SPDX-License-Identifier: Apache-2.0
"""HTTP clients of all servers that commands ask: scores, vLLM, judges and simulated users.

A server on this machine is reached without a proxy. For any other server the usual variables hold: HTTP_PROXY,
HTTPS_PROXY, ALL_PROXY and NO_PROXY. No client follows redirects, which would carry texts to a host that nobody named.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from dschat.base.errors import UserError

if TYPE_CHECKING:
    import httpx2

# Seconds to keep an idle connection, fewer than servers keep it.
KEEPALIVE = 1.0

Transport = TypeVar("Transport", "httpx2.HTTPTransport", "httpx2.AsyncHTTPTransport")


def is_loopback(host: str) -> bool:
    """Whether a host is a loopback address in any spelling, or a name of the domain localhost."""
    address = _address_of(host)
    if address is None:
        name = host.rstrip(".").lower()
        return name == "localhost" or name.endswith(".localhost")
    return address.is_loopback


def is_local(url: str) -> bool:
    """Whether requests to an address stay on this machine; those to 0.0.0.0 and :: do, in any spelling."""
    host = urlsplit(url).hostname or ""
    address = _address_of(host)
    return is_loopback(host) or (address is not None and address.is_unspecified)


def _address_of(host: str) -> IPv4Address | IPv6Address | None:
    """The IP address that a host is in any spelling; None if it is a name."""
    try:
        number = socket.getaddrinfo(host.strip("[]").rstrip("."), None, flags=socket.AI_NUMERICHOST)[0][4][0]
    except (OSError, UnicodeError):
        return None
    address = ip_address(number)
    return getattr(address, "ipv4_mapped", None) or address


def open_client(url: str, flag: str, timeout: float | None, headers: Mapping[str, str] | None = None) -> httpx2.Client:
    """A client for a server; sends nothing yet.

    Args:
        url: address of the server.
        flag: the flag that names it, for messages.
        timeout: seconds to wait for an answer; None for no limit.
        headers: of all requests.

    Raises:
        UserError: the address is invalid, or the proxy for it cannot be used.
    """
    import httpx2

    limits = httpx2.Limits(keepalive_expiry=KEEPALIVE)
    transport = _transport(httpx2.HTTPTransport, url, flag, limits)
    return httpx2.Client(transport=transport, timeout=timeout, headers=headers)


def open_async_client(
    url: str,
    flag: str,
    timeout: float | None,
    headers: Mapping[str, str] | None = None,
    connections: int | None = None,
) -> httpx2.AsyncClient:
    """Like `open_client`, for asynchronous requests, over at most a number of connections at the same time."""
    import httpx2

    limits = httpx2.Limits(max_connections=connections, keepalive_expiry=KEEPALIVE)
    transport = _transport(httpx2.AsyncHTTPTransport, url, flag, limits)
    return httpx2.AsyncClient(transport=transport, timeout=timeout, headers=headers)


def _transport(kind: type[Transport], url: str, flag: str, limits: httpx2.Limits) -> Transport:
    """A connection to an address, through its proxy if it has one. It reads no variables of proxies itself."""
    import httpx2

    try:
        httpx2.URL(url)
    except httpx2.InvalidURL as error:
        raise UserError(f"{flag} {url} is not an address: {error}.") from error
    variable, proxy = proxy_of(url)
    try:
        return kind(limits=limits, proxy=proxy)
    except ImportError as error:
        problem = f"the proxy of {variable.upper()} is a SOCKS proxy, which needs a package: pip install socksio"
        raise UserError(f"{flag} {url}: {problem}. Or add {urlsplit(url).hostname} to NO_PROXY.") from error
    except (
        ValueError,
        httpx2.InvalidURL,
    ) as error:  # the message does not repeat the proxy, which may hold a password
        problem = f"the proxy of {variable.upper()} is not an address such as http://host:8080 or socks5h://host:1080"
        raise UserError(
            f"{flag} {url}: {problem}. Correct it, or add {urlsplit(url).hostname} to NO_PROXY."
        ) from error


def proxy_of(url: str) -> tuple[str, str | None]:
    """The proxy for an address, after the variable that names it; None if the server is reached directly."""
    parts = urlsplit(url)
    proxies = getproxies()
    scheme = parts.scheme if proxies.get(parts.scheme) else "all"
    variable = f"{scheme}_proxy"
    proxy = proxies.get(scheme)
    if not proxy or is_local(url) or proxy_bypass(parts.netloc) or _in_networks(parts.hostname or "", proxies):
        return variable, None
    return variable, proxy if "://" in proxy else f"http://{proxy}"


def _in_networks(host: str, proxies: Mapping[str, str]) -> bool:
    """Whether NO_PROXY has the IP address of a host, or a network that contains it."""
    for entry in proxies.get("no", "").split(","):
        with suppress(ValueError):  # names
            if ip_address(host) in ip_network(entry.strip().strip("[]"), strict=False):
                return True
    return False
