# SPDX-License-Identifier: Apache-2.0
"""Placeholder until the presets are there."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dschat.config.preset_batches import preset_batches as batch_sizes  # noqa: F401


def find_preset(command: str, name: str) -> Path | None:
    return None


def preset_names(command: str | None = None) -> list[str]:
    return []


def variables(preset: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, str]:
    return {}
