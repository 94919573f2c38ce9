# SPDX-License-Identifier: Apache-2.0
"""From flags to a termination condition: Segmenter(trajectory, epoch) → Cuts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dschat.common.user_function import call_function, load_function
from dschat.conditions.parsing.backend import load_backend
from dschat.conditions.parsing.condition import ParsedLengths, ParsingCondition
from dschat.errors import UserError
from dschat.models.tokenizer import end_token_id
from dschat.rl.termination import (
    fixed_ngram_ends,
    isolate_last_token,
    make_row_seeds,
    perplexity_ends,
    randomized_ngram_ends,
    span_ends,
)
from dschat.rl.types import Trajectory


@dataclass(frozen=True)
class Cuts:
    """Where the macro actions of a rollout end, and what is to be logged of finding that out."""

    ends: Tensor  # (B, R) bool
    totals: Mapping[str, float] = field(default_factory=dict)  # metric → sum over the rows


class Segmenter:
    """The termination condition of a run: called once per rollout.

    Attributes:
        parser: name and version of the parser; empty for other conditions.
    """

    def __init__(self, config: Any, tokenizer: Any) -> None:
        """Loads what the condition needs.

        Args:
            config: PPOConfig: --termination_condition and its parameters.
            tokenizer: of the policy; also handed to a user's own function.

        Raises:
            UserError: a user's function cannot be imported, or the parser cannot be loaded.
        """
        self._config, self._tokenizer = config, tokenizer
        condition = config.termination_condition
        self._own = load_function(condition, "--termination_condition") if ":" in condition else None
        self._parsing = _parsing_condition(config, tokenizer) if condition == "parsing" else None
        backend = self._parsing.backend if self._parsing else None
        self.parser = {"name": backend.name, "version": backend.version} if backend else {}

    def __call__(self, trajectory: Trajectory, epoch: int) -> Cuts:
        """Cuts every response of a trajectory.

        Args:
            trajectory: of this rank.
            epoch: pass over the data set; `randomized` draws anew in each.

        Raises:
            UserError: a user's function fails or returns something else than (B, R) bool.
        """
        config, mask = self._config, trajectory.response_mask
        condition, totals = config.termination_condition, {}
        if condition == "fixed":
            ends = fixed_ngram_ends(mask, config.ngram_length)
        elif condition == "randomized":
            seeds = make_row_seeds(config.seed, trajectory.rollout.prompt_index, epoch)
            ends = randomized_ngram_ends(mask, config.repeat_times, config.ngram_lengths, seeds)
        elif condition == "ppl":
            ends = perplexity_ends(trajectory.ref_logprobs, mask, config.ppl_mode)
        elif self._parsing is not None:
            found = self._parsing(trajectory.rollout.response_rows())
            ends, totals = span_ends(found.lengths, mask), _totals(found)
        elif self._own is not None:
            returned = call_function(self._own, "--termination_condition", trajectory, self._tokenizer)
            ends = _checked(returned, mask, condition)
        else:
            raise UserError(f"--termination_condition {condition}: unknown.")
        return Cuts(isolate_last_token(ends, mask) if config.isolate_last_token else ends, totals)


def _parsing_condition(config: Any, tokenizer: Any) -> ParsingCondition:
    """Every rank parses its own rows with a parser of its own."""
    backend = load_backend(config.parser, config.parser_model, config.parser_device)
    end_id = end_token_id(tokenizer, config.end_of_conversation_token)
    return ParsingCondition(tokenizer, backend, config.parsing_cutoff, {end_id})


def _totals(found: ParsedLengths) -> dict[str, float]:
    counts = {name: getattr(found.counts, name) for name in ("sentences", "parsed", "fell_back")}
    return {f"parsing/{name}": total for name, total in (counts | {"seconds": found.seconds}).items()}


def _checked(ends: Any, mask: Tensor, condition: str) -> Tensor:
    if not isinstance(ends, Tensor) or ends.dtype != torch.bool or ends.shape != mask.shape:
        got = f"{tuple(ends.shape)} {ends.dtype}" if isinstance(ends, Tensor) else type(ends).__name__
        raise UserError(
            f"--termination_condition {condition}: the function must return a bool tensor of shape (B, R) = "
            f"{tuple(mask.shape)}, not {got}."
        )
    return ends.to(mask.device)
