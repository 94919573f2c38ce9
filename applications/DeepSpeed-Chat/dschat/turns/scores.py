# SPDX-License-Identifier: Apache-2.0
"""Scores from the rewards of an environment: an episode's is the sum over its turns."""

from __future__ import annotations

import torch

from dschat.scoring.source import ResponseTexts, Scores
from macro_actions.masked import last_true
from macro_actions.types import Rollout


class EnvironmentScores:
    """The rewards that the environments of a rollout gave; an episode whose environment failed has no score."""

    model: None = None  # the self-check has no model to compare

    def __call__(self, rollout: Rollout, texts: ResponseTexts) -> Scores:
        """The sum of each episode's rewards, with the rewards on the last tokens of the turns."""
        episodes = texts.episodes
        assert episodes is not None  # --environment samples episodes
        values = episodes.turn_rewards.sum(1)
        turns = last_true(rollout.response_mask).sum(1)
        rows = torch.arange(len(values), device=values.device)
        is_counted = rows < (len(values) if texts.counted is None else texts.counted)
        played = is_counted & ~episodes.failed
        count = float(played.sum())
        turn_count = float(turns[played].sum())
        between = rollout.attention_mask[:, rollout.prompt_width :] & ~rollout.response_mask
        cut_turns = 0.0 if rollout.cut_turns is None else float(rollout.cut_turns[played].sum())
        measured = {
            "episode/turns": (turn_count, count),
            "episode/done": (float(episodes.done[played].sum()), count),
            "episode/cut_turns": (cut_turns, turn_count),
            "episode/environment_tokens": (float(between[played].sum()), count),
        }
        return Scores(torch.where(episodes.failed, torch.nan, values), measured=measured, tokens=episodes.turn_rewards)
