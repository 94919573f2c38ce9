# SPDX-License-Identifier: Apache-2.0
"""Builds the source of scores of a run from its flags.

Each flag that names a source has a row of `SCORE_SOURCES` in settings/rewards.py, which says what builds it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from dschat.run.distributed import world_size
from dschat.scoring.source import NoScores, ScoreSource, Weighted
from dschat.settings.ppo import PPOConfig
from dschat.settings.rewards import SIMULATED_USER, SOURCE_BY_FLAG, SourceKind, longest_rollout
from dschat.training.steps.engines import RunPlan


class RunsPrograms(Protocol):
    """A pool that runs programs (`PROGRAM_POOL`, training/steps/ppo.py)."""

    @property
    def level(self) -> str:
        """The isolation of its sandbox, for run.json."""


@dataclass(frozen=True)
class SourceParts:
    """What sources of scores are built from.

    Attributes:
        config: the flags.
        plan: batch sizes and placement of the run.
        tokenizer: the actor's tokenizer.
        programs: runs the programs in responses, with --reward_source programs.
        on_base: with --share_base, the scores of the reward model, which is an adapter on the actor's base.
    """

    config: PPOConfig
    plan: RunPlan
    tokenizer: PreTrainedTokenizerBase
    programs: RunsPrograms | None = None
    on_base: ScoreSource | None = None

    @property
    def skips(self) -> bool:
        """Whether responses without a score are left out."""
        return self.config.rewards.on_reward_error == "skip"


def reward_source(parts: SourceParts) -> ScoreSource:
    """The source of scores of a run: a single one, the weighted sum of several, or zeros if the flags name none.

    Raises:
        UserError: a function, a model, a rubric, a key or an address cannot be used.
    """
    config = parts.config
    weighted = _weighted_sources(parts)
    if config.has_simulated_user:
        weighted.append(_simulated_user(parts))
    if not weighted:
        return NoScores()
    # Beside sums, `WeightedScores` reports scores by name, leaves out responses without one, and adds metrics.
    reports_names = any(source.name is not None for source in weighted)
    if reports_names or parts.skips or config.has_simulated_user:
        from dschat.scoring.weighted import WeightedScores

        return WeightedScores(weighted, parts.skips)
    return weighted[0].source


def _weighted_sources(parts: SourceParts) -> list[Weighted]:
    """The sources that flags name. Those of a sum have their names in --reward_weights; a single one has none."""
    rewards = parts.config.rewards
    is_sum = len(rewards.sources) > 1 or rewards.reward_weights is not None
    weighted: list[Weighted] = []
    for name, (kind, value) in zip(rewards.source_names, rewards.sources, strict=True):
        source = build_source(parts, kind, value)
        weighted.append(Weighted(name if is_sum else None, rewards.weights[name], source))
    return weighted


def _simulated_user(parts: SourceParts) -> Weighted:
    """What counts the turns of dialogues with a simulated user.

    Nothing is rewarded; dialogues whose user failed get no score.
    """
    return Weighted(None, 1.0, build_source(parts, SOURCE_BY_FLAG["environment"], SIMULATED_USER))


def build_source(parts: SourceParts, kind: SourceKind, value: str) -> ScoreSource:
    """Imports the builder of a kind of source, and builds the one that a flag's value names."""
    builder: Callable[[SourceParts, str], ScoreSource] = resolve_name(f"dschat.{kind.builder}")
    return builder(parts, value)


def patience_of(config: PPOConfig) -> float:
    """Seconds in which all answers of a rollout must come, since other processes wait; unlimited without others."""
    return longest_rollout(config) if world_size() > 1 else math.inf
