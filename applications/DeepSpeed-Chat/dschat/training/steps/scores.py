# SPDX-License-Identifier: Apache-2.0
"""The source of scores of a run, made of those that its flags name: rows of `SCORE_SOURCES`, settings/rewards.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from dschat.run.distributed import world_size
from dschat.scoring.source import NoScores, ScoreSource, Weighted, WeightedScores
from dschat.settings.ppo import PPOConfig
from dschat.settings.rewards import SCORE_SOURCES, SIMULATED_USER, SourceKind, longest_rollout
from dschat.training.steps.engines import RunPlan


class RunsPrograms(Protocol):
    """What runs programs, made by `PROGRAM_POOL` (training/steps/ppo.py) for the rows that read it."""

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
        on_base: scores of a reward model that is an adapter on the actor's base, with --share_base.
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

    Each source of a sum has its name in --reward_weights, metrics and samples.

    Raises:
        UserError: a function, a model, a rubric, a key or an address cannot be used.
    """
    config = parts.config
    rewards = config.rewards
    sources = []
    for name, (kind, value) in zip(rewards.source_names, rewards.sources, strict=True):
        sources.append((name, build_source(parts, kind, value)))
    if not sources and not config.has_simulated_user:
        return NoScores()
    is_sum = len(sources) > 1 or rewards.reward_weights is not None
    # Beside sums, `WeightedScores` leaves out responses without a score, and adds metrics of a simulated user.
    if not (is_sum or parts.skips or config.has_simulated_user):
        return sources[0][1]

    weighted = []
    for name, source in sources:
        weighted.append(Weighted(name if is_sum else "", rewards.weights[name], source))
    if config.has_simulated_user:
        # It rewards nothing. Its source counts turns, and gives no score to dialogues whose user failed.
        environment = next(kind for kind in SCORE_SOURCES if kind.flag == "environment")
        weighted.append(Weighted("", 1.0, build_source(parts, environment, SIMULATED_USER)))
    return WeightedScores(weighted, parts.skips)


def build_source(parts: SourceParts, kind: SourceKind, value: str) -> ScoreSource:
    """Imports the builder of a kind of source, and builds the one that a flag's value names."""
    builder: Callable[[SourceParts, str], ScoreSource] = resolve_name(f"dschat.{kind.builder}")
    return builder(parts, value)


def longest_wait(config: PPOConfig) -> float:
    """Seconds for all answers of a rollout. Other processes wait for this one, and give up after --ddp_timeout."""
    return longest_rollout(config) if world_size() > 1 else math.inf
