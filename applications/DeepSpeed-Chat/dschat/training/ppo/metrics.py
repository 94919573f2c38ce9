# SPDX-License-Identifier: Apache-2.0
"""Metrics of a rollout, and a response written down token by token.

Every function computes its numbers and returns them; numbers over all ranks cost one synchronisation each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat.models.tokenizer import token_texts
from dschat.run.distributed import sum_over_ranks
from dschat.run.metrics import Means
from dschat.training.iteration import Metrics
from dschat.training.ppo.score import ExternalStats
from macro_actions.estimators import critic_targets
from macro_actions.masked import last_true, masked_moments, masked_sum, widths
from macro_actions.returns import adaptive_lam
from macro_actions.rewards import ScoreMoments
from macro_actions.settings import EstimatorSettings
from macro_actions.types import PPOBatch, Rollout

SMALLEST_VARIANCE = 1e-12  # variance of returns, below which no part of it is explained
HASH_FACTOR = 6364136223846793005  # an odd number below 2^63, whose products spread over 64 bits
ROUNDING = 1e-9  # variances below this share of the mean square are rounding


def external_metrics(stats: ExternalStats) -> Metrics:
    """Metrics over all ranks of what score sources and the parser report."""
    means = Means()
    for name, (total, count) in stats.measured.items():
        means.add(name, total, count)
    for name, numbers in stats.auxiliary.items():
        means.add(f"objective/{name}", numbers.sum(), len(numbers))
    means.add_sums(stats.totals)
    return means.reduce()


def rollout_metrics(batch: PPOBatch, lam: float, lam_alpha: float | None = None) -> Metrics:
    """Means over the responses of all ranks, from this rank's rows.

    objective/…, response/…, macro/…, val/num_eos_tokens, with a teacher teacher/…, and with a critic
    val/explained_variance and macro/lambda_eff. KL and entropy are in nats; response/repetition is the share of
    4-grams that the response has had before.
    """
    trajectory = batch.trajectory
    mask = batch.response_mask
    tokens = mask.sum()
    macro_count = batch.macro.mask.sum()

    # A response without a score has no token left, and counts in no mean.
    has_tokens = mask.any(1)
    responses = has_tokens.sum()
    finished = (trajectory.rollout.finished & has_tokens).sum()
    kl = masked_sum(batch.kl, mask)
    repeated, grams = repeated_4grams(trajectory.rollout)

    means = Means()
    means.add("objective/kl", kl, responses)
    means.add("objective/kl_per_token", kl, tokens)
    means.add("objective/entropy", masked_sum(-trajectory.logprobs, mask), responses)
    means.add("objective/scores", masked_sum(trajectory.scores, has_tokens), responses)
    means.add("objective/rlhf_reward", masked_sum(batch.rewards, mask), responses)
    means.add("response/length", tokens, responses)
    means.add("response/eos_rate", finished, responses)
    means.add("response/repetition", repeated, grams)
    means.add("macro/count", macro_count, responses)
    means.add("macro/length", tokens, macro_count)
    if batch.counted is not None:
        means.add("policy/counted", (batch.counted & mask).sum(), tokens)
    if trajectory.teacher_logprobs is not None:
        teacher_kl = -trajectory.teacher_log_ratios.sum()
        means.add("teacher/kl", teacher_kl, responses)
        means.add("teacher/kl_per_token", teacher_kl, tokens)
    means.add_sum("val/num_eos_tokens", finished)
    metrics = means.reduce()

    replies = last_true(mask).sum(1).clamp(min=1)  # more than one in an episode of several turns
    scores_and_lengths = score_length_statistics(trajectory.scores, mask.sum(1) / replies, has_tokens)
    metrics["objective/scores_std"] = scores_and_lengths.scores_std
    metrics["response/score_length_correlation"] = scores_and_lengths.correlation
    if batch.returns is not None and trajectory.values is not None:
        metrics["val/explained_variance"] = explained_variance(trajectory.values, batch.returns, mask)
        metrics["macro/lambda_eff"] = lambda_per_token(metrics["macro/count"], metrics["macro/length"], lam, lam_alpha)
    return metrics


@dataclass(frozen=True)
class ScoreLengthStatistics:
    """Statistics of the scores and lengths of the responses of all ranks."""

    scores_std: float  # standard deviation of the scores, with the denominator of a population
    correlation: float  # Pearson's, between score and length


def score_length_statistics(scores: Tensor, lengths: Tensor, counted: Tensor) -> ScoreLengthStatistics:
    """Spread of the scores and their correlation with response length, over all ranks. Every rank must call it.

    Args:
        scores: shape ``(B,)``, as their source gave them.
        lengths: shape ``(B,)``, tokens of each response, or the mean of an episode's replies.
        counted: shape ``(B,)``, bool, rows that count.
    """
    length = lengths.double()
    score = torch.where(counted, scores, 0.0).double()
    products = [length, score, length**2, score**2, length * score]
    sums = [product.sum() for product in products]
    count, *totals = _sum_over_ranks([counted.sum(), *sums])
    mean_length, mean_score, mean_length_squared, mean_score_squared, mean_product = (
        total / count if count else 0.0 for total in totals
    )
    length_variance = _variance(mean_length_squared, mean_length)
    score_variance = _variance(mean_score_squared, mean_score)
    correlation = 0.0
    if length_variance and score_variance:
        covariance = mean_product - mean_length * mean_score
        correlation = covariance / math.sqrt(length_variance * score_variance)
    return ScoreLengthStatistics(math.sqrt(score_variance), min(max(correlation, -1.0), 1.0))


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 − Var(returns − values) / Var(returns) over the entries of the mask on all ranks; 0 for constant returns.

    Every rank must call it. All arguments have the same shape, ``(B, R)`` for tokens or ``(B, M)`` for macro actions.
    """
    return explained_share(_sum_over_ranks(fit_totals(values, returns, mask)))


