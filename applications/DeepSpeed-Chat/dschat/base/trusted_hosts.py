# SPDX-License-Identifier: Apache-2.0
"""ASGI middleware of every server and page: what listens on this machine alone answers to its names alone."""

from urllib.parse import urlsplit

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from dschat.base.servers import is_loopback

PROBLEM = (
    "this server answers for this machine alone: ask http://127.0.0.1 or http://localhost. A proxy in front of it must"
    " send Host: localhost."
)


class TrustedHosts:
    """Refuses requests that arrive at a loopback address with the name of another host.

    A browser sends them for a page of a stranger whose name suddenly points to 127.0.0.1 (DNS rebinding); the page
    could otherwise read the answers.
    """

    def __init__(self, app: ASGIApp, named: str = "") -> None:
        """Takes the application behind it, and the name by which the user has it listen, if that is another one."""
        self._app = app
        self._named = named

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or answers 400."""
        responder = self._app if is_trusted(scope, self._named) else JSONResponse({"error": PROBLEM}, 400)
        await responder(scope, receive, send)


def is_trusted(scope: Scope, named: str = "") -> bool:
    """Whether a request may have the host that it names; `named` is a further name of this machine.

    A request that names none, as HTTP/1.0 allows, comes from no browser.
    """
    address = scope.get("server") or ("", None)
    if scope["type"] not in ("http", "websocket") or not is_loopback(address[0]):
        return True
    hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
    return all(_is_own_name(host, named) for host in hosts)


def _is_own_name(header: str, named: str) -> bool:
    """Whether a Host header, with or without a port, names this machine."""
    try:
        host = urlsplit(f"//{header}").hostname or ""
    except ValueError:  # a broken IPv6 address
        return False
    return is_loopback(host) or host == named.lower() != ""
