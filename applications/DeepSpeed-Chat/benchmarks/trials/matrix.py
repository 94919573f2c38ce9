# SPDX-License-Identifier: Apache-2.0
"""The run matrix: `matrix.toml` as groups of settings, the runs that they need, and the folder of finished runs."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path

Flag = str | int | float | bool
Options = Mapping[str, Flag]  # flags of step 3 by name; of a setting, also its estimator and its condition
MATRIX = Path(__file__).with_name("matrix.toml")
BATCH = 64  # prompts of a rollout


@dataclass(frozen=True)
class Spec:
    """Everything that decides a run; equal specs give equal curves."""

    task: str
    seed: int
    critic: str = "fresh"  # what it starts from: the SFT model with a zero head, a `regressed` one, the `reward` model
    scores: str = "gold"  # or of the `reward` model
    critic_rate: float = 1e-3
    estimator: str = "product"  # or a name in `trials.variants`
    condition: str = "product"  # the same
    updates: int = 100  # PPO iterations, of one optimiser update each unless flags say otherwise
    flags: tuple[tuple[str, Flag], ...] = ()  # of step 3, in order

    @property
    def key(self) -> str:
        """Short, and the same for equal specs alone."""
        usual = asdict(Spec("", -1))
        own = {name: value for name, value in asdict(self).items() if value != usual[name]}
        return sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Group:
    """Settings that are compared with each other. Those from `critic` to `updates` go into every `Spec`."""

    name: str
    part: str  # core, around or search
    task: str
    seeds: int
    settings: dict[str, Options]
    critic: str = Spec.critic
    scores: str = Spec.scores
    critic_rate: float = Spec.critic_rate
    updates: int = Spec.updates
    kl_levels: Sequence[float] = (5.0, 10.0, 14.0, 20.0)  # at which settings are compared, nats per response
    flags: Options = field(default_factory=dict)  # of all settings

    def spec(self, setting: str, seed: int) -> Spec:
        """One run."""
        flags = {**self.flags, **self.settings[setting]}
        ways = {name: flags.pop(name) for name in ("estimator", "condition") if name in flags}
        shared = {name: getattr(self, name) for name in ("critic", "scores", "critic_rate", "updates")}
        return Spec(self.task, seed, flags=tuple(sorted(flags.items())), **shared, **ways)  # type: ignore[arg-type]


def read_matrix(file: Path = MATRIX) -> list[Group]:
    """Every group of a matrix file."""
    content = tomllib.loads(file.read_text(encoding="utf-8"))
    known = content["settings"]
    return [
        Group(**entry | {"settings": {name: known[name] for name in entry["settings"]}}) for entry in content["groups"]
    ]


def runs_of(groups: Sequence[Group], most_seeds: int | None = None) -> list[Spec]:
    """Every run once: group by group, seed by seed."""
    specs = {
        spec.key: spec
        for group in groups
        for seed in range(min(group.seeds, most_seeds or group.seeds))
        for spec in (group.spec(setting, seed) for setting in group.settings)
    }
    return list(specs.values())


@dataclass(frozen=True)
class Result:
    """A finished run."""

    spec: Mapping[str, object]
    seconds: float
    curves: dict[str, list[float]]  # one number per PPO iteration


class Results:
    """A folder of finished runs, that of the whole benchmark."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def file(self, spec: Spec) -> Path:
        """Of one run."""
        return self.folder / "results" / f"{spec.key}.json"

    def read(self, spec: Spec) -> Result | None:
        """A run's curves; None if it is not finished."""
        try:
            return Result(**json.loads(self.file(spec).read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
