# SPDX-License-Identifier: Apache-2.0
"""The trials: `trials.toml` as groups of settings, and the training runs that they need."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path

import pandas as pd

Value = str | int | float | bool
TRIALS = Path(__file__).with_name("trials.toml")
BATCH = 64  # responses of a rollout


@dataclass(frozen=True)
class Trial:
    """Everything that decides a run; equal trials have equal curves."""

    task: str
    seed: int
    critic: str = "fresh"  # it starts as the SFT model with a zero head, `regressed`, or from the `reward` model
    scores: str = "gold"  # gold scores, or those of the `reward` model
    critic_rate: float = 1e-3  # its learning rate
    estimator: str = "product"  # an estimator of `variants`; product: that of --advantage_estimator
    updates: int = 100  # rollouts; each is one optimizer update unless flags say otherwise
    flags: Mapping[str, Value] = field(default_factory=dict)  # flags of step 3 by name

    @property
    def key(self) -> str:
        """A short name that differs between trials, also once a FILE.py:NAME among the flags was edited."""
        content = json.dumps(asdict(self), sort_keys=True).encode()
        for value in self.flags.values():
            file = Path(str(value).rpartition(":")[0])
            if file.suffix == ".py" and file.is_file():
                content += file.read_bytes()
        return sha256(content).hexdigest()[:16]

    def file(self, folder: Path) -> Path:
        """The file of its curves, which exists when the run is finished."""
        return folder / "curves" / f"{self.key}.csv"


@dataclass(frozen=True)
class Group:
    """Settings that are compared with each other. `critic` to `updates` hold for every trial of the group."""

    name: str
    part: str  # core or around
    task: str
    seeds: int
    settings: dict[str, dict[str, Value]]  # flags of step 3, and `estimator`
    critic: str = Trial.critic
    scores: str = Trial.scores
    critic_rate: float = Trial.critic_rate
    updates: int = Trial.updates
    kl_levels: Sequence[float] = (5.0, 10.0, 14.0, 20.0)  # nats per response at which settings are compared
    flags: dict[str, Value] = field(default_factory=dict)  # flags of all settings

    @property
    def baseline(self) -> str:
        """The setting that the others are compared with."""
        return next(iter(self.settings))

    def trial(self, setting: str, seed: int) -> Trial:
        """The run of a setting with a seed."""
        flags = {**self.flags, **self.settings[setting]}
        estimator = flags.pop("estimator", Trial.estimator)
        return Trial(
            task=self.task,
            seed=seed,
            critic=self.critic,
            scores=self.scores,
            critic_rate=self.critic_rate,
            estimator=str(estimator),
            updates=self.updates,
            flags=flags,
        )

    def curves(self, folder: Path) -> pd.DataFrame:
        """Curves of the finished runs; columns setting, seed and update, and those of `run_trial`."""
        tables = []
        for setting in self.settings:
            for seed in range(self.seeds):
                file = self.trial(setting, seed).file(folder)
                if file.exists():
                    tables.append(pd.read_csv(file).assign(setting=setting, seed=seed))
        return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()


def read_groups(file: Path = TRIALS) -> list[Group]:
    """The groups of a file."""
    content = tomllib.loads(file.read_text(encoding="utf-8"))
    groups = []
    for entry in content["groups"]:
        entry["settings"] = {name: content["settings"][name] for name in entry["settings"]}
        groups.append(Group(**entry))
    return groups


def trials_of(groups: Iterable[Group], most_seeds: int | None = None) -> list[Trial]:
    """Every trial of some groups once: group by group, seed by seed."""
    trials: dict[str, Trial] = {}
    for group in groups:
        for seed in range(min(group.seeds, most_seeds or group.seeds)):
            for setting in group.settings:
                trial = group.trial(setting, seed)
                trials[trial.key] = trial
    return list(trials.values())
