# SPDX-License-Identifier: Apache-2.0
"""Display of text to people: model text made harmless for terminals, tables, and pages of Gradio."""

import os
import socket
import textwrap
import unicodedata
from collections.abc import Sequence
from typing import Any

from dschat.base.errors import UserError

EMPTY = "(empty)"
# Control characters, halves of surrogate pairs, line and paragraph separators; and what turns the direction of text.
HIDDEN_CATEGORIES = ("Cc", "Cs", "Zl", "Zp")
TURNING = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
HOST = "127.0.0.1"
USER = "demo"  # user name of a page with a password
LARGEST_FILE = 1 << 20  # bytes; Gradio accepts uploads from anybody, though no page asks for a file
Component = Any  # of Gradio, which is imported only where a page is served


def visible(text: str) -> str:
    r"""Text with control characters written out: an escape becomes the four characters ``\x1b``.

    Line ends and tabs stay; line ends of Windows become plain ones.
    """
    text = text.replace("\r\n", "\n")
    return "".join(_written_out(char) if is_hidden(char) else char for char in text)


def pictures(text: str) -> str:
    """Text with a visible character for each that would control the terminal; line ends and tabs stay.

    Control characters become their pictures, an escape ␛; others without a picture become U+FFFD.
    """
    return "".join(_picture(char) if is_hidden(char) else char for char in text)


def for_reading(text: str) -> str:
    """Prompt or response as a rater sees it: `visible`, without surrounding white space; EMPTY if nothing is left."""
    return visible(text).strip() or EMPTY


def wrapped(text: str, width: int) -> str:
    """Text in lines of at most `width` characters, broken between words; existing line ends and indents stay."""
    wrapper = textwrap.TextWrapper(
        width=width, break_long_words=False, break_on_hyphens=False, replace_whitespace=False
    )
    return "\n".join(wrapper.fill(line) for line in text.split("\n"))


def is_hidden(char: str) -> bool:
    """Whether a character would control the terminal instead of being shown; line ends and tabs do not count."""
    if char in "\n\t":
        return False
    return char in TURNING or unicodedata.category(char) in HIDDEN_CATEGORIES


def _written_out(char: str) -> str:
    return f"\\x{ord(char):02x}" if ord(char) < 256 else f"\\u{ord(char):04x}"


def _picture(char: str) -> str:
    if char < " ":
        return chr(0x2400 + ord(char))
    return "␡" if char == "\x7f" else "\ufffd"


def text_table(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
) -> str:
    """Table for a terminal: columns padded to their widest cell, the first to the left and the others to the right."""
    table = _padded([headers, *rows])
    lines = ["  ".join(row).rstrip() for row in table]
    lines.insert(1, "-" * text_width(lines[0]))
    return "\n".join(lines)


def markdown_table(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
) -> str:
    """Table of Markdown that is also readable as plain text; a pipe in a cell is escaped."""
    escaped = []
    for row in (headers, *rows):
        escaped.append([cell.replace("|", "\\|") for cell in row])
    table = _padded(escaped, min_width=3)
    lines = [f"| {' | '.join(row)} |" for row in table]
    widths = [text_width(cell) for cell in table[0]]
    rules = ["-" * (widths[0] + 2)]
    rules += ["-" * (width + 1) + ":" for width in widths[1:]]
    lines.insert(1, f"|{'|'.join(rules)}|")
    return "\n".join(lines)


def _padded(
    table: Sequence[Sequence[str]],
    min_width: int = 0,
) -> list[list[str]]:
    """Rows with blanks after their first cells and before the others, so that all cells of a column are as wide."""
    columns = []
    for number, column in enumerate(zip(*table, strict=True)):
        width = max(min_width, *map(text_width, column))
        blanks = [" " * (width - text_width(cell)) for cell in column]
        pairs = zip(column, blanks, strict=True)
        columns.append([blank + cell if number else cell + blank for cell, blank in pairs])
    return [list(row) for row in zip(*columns, strict=True)]


def text_width(text: str) -> int:
    """Width of a text in columns of a terminal: wide characters take two, combining ones none."""
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text)
    return len(text) + wide - sum(unicodedata.combining(character) > 0 for character in text)


def gradio(flag: str) -> Any:
    """Import Gradio with its telemetry turned off; raises UserError where it is missing, naming the flag."""
    os.environ.update(GRADIO_ANALYTICS_ENABLED="False", HF_HUB_DISABLE_TELEMETRY="1")
    for name in ("NO_PROXY", "no_proxy"):  # Gradio calls its own server once
        os.environ[name] = ",".join(filter(None, [os.environ.get(name), HOST]))
    try:
        import gradio
    except ImportError as error:
        raise UserError(f"{flag} needs Gradio: pip install 'ma-rlhf[ui]'") from error
    return gradio


def launch(
    page: Component,
    css: str,
    js: str | None = None,
    port: int | None = None,
    host: str = HOST,
    password: str | None = None,
) -> str:
    """Serve a page until the process ends or its `close()` is called; returns the address.

    Args:
        page: Blocks of Gradio.
        css, js: of the page, in addition to Gradio's.
        port: None for the first free one from 7860.
        host: address to listen on.
        password: asked for with the user name `USER`; None or empty for a page without one.

    Raises:
        UserError: the address or the port cannot be listened on.
    """
    check_address(host, port)
    try:
        _, address, _ = page.launch(
            server_name=host,
            server_port=port,
            auth=[(USER, password)] if password else None,
            max_file_size=LARGEST_FILE,
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
    """Raise UserError at once where the address is taken or invalid; Gradio would fail after seconds."""
    if port is None and host == HOST:
        return
    flags = []
    if host != HOST:
        flags.append(f"--host {host}")
    if port or host == HOST:
        flags.append(f"--port {port}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port or 0))
    except (OSError, OverflowError, UnicodeError) as error:
        raise UserError(f"{' '.join(flags)}: cannot be listened on ({error}); give another one.") from error


def _theme() -> Any:
    """Gradio's plain theme with system fonts, so that none is downloaded."""
    from gradio import themes

    sans = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "Helvetica Neue", "Arial", "sans-serif")
    theme = themes.Base(
        primary_hue="blue",
        neutral_hue="slate",
        font=sans,
        font_mono=("ui-monospace", "monospace"),
    )
    return theme.set(
        button_primary_background_fill="*primary_600",
        button_primary_background_fill_hover="*primary_700",
        button_primary_background_fill_dark="*primary_600",
        button_primary_background_fill_hover_dark="*primary_700",
    )
