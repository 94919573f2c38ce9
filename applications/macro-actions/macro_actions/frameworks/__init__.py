# SPDX-License-Identifier: Apache-2.0
"""Adapters for other trainers: SkyRL, slime, verl, OpenRLHF and TRL. Each imports its framework when it is used.

An adapter puts `macro_gae` where its framework computes GAE, and leaves rewards, KL, whitening and losses to the
framework. If the framework lacks a hook or an input, the adapter raises `UnsupportedError`, which names it; it never
continues with a default.

Shapes: B rows, R response positions.
"""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from macro_actions.conditions import fixed, make_row_seeds, parsing, ppl, randomized
from macro_actions.returns import macro_gae
from macro_actions.segments import macro_logprobs, pool_rewards, segment, value_weights

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FRAMEWORKS = ("skyrl", "slime", "verl", "openrlhf", "trl")
# Termination condition → what it reads in addition to the response mask.
READS = {"parsing": "response_ids", "ppl": "ref_logprobs", "randomized": "uids"}
CONDITIONS = ("fixed", "turn", *READS)


class UnsupportedError(RuntimeError):
    """The framework lacks a hook, or does not pass an input that macro actions need."""


@dataclass(frozen=True)
class MacroActionsConfig:
    """Where macro actions end and how they are pooled.

    Names, values and defaults are those of `dschat ppo`. Only `policy_ratio` has another default; it is read where the
    framework's loss has ratios of macro actions.

    Attributes:
        termination_condition: ``fixed``, ``turn``, ``randomized``, ``parsing`` or ``ppl``. With ``turn`` each run of
            the response mask is one macro action.
        ngram: tokens per macro action, for ``fixed``. 1 is the framework's own GAE if masks have no holes; some
            frameworks count the tokens of a hole as steps.
        ngram_lengths: lengths in tokens, for ``randomized``.
        repeat_times: how often each length occurs, for ``randomized``.
        seed: for ``randomized``, which shuffles the lengths by this seed and the uid of the row's prompt.
        ppl_mode: ``chunk``, ``prefix`` or ``token``, for ``ppl``.
        parsing_cutoff: constituents of fewer tokens are macro actions, for ``parsing``.
        parser: for ``parsing``, see :func:`macro_actions.conditions.parsing`.
        parser_model: model of the parser, where it has several.
        tokenizer: the policy's, for ``parsing``.
        value_function: ``equal``, ``unit``, ``position`` or ``first``.
        macro_reward: ``sum`` or ``mean``.
        policy_ratio: ratio of a macro action in losses: ``macro`` (product over its tokens) or ``macro_mean`` (their
            geometric mean).

    Raises:
        ValueError: a value is unknown or out of range.
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
        if self.termination_condition not in CONDITIONS:
            choices = ", ".join(CONDITIONS)
            raise ValueError(f"termination_condition must be one of {choices}, not {self.termination_condition!r}")
        if self.termination_condition == "parsing" and self.tokenizer is None:
            raise ValueError("termination_condition parsing: give the policy's tokenizer=")

        # The functions check the other values themselves: call them on a response of one token.
        token = torch.ones(1, 1)
        if self.termination_condition != "parsing":  # its parser is loaded when it is needed
            self.ends(token, "", uids=[0], ref_logprobs=token)
        macro = segment(token, token)
        value_weights(macro, self.value_function)
        pool_rewards(token, macro, self.macro_reward)
        macro_logprobs(token, macro, self.policy_ratio)

    def ends(
        self,
        response_mask: Tensor,
        framework: str,
        uids: Sequence[Hashable] | None = None,
        response_ids: Tensor | None = None,
        ref_logprobs: Tensor | None = None,
    ) -> Tensor:
        """Ends of the macro actions of a batch.

        Args:
            response_mask: shape ``(B, R)``.
            framework: its name, for the message.
            uids: id of each row's prompt, for ``randomized``. Rows with equal ids are samples of one prompt, in order.
            response_ids: shape ``(B, R)``, int64, for ``parsing``.
            ref_logprobs: shape ``(B, R)``, for ``ppl``.

        Returns:
            ends, shape ``(B, R)``, bool.

        Raises:
            UnsupportedError: the input that the condition reads is ``None``.
        """
        condition = self.termination_condition
        if condition == "fixed":
            return fixed(response_mask, self.ngram)
        if condition == "turn":
            return fixed(response_mask, math.inf)
        if condition == "randomized" and uids is not None:
            return randomized(response_mask, self.ngram_lengths, self.repeat_times, self._row_seeds(uids))
        if condition == "ppl" and ref_logprobs is not None:
            return ppl(response_mask, ref_logprobs, self.ppl_mode)
        if condition == "parsing" and response_ids is not None and self.tokenizer is not None:
            return parsing(
                response_mask, response_ids, self.tokenizer, self.parsing_cutoff, self.parser, self.parser_model
            )
        raise UnsupportedError(
            f"{framework}: termination_condition {condition} reads {READS[condition]}, which are not given here;"
            " see docs/plug-ins.md for what this framework supports, or use fixed."
        )

    def gae(
        self, values: Tensor, rewards: Tensor, ends: Tensor, response_mask: Tensor, gamma: float, lam: float
    ) -> tuple[Tensor, Tensor]:
        """GAE over macro actions, not whitened, see :func:`macro_actions.macro_gae`.

        A reward on a token that the policy did not produce, such as a score after a tool's answer, moves to the
        policy's last token before it. Example: mask 1 1 0 0 and rewards 0 0 0 1 become rewards 0 1 0 0.

        Args:
            values: shape ``(B, R)``.
            rewards: shape ``(B, R)``.
            ends: shape ``(B, R)``, bool.
            response_mask: shape ``(B, R)``.
            gamma: discount per macro action.
            lam: λ per macro action.

        Returns:
            advantages and returns, shape ``(B, R)`` each.
        """
        columns = torch.arange(rewards.shape[1], device=rewards.device)
        last_policy_token = torch.where(response_mask.bool(), columns, -1).cummax(1).values
        moved = torch.where(last_policy_token >= 0, rewards, torch.zeros_like(rewards))
        rewards = torch.zeros_like(rewards).scatter_add(1, last_policy_token.clamp(min=0), moved)
        return macro_gae(values, rewards, ends, response_mask, gamma, lam, self.value_function, self.macro_reward)

    def pooled(self, framework: str, response_mask: Tensor, *logprobs: Tensor) -> list[Tensor]:
        """Log-probabilities of macro actions, on each of their tokens: their difference is the macro action's ratio.

        Args:
            framework: its name, for the message.
            response_mask: shape ``(B, R)``.
            logprobs: log-probabilities of tokens, shape ``(B, R)`` each.

        Returns:
            Shape ``(B, R)`` each.

        Raises:
            UnsupportedError: the condition reads more than the mask, which is the only input that losses have.
        """
        macro = segment(self.ends(response_mask, framework), response_mask)
        return [macro_logprobs(x, macro, self.policy_ratio) for x in logprobs]

    def _row_seeds(self, uids: Sequence[Hashable]) -> Tensor:
        """Seeds for `randomized`, from each prompt's uid and the number of the sample among its rows. Shape (B,)."""
        row_counts: Counter[Hashable] = Counter()
        samples = []
        prompts = []
        for uid in uids:
            samples.append(row_counts[uid])
            row_counts[uid] += 1
            prompts.append(uid if isinstance(uid, int) else _number(str(uid)))
        return make_row_seeds(self.seed, torch.tensor(prompts), 0, torch.tensor(samples))


def require(framework: str, owner: object, *names: str) -> None:
    """Raise UnsupportedError if the framework's module or class lacks one of the named hooks."""
    for name in names:
        if not hasattr(owner, name):
            owner_name = getattr(owner, "__qualname__", getattr(owner, "__name__", str(owner)))
            raise UnsupportedError(
                f"{framework}: the installed version has no {owner_name}.{name}, which the adapter needs;"
                " docs/plug-ins.md names the versions that were tried."
            )


def replaced(function: Callable[..., Any]) -> Callable[..., Any]:
    """The framework's original of a function that an earlier registration may have replaced."""
    original: Callable[..., Any] = getattr(function, "replaces", function)
    return original


def _number(text: str) -> int:
    """Hash of a text in 55 bits; it does not differ between processes."""
    return int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "big") >> 1
