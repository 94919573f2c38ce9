# SPDX-License-Identifier: Apache-2.0
"""Variables of the environment in values of flags, and `~` in paths.

In a file of `--config`, `${NAME}` and `${NAME:-DEFAULT}` may be part of every value; `$${` is a literal `${`. In a
path, wherever it comes from, `$NAME`, `${NAME}`, `${NAME:-DEFAULT}` and a leading `~` or `~user` are expanded; `$$` is
a literal `$`, and `$~` at the beginning a literal `~`. DEFAULT is a literal text that ends at the first `}`; it is
also the value of a variable that is set but empty. A `~` at the beginning of a path may come from a variable.
"""

import os
import re
from collections.abc import Mapping

from dschat.base.errors import UserError

# What follows "$": a name in braces, perhaps with a default. Otherwise only the opening brace is matched, and
# `malformed` is the text after it, up to the closing brace if there is one.
BRACED = r"\{(?:(?P<braced>\w+)(?::-(?P<default>[^}]*))?\}|(?=(?P<malformed>[^}]*\}?)))"
IN_TEXT = re.compile(r"(?P<literal>\$(?=\$\{))?\$" + BRACED)
# `$~` is a literal only at the beginning of a path.
IN_PATH = re.compile(r"\$(?:(?P<literal>\$|(?<=^\$)~)|" + BRACED + r"|(?P<plain>[A-Za-z_]\w*))")


def expand_text(text: str, source: str, environ: Mapping[str, str]) -> str:
    """Replaces variables in a value from a file by their values.

    Args:
        text: the value.
        source: flag or FILE:LINE, for messages.
        environ: values of variables.

    Raises:
        UserError: a variable without a default is not set or empty, `${` has no closing brace, or the braces hold no
            name.
    """

    def fill(match: re.Match[str]) -> str:
        if match["literal"]:
            return match[0].removeprefix("$")
        return _value(match, match["braced"], source, environ, "$${ for a literal ${")

    return IN_TEXT.sub(fill, text)


def expand_path(text: str, source: str, environ: Mapping[str, str]) -> str:
    """Replaces variables in a path, then its leading `~`. For arguments and errors see `expand_text`."""

    def fill(match: re.Match[str]) -> str:
        if match["literal"]:
            return match["literal"]
        return _value(match, match["braced"] or match["plain"], source, environ, "$$ for a literal $")

    filled = IN_PATH.sub(fill, text)
    if not filled.startswith("~") or text.startswith("$~"):
        return filled
    expanded = os.path.expanduser(filled)
    if expanded.startswith("~"):
        user = filled.partition("/")[0]
        raise UserError(f"{source}: {filled}: there is no user {user[1:]}; write ./~ for a name that begins with ~.")
    return expanded


def escape_text(text: str) -> str:
    """The text that stands for a value in a file: `expand_text` turns it back into the value."""
    return text.replace("${", "$${")


def escape_path(text: str) -> str:
    """The text that stands for a path: `expand_path` turns it back into the path."""
    escaped = text.replace("$", "$$")
    return f"${escaped}" if escaped.startswith("~") else escaped


def _value(match: re.Match[str], name: str | None, source: str, environ: Mapping[str, str], escape_hint: str) -> str:
    """Value of the variable `name` in a match of IN_TEXT or IN_PATH; `name` is None if the match is malformed."""
    if name is None:
        malformed = match["malformed"]
        if not malformed.endswith("}"):
            raise UserError(f"{source}: ${{ has no closing brace: write ${{NAME}}, or {escape_hint}.")
        raise UserError(
            f"{source}: ${{{malformed} is not a variable: write ${{NAME}} or ${{NAME:-DEFAULT}}, where NAME has"
            f" letters, digits and _ alone, or {escape_hint}."
        )
    value = environ.get(name) or match["default"]
    if value is None:
        problem = "is empty" if name in environ else "is not set"
        raise UserError(
            f"{source}: the variable {name} {problem}; set it, or write ${{{name}:-DEFAULT}}, or {escape_hint}."
        )
    return value