def fit_totals(values: Tensor, returns: Tensor, mask: Tensor) -> list[Tensor]:
    """Totals that determine the explained variance, and that can be added up over rows and ranks; 0-d float64 each."""
    return [*masked_moments(returns, mask), *masked_moments(returns - values, mask)]


def explained_share(totals: Sequence[float]) -> float:
    """The explained variance of `fit_totals`, which may all be divided by one number; 0 for constant returns."""
    count, return_sum, return_squares, _, residual_sum, residual_squares = totals
    if not count:
        return 0.0
    variance = return_squares / count - (return_sum / count) ** 2
    unexplained = residual_squares / count - (residual_sum / count) ** 2
    return 1 - unexplained / variance if variance > SMALLEST_VARIANCE else 0.0


@dataclass(frozen=True)
class CriticGate:
    """Whether the critic serves as a baseline (EVPO, Pan et al. 2026), decided over a rollout of all ranks.

    Attributes:
        explained_variance: share of the variance of the macro actions' discounted sums of rewards that the critic's
            values explain.
        mean_return: mean of these sums.
    """

    explained_variance: float
    mean_return: float

    @property
    def is_open(self) -> bool:
        """Whether the critic's values lower the variance of the advantages."""
        return self.explained_variance > 0

    def metrics(self) -> Metrics:
        """The gate in the metrics of an iteration."""
        return {"val/gate_explained_variance": self.explained_variance, "val/gate_open": float(self.is_open)}


def critic_gate(batch: PPOBatch, settings: EstimatorSettings) -> CriticGate:
    """EVPO's gate for this rank's rows of a rollout. Every rank must call it."""
    values, returns = critic_targets(batch, settings)
    mask = batch.macro.mask
    count, total, _ = masked_moments(returns, mask)
    all_count, all_total = _sum_over_ranks([count, total])
    return CriticGate(explained_variance(values, returns, mask), all_total / max(all_count, 1.0))


