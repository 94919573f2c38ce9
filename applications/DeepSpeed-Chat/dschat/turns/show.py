# SPDX-License-Identifier: Apache-2.0
"""Episodes of several turns, shown turn by turn: the messages of both sides with rewards, values and advantages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from dschat.base.display import pictures
from dschat.base.errors import UserError
from dschat.base.jsonl import read_rows
from dschat.evaluation.page import Table

Sample = Mapping[str, Any]  # a row of a sample file
Token = Mapping[str, Any]  # a row of its table of tokens

HEADERS = ("turn", "who", "text", "reward", "value before", "advantage")
DECIMALS = 2


def longest_episode(samples: Sequence[Sample]) -> Sample:
    """The episode with the most turns among those that were written token by token; the first of several.

    Raises:
        UserError: there is none.
    """
    complete = [sample for sample in samples if sample.get("tokens") and "turn_rewards" in sample]
    if not complete:
        raise UserError("No sample is an episode that was written token by token: give samples of --environment.")
    return max(complete, key=lambda sample: len(sample["turn_rewards"]))


def read_samples(file: Path) -> list[Sample]:
    """The rows of a sample file of step 3. Raises UserError if it cannot be read."""
    return [row for _, row in read_rows(file, "samples of episodes:")]


def episode_table(sample: Sample, title: str) -> Table:
    """A table with a row for each message of an episode.

    The value is that of the state before the turn's first token. The advantage is the mean over the turn's tokens,
    which all have the same with `--termination_condition turn`. The reward is the environment's.
    """
    turns = _tokens_of_turns(sample["tokens"])
    rewards = sample["turn_rewards"]
    rows: list[list[object]] = []
    turn = 0
    prompt_count = len(sample["prompt_messages"])  # whose replies, if there are any, are not the policy's
    for number, message in enumerate(sample["messages"]):
        text = pictures(message["content"])
        if number < prompt_count or message["role"] != "assistant":
            rows.append(["", message["role"], text, None, None, None])
            continue
        tokens = turns[turn]
        value = tokens[0].get("value")
        advantages = [token["advantage"] for token in tokens if "advantage" in token]
        rows.append(
            [
                str(turn + 1),
                "policy",
                text,
                _number(rewards[turn]),
                None if value is None else _number(value),
                _number(fmean(advantages)) if advantages else None,
            ]
        )
        turn += 1
    return Table(HEADERS, rows, heading=title)


def _tokens_of_turns(tokens: Sequence[Token]) -> list[list[Token]]:
    """The policy's tokens, turn by turn; those of the environment, between them, have the macro action -1."""
    turns: list[list[Token]] = []
    was_policy = False
    for token in tokens:
        is_policy = token["macro_action"] >= 0
        if is_policy and not was_policy:
            turns.append([])
        if is_policy:
            turns[-1].append(token)
        was_policy = is_policy
    return turns


def _number(value: float) -> str:
    return f"{value:.{DECIMALS}f}"
