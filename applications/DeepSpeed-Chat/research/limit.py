# SPDX-License-Identifier: Apache-2.0
"""The highest gold score that a policy can have at a KL from the SFT model, reached by π ∝ π_SFT exp(gold / β).

Among all policies with a given KL, this one has the highest mean score (the Gibbs variational principle). Nothing is
trained: its mean score and its KL follow from the SFT model's own responses, weighted by exp(gold / β). N responses
are enough up to a KL of about ln N − 3; beyond it the weights rest on too few of them. For `opener` the first word
alone decides the score, its probabilities are known, and the limit is exact at every KL. Prompts are part of what is
sampled, so that the limit may also choose among them: it is an upper bound.
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
from dschat.models.load import load_causal_lm
from dschat.models.tokenizer import load_tokenizer
from starts import Start, sample_responses
from tables import NONE, gold_at_kl, markdown, over_seeds
from tasks import LearningTask, gold_scores
from trials import Group

RESPONSES = 131_072
BATCH = 4096
LEVELS = (1.0, 2.0, 4.0, 6.0, 8.0)  # nats per response
FEWEST = 20.0  # least effective sample size of a weighted mean
STEEPEST = 1e4  # largest 1 / β, in standard deviations of the scores, that the search for a KL tries


@dataclass(frozen=True)
class KLPoint:
    """A policy's mean gold score at a KL, in nats per response."""

    kl: float
    gold: float
    responses: float  # effective sample size: 1 / Σ w²


@dataclass(frozen=True)
class GoldScores:
    """Gold scores of the SFT model's responses.

    Attributes:
        gold: shape (N,).
        mass: shape (N,), the probabilities of the responses if they are known; otherwise all are 1 / N.
    """

    gold: Tensor
    mass: Tensor | None = None

    @property
    def probabilities(self) -> Tensor:
        """Shape (N,), float64, with sum 1."""
        if self.mass is not None:
            return self.mass.double()
        count = len(self.gold)
        return torch.full((count,), 1 / count, dtype=torch.float64)

    @property
    def mean(self) -> float:
        """The mean gold score of the SFT model."""
        return float(self.probabilities @ self.gold.double())


def load_scores(
    folder: Path,
    task: LearningTask,
    start: Start,
    seed: int,
) -> GoldScores:
    """Exact scores of `opener`; otherwise scores of sampled responses, which the folder keeps."""
    if task.kind == "opener":
        return first_word_scores(task, start, seed)
    file = folder / f"{task.name}-seed{seed}.npy"
    if not file.exists():
        with writing(file) as unfinished, open(unfinished, "wb") as out:
            np.save(out, sft_scores(task, start, seed).numpy())
    return GoldScores(torch.from_numpy(np.load(file)))


@torch.no_grad()
def first_word_scores(
    task: LearningTask,
    start: Start,
    seed: int,
    count: int = BATCH,
) -> GoldScores:
    """The gold score of every token as a first word, with its mean probability over prompts."""
    tokenizer = load_tokenizer(start.sft, "sft")
    model = load_causal_lm(start.sft, "sft", torch.float32, tokenizer)
    prompts, _ = prompt_examples(
        task.parse(task.rows(count, seed, "limit")),
        tokenizer,
        task.max_prompt,
    )
    input_ids = torch.tensor([prompt.prompt_ids for prompt in prompts])
    logits = model(input_ids).logits[:, -1].double()
    logits[:, [tokenizer.pad_token_id, tokenizer.bos_token_id]] = -torch.inf  # never sampled
    words = [str(tokenizer.decode([token])) for token in range(logits.shape[1])]
    mass = logits.softmax(1).mean(0)
    gold = gold_scores(task, [], words)
    return GoldScores(gold[mass > 0], mass[mass > 0])


