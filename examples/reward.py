# SPDX-License-Identifier: Apache-2.0
"""Score functions for step 3: --reward_function examples/reward.py:closeness examples/reward.py:says_why.

A function gets B prompts, B responses and the B data rows that the prompts are of, as they stand in their files, and
returns B numbers; None or NaN where it has none (see --on_reward_error in docs/rewards.md).
"""

from typing import Any

WANTED = 200  # characters


def closeness(prompts: list[str], responses: list[str], rows: list[dict[str, Any]]) -> list[float]:
    """0 for a response of the wanted length, less the further from it."""
    return [-abs(len(response) - WANTED) / WANTED for response in responses]


def says_why(prompts: list[str], responses: list[str], rows: list[dict[str, Any]]) -> list[float]:
    """1 for a response that gives a reason."""
    return [float("because" in response.lower()) for response in responses]
