# SPDX-License-Identifier: Apache-2.0
"""Variables of the environment in values of flags, and `~` in paths.

In a file of `--config`, `${NAME}` and `${NAME:-DEFAULT}` may be part of every value; `$${` is a literal `${`. In a
path, wherever it comes from, `$NAME`, `${NAME}`, `${NAME:-DEFAULT}` and a leading `~` or `~user` are expanded; `$$` is
a literal `$`, and `$~` at the beginning a literal `~`.
"""

import os
import re
from collections.abc import Mapping

from dschat.base.errors import UserError

BRACED = r"\{(?:(?P<braced>\w+)(?::-(?P<default>[^}]*))?\})?"  # without a group: a brace that is not closed
IN_TEXT = re.compile(rf"(?P<literal>\$(?=\$\{{))?\${BRACED}")
IN_PATH = re.compile(rf"\$(?:(?P<literal>\$|(?<=^\$)~)|{BRACED}|(?P<plain>[A-Za-z_]\w*))")


def expand_text(
    text: str,
    source: str,
    environ: Mapping[str, str],
) -> str:
    """Fill in the variables of a value from a file.

    Args:
        text: the value.
        source: flag or FILE:LINE, for messages.
        environ: values of variables.

    Raises:
        UserError: a variable is not set, or `${` has no closing brace.
    """

    def fill(match: re.Match[str]) -> str:
        if match["literal"]:
            return match[0].removeprefix("$")
        return _value(match["braced"], match["default"], source, environ, "$${ for a literal ${")

    return IN_TEXT.sub(fill, text)


def expand_path(
    text: str,
    source: str,
    environ: Mapping[str, str],
) -> str:
    """Fill in the variables of a path, then its leading `~`. For arguments and errors see `expand_text`."""

    def fill(match: re.Match[str]) -> str:
        if match["literal"]:
            return match["literal"]
        return _value(match["braced"] or match["plain"], match["default"], source, environ, "$$ for a literal $")

    filled = IN_PATH.sub(fill, text)
    if not filled.startswith("~") or text.startswith("$~"):
        return filled
    expanded = os.path.expanduser(filled)
    if expanded.startswith("~"):
        user = filled.partition("/")[0]
        raise UserError(f"{source}: {filled}: there is no user {user[1:]}; write ./~ for a name that begins with ~.")
    return expanded


def escape_text(text: str) -> str:
    """A value for a file, such that `expand_text` gives back the value."""
    return text.replace("${", "$${")


def escape_path(text: str) -> str:
    """A path such that `expand_path` gives it back."""
    escaped = text.replace("$", "$$")
    return f"${escaped}" if escaped.startswith("~") else escaped


def _value(
    name: str | None,
    default: str | None,
    source: str,
    environ: Mapping[str, str],
    literal: str,
) -> str:
    """Value of a variable; an empty one has the default."""
    if name is None:
        raise UserError(f"{source}: ${{ has no name and closing brace: write ${{NAME}}, or {literal}.")
    value = environ.get(name) or default
    if value is None:
        raise UserError(
            f"{source}: the variable {name} is not set; set it, or write ${{{name}:-DEFAULT}}, or {literal}."
        )
    return value
