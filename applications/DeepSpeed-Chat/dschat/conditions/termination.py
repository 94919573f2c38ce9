# SPDX-License-Identifier: Apache-2.0
"""From flags to a termination condition: Trajectory → where its macro actions end."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat.common.user_function import call_function, load_function
from dschat.conditions.parsing import ParsingCondition, load_backend
from dschat.config.macro_actions import TerminationFlags
from dschat.errors import UserError
from dschat.rl.termination import (
    fixed_ngram_ends,
    isolate_last_token,
    make_row_seeds,
    perplexity_ends,
    randomized_ngram_ends,
    span_ends,
)
from dschat.rl.types import ScoredRollout, Trajectory

FLAG = "--termination_condition"


@dataclass(frozen=True)
class Ends:
    """Where the macro actions of a rollout end."""

    ends: Tensor  # (B, R) bool: True on the last token of each
    totals: Mapping[str, float] = field(default_factory=dict)  # what the parser reports: metric → sum over the rows


class TerminationCondition:
    """The termination condition of a run: called once per rollout."""

    def __init__(self, flags: TerminationFlags, tokenizer: PreTrainedTokenizerBase, end_id: int, seed: int) -> None:
        """Loads what the condition needs.

        Args:
            flags: --termination_condition and its parameters, checked.
            tokenizer: of the policy; also handed to a user's own function.
            end_id: ends a response beside EOS (--end_of_conversation_token).
            seed: of the run, for `randomized`.

        Raises:
            UserError: a user's function cannot be imported, or the parser cannot be loaded.
        """
        self._flags, self._seed = flags, seed
        self._user = self._parsing = None
        self.parser: dict[str, str] = {}  # name and version; empty for other conditions than parsing
        if ":" in flags.termination_condition:
            self._user = UserCondition(flags.termination_condition, tokenizer)
        elif flags.termination_condition == "parsing":
            # Every rank parses its own rows with a parser of its own.
            backend = load_backend(flags.parser, flags.parser_model, flags.parser_device)
            self._parsing = ParsingCondition(tokenizer, backend, flags.parsing_cutoff, {end_id})
            self.parser = {"name": backend.name, "version": backend.version}

    def __call__(self, trajectory: Trajectory | ScoredRollout, epoch: int) -> Ends:
        """Finds where the macro actions of every response end.

        Args:
            trajectory: of this rank; a scored rollout is enough for all but a user's function.
            epoch: pass over the data set; `randomized` draws anew in each.

        Raises:
            UserError: a user's function fails or returns something else than (B, R) bool.
        """
        flags, mask = self._flags, trajectory.response_mask
        totals: dict[str, float] = {}
        if self._user is not None:
            assert isinstance(trajectory, Trajectory)  # the caller asked
            ends = self._user(trajectory)
        elif self._parsing is not None:
            found = self._parsing(trajectory.rollout.response_rows())
            ends = span_ends(found.lengths, mask)
            totals = {f"parsing/{name}": getattr(found.counts, name) for name in ("sentences", "parsed", "fell_back")}
            totals["parsing/seconds"] = found.seconds
        elif flags.termination_condition == "ppl":
            ends = perplexity_ends(trajectory.ref_logprobs, mask, flags.ppl_mode)
        elif flags.termination_condition == "randomized":
            rollout = trajectory.rollout
            seeds = make_row_seeds(self._seed, rollout.prompt_index, epoch, rollout.sample_index)
            ends = randomized_ngram_ends(mask, flags.repeat_times, flags.ngram_lengths, seeds)
        elif flags.termination_condition == "fixed":
            ends = fixed_ngram_ends(mask, flags.ngram)
        else:
            raise ValueError(f"termination condition {flags.termination_condition} has no branch here")
        return Ends(isolate_last_token(ends, mask) if flags.isolate_last_token else ends, totals)


class UserCondition:
    """Calls ``f(trajectory, tokenizer)`` and checks the ends that it returns."""

    def __init__(self, spec: str, tokenizer: PreTrainedTokenizerBase) -> None:
        """Imports the function. Raises UserError where it cannot be imported."""
        self._function, self._spec, self._tokenizer = load_function(spec, FLAG), spec, tokenizer

    def __call__(self, trajectory: Trajectory) -> Tensor:
        """Where macro actions end: (B, R) bool.

        Raises:
            UserError: the function fails, or returns something else.
        """
        ends = call_function(self._function, FLAG, trajectory, self._tokenizer)
        mask = trajectory.response_mask
        if not isinstance(ends, Tensor) or ends.dtype != torch.bool or ends.shape != mask.shape:
            got = f"{tuple(ends.shape)} {ends.dtype}" if isinstance(ends, Tensor) else type(ends).__name__
            raise UserError(
                f"{FLAG} {self._spec}: the function must return a bool tensor of shape (B, R) = {tuple(mask.shape)}, "
                f"not {got}."
            )
        return ends.to(mask.device)
