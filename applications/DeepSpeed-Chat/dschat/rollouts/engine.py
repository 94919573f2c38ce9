# SPDX-License-Identifier: Apache-2.0
"""The interface of rollout engines, which sample responses, and how sampled ids become a Rollout."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat.data.batches import pad
from dschat.models.engines import TrainedPolicy
from dschat.rollouts.sampling import Sampling
from macro_actions.types import Rollout


@dataclass(frozen=True)
class Generation:
    """Responses as an engine sampled them."""

    rollout: Rollout  # rows in the order of the prompts, which prompt_index counts
    # (B, R) float32, 0 outside the response: log-probs of the sampled tokens under softmax(logits / temperature) of
    # the whole vocabulary, from the sampling pass; None if the engine does not report them.
    logprobs: Tensor | None
    bad_rows: Tensor  # (B,) bool: some logits were not finite, and the row must not be used


class ResponseSampler(Protocol):
    """Samples one response to each prompt."""

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int],
        *,
        limits: Sequence[int] | None = None,
    ) -> Generation:
        """Samples B responses.

        Args:
            prompts: B lists of ids, without padding.
            sampling: how to sample.
            seeds: one per prompt; it alone decides the random numbers of its response.
            limits: optional per-response token limits; each overrides `max_new_tokens` when smaller.
        """


class RolloutEngine(Protocol):
    """Samples responses from the actor with its current weights."""

    def session(self, actor: TrainedPolicy, same_weights: bool = False) -> AbstractContextManager[ResponseSampler]:
        """Prepares the actor's weights once for all sampling inside. Every rank must enter it.

        Args:
            actor: the policy.
            same_weights: its weights have not changed since the last session, so that an engine that keeps a copy need
                not be sent them.
        """


class Pending(Protocol):
    """Responses that are being sampled in the background."""

    def finish(self) -> Generation:
        """Waits for the responses. Every rank must call it."""

    def settle(self) -> Generation | None:
        """Waits for the responses despite signals; None if they cannot be finished. Every rank must call it."""


@runtime_checkable
class AheadEngine(RolloutEngine, Protocol):
    """A rollout engine on other machines, which samples while the models train and keeps its weights."""

    def begin(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]) -> Pending:
        """Like a `ResponseSampler`, with the weights of the last session, but does not wait for the responses."""


@dataclass
class PolicySampler:
    """A policy that is being trained, and how to sample from it."""

    policy: TrainedPolicy
    tokenizer: PreTrainedTokenizerBase
    sampling: Sampling
    seed: int  # of the run
    engine: RolloutEngine


def pad_prompts(prompts: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Pads B prompts on the left to the longest: input_ids (B, P) long and attention_mask (B, P) bool."""
    ids, mask = pad(prompts, pad_id, "left")
    return ids.to(device), mask.to(device)


def assemble(
    prompts: tuple[Tensor, Tensor], tokens: Tensor, sampling: Sampling, limits: Sequence[int] | None = None
) -> Rollout:
    """Makes a rollout from sampled ids; each row ends after its first end token, or at its limit.

    Args:
        prompts: input_ids and attention_mask of shape (B, P), padded on the left.
        tokens: sampled ids (B, T) long; anything may follow an end token or the limit.
        sampling: has the end tokens and the padding.
        limits: optional per-response token limits.
    """
    ended = torch.isin(tokens, torch.tensor(sampling.end_ids, device=tokens.device))
    within = torch.ones_like(ended)
    if limits is not None:
        columns = torch.arange(tokens.shape[1], device=tokens.device)
        within = columns < torch.tensor(limits, device=tokens.device)[:, None]
        ended &= within
    mask = within & ((ended.cumsum(1) - ended.long()) == 0)

    width = int(mask.sum(1).max())
    mask = mask[:, :width]
    responses = torch.where(mask, tokens[:, :width], sampling.pad_id)
    return Rollout(
        input_ids=torch.cat([prompts[0], responses], dim=1),
        attention_mask=torch.cat([prompts[1], mask], dim=1),
        response_mask=mask,
        prompt_index=torch.arange(len(tokens), device=tokens.device),
        finished=ended.any(1),
    )
