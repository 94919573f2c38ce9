# SPDX-License-Identifier: Apache-2.0
"""A rollout with holes in its responses, on which the critic makes eight updates and the actor one; in plain torch.

The critic's head is a number, or a distribution over bins (BINS) of its returns.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from dschat.run.distributed import rank, world_size
from dschat.training.ppo.credit import Credit
from dschat.training.ppo.update import UpdateContext, ppo_update
from factories import (
    engine_of,
    make_binned_classifier,
    make_causal_lm,
    make_classifier,
    to_device,
    update_flags,
    whole_state,
)
from macro_actions.types import PPOBatch, select_rows
from macro_actions.value_bins import ValueBins
from recorded_updates import GLOBAL_BATCH, ROWS, scored_batch

CRITIC = {"critic_minibatches": 4, "critic_epochs": 2}
BINS = {"value_head": "hl_gauss", "value_range": [-1.0, 1.0]}
RATE = 5e-5
SEED = 3


def holed_batch() -> PPOBatch:
    """`scored_batch`, in which an environment wrote the third token of each response of at least five."""
    batch = scored_batch()
    mask = batch.response_mask.clone()
    mask[mask.sum(1) > 4, 2] = False
    rollout = replace(batch.rollout, response_mask=mask)
    return replace(batch, trajectory=replace(batch.trajectory, rollout=rollout))


def cut_on_first_rank() -> PPOBatch:
    """The same, in which no token of every other row, those of the first of two processes, counts for the policy."""
    batch = holed_batch()
    counted = batch.response_mask.clone()
    counted[::2] = False
    return replace(batch, counted=counted)


def critic_updates(
    batch: PPOBatch, zero_stage: int = 0, tokens: int | None = None, **flags: Any
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Weights and statistics after one update of the actor and several of the critic, on each process's rows."""
    share = GLOBAL_BATCH // world_size()
    own = to_device(select_rows(batch, torch.arange(GLOBAL_BATCH)[rank() :: world_size()]))
    config, plan = update_flags(share, share, 1, tokens, **(CRITIC | flags))
    plan = replace(plan, world_size=world_size(), global_batch=GLOBAL_BATCH)
    critic_plan = config.critic_plan(plan)
    options: dict[str, Any] = {"learning_rate": RATE, "zero_stage": zero_stage}
    actor = engine_of(make_causal_lm(), plan=plan, **options)
    limits = config.critic.value_range
    bins = None if limits is None else ValueBins.between(*limits)
    critic = engine_of(classifier_with(limits), plan=critic_plan, bins=bins, **options)
    stats = ppo_update(UpdateContext(actor, critic, Credit(own), config, plan), SEED)
    weights: dict[str, torch.Tensor] = {}
    for name, engine in (("actor", actor), ("critic", critic)):
        weights |= {f"{name}.{key}": weight.clone() for key, weight in whole_state(engine).items()}
    return weights, stats


def classifier_with(limits: list[float] | None) -> Any:
    """The critic's model before the updates, with bins between two bounds or without."""
    if limits is None:
        return make_classifier(seed=2)
    return make_binned_classifier(ValueBins.between(*limits), seed=2)


def rows_of_critic(processes: int) -> list[list[int]]:
    """Rows of each of the critic's updates, on all processes: two passes of four parts, each process's own rows."""
    shuffle = np.random.RandomState(SEED)
    share = GLOBAL_BATCH // processes
    updates = []
    for _ in range(CRITIC["critic_epochs"]):
        order = shuffle.permutation(share)
        for part in np.split(order, CRITIC["critic_minibatches"]):
            updates.append([process + processes * place for process in range(processes) for place in part.tolist()])
    return updates


def cross_entropies(logits: torch.Tensor, returns: torch.Tensor, limits: list[float]) -> torch.Tensor:
    """Of each token, to a normal distribution around its return, of σ = 1/50 of the range, cut off at the bounds."""
    low, high = limits
    edges = torch.linspace(low, high, logits.shape[1] + 1, dtype=torch.float64)
    centres = returns.double().clamp(low, high)[:, None]
    below = torch.distributions.Normal(centres, (high - low) / 50).cdf(edges)
    masses = below.diff(dim=1) / (below[:, -1:] - below[:, :1])
    losses: torch.Tensor = -(masses * logits.double().log_softmax(1)).sum(1)
    return losses.float()


def plain_critic(
    batch: PPOBatch, updates: Sequence[list[int]], limits: list[float] | None = None
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The critic's weights after updates on these rows, and the loss of each, by autograd row by row."""
    critic = classifier_with(limits)
    adam = torch.optim.AdamW(critic.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    trajectory, mask, returns = batch.trajectory, batch.response_mask, batch.returns
    assert trajectory.values is not None and returns is not None
    losses = []
    for rows in updates:
        total = torch.zeros(())
        for row in rows:
            prompt, response = ROWS[row]
            states = critic.model(input_ids=torch.tensor([prompt + response])).last_hidden_state[0]
            outputs = critic.score(states[len(prompt) - 1 : -1])
            own = mask[row, : len(response)]
            target, old = returns[row, : len(response)], trajectory.values[row, : len(response)]
            if limits is not None:
                total = total + cross_entropies(outputs[own], target[own], limits).sum()
                continue
            value = outputs[:, 0]
            clipped = old + (value - old).clamp(-0.2, 0.2)
            total = total + torch.maximum((value - target) ** 2, (clipped - target) ** 2)[own].sum() / 2
        loss = total / mask[rows].sum()
        losses.append(loss.item())
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(critic.parameters(), 1.0)
        adam.step()
    return {f"critic.inner.{name}": p.detach() for name, p in critic.named_parameters()}, losses
