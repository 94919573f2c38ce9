# SPDX-License-Identifier: Apache-2.0
"""The highest gold score that any policy can have at a KL from the SFT model: that of π ∝ π_SFT exp(r / β).

Of all policies with a KL this one has the highest mean score (the Gibbs variational principle). It is not trained:
its mean score and its KL are those of the SFT model's own responses, weighted by exp(r / β). With N responses that
holds up to a KL of about ln N − 3; beyond it the weights rest on too few of them. Prompts are part of what is drawn,
so that the limit may also choose among them: it is an upper one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dschat.common.atomic import writing
from dschat.data.examples import prompt_examples
from dschat.models.load import load_causal_lm
from dschat.models.tokenizer import load_tokenizer
from harness import table
from trials.figures import Runs, at_kl, over_seeds
from trials.starts import Start
from trials.tasks import Task, gold_scores

RESPONSES = 131_072
BATCH = 4096
LEVELS = (1.0, 2.0, 4.0, 6.0, 8.0)  # nats per response
FEWEST = 20.0  # responses that a weighted mean must rest on, as its effective sample size
STEEPEST = 1e4  # 1 / β, times the spread of the scores, up to which a KL is looked for


@dataclass(frozen=True)
class Point:
    """A policy's mean gold score at a KL, in nats per response."""

    kl: float
    gold: float
    responses: float  # effective sample size: 1 / Σ w²


def sft_scores(task: Task, start: Start, seed: int, count: int = RESPONSES) -> Tensor:
    """(count,): gold scores of the SFT model's responses, each to a prompt of its own."""
    tokenizer = load_tokenizer(start.sft, "sft")
    model = load_causal_lm(start.sft, "sft", torch.float32, tokenizer)
    prompts, _ = prompt_examples(task.rows(count, seed, "limit"), tokenizer, task.max_prompt)
    torch.manual_seed(seed)
    found = []
    for first in range(0, count, BATCH):
        ids = torch.tensor([prompt.prompt_ids for prompt in prompts[first : first + BATCH]])
        length = {"max_new_tokens": task.length, "min_new_tokens": task.length, "eos_token_id": []}
        how = {"do_sample": True, "top_k": 0, "pad_token_id": tokenizer.pad_token_id, **length}
        drawn = model.generate(ids, attention_mask=torch.ones_like(ids), **how)
        texts = tokenizer.batch_decode(drawn[:, ids.shape[1] :], skip_special_tokens=True)
        found.append(gold_scores(task, [str(text) for text in texts]))
    return torch.cat(found)


def kept_scores(folder: Path, task: Task, start: Start, seed: int) -> Tensor:
    """`sft_scores`, drawn once and then read from the folder."""
    file = folder / f"{task.name}-seed{seed}.npy"
    if not file.exists():
        with writing(file) as beside, open(beside, "wb") as out:
            np.save(out, sft_scores(task, start, seed).numpy())
    return torch.from_numpy(np.load(file))


def limit_table(task: Task, settings: Mapping[str, Runs], scores: Mapping[int, Tensor]) -> str:
    """The limit at some KL, the best of as many SFT responses, and which share of the limit each setting has there.

    Shares are of what is above the SFT model's mean: means over the seeds of `scores` with their 95 % intervals.
    """
    limits = {kl: {seed: limit_at(gold, kl) for seed, gold in scores.items()} for kl in LEVELS}
    means = {seed: float(gold.mean()) for seed, gold in scores.items()}
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


def best_at(gold: Tensor, kl: float) -> Point:
    """The best of so many SFT responses that the KL is not above this one."""
    n = max(n for n in range(1, len(gold)) if math.log(n) - (n - 1) / n <= kl)
    return best_of(gold, n)


def _mean(numbers: Sequence[float], digits: int = 3) -> str:
    return f"{np.mean(numbers):,.{digits}f}" if numbers else "–"


def tilted(gold: Tensor, steepness: float) -> Point:
    """π ∝ π_SFT exp(steepness · gold), from the scores (N,) of SFT responses."""
    weights = (steepness * gold.double()).softmax(0)
    kl = (weights * (weights * len(gold)).clamp(min=1e-300).log()).sum()
    return Point(float(kl), float((weights * gold).sum()), float(1 / weights.square().sum()))


def limit_at(gold: Tensor, kl: float) -> Point | None:
    """The limit at a KL, by bisection; None where it rests on too few responses, or no policy has that KL."""
    low, high = 0.0, STEEPEST / float(gold.double().std())
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if tilted(gold, middle).kl < kl else (low, middle)
    point = tilted(gold, high)
    return point if point.responses >= FEWEST and abs(point.kl - kl) < 1e-3 else None


def best_of(gold: Tensor, n: int) -> Point:
    """The best of n SFT responses: its mean gold score, and a KL that it does not exceed, ln n − (n − 1) / n."""
    ordered = gold.double().sort().values
    ranks = torch.arange(1, len(gold) + 1, dtype=torch.float64) / len(gold)
    weights = ranks**n - torch.cat([torch.zeros(1, dtype=torch.float64), ranks[:-1]]) ** n
    return Point(math.log(n) - (n - 1) / n, float((weights * ordered).sum()), len(gold) / n)
