# SPDX-License-Identifier: Apache-2.0
"""The run matrix: `matrix.toml` as groups of settings, and the runs that they need."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trials.spec import Spec

MATRIX = Path(__file__).with_name("matrix.toml")
OWN = ("estimator", "condition")  # keys of a setting that are no flags


@dataclass(frozen=True)
class Group:
    """Settings that are compared with each other."""

    name: str
    part: str  # core, around, search or quickstart
    task: str
    seeds: int
    settings: dict[str, dict[str, Any]]  # name → flags, estimator, condition
    base: dict[str, Any]  # fields of `Spec` that all settings share

    def spec(self, setting: str, seed: int) -> Spec:
        """One run."""
        options = dict(self.settings[setting])
        own = {key: options.pop(key) for key in OWN if key in options}
        base = dict(self.base)
        flags = base.pop("flags", {}) | options
        return Spec(task=self.task, seed=seed, flags=tuple(sorted(flags.items())), **base, **own)


def read_matrix(file: Path = MATRIX) -> list[Group]:
    """Every group of a matrix file."""
    content = tomllib.loads(file.read_text(encoding="utf-8"))
    groups = []
    for entry in content["groups"]:
        name, part, task, seeds, names = (entry.pop(key) for key in ("name", "part", "task", "seeds", "settings"))
        settings = {setting: content["settings"][setting] for setting in names}
        groups.append(Group(name, part, task, seeds, settings, entry))
    return groups


def runs_of(groups: Sequence[Group], most_seeds: int | None = None) -> list[Spec]:
    """Every run once: group by group, seed by seed."""
    specs = {
        spec.key: spec
        for group in groups
        for seed in range(min(group.seeds, most_seeds or group.seeds))
        for spec in (group.spec(setting, seed) for setting in group.settings)
    }
    return list(specs.values())
