# SPDX-License-Identifier: Apache-2.0
"""pass@k: the chance that one of k programs for a problem passes its tests, estimated from n ≥ k of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dschat.base.errors import UserError
from dschat.base.jsonl import read_rows, text_of
from dschat.base.statistics import Rate, bootstrap_ratio
from dschat.lab.responses import FILE

ALL = "all"
INVALID = "invalid"  # status of a program that could not be run, which says nothing of it
APPS = "apps"  # its name in `dschat.data.formats.registry`
# Problems of its test set.
NUMBERS = {"interview": 3000, "introductory": 1000, "competition": 1000}
# Chai et al., ICLR 2025: pass@1 and pass@5 in per cent, PPO and MA-PPO (n = 10), by difficulty and over all problems.
PUBLISHED = {
    model: {k: dict(zip((*NUMBERS, ALL), rates, strict=True)) for k, rates in ((1, first), (5, fifth))}
    for model, first, fifth in (
        ("PPO, CodeGemma-2B", (2.82, 15.26, 0.92, 4.92), (4.10, 17.30, 1.70, 6.26)),
        ("MA-PPO, CodeGemma-2B", (3.25, 16.56, 0.94, 5.45), (4.37, 18.30, 1.60, 6.60)),
        ("PPO, CodeGemma-7B", (4.26, 20.90, 1.21, 6.98), (6.57, 23.30, 2.30, 9.06)),
        ("MA-PPO, CodeGemma-7B", (6.22, 26.74, 2.00, 9.48), (8.37, 30.30, 3.30, 11.74)),
    )
}


@dataclass(frozen=True)
class SolvedProblem:
    """A problem's programs."""

    dataset: str  # name of the published set; empty for others
    difficulty: str  # empty where the data set names none
    samples: int  # that were run
    passed: int  # all tests


@dataclass(frozen=True)
class PassRates:
    """pass@k of one model on the problems of one difficulty."""

    model: str
    dataset: str  # of all its problems; empty where that is no published one, or there are several
    difficulty: str
    problems: int
    rates: dict[int, Rate | None]  # k → rate with a bootstrap interval over problems; None without enough samples


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """1 − C(n − c, k) / C(n, k) of n ≥ k samples, of which c passed: unbiased (Chen et al. 2021, equation 1)."""
    return 1 - math.comb(samples - passed, k) / math.comb(samples, k)


def pass_rates(files: Sequence[Path], ks: Sequence[int], dataset: str = "") -> list[PassRates]:
    """The rates of files from inference/inference_with_programs.py, by difficulty and over all problems.

    A file's name is its model's; `dataset` is that of rows that name none. Raises UserError where a file is missing or
    holds something else.
    """
    found = []
    for file in files:
        problems = [_problem(row, dataset, origin) for origin, row in read_rows(file, FILE)]
        of = problems[0].dataset if len({problem.dataset for problem in problems}) == 1 else ""
        named = list(dict.fromkeys(problem.difficulty for problem in problems if problem.difficulty))
        for difficulty in [*named, ALL]:
            chosen = [problem for problem in problems if difficulty in (ALL, problem.difficulty)]
            found.append(PassRates(file.stem, of, difficulty, len(chosen), {k: _rate(chosen, k) for k in ks}))
    return found


def _problem(row: dict[str, Any], dataset: str, origin: str) -> SolvedProblem:
    samples = row.get("samples")
    if not isinstance(samples, list) or not all(isinstance(s, dict) and "status" in s for s in samples):
        raise UserError(f"{origin}: column 'samples' must be a list of objects with a status; correct the row.")
    statuses = [sample["status"] for sample in samples if sample["status"] != INVALID]
    named = text_of({"dataset": ""} | row, "dataset", origin) or dataset
    return SolvedProblem(named, text_of(row, "difficulty", origin), len(statuses), statuses.count("passed"))


def _rate(problems: Sequence[SolvedProblem], k: int) -> Rate | None:
    """The mean over the problems; None where one has fewer than k samples."""
    if any(problem.samples < k for problem in problems):
        return None
    return bootstrap_ratio({i: (pass_at_k(p.samples, p.passed, k), 1) for i, p in enumerate(problems)})
