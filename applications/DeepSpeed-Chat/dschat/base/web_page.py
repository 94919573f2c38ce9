# SPDX-License-Identifier: Apache-2.0
"""Serves a Gradio page without telemetry, public tunnel or downloaded fonts: the demo, and votes in a browser.

Gradio and what comes with it are an extra, imported only where a page is served.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dschat.base.errors import UserError

HOST = "127.0.0.1"
USER = "demo"  # user name that goes with the password of a page
LARGEST_UPLOAD = 1 << 20  # bytes; Gradio accepts uploads from anybody, although no page asks for a file
Component = Any  # a component of Gradio


def import_gradio(flag: str) -> Any:
    """Imports Gradio with its telemetry turned off, and returns the module.

    Args:
        flag: the flag or command that needs Gradio, for the message.

    Raises:
        UserError: Gradio is not installed.
    """
    os.environ.update(GRADIO_ANALYTICS_ENABLED="False", HF_HUB_DISABLE_TELEMETRY="1")
    try:
        with _without_proxies():
            import gradio
    except ImportError as error:
        raise UserError(f"{flag} needs Gradio: pip install 'ma-rlhf[ui]'") from error
    return gradio


@contextmanager
def _without_proxies() -> Iterator[None]:
    """Context without proxy variables: Gradio asks its own server, and does not start with a SOCKS proxy."""
    variables = {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}
    for name in variables:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(variables)


def launch(
    page: Component,
    css: str,
    js: str | None = None,
    port: int | None = None,
    host: str = HOST,
    password: str | None = None,
) -> str:
    """Serves a page until the process ends or the page's `close()` is called; returns the address.

    Args:
        page: Gradio Blocks.
        css: style sheet of the page, in addition to Gradio's.
        js: script of the page, in addition to Gradio's.
        port: port to listen on; None or 0 for the first free one from 7860.
        host: address to listen on.
        password: password that the page asks for, with the user name `USER`; None or empty for no password.

    Raises:
        UserError: the address or the port cannot be listened on.
    """
    from starlette.middleware import Middleware

    from dschat.base.trusted_hosts import TrustedHosts

    check_address(host, port)
    try:
        with _without_proxies():
            _, address, _ = page.launch(
                server_name=host,
                server_port=port or None,
                auth=[(USER, password)] if password else None,
                max_file_size=LARGEST_UPLOAD,
                share=False,  # GRADIO_SHARE or a notebook service would otherwise open a public tunnel
                prevent_thread_lock=True,
                quiet=True,
                footer_links=[],
                run_history=False,
                enable_monitoring=False,
                ssr_mode=False,
                mcp_server=False,
                pwa=False,
                theme=_theme(),
                css=css,
                js=js,
                app_kwargs={"middleware": [Middleware(TrustedHosts, named=host)]},
            )
    except OSError as error:
        reason = str(error).partition(". ")[0]  # what follows is about Gradio's own parameters
        raise UserError(f"--port: {reason}; give another one.") from error
    return str(address)


def check_address(host: str, port: int | None) -> None:
    """Raises UserError if the address is invalid or the port is taken, which Gradio would notice seconds later."""
    if not port and host == HOST:
        return
    flags = []
    if host != HOST:
        flags.append(f"--host {host}")
    if port:
        flags.append(f"--port {port}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port or 0))
    except (OSError, OverflowError, UnicodeError) as error:
        raise UserError(f"{' '.join(flags)}: cannot be listened on ({error}); give another one.") from error


def _theme() -> Any:
    """Gradio's plain theme with system fonts, which need no download."""
    from gradio import themes

    sans = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "Helvetica Neue", "Arial", "sans-serif")
    theme = themes.Base(primary_hue="blue", neutral_hue="slate", font=sans, font_mono=("ui-monospace", "monospace"))
    return theme.set(
        button_primary_background_fill="*primary_600",
        button_primary_background_fill_hover="*primary_700",
        button_primary_background_fill_dark="*primary_600",
        button_primary_background_fill_hover_dark="*primary_700",
    )
