# SPDX-License-Identifier: Apache-2.0
"""What draws responses, whichever way it computes them, and how its ids become a Rollout."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat.data.collate import pad
from dschat.models.engines import TrainedPolicy
from dschat.rollouts.sampling import Sampling
from macro_actions.types import Rollout


@dataclass(frozen=True)
class Generation:
    """Responses as an engine drew them."""

    rollout: Rollout  # rows in the order of the prompts; prompt_index counts them
    # (B, R) float32, 0 off the response: log-probs of the drawn tokens under the whole softmax(logits / temperature),
    # as the drawing pass computed them; None where the engine does not know them.
    logprobs: Tensor | None
    bad_rows: Tensor  # (B,) bool: some logits were not finite; such a row is of no use


class Draw(Protocol):
    """Draws one response to each prompt."""

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int],
        *,
        limits: Sequence[int] | None = None,
    ) -> Generation:
        """B prompts as ids without padding, a seed for each, which alone decides its draws → B responses.

        `limits` are the most tokens of each response, where that is fewer than the sampling's.
        """


class RolloutEngine(Protocol):
    """Draws responses from the actor as it is now."""

    def session(self, actor: TrainedPolicy) -> AbstractContextManager[Draw]:
        """Makes the actor's weights ready for drawing, once for all draws inside. Every rank must enter it."""


class Pending(Protocol):
    """Responses that are being drawn."""

    def finish(self, actor: TrainedPolicy) -> Generation:
        """Waits for them. Every rank must call it."""

    def settle(self) -> Generation | None:
        """Waits for them whatever signals come; None where they cannot be finished now. Every rank must call it."""


@runtime_checkable
class AheadEngine(RolloutEngine, Protocol):
    """A rollout engine that draws while the models train, elsewhere, and keeps its weights between sessions."""

    def session_again(self, actor: TrainedPolicy) -> AbstractContextManager[Draw]:
        """A session with the weights of the last one, which the actor still has: they are not sent again."""

    def begin(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]) -> Pending:
        """As `Draw`, with the weights of the last session. Does not wait."""


@dataclass
class PolicySampler:
    """What draws responses with a policy that trains, and how."""

    policy: TrainedPolicy
    tokenizer: PreTrainedTokenizerBase
    sampling: Sampling
    seed: int  # of the run
    engine: RolloutEngine


def pad_prompts(prompts: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """B prompts → input_ids (B, P) long and attention_mask (B, P) bool, padded on the left to the longest."""
    ids, mask = pad(prompts, pad_id, "left")
    return ids.to(device), mask.to(device)


def assemble(
    prompts: tuple[Tensor, Tensor], tokens: Tensor, sampling: Sampling, limits: Sequence[int] | None = None
) -> Rollout:
    """A rollout of what was drawn, each row cut behind its first end token, or at its limit.

    `prompts` are input_ids (B, P) and attention_mask (B, P), padded on the left; `tokens` (B, T) long are drawn ids,
    of which anything may follow an end token or the limit.
    """
    ended = torch.isin(tokens, torch.tensor(sampling.end_ids, device=tokens.device))
    within = torch.ones_like(ended)
    if limits is not None:
        most = torch.tensor(limits, device=tokens.device)
        within = torch.arange(tokens.shape[1], device=tokens.device) < most[:, None]
        ended &= within
    mask = within & ((ended.cumsum(1) - ended.long()) == 0)
    width = int(mask.sum(1).max())
    mask, tokens = mask[:, :width], tokens[:, :width]
    return Rollout(
        input_ids=torch.cat([prompts[0], torch.where(mask, tokens, sampling.pad_id)], dim=1),
        attention_mask=torch.cat([prompts[1], mask], dim=1),
        response_mask=mask,
        prompt_index=torch.arange(len(tokens), device=tokens.device),
        finished=ended.any(1),
    )
