# SPDX-License-Identifier: Apache-2.0
"""Builds the score source of a PPO run from its flags.

Each flag that names a source has a row of `SCORE_SOURCES` in settings/rewards.py. The row names a function, such as
`build_server` in training/steps/reward_url.py, which is imported and called with the parts and the flag's value.
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


class ProgramRunner(Protocol):
    """What the core knows of the pool that runs programs, which the wing `programs` makes."""

    @property
    def level(self) -> str:
        """The isolation of its sandbox, for run.json."""


@dataclass(frozen=True)
class SourceParts:
    """What score sources are built from.

    Attributes:
        config: the flags.
        plan: batch sizes and placement of the run.
        tokenizer: the actor's tokenizer.
        programs: runs the programs in responses, with --reward_source programs.
        shared_scores: scores of the reward model, where --share_base makes it an adapter on the actor's base.
    """

    config: PPOConfig
    plan: RunPlan
    tokenizer: PreTrainedTokenizerBase
    programs: ProgramRunner | None = None
    shared_scores: ScoreSource | None = None

    @property
    def skips(self) -> bool:
        """Whether responses without a score are left out."""
        return self.config.rewards.on_reward_error == "skip"

    @property
    def patience(self) -> float:
        """Seconds in which all answers of a rollout must come, since other ranks wait; unlimited on a single rank."""
        return longest_rollout(self.config) if world_size() > 1 else math.inf


def reward_source(parts: SourceParts) -> ScoreSource:
    """The score source of a run: a single source, the weighted sum of several, or zeros if the flags name none.

    Raises:
        UserError: a function, a model, a rubric, a key or an address cannot be used.
    """
    rewards = parts.config.rewards
    terms: list[Weighted] = []
    for name, (kind, value) in zip(rewards.source_names, rewards.sources, strict=True):
        source = _build_source(parts, kind, value)
        terms.append(Weighted(name if rewards.are_named else None, rewards.weights[name], source))
    if parts.config.has_simulated_user:
        terms.append(_episodes_without_rewards(parts))

    if not terms:
        return NoScores()
    # A sum is needed for several terms, for scores under names of their own, and to leave out missing scores.
    if len(terms) > 1 or rewards.are_named or parts.skips:
        from dschat.scoring.weighted import WeightedScores

        return WeightedScores(terms, parts.skips)
    return terms[0].source


def _episodes_without_rewards(parts: SourceParts) -> Weighted:
    """Dialogues with a simulated user: they add 0, no score where the user failed, and the metrics of episodes."""
    return Weighted(None, 1.0, _build_source(parts, SOURCE_BY_FLAG["environment"], SIMULATED_USER))


def _build_source(parts: SourceParts, kind: SourceKind, value: str) -> ScoreSource:
    """Imports the builder of a kind of source, and builds the source that the flag's value names."""
    builder: Callable[[SourceParts, str], ScoreSource] = resolve_name(f"dschat.{kind.builder}")
    return builder(parts, value)
