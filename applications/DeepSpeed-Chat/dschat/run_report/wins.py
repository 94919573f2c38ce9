# SPDX-License-Identifier: Apache-2.0
"""Win rates between models on the held-out prompts, with the reward model and the metric function as judges."""

import math
from collections.abc import Mapping, Sequence

from dschat.common.statistics import Rate, WinRates, score_verdict, win_rates
from dschat.run_report.data import HeldOut, RunData

HEADERS = ["win rates (%)", "judge", "win", "tie", "loss", "win + ½ tie", "prompts"]


def win_rows(runs: Sequence[RunData], judges: Mapping[str, str]) -> list[list[str]]:
    """Rows of the table of win rates, under HEADERS.

    The run that ended highest by the first judge against each other one, then each run against SFT. A judge prefers,
    of two responses to a prompt, the one it scores higher. Pairs whose samples files do not hold all responses, or
    hold other prompts, are left out.

    Args:
        runs: at least one.
        judges: names of scores in the samples, and how to call them.
    """
    judge = next(iter(judges))
    best, *others = sorted((run.last for run in runs), key=lambda end: (-_finite(end.mean(judge)), end.model))
    rows = []
    for one, other in [*((best, other) for other in others), *((run.last, run.first) for run in runs)]:
        for name, label in judges.items():
            rates = _rates(name, one, other)
            if rates is not None:
                tie = None if rates.tie is None else Rate(rates.tie.value)
                shares = ["–" if rate is None else rate.text() for rate in (rates.win, tie, rates.loss, rates.half)]
                rows.append([f"{one.model} against {other.model}", label, *shares, str(rates.tally.counted)])
    return rows


def _rates(name: str, one: HeldOut, other: HeldOut) -> WinRates | None:
    ours, theirs, matches = one.values(name), other.values(name), one.matches(other)
    if ours is None or theirs is None or matches is None:
        return None
    return win_rates([score_verdict(our, theirs[match]) for our, match in zip(ours, matches, strict=True)])


def _finite(number: float) -> float:
    return number if math.isfinite(number) else -math.inf
