# SPDX-License-Identifier: Apache-2.0
"""The self-check of the first rollout, before the first update.

`check_rollout` compares the log-probs of sampling, rollout, update and reference, which must be equal at that time.
`check_sampled_tokens` looks at the responses: which tokens they hold, where, and how they end.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dschat.base.errors import UserError
from dschat.models.engines import TrainedPolicy
from dschat.models.vocabulary import missing_ids_of
from dschat.training.selfcheck import ROWS, check_policy, largest, require_close
from macro_actions.masked import last_true
from macro_actions.types import Rollout, Trajectory, select_rows

if TYPE_CHECKING:
    from dschat.rollouts.sampling import Sampling


@torch.no_grad()
def check_rollout(
    actor: TrainedPolicy, trajectory: Trajectory, sampling: Sampling, sampled_logprobs: Tensor | None = None
) -> None:
    """Checks the first rollout: the ratio is 1, the KL to the reference 0, and every sampled token was allowed.

    Args:
        actor: in evaluation mode.
        trajectory: trajectory of the first rollout, before any update.
        sampling: how it was sampled.
        sampled_logprobs: shape ``(B, R)``, log-probs of the pass that sampled the tokens, if it gave them.

    Raises:
        UserError: naming what differs, or the token.
    """
    rollout = trajectory.rollout
    mask = trajectory.response_mask
    missing_ids = missing_ids_of(actor.module.inner)
    if missing_ids is not None:
        is_missing = torch.isin(rollout.response_ids, missing_ids) & mask
        if bool(is_missing.any()):
            raise UserError("self-check: the policy sampled an id that its tokenizer does not have.")
    tokens = (rollout.input_ids, rollout.attention_mask)
    size = check_policy(actor, tokens, mask.shape[1], sampling.temperature, sampling.pad_id)

    # Log-probs of the update, of the rollout, of sampling and of the reference are equal.
    rows = torch.arange(min(ROWS, len(mask)), device=mask.device)
    part = select_rows(rollout, rows)
    logprobs, _ = actor(part.input_ids, part.attention_mask, mask.shape[1], sampling.temperature)
    size = max(size, largest(trajectory.logprobs, mask))
    check = partial(require_close, mask=part.response_mask, engine=actor, size=size)
    check("log-probs at the update", "those of the rollout", logprobs, trajectory.logprobs[rows])
    if sampled_logprobs is not None:
        check("log-probs of the sampling pass", "those of the actor", sampled_logprobs[rows], logprobs)
    check("actor's log-probs", "the reference's", trajectory.logprobs, trajectory.ref_logprobs, mask=mask)
    check_sampled_tokens(rollout, sampling)


def check_sampled_tokens(rollout: Rollout, sampling: Sampling) -> None:
    """Checks that responses hold allowed tokens alone, are prefixes of their rows, and end as `finished` says.

    In an episode, every turn must end as `cut_turns` says, and the response mask has holes.

    Raises:
        UserError: naming what a response does not keep to.
    """
    mask = rollout.response_mask
    for token_id in sampling.forbidden:
        if bool(((rollout.response_ids == token_id) & mask).any()):
            raise UserError(f"self-check: the policy sampled token {token_id}, a pad or BOS token.")
    end_ids = torch.tensor(sampling.end_ids, device=mask.device)
    is_end = torch.isin(rollout.response_ids, end_ids) & last_true(mask)
    if rollout.cut_turns is not None:
        if not torch.equal(last_true(mask) & ~is_end, rollout.cut_turns):
            raise UserError("self-check: a finished turn does not end with EOS, or one that was cut does.")
        return
    columns = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    if not bool((mask.cumsum(1) == columns)[mask].all()):
        raise UserError("self-check: a response is not a prefix of its row.")
    is_consistent = is_end.any(1) == rollout.finished
    if not bool(is_consistent[mask.any(1)].all()):
        raise UserError("self-check: a finished response does not end with EOS, or one that was cut does.")
