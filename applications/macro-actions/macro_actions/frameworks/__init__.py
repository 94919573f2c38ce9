# SPDX-License-Identifier: Apache-2.0
"""Macro actions in other people's trainers: what all adapters share. Each imports its framework when it is used.

An adapter puts `macro_gae` where its framework computes GAE, and leaves everything else to the framework: rewards, KL,
whitening, losses. What a framework does not give is an `UnsupportedError` that names the hook, never a default.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from macro_actions.conditions import fixed, make_row_seeds, parsing, ppl, randomized
from macro_actions.estimators import macro_gae
from macro_actions.segments import MEANS, macro_logprobs, pool_rewards, segment, value_weights

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FRAMEWORKS = ("skyrl", "slime", "verl", "openrlhf", "trl")
READS = {"parsing": "response_ids", "ppl": "ref_logprobs", "randomized": "uids"}  # of each row, beside its mask


class UnsupportedError(RuntimeError):
    """The framework lacks the hook, or does not give what the macro actions need."""


@dataclass(frozen=True)
class MacroActionsConfig:
    """Where macro actions end and how they are pooled; names and values are those of `dschat ppo`, and so are the
    defaults but for `policy_ratio`, which is read where the framework's loss is one of macro actions.

    Attributes:
        termination_condition: fixed, randomized, parsing or ppl.
        ngram: of fixed; 1 is the framework's own GAE, where masks have no holes: some count those as steps.
        ngram_lengths, repeat_times, seed: of randomized, which cuts a sample by its prompt's uid.
        ppl_mode: of ppl: chunk, prefix or token.
        parsing_cutoff, parser, parser_model, tokenizer: of parsing.
        value_function: equal, unit, position or first.
        macro_reward: sum or mean.
        policy_ratio: of the losses: macro (product over its tokens) or macro_mean (their geometric mean).

    Raises:
        ValueError: a value that is none of these.
    """

    termination_condition: str = "fixed"
    ngram: float = 5
    ngram_lengths: tuple[int, ...] = (2, 3, 5, 10)
    repeat_times: int = 3
    seed: int = 1234
    ppl_mode: str = "chunk"
    parsing_cutoff: int = 5
    parser: str = "benepar"
    parser_model: str | None = None
    tokenizer: "PreTrainedTokenizerBase | None" = None
    value_function: str = "equal"
    macro_reward: str = "sum"
    policy_ratio: str = "macro_mean"

    def __post_init__(self) -> None:
        if self.termination_condition not in ("fixed", *READS):
            known = ", ".join(("fixed", *READS))
            raise ValueError(f"termination_condition must be one of {known}, not {self.termination_condition!r}")
        if self.policy_ratio not in MEANS:
            raise ValueError(f"policy_ratio must be one of {', '.join(MEANS)}, not {self.policy_ratio!r}")
        if self.termination_condition == "parsing" and self.tokenizer is None:
            raise ValueError("termination_condition parsing: give the policy's tokenizer=")
        one = torch.ones(1, 1)
        if self.termination_condition != "parsing":  # whose parser is loaded when it is needed
            self.ends(one, "", [0], None, one)
        macro = segment(one, one)
        value_weights(macro, self.value_function)
        pool_rewards(one, macro, self.macro_reward)

    def ends(
        self,
        response_mask: Tensor,
        framework: str,
        uids: Sequence[Hashable] | None = None,
        response_ids: Tensor | None = None,
        ref_logprobs: Tensor | None = None,
    ) -> Tensor:
        """Where the macro actions of a batch end, (B, R) bool.

        Args:
            response_mask: (B, R).
            framework: how it is called, for the message.
            uids: of each row's prompt, with `randomized`; rows with the same one are its samples, in order.
            response_ids: (B, R) long, with `parsing`.
            ref_logprobs: (B, R), with `ppl`.

        Raises:
            UnsupportedError: what the condition reads is None.
        """
        condition, mask = self.termination_condition, response_mask
        if condition == "fixed":
            return fixed(mask, self.ngram)
        if condition == "randomized" and uids is not None:
            return randomized(mask, self.ngram_lengths, self.repeat_times, self._row_seeds(uids))
        if condition == "ppl" and ref_logprobs is not None:
            return ppl(mask, ref_logprobs, self.ppl_mode)
        if condition == "parsing" and response_ids is not None and self.tokenizer is not None:
            return parsing(mask, response_ids, self.tokenizer, self.parsing_cutoff, self.parser, self.parser_model)
        raise UnsupportedError(
            f"{framework}: termination_condition {condition} reads {READS[condition]}, which are not given here;"
            " see docs/plug-ins.md for what this framework supports, or use fixed."
        )

    def gae(
        self, values: Tensor, rewards: Tensor, ends: Tensor, response_mask: Tensor, gamma: float, lam: float
    ) -> tuple[Tensor, Tensor]:
        """Advantages and returns, (B, R) each, not whitened; see `macro_actions.macro_gae`.

        A reward on what the policy did not produce, such as a score behind a tool's answer, is that of the policy's
        last token before it.
        """
        columns = torch.arange(rewards.shape[1], device=rewards.device)
        place = torch.where(response_mask.bool(), columns, -1).cummax(1).values
        own = torch.where(place >= 0, rewards, torch.zeros_like(rewards))
        rewards = torch.zeros_like(rewards).scatter_add(1, place.clamp(min=0), own)
        return macro_gae(values, rewards, ends, response_mask, gamma, lam, self.value_function, self.macro_reward)

    def pooled(self, framework: str, response_mask: Tensor, *logprobs: Tensor | None) -> list[Tensor | None]:
        """(B, R) log-probabilities of macro actions, by which a token's ratio is that of its macro action.

        Raises:
            UnsupportedError: the condition reads more than the mask, which is all that losses are given.
        """
        macro = segment(self.ends(response_mask, framework), response_mask)
        mean = MEANS[self.policy_ratio]
        return [None if x is None else macro_logprobs(x, macro, mean) for x in logprobs]

    def _row_seeds(self, uids: Sequence[Hashable]) -> Tensor:
        """One of each row, by its prompt's uid and how many rows before have the same."""
        seen: Counter[Hashable] = Counter()
        samples = []
        for uid in uids:
            samples.append(seen[uid])
            seen[uid] += 1
        prompts = [uid if isinstance(uid, int) else _number(str(uid)) for uid in uids]
        return make_row_seeds(self.seed, torch.tensor(prompts), 0, torch.tensor(samples))


def require(framework: str, owner: object, *names: str) -> None:
    """Raises UnsupportedError where the framework's module or class lacks one of these hooks."""
    for name in names:
        if not hasattr(owner, name):
            place = getattr(owner, "__qualname__", getattr(owner, "__name__", str(owner)))
            raise UnsupportedError(
                f"{framework}: the installed version has no {place}.{name}, which the adapter needs; docs/plug-ins.md"
                " names the versions that were tried."
            )


def replaced(function: Callable[..., Any]) -> Callable[..., Any]:
    """The framework's own function, where an earlier registration has put ours in its place."""
    own: Callable[..., Any] = getattr(function, "replaces", function)
    return own


def _number(text: str) -> int:
    """55 bits of a text, the same in every process."""
    return int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "big") >> 1
