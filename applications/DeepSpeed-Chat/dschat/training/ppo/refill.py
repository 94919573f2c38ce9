# SPDX-License-Identifier: Apache-2.0
"""Refilling a rollout (--refill_rounds): prompts whose responses all have the same score give way to further ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dschat.data.batches import further_examples
from dschat.data.examples import PromptExample
from dschat.run.distributed import gather_on_host, interleave_over_ranks, rank, world_size
from dschat.run.state import SeedKind, derive_seed
from dschat.settings.batches import BatchPlan
from dschat.settings.ppo import PPOConfig
from dschat.training.ppo.collect import ActorSampler, Collector, RolloutWork, lengths_of_samplings
from dschat.training.ppo.groups import equal_groups
from dschat.training.ppo.score import RolloutScorer, ScoredBatch
from macro_actions.types import join, mapped, select_rows


class RefillCollector(Collector):
    """Adds rounds of further prompts to a rollout, instead of prompts with equal scores.

    Equal scores that remain after the last round are left out of the loss by --drop_equal_groups. Which prompts a
    rollout ends up with does not depend on the number of ranks. A run that is stopped during refilling samples the
    whole rollout again.
    """

    def __init__(
        self,
        inner: Collector,
        actor: ActorSampler,
        scorer: RolloutScorer,
        prompts: Sequence[PromptExample],
        config: PPOConfig,
        plan: BatchPlan,
    ) -> None:
        self._inner = inner
        self._actor = actor
        self._scorer = scorer
        self._prompts = prompts
        self._rounds = config.advantages.refill_rounds
        self._seed = config.optimisation.seed
        self._samples = plan.samples_per_prompt
        self._rollout_size = plan.global_rollout

    def collect(self, work: RolloutWork) -> ScoredBatch:
        batch = self._inner.collect(work)
        used_prompts = interleave_over_ranks(work.prompt_numbers)
        order_seed = derive_seed(self._seed, SeedKind.REFILL, work.iteration)
        replaced_count = 0
        sampled_tokens = 0
        for round_number in range(self._rounds):
            is_equal = self._equal_on_all_ranks(batch)
            if not is_equal.any():
                break
            work.clock.record("scoring")

            # As many further prompts as a rollout has; this rank answers its share.
            numbers = further_examples(len(self._prompts), used_prompts, self._rollout_size, order_seed, round_number)
            further, tokens = self._collect_further(numbers[rank() :: world_size()], work, round_number)
            sampled_tokens += tokens

            # Those with different scores replace prompts with equal ones, on all ranks together.
            groups = refill_slots(is_equal, self._equal_on_all_ranks(further), world_size())
            batch = replace_prompts(batch, further, groups, self._samples, self._actor.sampling.pad_id)
            local_groups = groups[rank() :: world_size()]
            replaced_count += int((local_groups >= self._rollout_size).sum())
        totals = {**batch.stats.totals, "rollout/refilled": replaced_count, "rollout/refill_tokens": sampled_tokens}
        return replace(batch, stats=replace(batch.stats, totals=totals))

    def _collect_further(
        self, prompt_numbers: Sequence[int], work: RolloutWork, round_number: int
    ) -> tuple[ScoredBatch, int]:
        """Scored responses to further prompts of this rank, and how many tokens were sampled."""
        examples = [self._prompts[number] for number in prompt_numbers]
        occasion = derive_seed(work.iteration, round_number)
        generation, texts = self._actor.sample(
            examples, SeedKind.REFILL, occasion, self._samples, same_weights=round_number > 0
        )
        work.clock.record("generation")
        work.clock.sampled += lengths_of_samplings(generation, texts)
        batch = self._scorer.score_rollout(generation, texts, work.epoch)
        numbers = torch.tensor(prompt_numbers, device=batch.bad_rows.device)
        batch = replace(batch, prompt_numbers=numbers.repeat_interleave(self._samples))
        num_tokens = int(generation.rollout.response_mask.sum())
        return batch, num_tokens

    def _equal_on_all_ranks(self, batch: ScoredBatch) -> Tensor:
        """Which prompts of all ranks, dealt to them in turn, have equal scores: (P,) bool on the host."""
        local = prompts_with_equal_scores(batch, self._samples).tolist()
        return torch.tensor(interleave_over_ranks(local))


def refill_slots(equal: Tensor, extra_equal: Tensor, ranks: int) -> Tensor:
    """Replace groups of equal scores by extra groups of unequal scores, until there are no more of one kind.

    Groups are dealt to ranks in turn: group g belongs to rank g % ranks. An extra group stays on its rank while there
    are slots to fill; the other extra groups fill the remaining slots in order. Which groups are replaced, and which
    extra groups are used, does not depend on the number of ranks.

    Example: groups equal, not, equal, equal; the second of three extra groups is equal: 4, 1, 6, 3.
    Groups equal, equal, not, not; the first of four extra groups is equal: 5, 6, 2, 3 on one rank. On two ranks, where
    rank 0 has slots 0, 2 and extra groups 4, 6: 6, 5, 2, 3.

    Args:
        equal: shape ``(P,)``, bool, groups to be replaced, see `prompts_with_equal_scores`.
        extra_equal: shape ``(Q,)``, bool, extra groups of equal scores, which are not used.
        ranks: number of processes; P is a multiple of it.

    Returns:
        Shape ``(P,)``, int64: the group in each slot; extra groups are numbered from P.
    """
    equal_slots: list[int] = equal.nonzero().flatten().tolist()
    usable: list[int] = (~extra_equal).nonzero().flatten().tolist()
    count = min(len(equal_slots), len(usable))
    equal_slots = equal_slots[:count]
    groups = [len(equal) + number for number in usable[:count]]
    group_of_slot: dict[int, int] = {}

    # Groups stay on the rank that sampled them, where it has a slot.
    for owner in range(ranks):
        owner_slots = [slot for slot in equal_slots if slot % ranks == owner]
        owner_groups = [group for group in groups if group % ranks == owner]
        group_of_slot.update(zip(owner_slots, owner_groups, strict=False))

    # The others move to the remaining slots.
    used = set(group_of_slot.values())
    free_slots = [slot for slot in equal_slots if slot not in group_of_slot]
    moved_groups = [group for group in groups if group not in used]
    group_of_slot.update(zip(free_slots, moved_groups, strict=True))

    numbers = [group_of_slot.get(slot, slot) for slot in range(len(equal))]
    return torch.tensor(numbers, dtype=torch.int64)


def replace_prompts(
    batch: ScoredBatch, further: ScoredBatch, groups: Tensor, samples: int, pad_id: int
) -> ScoredBatch:
    """Batch of this rank in which further prompts have taken slots. Every rank must call it.

    Args:
        batch: this rank's prompts.
        further: equally many further prompts of this rank.
        groups: shape ``(P,)``, int64, from `refill_slots`: the prompt in each slot of all ranks.
            Further prompts are numbered from P; slots and prompts are dealt to ranks in turn.
        samples: responses to each prompt.
        pad_id: fills ids.
    """
    ranks = world_size()
    group_of_slot: list[int] = groups.tolist()
    num_slots = len(group_of_slot)

    # Prompts that are sampled on one rank and trained on another pass through host memory.
    further_rows = mapped(without_totals(further), Tensor.cpu)
    replacements: dict[int, ScoredBatch] = {}
    passed_on: dict[int, ScoredBatch] = {}
    for slot, group in enumerate(group_of_slot):
        if group >= num_slots and group % ranks == rank():
            replacements[group] = select_prompts(further_rows, [(group - num_slots) // ranks], samples)
            if slot % ranks != group % ranks:
                passed_on[group] = replacements[group]
    for received in gather_on_host(passed_on):
        replacements |= received

    # This rank's slots, in their order: prompts that stay, and replacements below them.
    device = batch.bad_rows.device
    local_groups = group_of_slot[rank() :: ranks]
    parts = [without_totals(batch)]
    order = []
    for slot, group in enumerate(local_groups):
        if group < num_slots:
            order.append(slot)
        else:
            order.append(len(local_groups) + len(parts) - 1)
            parts.append(mapped(replacements[group], lambda x: x.to(device)))
    rows = select_prompts(concat_rows(parts, pad_id), order, samples)

    stats = replace(batch.stats.with_sums_of(further.stats), auxiliary=rows.stats.auxiliary)
    return replace(rows, stats=stats)


def select_prompts(batch: ScoredBatch, prompts: Sequence[int], samples: int) -> ScoredBatch:
    """Rows of some prompts, given by their positions in the batch; `samples` rows belong to each."""
    first_rows = samples * torch.tensor(prompts, dtype=torch.long)
    rows = first_rows[:, None] + torch.arange(samples)
    return select_rows(batch, rows.flatten().to(batch.bad_rows.device))


def concat_rows(batches: Sequence[ScoredBatch], pad_id: int) -> ScoredBatch:
    """Rows of all batches, one batch after the other, with the totals of the first; `pad_id` fills ids."""
    first = batches[0]
    rows = []
    bad_rows = []
    prompt_numbers = []
    auxiliary: dict[str, list[Tensor]] = defaultdict(list)
    for batch in batches:
        rows.append(batch.rows)
        bad_rows.append(batch.bad_rows)
        if batch.prompt_numbers is not None:
            prompt_numbers.append(batch.prompt_numbers)
        for name in first.stats.auxiliary:
            auxiliary[name].append(batch.stats.auxiliary[name])
    all_auxiliary = {name: torch.cat(numbers) for name, numbers in auxiliary.items()}
    return replace(
        first,
        rows=join(rows, pad_id),
        bad_rows=torch.cat(bad_rows),
        stats=replace(first.stats, auxiliary=all_auxiliary),
        prompt_numbers=torch.cat(prompt_numbers) if prompt_numbers else None,
    )


def without_totals(batch: ScoredBatch) -> ScoredBatch:
    """Copy without sums over the rollout; only numbers of rows remain."""
    return replace(batch, stats=replace(batch.stats, totals={}, measured={}))


def prompts_with_equal_scores(batch: ScoredBatch, samples: int) -> Tensor:
    """Prompts whose responses all have the same score, (P,) bool.

    Prompts with logits that are not finite are not among them: they must stay in the batch to be reported.
    """
    has_bad_rows = batch.bad_rows.view(-1, samples).any(1)
    return equal_groups(batch.rows.scored.scores, batch.rows.response_mask, samples) & ~has_bad_rows
