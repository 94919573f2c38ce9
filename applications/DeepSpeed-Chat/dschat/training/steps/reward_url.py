# SPDX-License-Identifier: Apache-2.0
"""Scores of a server (--reward_url), from the flags of a run."""

from dschat.scoring.url import UrlScores, UrlSettings
from dschat.training.steps.scores import SourceParts


def build_server(parts: SourceParts, address: str) -> UrlScores:
    """Scores of a server. No request is sent yet."""
    flags = parts.config.rewards
    settings = UrlSettings(
        address, flags.reward_batch, flags.reward_timeout, flags.reward_patience, parts.skips, parts.patience
    )
    return UrlScores(settings)
