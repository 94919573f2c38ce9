# SPDX-License-Identifier: Apache-2.0
"""Pages of Gradio that this machine serves, and that ask no other host for anything."""

import os
import socket
from typing import Any

from dschat.errors import UserError

HOST = "127.0.0.1"

Component = Any  # of Gradio, which is imported only when a page is wanted


def gradio(flag: str) -> Any:
    """Gradio, told to send nothing anywhere; raises UserError where it is missing, naming the flag that needs it."""
    os.environ.update(GRADIO_ANALYTICS_ENABLED="False", HF_HUB_DISABLE_TELEMETRY="1")
    for name in ("NO_PROXY", "no_proxy"):  # Gradio calls its own server once
        os.environ[name] = ",".join(filter(None, [os.environ.get(name), HOST]))
    try:
        import gradio
    except ImportError as error:
        raise UserError(f"{flag} needs Gradio: pip install 'ma-rlhf[ui]'") from error
    return gradio


def launch(page: Component, css: str, js: str | None = None, port: int | None = None, host: str = HOST) -> str:
    """Serves a page until the process ends or its `close()` is called; returns the address.

    Args:
        page: of Gradio.
        css, js: of the page, beside Gradio's own.
        port: the first free one from 7860 where it is None.
        host: address to listen on.

    Raises:
        UserError: the address or the port cannot be listened on.
    """
    check_address(host, port)
    try:
        _, address, _ = page.launch(
            server_name=host,
            server_port=port,
            share=False,  # else GRADIO_SHARE, or a notebook service, would open a public tunnel
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
        )
    except OSError as error:
        raise UserError("--port: 7860 to 7959 are taken; give another one.") from error
    return str(address)


def check_address(host: str, port: int | None) -> None:
    """Fails early and in plain words where Gradio would after seconds."""
    if port is None and host == HOST:
        return
    flags = f"--port {port}" if host == HOST else f"--host {host}" + (f" --port {port}" if port else "")
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port or 0))
    except (OSError, OverflowError, UnicodeError) as error:
        raise UserError(f"{flags}: cannot be listened on ({error}); give another one.") from error


def _theme() -> Any:
    """Gradio's plain theme with the fonts of the machine: no font is fetched."""
    from gradio import themes

    sans = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "Helvetica Neue", "Arial", "sans-serif")
    theme = themes.Base(primary_hue="blue", neutral_hue="slate", font=sans, font_mono=("ui-monospace", "monospace"))
    return theme.set(
        button_primary_background_fill="*primary_600",
        button_primary_background_fill_hover="*primary_700",
        button_primary_background_fill_dark="*primary_600",
        button_primary_background_fill_hover_dark="*primary_700",
    )
