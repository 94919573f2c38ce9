# SPDX-License-Identifier: Apache-2.0
"""Score functions for step 3: --reward_function examples/reward.py:closeness examples/reward.py:says_why.

A function gets B prompts, B responses and the B data rows of the prompts, as they are in their files, and returns B
numbers. None or NaN means that a response has no score (see --on_reward_error in docs/rewards.md).
"""

from typing import Any

WANTED_LENGTH = 200  # characters


def closeness(prompts: list[str], responses: list[str], rows: list[dict[str, Any]]) -> list[float]:
    """0 for a response of the wanted length, and lower the further its length is from it."""
    scores = []
    for response in responses:
        distance = abs(len(response) - WANTED_LENGTH)
        scores.append(-distance / WANTED_LENGTH)
    return scores


def says_why(prompts: list[str], responses: list[str], rows: list[dict[str, Any]]) -> list[float]:
    """1 for a response that gives a reason."""
    return [float("because" in response.lower()) for response in responses]
