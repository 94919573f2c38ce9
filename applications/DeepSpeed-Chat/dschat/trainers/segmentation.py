# SPDX-License-Identifier: Apache-2.0
"""From flags to a termination condition: one function (trajectory, epoch) → ends (B, R)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dschat.errors import UserError
from dschat.functions import call_function, load_function
from dschat.rl.termination import (
    fixed_ngram_ends,
    isolate_last_token,
    make_row_seeds,
    perplexity_ends,
    randomized_ngram_ends,
)
from dschat.rl.types import Trajectory

Segmenter = Callable[[Trajectory, int], Tensor]


def make_segmenter(config: Any, tokenizer: Any) -> Segmenter:
    """The termination condition of a PPOConfig.

    Args:
        config: --termination_condition and its parameters.
        tokenizer: handed to a user's own function.

    Returns:
        A function of the trajectory and the epoch, called once per rollout.

    Raises:
        UserError: a user's function cannot be imported, or (when called) returns something else than (B, R) bool.
    """
    condition = config.termination_condition
    own = load_function(condition, "--termination_condition") if ":" in condition else None

    def segmenter(trajectory: Trajectory, epoch: int) -> Tensor:
        mask = trajectory.response_mask
        if condition == "fixed":
            ends = fixed_ngram_ends(mask, config.ngram_length)
        elif condition == "randomized":
            seeds = make_row_seeds(config.seed, trajectory.rollout.prompt_index, epoch)
            ends = randomized_ngram_ends(mask, config.repeat_times, config.ngram_lengths, seeds)
        elif condition == "ppl":
            ends = perplexity_ends(trajectory.ref_logprobs, mask, config.ppl_mode)
        elif own is not None:
            ends = _checked(call_function(own, "--termination_condition", trajectory, tokenizer), mask, condition)
        else:
            raise UserError(f"--termination_condition {condition}: unknown.")
        return isolate_last_token(ends, mask) if config.isolate_last_token else ends

    return segmenter


def _checked(ends: Any, mask: Tensor, condition: str) -> Tensor:
    if not isinstance(ends, Tensor) or ends.dtype != torch.bool or ends.shape != mask.shape:
        got = f"{tuple(ends.shape)} {ends.dtype}" if isinstance(ends, Tensor) else type(ends).__name__
        raise UserError(
            f"--termination_condition {condition}: the function must return a bool tensor of shape (B, R) = "
            f"{tuple(mask.shape)}, not {got}."
        )
    return ends.to(mask.device)