def sft_scores(
    task: LearningTask,
    start: Start,
    seed: int,
    count: int = RESPONSES,
) -> Tensor:
    """Gold scores of the SFT model's responses, each to a prompt of its own: shape (count,)."""
    tokenizer = load_tokenizer(start.sft, "sft")
    model = load_causal_lm(start.sft, "sft", torch.float32, tokenizer)
    parts = []
    for part in range(-(-count // BATCH)):
        _, gold = sample_responses(task, model, tokenizer, BATCH, seed, f"limit {part}")
        parts.append(gold)
    return torch.cat(parts)[:count]


def tilted(scores: GoldScores, steepness: float) -> KLPoint:
    """The policy π ∝ π_SFT exp(steepness · gold)."""
    gold = scores.gold.double()
    base = scores.probabilities
    weights = (steepness * gold + base.log()).softmax(0)
    kl = (weights * (weights / base).clamp(min=1e-300).log()).sum()
    responses = math.inf if scores.mass is not None else float(1 / weights.square().sum())
    return KLPoint(float(kl), float((weights * gold).sum()), responses)


def limit_at(scores: GoldScores, kl: float) -> KLPoint | None:
    """The limit at a KL, by bisection; None if it rests on too few responses, or if no policy has that KL."""
    low = 0.0
    high = STEEPEST / float(scores.gold.double().std())
    for _ in range(100):
        middle = (low + high) / 2
        if tilted(scores, middle).kl < kl:
            low = middle
        else:
            high = middle
    point = tilted(scores, high)
    return point if point.responses >= FEWEST and abs(point.kl - kl) < 1e-3 else None


def best_of(scores: GoldScores, n: int) -> KLPoint:
    """The best of n SFT responses: its mean gold score, and the bound of its KL, ln n − (n − 1) / n."""
    ordered, order = scores.gold.double().sort()
    ranks = scores.probabilities[order].cumsum(0)
    ranks_before = ranks.roll(1)
    ranks_before[0] = 0
    weights = ranks**n - ranks_before**n
    responses = math.inf if scores.mass is not None else len(ordered) / n
    return KLPoint(best_of_kl(n), float((weights * ordered).sum()), responses)


def best_of_kl(n: int) -> float:
    """The bound of the KL of the best of n."""
    return math.log(n) - (n - 1) / n


def best_at(scores: GoldScores, kl: float) -> KLPoint:
    """The best of the largest number of SFT responses whose KL is not above this one."""
    most = len(scores.gold) if scores.mass is None else RESPONSES
    n = max(n for n in range(1, most) if best_of_kl(n) <= kl)
    return best_of(scores, n)


def limit_table(
    group: Group,
    task: LearningTask,
    curves: pd.DataFrame,
    scores: Mapping[int, GoldScores],
) -> str:
    """The limit at some KL, the best of as many SFT responses, and the share of the limit that each setting has.

    A share counts from the SFT model's mean: means over the seeds of `scores` with their 95 % intervals.
    """
    name = f"{task.name}, {len(scores)} seeds"
    names = ["limit", "its responses", "best of N", *group.settings]
    columns: dict[str, list[str]] = {name: names}
    for level in LEVELS:
        limits = {seed: limit_at(scores_of_seed, level) for seed, scores_of_seed in scores.items()}
        points = {seed: point for seed, point in limits.items() if point is not None}
        cells = [
            _mean_text([point.gold for point in points.values()]),
            _mean_text([point.responses for point in points.values()], 0),
            _mean_text([best_at(scores[seed], level).gold for seed in points]),
        ]
        for setting in group.settings:
            runs = curves[curves["setting"] == setting]
            shares = []
            for seed, point in points.items():
                run = runs[runs["seed"] == seed]
                gold = gold_at_kl(run, level) if len(run) else math.nan
                mean = scores[seed].mean
                if not math.isnan(gold):
                    shares.append((gold - mean) / (point.gold - mean))
            cells.append(over_seeds(shares).text(2) if shares else NONE)
        columns[f"KL {level:g}"] = cells
    return markdown(pd.DataFrame(columns))


def _mean_text(numbers: list[float], digits: int = 3) -> str:
    return f"{np.mean(numbers):,.{digits}f}" if numbers else NONE