def lambda_per_token(macro_count: float, macro_length: float, lam: float, lam_alpha: float | None) -> float:
    """GAE's λ per token, λ^(1 / mean macro length): λ itself acts per macro action.

    Args:
        macro_count: mean number of macro actions in a response.
        macro_length: their mean length in tokens.
        lam: λ per macro action.
        lam_alpha: λ follows from the number of macro actions instead, see `adaptive_lam`.
    """
    if lam_alpha is not None:
        lam = float(adaptive_lam(torch.tensor(macro_count), lam_alpha))
    return lam ** (1 / macro_length) if macro_length else lam


def normalised_metrics(moments: ScoreMoments | None, scores: float) -> Metrics:
    """The mean score of a rollout as it is trained on, before penalties and clipping, and what normalises it.

    {} without --normalize_scores (`moments` is None).
    """
    if moments is None:
        return {}
    return {
        "objective/normalized_scores": (scores - moments.mean) / moments.deviation,
        "objective/scores_running_mean": moments.mean,
        "objective/scores_running_std": moments.deviation,
    }


def _sum_over_ranks(sums: Sequence[Tensor]) -> list[float]:
    """0-d tensors, each added up over all ranks in float64; one synchronisation."""
    stacked = torch.stack([x.double() for x in sums])
    totals: list[float] = sum_over_ranks(stacked).tolist()
    return totals


def _variance(mean_square: float, mean: float) -> float:
    """The variance; 0 where it is no more than rounding."""
    variance = mean_square - mean**2
    return variance if variance > ROUNDING * mean_square else 0.0


def repeated_4grams(rollout: Rollout) -> tuple[Tensor, Tensor]:
    """How many 4-grams occurred earlier in the same response, and how many there are; 0-d, over all rows."""
    ids = rollout.response_ids
    mask = rollout.response_mask
    both = mask[:, 1:] & mask[:, :-1]
    exists = both[:, 2:] & both[:, :-2]  # by a 4-gram's last token
    if not exists.shape[1]:
        zero = torch.zeros((), device=ids.device)
        return zero, zero

    # A 4-gram as one number: a hash in 64 bits of its two pairs of ids.
    pairs = (ids[:, :-1] << 31) + ids[:, 1:]
    grams = pairs[:, :-2] * HASH_FACTOR + pairs[:, 2:]
    # Columns without a 4-gram get negative numbers that differ, so that they equal nothing.
    unique = -1 - torch.arange(exists.shape[1], device=ids.device)
    grams = torch.where(exists, grams, unique).sort(dim=1).values
    is_repeated = grams[:, 1:] == grams[:, :-1]
    return is_repeated.sum(), exists.sum()


def token_table(batch: PPOBatch, row: int, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, object]]:
    """One response of a batch as a list of tokens with their macro action and numbers, for sample files.

    Per token: text, macro_action, value, reward, advantage, logprob, ref_logprob. Without a critic there is no value,
    and no advantage either: an evaluation has one response to each prompt, whose advantage is 0. An environment's
    tokens have the macro action -1, and numbers that are 0.
    """
    trajectory = batch.trajectory
    length = int(widths(batch.response_mask[row : row + 1]))

    def numbers(x: Tensor) -> list[float]:
        return [round(number, 5) for number in x[row, :length].tolist()]

    token_ids = trajectory.rollout.response_ids[row, :length].tolist()
    columns: dict[str, list[str] | list[int] | list[float]] = {
        "text": token_texts(token_ids, tokenizer),
        "macro_action": batch.macro.index[row, :length].tolist(),
    }
    if trajectory.values is not None:
        columns["value"] = numbers(trajectory.values)
    columns["reward"] = numbers(batch.rewards)
    if trajectory.values is not None:
        columns["advantage"] = numbers(batch.advantages)
    columns["logprob"] = numbers(trajectory.logprobs)
    columns["ref_logprob"] = numbers(trajectory.ref_logprobs)
    table: list[dict[str, object]] = []
    for token in range(length):
        table.append({name: column[token] for name, column in columns.items()})
    return table
