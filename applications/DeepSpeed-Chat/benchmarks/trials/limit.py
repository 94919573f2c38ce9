# SPDX-License-Identifier: Apache-2.0
"""The highest gold score that any policy can have at a KL from the SFT model: that of π ∝ π_SFT exp(r / β).

Of all policies with a KL this one has the highest mean score (the Gibbs variational principle). It is not trained:
its mean score and its KL are those of the SFT model's own responses, weighted by exp(r / β). With N responses that
holds up to a KL of about ln N − 3; beyond it the weights rest on too few of them. Where the first word alone decides
the score, its probabilities are known, and the limit is exact at every KL. Prompts are part of what is drawn, so that
the limit may also choose among them: it is an upper one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dschat.base.atomic import writing
from dschat.data.examples import prompt_examples
from dschat.models.load import load_causal_lm
from dschat.models.tokenizer import load_tokenizer
from harness import table
from trials.figures import Runs, at_kl, over_seeds
from trials.starts import Start, draw
from trials.tasks import LearningTask, gold_scores

RESPONSES = 131_072
BATCH = 4096
LEVELS = (1.0, 2.0, 4.0, 6.0, 8.0)  # nats per response
FEWEST = 20.0  # responses that a weighted mean must rest on, as its effective sample size
STEEPEST = 1e4  # 1 / β, times the spread of the scores, up to which a KL is looked for


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
        gold: (N,).
        mass: (N,) their probabilities, where these are known; else all are 1 / N, and the scores are drawn ones.
    """

    gold: Tensor
    mass: Tensor | None = None

    @property
    def probabilities(self) -> Tensor:
        """(N,) float64, together 1."""
        even = torch.full((len(self.gold),), 1 / len(self.gold), dtype=torch.float64)
        return even if self.mass is None else self.mass.double()

    @property
    def mean(self) -> float:
        """That of the SFT model."""
        return float(self.probabilities @ self.gold.double())


@torch.no_grad()
def first_word_scores(task: LearningTask, start: Start, seed: int, count: int = BATCH) -> GoldScores:
    """Every id of the vocabulary as a first word: its gold score, and its probability in the mean over prompts."""
    tokenizer = load_tokenizer(start.sft, "sft")
    model = load_causal_lm(start.sft, "sft", torch.float32, tokenizer)
    prompts, _ = prompt_examples(task.rows(count, seed, "limit"), tokenizer, task.max_prompt)
    logits = model(torch.tensor([prompt.prompt_ids for prompt in prompts])).logits[:, -1].double()
    logits[:, [tokenizer.pad_token_id, tokenizer.bos_token_id]] = -torch.inf  # which are never drawn
    words = [str(tokenizer.decode([n])) for n in range(logits.shape[1])]
    mass = logits.softmax(1).mean(0)
    return GoldScores(gold_scores(task, [], words)[mass > 0], mass[mass > 0])


def sft_scores(task: LearningTask, start: Start, seed: int, count: int = RESPONSES) -> Tensor:
    """(count,): gold scores of the SFT model's responses, each to a prompt of its own."""
    tokenizer = load_tokenizer(start.sft, "sft")
    model = load_causal_lm(start.sft, "sft", torch.float32, tokenizer)
    parts = range(-(-count // BATCH))
    return torch.cat([draw(task, model, tokenizer, BATCH, seed, f"limit {part}")[1] for part in parts])[:count]


def kept_scores(folder: Path, task: LearningTask, start: Start, seed: int) -> GoldScores:
    """Exact ones of `opener`; else `sft_scores`, drawn once and then read from the folder."""
    if task.kind == "opener":
        return first_word_scores(task, start, seed)
    file = folder / f"{task.name}-seed{seed}.npy"
    if not file.exists():
        with writing(file) as beside, open(beside, "wb") as out:
            np.save(out, sft_scores(task, start, seed).numpy())
    return GoldScores(torch.from_numpy(np.load(file)))


def limit_table(task: LearningTask, settings: Mapping[str, Runs], scores: Mapping[int, GoldScores]) -> str:
    """The limit at some KL, the best of as many SFT responses, and which share of the limit each setting has there.

    Shares are of what is above the SFT model's mean: means over the seeds of `scores` with their 95 % intervals.
    """
    limits = {kl: {seed: limit_at(found, kl) for seed, found in scores.items()} for kl in LEVELS}
    means = {seed: found.mean for seed, found in scores.items()}
    known = {kl: {seed: point for seed, point in of.items() if point is not None} for kl, of in limits.items()}
    rows = [["limit", *(_mean([point.gold for point in of.values()]) for of in known.values())]]
    rows.append(["its responses", *(_mean([point.responses for point in of.values()], 0) for of in known.values())])
    rows.append(["best of N", *(_mean([best_at(scores[seed], kl).gold for seed in of]) for kl, of in known.items())])
    for name, runs in settings.items():
        cells = []
        for kl, of in known.items():
            at = {seed: at_kl(runs[seed].curves["gold"], runs[seed].curves["kl"], kl) for seed in of if seed in runs}
            found = {seed: gold for seed, gold in at.items() if gold is not None}
            shares = [(gold - means[seed]) / (of[seed].gold - means[seed]) for seed, gold in found.items()]
            cells.append(over_seeds(shares).text(2) if shares else "–")
        rows.append([name, *cells])
    return table([f"{task.name}, {len(scores)} seeds", *(f"KL {kl:g}" for kl in LEVELS)], rows)


def best_at(scores: GoldScores, kl: float) -> KLPoint:
    """The best of so many SFT responses that the KL is not above this one."""
    most = len(scores.gold) if scores.mass is None else RESPONSES
    n = max(n for n in range(1, most) if math.log(n) - (n - 1) / n <= kl)
    return best_of(scores, n)


def _mean(numbers: Sequence[float], digits: int = 3) -> str:
    return f"{np.mean(numbers):,.{digits}f}" if numbers else "–"


def tilted(scores: GoldScores, steepness: float) -> KLPoint:
    """π ∝ π_SFT exp(steepness · gold)."""
    gold, base = scores.gold.double(), scores.probabilities
    weights = (steepness * gold + base.log()).softmax(0)
    kl = (weights * (weights / base).clamp(min=1e-300).log()).sum()
    responses = math.inf if scores.mass is not None else float(1 / weights.square().sum())
    return KLPoint(float(kl), float((weights * gold).sum()), responses)


def limit_at(scores: GoldScores, kl: float) -> KLPoint | None:
    """The limit at a KL, by bisection; None where it rests on too few responses, or no policy has that KL."""
    low, high = 0.0, STEEPEST / float(scores.gold.double().std())
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if tilted(scores, middle).kl < kl else (low, middle)
    point = tilted(scores, high)
    return point if point.responses >= FEWEST and abs(point.kl - kl) < 1e-3 else None


def best_of(scores: GoldScores, n: int) -> KLPoint:
    """The best of n SFT responses: its mean gold score, and a KL that it does not exceed, ln n − (n − 1) / n."""
    ordered, order = scores.gold.double().sort()
    ranks = scores.probabilities[order].cumsum(0)
    weights = ranks**n - torch.cat([torch.zeros(1, dtype=torch.float64), ranks[:-1]]) ** n
    responses = math.inf if scores.mass is not None else len(ordered) / n
    return KLPoint(math.log(n) - (n - 1) / n, float((weights * ordered).sum()), responses)
