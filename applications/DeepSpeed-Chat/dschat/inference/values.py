# SPDX-License-Identifier: Apache-2.0
"""What values of flags must be, and what a model is called in result paths."""

import math
import os
from collections.abc import Sequence
from pathlib import Path

from dschat.errors import UserError


def check_known(name: str, value: str | None, known: Sequence[str | None]) -> None:
    """Raises UserError unless a flag has one of the values that are known."""
    if value not in known:
        raise UserError(f"{flag_of(name)} {value}: must be one of {', '.join(filter(None, known))}.")


def check_positive(name: str, value: int | None) -> None:
    """Raises UserError where a flag is given and below 1."""
    if value is not None and value < 1:
        raise UserError(f"{flag_of(name)} {value}: must be at least 1.")


def check_temperature(name: str, value: float, typed: str | None = None) -> None:
    """Raises UserError unless a flag's temperature, which the user typed so, is 0 or a positive number."""
    if not (math.isfinite(value) and value >= 0):
        shown = typed or f"{value:g}"
        raise UserError(f"{flag_of(name)} {shown}: must be 0 (greedy) or a positive number, such as 0.8.")


def flag_of(field: str) -> str:
    """`num_return` → `--num-return`."""
    return "--" + field.replace("_", "-")


def model_name(path: str) -> str:
    """Name of a model, a folder or hub id, in result paths: the folder's, or that above `actor`.

    The training scripts' presets write into PRESET/sft, PRESET/reward, PRESET/dpo, PRESET/ppo and PRESET/ppo-VARIANT.
    There the folder alone does not tell models apart, and the one above joins it: `tldr-gemma-2b-ppo`.
    """
    folder = Path(os.path.abspath(path))
    if folder.name == "actor":
        folder = folder.parent
    known = ("sft", "reward", "dpo", "ppo", "refuel")
    if folder.parent.name and (folder.name in known or folder.name.startswith("ppo-")):
        return f"{folder.parent.name}-{folder.name}"
    return folder.name
