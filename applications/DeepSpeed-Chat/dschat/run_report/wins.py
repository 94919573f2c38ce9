# SPDX-License-Identifier: Apache-2.0
"""Win rates between models on the held-out prompts, with the reward model and the metric function as judges."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dschat.common.statistics import Rate, WinRates, score_verdict, win_rates
from dschat.run_report.data import RunData, Sample, covering, same_prompts

HEADERS = ["win rates (%)", "judge", "win", "tie", "loss", "win + ½ tie", "prompts"]


@dataclass(frozen=True)
class _Answers:
    """A model's name with one of its evaluations: the means and the samples."""

    model: str
    means: Mapping[str, float]
    samples: Sequence[Sample]


def win_rows(runs: Sequence[RunData], judges: Mapping[str, str]) -> list[list[str]]:
    """Rows of the table of win rates, under HEADERS.

    The run that ended highest by the first judge against each other one, then each run against SFT. A judge prefers,
    of two responses to a prompt, the one it scores higher. Pairs whose samples files do not hold all responses, or
    hold other prompts, are left out.

    Args:
        runs: at least one.
        judges: names of scores in the samples, and how to call them.
    """
    first = next(iter(judges))
    ends = [_Answers(run.name, run.evals[-1], run.last) for run in runs]
    ends.sort(key=lambda end: (-_finite(end.means.get(f"eval/{first}", math.nan)), end.model))
    couples = [(ends[0], other) for other in ends[1:]]
    couples += [
        (_Answers(run.name, run.evals[-1], run.last), _Answers("SFT", run.evals[0], run.first)) for run in runs
    ]
    rows = []
    for one, other in couples:
        for name, label in judges.items():
            rates = _rates(name, one, other)
            if rates is not None:
                tie = None if rates.tie is None else Rate(rates.tie.value)
                shares = map(_text, (rates.win, tie, rates.loss, rates.half))
                rows.append([f"{one.model} against {other.model}", label, *shares, str(rates.tally.counted)])
    return rows


def _rates(name: str, one: _Answers, other: _Answers) -> WinRates | None:
    scores = [covering(name, side.means.get(f"eval/{name}", math.nan), side.samples) for side in (one, other)]
    order = same_prompts(one.samples, other.samples)
    if scores[0] is None or scores[1] is None or order is None:
        return None
    ours, theirs = scores[0], scores[1]
    return win_rates([score_verdict(ours[index], theirs[match]) for index, match in enumerate(order)])


def _text(rate: Rate | None) -> str:
    return "–" if rate is None else rate.text()


def _finite(number: float) -> float:
    return number if math.isfinite(number) else -math.inf
