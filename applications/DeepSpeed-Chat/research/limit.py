# SPDX-License-Identifier: Apache-2.0
"""The highest gold score that a policy can have at a KL from the SFT model, reached by π ∝ π_SFT exp(gold / β).

Among all policies with a given KL, this one has the highest mean score (the Gibbs variational principle). Nothing is
trained: its mean score and its KL follow from the SFT model's own responses, weighted by exp(gold / β). N responses
are enough up to a KL of about ln N − 3; beyond it the weights rest on too few of them. For `opener` the first word
alone decides the score, and its probabilities are known: there is no sampling error at any KL. The weights may also
prefer some prompts to others, which no policy can do; so the limit is an upper bound for every task.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from dschat.base.atomic import writing
from dschat.data.examples import prompt_examples
from starts import SFTModel, load_policy, sample_responses
from tables import NONE, gold_at_kl, markdown, over_seeds
from tasks import LearningTask, gold_scores
from trials import Group

NUM_RESPONSES = 131_072
BATCH_SIZE = 4096
LEVELS = (1.0, 2.0, 4.0, 6.0, 8.0)  # nats per response
MIN_EFFECTIVE_RESPONSES = 20.0
MAX_STEEPNESS = 1e4  # largest 1 / β times the scores' standard deviation that the search for a KL tries


@dataclass(frozen=True)
class KLPoint:
    """A policy's mean gold score at a KL, in nats per response."""

    kl: float
    gold: float
    effective_responses: float  # 1 / Σ w² of the responses' weights; infinite for known probabilities


@dataclass(frozen=True)
class GoldScores:
    """Gold scores of the SFT model's responses.

    Attributes:
        gold: shape (N,).
        known_probabilities: shape (N,), of the responses; None: each is 1 / N.
    """

    gold: Tensor
    known_probabilities: Tensor | None = None

    @property
    def probabilities(self) -> Tensor:
        """Shape (N,), float64, with sum 1."""
        if self.known_probabilities is not None:
            return self.known_probabilities.double()
        count = len(self.gold)
        return torch.full((count,), 1 / count, dtype=torch.float64)

    @property
    def mean(self) -> float:
        """The mean gold score of the SFT model."""
        return float(self.probabilities @ self.gold.double())


def load_scores(folder: Path, task: LearningTask, sft: SFTModel, seed: int) -> GoldScores:
    """Exact scores of `opener`; otherwise scores of sampled responses, which the folder keeps."""
    if task.kind == "opener":
        return first_word_scores(task, sft, seed)
    file = folder / f"{task.name}-seed{seed}.npy"
    if not file.exists():
        with writing(file) as unfinished, open(unfinished, "wb") as out:
            np.save(out, sft_scores(task, sft, seed).numpy())
    return GoldScores(torch.from_numpy(np.load(file)))


@torch.no_grad()
def first_word_scores(task: LearningTask, sft: SFTModel, seed: int, count: int = BATCH_SIZE) -> GoldScores:
    """The gold score of every token as a first word, with its mean probability over prompts."""
    policy = load_policy(sft.path)
    tokenizer = policy.tokenizer
    prompts, _ = prompt_examples(task.parse(task.rows(count, seed, "limit")), tokenizer, task.max_prompt)
    input_ids = torch.tensor([prompt.prompt_ids for prompt in prompts])
    logits = policy.model(input_ids).logits[:, -1].double()
    logits[:, [tokenizer.pad_token_id, tokenizer.bos_token_id]] = -torch.inf  # never sampled
    words = [str(tokenizer.decode([token])) for token in range(logits.shape[1])]
    probabilities = logits.softmax(1).mean(0)
    gold = gold_scores(task, [], words)
    is_sampled = probabilities > 0
    return GoldScores(gold[is_sampled], probabilities[is_sampled])


