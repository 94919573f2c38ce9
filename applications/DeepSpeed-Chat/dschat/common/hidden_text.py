# SPDX-License-Identifier: Apache-2.0
"""Model text on a screen or page: every character is shown, none is obeyed."""

import textwrap
import unicodedata

EMPTY = "(empty)"
# Control characters, halves of surrogate pairs, line and paragraph separators; and what turns the direction of text.
HIDDEN_CATEGORIES = ("Cc", "Cs", "Zl", "Zp")
TURNING = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


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
