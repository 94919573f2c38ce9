# SPDX-License-Identifier: Apache-2.0
"""The functions of the termination conditions: Trajectory → where its macro actions end.

`dschat.settings.conditions` lists the conditions with their flags. Those that read the responses' texts are in
text_conditions.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pkgutil import resolve_name
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat.base.errors import UserError
from dschat.base.user_function import call_function, load_function
from dschat.settings.conditions import FixedFlags, NoFlags, PerplexityFlags, RandomizedFlags, SurpriseFlags
from dschat.settings.macro_actions import TerminationFlags
from macro_actions import conditions as macro
from macro_actions.conditions import isolate_last_token, make_row_seeds
from macro_actions.masked import last_true
from macro_actions.types import ScoredRollout, Trajectory, mapped

FLAG = "--termination_condition"


@dataclass(frozen=True)
class Ends:
    """Where the macro actions of a rollout end."""

    ends: Tensor  # (B, R) bool: True on the last token of each
    totals: Mapping[str, float] = field(default_factory=dict)  # of the parser: metric → sum over the rows


@dataclass(frozen=True)
class RunParts:
    """The parts of a run that conditions may need."""

    tokenizer: PreTrainedTokenizerBase  # the policy's
    end_id: int  # ends a response beside EOS (--end_of_conversation_token)
    seed: int  # the run's, for `randomized`


class FindEnds(Protocol):
    """A termination condition with its parameters; called once per rollout."""

    def __call__(self, trajectory: Trajectory | ScoredRollout, epoch: int) -> Ends:
        """Finds where the macro actions of every response end; `epoch` counts passes over the data set."""


class TerminationCondition:
    """The termination condition of a run: called once per rollout."""

    def __init__(self, flags: TerminationFlags, tokenizer: PreTrainedTokenizerBase, end_id: int, seed: int) -> None:
        """Makes the condition, and loads its function or parser.

        Args:
            flags: --termination_condition and its parameters, checked.
            tokenizer: the policy's; also passed to a user's function.
            end_id: ends a response beside EOS (--end_of_conversation_token).
            seed: the run's, for `randomized`.

        Raises:
            UserError: a user's function cannot be imported, or the parser cannot be loaded.
        """
        self._isolates_last_token = flags.isolate_last_token
        condition = flags.condition
        self._find: FindEnds
        if condition is None:
            self._find = user_condition(flags.termination_condition, tokenizer)
        else:
            make = resolve_name(f"dschat.{condition.function}")
            self._find = make(flags.conditions[condition.name], RunParts(tokenizer, end_id, seed))

    @property
    def parser(self) -> dict[str, str]:
        """Name and version of the parser; empty for other conditions than parsing."""
        return getattr(self._find, "parser", {})

    def __call__(self, trajectory: Trajectory | ScoredRollout, epoch: int) -> Ends:
        """Finds where the macro actions of every response end.

        Args:
            trajectory: this rank's; a scored rollout is enough unless the condition reads the policy's log-probs.
            epoch: pass over the data set; `randomized` shuffles anew in each.

        Raises:
            UserError: a user's function fails or returns something else than (B, R) bool.
        """
        result = self._find(trajectory, epoch)
        if not self._isolates_last_token:
            return result
        return replace(result, ends=isolate_last_token(result.ends, trajectory.response_mask))


def fixed(flags: FixedFlags, run: RunParts) -> FindEnds:
    """A macro action every n tokens."""

    def find(trajectory: Trajectory | ScoredRollout, epoch: int) -> Ends:
        return Ends(macro.fixed(trajectory.response_mask, flags.ngram))

    return find


def turn(flags: NoFlags, run: RunParts) -> FindEnds:
    """A turn of the policy is a macro action: the whole response, unless an environment answers in between."""

    def find(trajectory: Trajectory | ScoredRollout, epoch: int) -> Ends:
        return Ends(last_true(trajectory.response_mask))

    return find


def randomized(flags: RandomizedFlags, run: RunParts) -> FindEnds:
    """Macro actions of shuffled lengths, shuffled anew for each row and epoch."""

    def find(trajectory: Trajectory | ScoredRollout, epoch: int) -> Ends:
        rollout = trajectory.rollout
        seeds = make_row_seeds(run.seed, rollout.prompt_index, epoch, rollout.sample_index)
        return Ends(macro.randomized(trajectory.response_mask, flags.ngram_lengths, flags.repeat_times, seeds))

    return find


def perplexity(flags: PerplexityFlags, run: RunParts) -> FindEnds:
    """Macro actions that end where the reference is surprised."""

    def find(trajectory: Trajectory | ScoredRollout, epoch: int) -> Ends:
        return Ends(macro.ppl(trajectory.response_mask, trajectory.ref_logprobs, flags.ppl_mode))

    return find


def surprise(flags: SurpriseFlags, run: RunParts) -> FindEnds:
    """Macro actions that begin at tokens which were unlikely under the policy."""

    def find(trajectory: Trajectory | ScoredRollout, epoch: int) -> Ends:
        assert isinstance(trajectory, Trajectory)  # `TerminationFlags.reads_policy` asks for one
        mask = trajectory.response_mask
        return Ends(macro.surprise(mask, trajectory.logprobs, flags.surprise_probability, flags.surprise_count))

    return find


def user_condition(spec: str, tokenizer: PreTrainedTokenizerBase) -> FindEnds:
    """Calls a user's ``f(trajectory, tokenizer)`` with copies, which it may change, and checks the ends it returns.

    Raises:
        UserError: the function cannot be imported or does not take two arguments; when it is called, it fails or
            returns something else.
    """
    function = load_function(spec, FLAG, ["trajectory", "tokenizer"])

    def find(trajectory: Trajectory | ScoredRollout, epoch: int) -> Ends:
        assert isinstance(trajectory, Trajectory)  # `TerminationFlags.reads_policy` asks for one
        copies = mapped(trajectory, torch.clone)
        ends = call_function(function, FLAG, copies, tokenizer)
        mask = trajectory.response_mask
        if not isinstance(ends, Tensor) or ends.dtype != torch.bool or ends.shape != mask.shape:
            got = f"{tuple(ends.shape)} {ends.dtype}" if isinstance(ends, Tensor) else type(ends).__name__
            raise UserError(
                f"{FLAG} {spec}: the function must return a bool tensor of shape (B, R) = {tuple(mask.shape)}, not"
                f" {got}."
            )
        return Ends(ends.to(mask.device))

    return find