def sft_scores(task: LearningTask, sft: SFTModel, seed: int, count: int = NUM_RESPONSES) -> Tensor:
    """Gold scores of the SFT model's responses, each to a prompt of its own: shape (count,)."""
    policy = load_policy(sft.path)
    parts = []
    for part in range(-(-count // BATCH_SIZE)):
        split = f"limit {part}"
        _, gold = sample_responses(task, policy, task.rows(BATCH_SIZE, seed, split), seed, split)
        parts.append(gold)
    return torch.cat(parts)[:count]


def tilted_policy(scores: GoldScores, steepness: float) -> KLPoint:
    """The policy π ∝ π_SFT exp(steepness · gold)."""
    gold = scores.gold.double()
    base = scores.probabilities
    weights = (steepness * gold + base.log()).softmax(0)
    kl = (weights * (weights / base).clamp(min=1e-300).log()).sum()
    return KLPoint(float(kl), float((weights * gold).sum()), effective_responses(scores, weights))


def effective_responses(scores: GoldScores, weights: Tensor) -> float:
    """Effective sample size of a mean with these weights (N,), whose sum is 1."""
    if scores.known_probabilities is not None:
        return math.inf
    return float(1 / weights.square().sum())


def limit_at(scores: GoldScores, kl: float) -> KLPoint | None:
    """The limit at a KL, by bisection; None if it rests on too few responses, or if no policy has that KL."""
    deviation = float(scores.gold.double().std())
    if deviation == 0:  # equal scores: every policy of this kind is the SFT model
        return None
    low = 0.0
    high = MAX_STEEPNESS / deviation
    for _ in range(100):
        middle = (low + high) / 2
        if tilted_policy(scores, middle).kl < kl:
            low = middle
        else:
            high = middle
    point = tilted_policy(scores, high)
    if point.effective_responses < MIN_EFFECTIVE_RESPONSES or abs(point.kl - kl) >= 1e-3:
        return None
    return point


def best_of(scores: GoldScores, n: int) -> KLPoint:
    """The best of n SFT responses: its mean gold score, and the bound of its KL, ln n − (n − 1) / n."""
    ordered, order = scores.gold.double().sort()
    ranks = scores.probabilities[order].cumsum(0)
    ranks_before = ranks.roll(1)
    ranks_before[0] = 0
    weights = ranks**n - ranks_before**n
    return KLPoint(best_of_kl(n), float((weights * ordered).sum()), effective_responses(scores, weights))


def best_of_kl(n: int) -> float:
    """The bound of the KL of the best of n."""
    return math.log(n) - (n - 1) / n


def best_at(scores: GoldScores, kl: float) -> KLPoint:
    """The best of the largest number of SFT responses whose KL is not above this one."""
    most = NUM_RESPONSES if scores.known_probabilities is not None else len(scores.gold)
    n = max(n for n in range(1, most + 1) if best_of_kl(n) <= kl)
    return best_of(scores, n)


def limit_table(group: Group, task: LearningTask, curves: pd.DataFrame, scores: Mapping[int, GoldScores]) -> str:
    """The limit at some KL, the best of as many SFT responses, and the share of the limit that each setting has.

    A share counts from the SFT model's mean: means over the seeds of `scores` with their 95 % intervals.
    """
    row_labels = ["limit", "its responses", "best of N", *group.settings]
    columns: dict[str, list[str]] = {f"{task.name}, {len(scores)} seeds": row_labels}
    for level in LEVELS:
        points: dict[int, KLPoint] = {}
        for seed, scores_of_seed in scores.items():
            point = limit_at(scores_of_seed, level)
            if point is not None:
                points[seed] = point
        cells = [
            _mean_text([point.gold for point in points.values()]),
            _mean_text([point.effective_responses for point in points.values()], 0),
            _mean_text([best_at(scores[seed], level).gold for seed in points]),
        ]
        for setting in group.settings:
            shares = _shares_of_limit(curves[curves["setting"] == setting], level, points, scores)
            cells.append(over_seeds(shares).text(2) if shares else NONE)
        columns[f"KL {level:g}"] = cells
    return markdown(pd.DataFrame(columns))


def _shares_of_limit(
    runs: pd.DataFrame, level: float, points: Mapping[int, KLPoint], scores: Mapping[int, GoldScores]
) -> list[float]:
    """What part of the way from the SFT model's mean to the limit each seed's run has gone at a KL."""
    shares = []
    for seed, point in points.items():
        run = runs[runs["seed"] == seed]
        gold = gold_at_kl(run, level) if len(run) else math.nan
        mean = scores[seed].mean
        if not math.isnan(gold):
            shares.append((gold - mean) / (point.gold - mean))
    return shares


def _mean_text(numbers: list[float], digits: int = 3) -> str:
    return f"{np.mean(numbers):,.{digits}f}" if numbers else NONE
