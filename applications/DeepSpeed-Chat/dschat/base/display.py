# SPDX-License-Identifier: Apache-2.0
"""What people look at: model text of which no character is obeyed, tables, and pages that this machine serves."""

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
USER = "demo"  # the name that a page with a password asks for
LARGEST_FILE = 1 << 20  # bytes; Gradio takes files from anybody who reaches it, though no page asks for one
Component = Any  # of Gradio, which is imported only when a page is wanted


def visible(text: str) -> str:
    r"""The text with control characters written out: an escape becomes the four characters ``\x1b``.

    Line ends and tabs stay; line ends of Windows become plain ones.
    """
    text = text.replace("\r\n", "\n")
    return "".join(_written_out(char) if is_hidden(char) else char for char in text)


def pictures(text: str) -> str:
    """The text with a character of the same width for each that would steer the screen; line ends and tabs stay.

    Control characters get their pictures, an escape ␛; what has none gets U+FFFD.
    """
    return "".join(_picture(char) if is_hidden(char) else char for char in text)


def for_reading(text: str) -> str:
    """What a rater sees of a prompt or response: `visible`, without blank space around it; never nothing."""
    return visible(text).strip() or EMPTY


def wrapped(text: str, width: int) -> str:
    """The text in lines of at most `width` characters, broken between words; its own line ends and indents stay."""
    wrapper = textwrap.TextWrapper(width=width, break_long_words=False, break_on_hyphens=False)
    wrapper.replace_whitespace = False
    return "\n".join("\n".join(wrapper.wrap(line)) for line in text.split("\n"))


def is_hidden(char: str) -> bool:
    """Whether a character would steer the screen instead of being shown; line ends and tabs do not count."""
    if char in "\n\t":
        return False
    return char in TURNING or unicodedata.category(char) in HIDDEN_CATEGORIES


def _written_out(char: str) -> str:
    return f"\\x{ord(char):02x}" if ord(char) < 256 else f"\\u{ord(char):04x}"


def _picture(char: str) -> str:
    return chr(0x2400 + ord(char)) if char < " " else "␡" if char == "\x7f" else "\ufffd"


def text_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns padded to their widest cell, the first to the left and the others to the right."""
    table, _ = _padded([headers, *rows])
    lines = ["  ".join(row).rstrip() for row in table]
    lines.insert(1, "-" * text_width(lines[0]))
    return "\n".join(lines)


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same as Markdown, which is also readable as plain text; a pipe in a cell is escaped."""
    table, widths = _padded([[cell.replace("|", "\\|") for cell in row] for row in (headers, *rows)], least=3)
    lines = [f"| {' | '.join(row)} |" for row in table]
    lines.insert(1, f"|{'|'.join(['-' * (widths[0] + 2), *('-' * (width + 1) + ':' for width in widths[1:])])}|")
    return "\n".join(lines)


def _padded(table: Sequence[Sequence[str]], least: int = 0) -> tuple[list[list[str]], list[int]]:
    """The rows with blanks behind their first cells and before the others, and the width of each column."""
    widths = [max(least, *(text_width(row[column]) for row in table)) for column in range(len(table[0]))]
    padded = []
    for row in table:
        spaces = [" " * (width - text_width(cell)) for cell, width in zip(row, widths, strict=True)]
        padded.append([row[0] + spaces[0], *(space + cell for space, cell in zip(spaces[1:], row[1:], strict=True))])
    return padded, widths


def text_width(text: str) -> int:
    """Columns of a terminal: wide characters take two, combining ones none."""
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text)
    return len(text) + wide - sum(unicodedata.combining(character) > 0 for character in text)


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


def launch(
    page: Component,
    css: str,
    js: str | None = None,
    port: int | None = None,
    host: str = HOST,
    password: str | None = None,
) -> str:
    """Serves a page until the process ends or its `close()` is called; returns the address.

    Args:
        page: of Gradio.
        css, js: of the page, beside Gradio's own.
        port: the first free one from 7860 where it is None.
        host: address to listen on.
        password: which the page asks for, with the name `USER`; none is asked for where it is None or empty.

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
