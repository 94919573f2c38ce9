# SPDX-License-Identifier: Apache-2.0
"""What is known of a rollout, what is logged of it, and how a response is written down token by token."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat.models.tokenizer import token_texts
from dschat.run.distributed import gather_on_host, rank, world_size
from dschat.run.metrics import Means
from dschat.scoring.source import Measured
from dschat.training.iteration import Metrics
from dschat.training.ppo.credit import equal_groups
from dschat.training.ppo.models import AuxiliaryScores
from macro_actions.estimators import adaptive_lam
from macro_actions.masked import masked_moments, masked_sum
from macro_actions.rewards import ScoreMoments
from macro_actions.types import (
    MacroActions,
    PPOBatch,
    Rollout,
    ScoredRollout,
    Trajectory,
    join,
    mapped,
    select_rows,
)


@dataclass(frozen=True)
class Outside:
    """What others than the models say of a rollout of B rows, by the same names on each rank."""

    auxiliary: AuxiliaryScores  # numbers (B,); their means are objective/<name>
    totals: Mapping[str, float]  # sums over this rank's rows; the sums of all ranks are metrics
    measured: Measured  # by the source of scores: (total, count), whose means over all ranks are metrics

    def with_sums_of(self, further: Outside) -> Outside:
        """The same numbers, and sums over the rows of both."""
        totals = {name: total + further.totals[name] for name, total in self.totals.items()}
        measured = {
            name: (total + further.measured[name][0], count + further.measured[name][1])
            for name, (total, count) in self.measured.items()
        }
        return replace(self, totals=totals, measured=measured)


@dataclass(frozen=True)
class Collected:
    """A rollout, scored, and where its macro actions end."""

    # With log-probs and values; a ScoredRollout where the update's own forward passes give those.
    rollout: Trajectory | ScoredRollout
    macro: MacroActions  # its macro actions
    moments: ScoreMoments | None  # of all scores so far, these included; None without --normalize_scores
    bad_rows: Tensor  # (B,) bool, rows that were sampled from logits that are not finite
    outside: Outside  # what others than the models say of it
    rates: Metrics  # the learning rates, as metrics
    is_stale: bool = False  # whether the weights that drew it are those of an iteration ago

    def refilled(self, further: Collected, groups: Tensor, samples: int, pad_id: int) -> Collected:
        """What this rank trains on once further prompts have taken places. Every rank must call it.

        Args:
            further: this rank's further prompts, as many as it has.
            groups: (P,) long, from `macro_actions.groups.refilled` of the prompts of all ranks, dealt to them in turn.
            samples: responses to a prompt.
            pad_id: fills ids.
        """
        ranks, places = world_size(), len(groups)
        own = groups.tolist()[rank() :: ranks]
        moved = {group for place, group in enumerate(groups.tolist()) if place % ranks != group % ranks}
        # Through the host's memory, so that a device holds no more than its rank has drawn and trains on.
        here = mapped(further._rows_alone(), Tensor.cpu)
        used = [group for group in groups.tolist() if group >= places and group % ranks == rank()]
        drawn = {group: here._prompts([(group - places) // ranks], samples) for group in used}
        for passed in gather_on_host({group: rows for group, rows in drawn.items() if group in moved}):
            drawn |= passed
        taken = [drawn[group] for group in own if group >= places]
        device = self.bad_rows.device
        known = self._rows_alone()._above([mapped(rows, lambda x: x.to(device)) for rows in taken], pad_id)
        number = itertools.count(len(own))
        known = known._prompts([n if group < places else next(number) for n, group in enumerate(own)], samples)
        outside = replace(self.outside.with_sums_of(further.outside), auxiliary=known.outside.auxiliary)
        return replace(known, outside=outside, rates=self.rates)

    def _rows_alone(self) -> Collected:
        """The same without what is of no row."""
        return replace(self, outside=Outside(self.outside.auxiliary, {}, {}), rates={})

    def _prompts(self, numbers: Sequence[int], samples: int) -> Collected:
        """The rows of some prompts."""
        rows = samples * torch.tensor(numbers, dtype=torch.long)[:, None] + torch.arange(samples)
        return select_rows(self, rows.flatten().to(self.bad_rows.device))

    def _above(self, others: Sequence[Collected], pad_id: int) -> Collected:
        """The rows of all, one below the other."""
        everything = [self, *others]
        auxiliary = {
            name: torch.cat([one.outside.auxiliary[name] for one in everything]) for name in self.outside.auxiliary
        }
        return replace(
            self,
            rollout=join([one.rollout for one in everything], pad_id),
            macro=join([one.macro for one in everything]),
            bad_rows=torch.cat([one.bad_rows for one in everything]),
            outside=replace(self.outside, auxiliary=auxiliary),
        )

    def equal_groups(self, samples: int) -> Tensor:
        """(P,) bool: prompts whose scores are all equal; none whose logits were not finite, which is said later."""
        assert isinstance(self.rollout, Trajectory)  # credit is not fused
        bad = self.bad_rows.view(-1, samples).any(1)
        return equal_groups(self.rollout, samples) & ~bad


def outside_metrics(outside: Outside) -> dict[str, float]:
    """The metrics of all ranks; one synchronisation if there is anything."""
    means = Means()
    for name, (total, count) in outside.measured.items():
        means.add(name, total, count)
    for name, numbers in outside.auxiliary.items():
        means.add(f"objective/{name}", numbers.sum(), len(numbers))
    means.add_sums(outside.totals)
    return means.reduce()


def rollout_metrics(batch: PPOBatch, lam: float, lam_alpha: float | None = None) -> dict[str, float]:
    """Means over the responses of all ranks, from this rank's rows; one synchronisation.

    objective/…, response/…, macro/…, val/num_eos_tokens and, of a critic, val/explained_variance and macro/lambda_eff:
    GAE's λ acts per macro action, per token that is λ_eff = λ^(1/mean macro length). KL in nats. Of the responses,
    score_length_correlation is Pearson's, and repetition the share of 4-grams that the response has had before.
    scores_std is the standard deviation of the scores as their source gave them, with the denominator of a population.
    """
    mask, macro, trajectory = batch.response_mask, batch.macro, batch.trajectory
    rows, tokens, macros = mask.shape[0], mask.sum(), macro.mask.sum()
    kept = mask.any(1)  # a response without a score has no token left, and counts in no mean but that of scores
    responses = kept.sum()
    kl, surprise = masked_sum(batch.kl, mask), masked_sum(-trajectory.logprobs, mask)
    finished = (trajectory.rollout.finished & kept).sum()
    means = Means()
    means.add("objective/kl", kl, responses)
    means.add("objective/kl_per_token", kl, tokens)
    means.add("objective/entropy", surprise, responses)
    means.add("objective/scores", trajectory.scores.sum(), rows)
    means.add("objective/rlhf_reward", masked_sum(batch.rewards, mask), responses)
    means.add("response/length", tokens, responses)
    means.add("response/eos_rate", finished, responses)
    repeated, grams = repeated_4grams(trajectory.rollout)
    means.add("response/repetition", repeated, grams)
    length, score = mask.sum(1).double(), torch.where(kept, trajectory.scores, 0.0).double()
    for name, products in (("l", length), ("s", score), ("l²", length**2), ("s²", score**2), ("ls", length * score)):
        means.add(name, products.sum(), responses)
    means.add("macro/count", macros, responses)
    means.add("macro/length", tokens, macros)
    if batch.counted is not None:
        means.add("policy/counted", (batch.counted & mask).sum(), tokens)
    if batch.returns is not None and trajectory.values is not None:
        # Means of x and x² over tokens, from which follow the variances that the explained variance compares.
        for name, x in (("returns", batch.returns), ("residuals", batch.returns - trajectory.values)):
            count, total, squares = masked_moments(x, mask)
            means.add(name, total, count)
            means.add(f"{name}²", squares, count)
    means.add_sum("val/num_eos_tokens", finished)
    metrics = _with_correlation(means.reduce())
    return metrics if batch.returns is None else _with_critic(metrics, lam, lam_alpha)


def normalised_metrics(moments: ScoreMoments | None, scores: float | None) -> dict[str, float]:
    """The mean score of a rollout as it is trained on, before a penalty and clipping, and what it is normalised by.

    {} without --normalize_scores (`moments` is None), and of a rollout that was left out (`scores` is None).
    """
    if moments is None or scores is None:
        return {}
    return {
        "objective/normalized_scores": (scores - moments.mean) / moments.deviation,
        "objective/scores_running_mean": moments.mean,
        "objective/scores_running_std": moments.deviation,
    }


def _with_critic(metrics: dict[str, float], lam: float, lam_alpha: float | None) -> dict[str, float]:
    spread = metrics.pop("returns²") - metrics.pop("returns") ** 2
    unexplained = metrics.pop("residuals²") - metrics.pop("residuals") ** 2
    metrics["val/explained_variance"] = 1 - unexplained / spread if spread > 1e-12 else 0.0
    if lam_alpha is not None:
        lam = float(adaptive_lam(torch.tensor(metrics["macro/count"]), lam_alpha))
    metrics["macro/lambda_eff"] = lam ** (1 / metrics["macro/length"]) if metrics["macro/length"] else lam
    return metrics


def _with_correlation(metrics: dict[str, float]) -> dict[str, float]:
    length, score, product = (metrics.pop(name) for name in ("l", "s", "ls"))
    spreads = [_spread(metrics.pop(f"{name}²"), mean) for name, mean in (("l", length), ("s", score))]
    correlation = (product - length * score) / math.sqrt(math.prod(spreads)) if all(spreads) else 0.0
    metrics["objective/scores_std"] = math.sqrt(spreads[1])
    metrics["response/score_length_correlation"] = min(max(correlation, -1.0), 1.0)
    return metrics


def _spread(mean_square: float, mean: float) -> float:
    """The variance; 0 where it is no more than rounding."""
    variance = mean_square - mean**2
    return variance if variance > 1e-9 * mean_square else 0.0


def repeated_4grams(rollout: Rollout) -> tuple[Tensor, Tensor]:
    """How many runs of 4 tokens occurred earlier in the same response, and how many there are; 0-d, of all rows."""
    ids, mask = rollout.response_ids, rollout.response_mask
    exists = mask[:, 3:]  # by its last token
    if not exists.shape[1]:
        return torch.zeros((), device=ids.device), torch.zeros((), device=ids.device)
    pairs = (ids[:, :-1] << 31) + ids[:, 1:]
    # What is no 4-gram gets a number of its own, so that it equals nothing.
    places = -1 - torch.arange(exists.shape[1], device=ids.device)
    first, second = torch.where(exists, pairs[:, :-2], places), pairs[:, 2:]
    for number in (1, 0):  # by the second pair, then by the first: a stable sort keeps equal ones in order
        order = (first, second)[number].argsort(dim=1, stable=True)
        first, second = first.gather(1, order), second.gather(1, order)
    same = (first[:, 1:] == first[:, :-1]) & (second[:, 1:] == second[:, :-1])
    return same.sum(), exists.sum()


def token_table(batch: PPOBatch, row: int, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, object]]:
    """One response of a batch as a list of tokens with their macro action and numbers, for sample files.

    Per token: text, macro_action, value, reward, advantage, logprob, ref_logprob. Without a critic there is no value,
    nor an advantage: that of a response whose prompt has no other is 0.
    """
    length = int(batch.response_mask[row].sum())
    trajectory = batch.trajectory

    def numbers(x: Tensor) -> list[float]:
        return [round(v, 5) for v in x[row, :length].tolist()]

    values = trajectory.values
    columns = {
        "text": token_texts(trajectory.rollout.response_ids[row, :length].tolist(), tokenizer),
        "macro_action": batch.macro.index[row, :length].tolist(),
        **({} if values is None else {"value": numbers(values)}),
        "reward": numbers(batch.rewards),
        **({} if values is None else {"advantage": numbers(batch.advantages)}),
        "logprob": numbers(trajectory.logprobs),
        "ref_logprob": numbers(trajectory.ref_logprobs),
    }
    return [dict(zip(columns, of_token, strict=True)) for of_token in zip(*columns.values(), strict=True)]
