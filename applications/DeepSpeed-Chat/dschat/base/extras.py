# SPDX-License-Identifier: Apache-2.0
"""Packages that a plain installation leaves out: extras of setup.py, checked before a command does anything else."""

from importlib.util import find_spec

from dschat.base.errors import UserError

# Extra → the modules that it brings, and that are imported without a message of their own.
EXTRAS = {
    "bench": ("lm_eval",),
    "evaluation": ("matplotlib", "pandas", "rouge_score", "scipy", "statsmodels"),
    "programs": ("markdown_it",),
    "serve": ("fastapi", "starlette", "uvicorn"),
}


def require_extra(extra: str, user: str) -> None:
    """Checks that the modules of an extra can be imported.

    Args:
        extra: a key of `EXTRAS`.
        user: the command or flag that needs them, for the message.

    Raises:
        UserError: a module is missing; says which, and the command that installs it.
    """
    missing = [module for module in EXTRAS[extra] if find_spec(module) is None]
    if missing:
        raise UserError(
            f"{user} needs {', '.join(missing)}, which a plain installation leaves out: pip install 'ma-rlhf[{extra}]'"
        )
