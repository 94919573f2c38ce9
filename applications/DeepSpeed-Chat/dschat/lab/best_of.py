# SPDX-License-Identifier: Apache-2.0
"""What the best of N responses of a model is worth to a reward model, by N and temperature."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dschat.base.errors import UserError
from dschat.base.jsonl import text_of
from dschat.base.statistics import MeanInterval, mean_interval
from dschat.lab.responses import number_of, numbers_of

PUBLISHED = (4, 8, 16, 32)  # numbers of responses to choose from in Chai et al., ICLR 2025, section 4.4


def best_of_first(rewards: Sequence[float], n: int) -> float:
    """The highest reward of the first n, 1 to M, of the responses: rewards (M,) in the order of the draws."""
    return max(rewards[:n])


def expected_best(rewards: Sequence[float], n: int) -> float:
    """The mean, over all subsets of n responses, of a subset's highest reward: unbiased, as `best_of_first` is.

    E[max of n] = Σ_i C(i − 1, n − 1) / C(M, n) · r_(i), where r_(1) ≤ … ≤ r_(M): the i-th smallest reward is the
    highest of those subsets whose other n − 1 members are among the i − 1 below it. Rewards are (M,), n is 1 to M.
    """
    subsets = math.comb(len(rewards), n)
    return math.fsum(math.comb(below, n - 1) / subsets * reward for below, reward in enumerate(sorted(rewards)))


@dataclass(frozen=True)
class Sweep:
    """The rewards of one model's responses."""

    model: str
    rewards: dict[float, list[list[float]]]  # temperature → for each prompt the rewards, in the order they were drawn
    prompts: list[str]  # the same at every temperature

    def draws(self, temperature: float) -> int:
        """Responses to each prompt at a temperature."""
        return len(self.rewards[temperature][0])

    @property
    def most_draws(self) -> int:
        """The largest number of responses to a prompt at any temperature."""
        return max(map(self.draws, self.rewards))


def published_numbers(sweeps: Sequence[Sweep]) -> list[int]:
    """How many responses to choose from: the published numbers that were drawn, and all."""
    most = max(sweep.most_draws for sweep in sweeps)
    return [*(n for n in PUBLISHED if n < most), most]


def sweep_of(model: str, rows: Iterable[tuple[str, dict[str, Any]]]) -> Sweep:
    """A model's sweep from its rows, each with its place "file:line".

    Raises UserError where a row holds something else, or the temperatures differ in their prompts.
    """
    rewards: dict[float, list[list[float]]] = {}
    prompts: dict[float, list[str]] = {}
    for origin, row in rows:
        temperature = number_of(row, "temperature", origin)
        if temperature is None:
            raise UserError(f"{origin}: no column 'temperature'; give files that inference/best_of_n.py wrote.")
        given = numbers_of(row, "rewards", origin, "numbers; correct the row.")
        known = rewards.setdefault(temperature, [])
        if known and len(known[0]) != len(given):
            sizes = f"{len(given)} rewards, and {len(known[0])} in the rows before it"
            raise UserError(f"{origin}: {sizes}, at the same temperature; correct the file.")
        known.append(given)
        prompts.setdefault(temperature, []).append(text_of(row, "prompt", origin))
    first, *others = prompts
    for temperature in others:
        if prompts[temperature] != prompts[first]:
            temperatures = f"the prompts at temperature {temperature:g} are not those at {first:g}"
            raise UserError(f"{model}: {temperatures}; give the file of one finished run.")
    return Sweep(model, dict(sorted(rewards.items())), prompts[first])


@dataclass(frozen=True)
class BestOf:
    """What the best of n responses of a model is worth at one temperature."""

    model: str
    temperature: float
    n: int
    draws: int  # responses to each prompt that the means are made from
    prompts: int
    expected: MeanInterval  # the mean over all subsets
    first: MeanInterval  # the best of the first n


def best_of_n(sweep: Sweep, numbers: Sequence[int]) -> list[BestOf]:
    """The means of a sweep, for each temperature those of a single response and of the best of each number."""
    found = []
    for temperature, rewards in sweep.rewards.items():
        draws = sweep.draws(temperature)
        for n in sorted({1, *numbers}):
            if n <= draws:
                expected = mean_interval([expected_best(row, n) for row in rewards])
                first = mean_interval([best_of_first(row, n) for row in rewards])
                found.append(BestOf(sweep.model, temperature, n, draws, len(rewards), expected, first))
    return found
