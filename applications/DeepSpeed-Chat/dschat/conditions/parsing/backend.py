# SPDX-License-Identifier: Apache-2.0
"""From flags to a parser."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dschat.common.user_function import call_function, load_function
from dschat.errors import UserError

if TYPE_CHECKING:
    from constituent_treelib.parsing import Backend


def load_backend(parser: str, model: str | None, device: str = "cpu") -> Backend:
    """The parser of `--parser`.

    Args:
        parser: name of a backend of constituent_treelib, or module.py:function, which returns one.
        model: name or path of its model; each backend's own default if None.
        device: where a neural parser computes.

    Raises:
        UserError: the package, a library, the model or the user's function is missing; the message says what to do.
    """
    try:
        from constituent_treelib.backends import make_backend
        from constituent_treelib.errors import TreelibError
    except ModuleNotFoundError as error:
        raise UserError(
            f"--parser {parser}: the package constituent_treelib is not installed ({error}). Run "
            "`cd Constituent-Treelib && pip install -e .`, or use another --termination_condition."
        ) from error
    if ":" in parser:
        return _checked(call_function(load_function(parser, "--parser"), "--parser", model), parser)
    try:
        return make_backend(parser, model=model, device=device)
    except TreelibError as error:
        flags = f"--parser {parser}" + ("" if model is None else f" --parser_model {model}")
        raise UserError(f"{flags}: {error}") from error


def _checked(backend: Any, parser: str) -> Backend:  # type: ignore[explicit-any]  # whatever the user returned
    missing = [name for name in ("name", "version", "unit", "parse") if not hasattr(backend, name)]
    if missing or backend.unit not in ("sentence", "text"):
        lacks = f"lacks {', '.join(missing)}" if missing else f"has the unit {backend.unit!r}"
        raise UserError(
            f"--parser {parser}: the function must return an object with name, version, unit (sentence or text) and "
            f"parse(units); what it returned {lacks}."
        )
    checked: Backend = backend
    return checked
