# SPDX-License-Identifier: Apache-2.0
"""pass@k as a table; on APPS beside the published rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from dschat.common.display import text_table
from dschat.data.hub import find_known
from dschat.errors import UserError
from dschat.evaluation.programs.pass_at_k import PassRates, pass_rates

APPS = "apps"  # its name in `dschat.data.hub.KNOWN_SETS`
# Problems of its test set.
NUMBERS = {"interview": 3000, "introductory": 1000, "competition": 1000}
# Chai et al., ICLR 2025: pass@1 and pass@5 in per cent, PPO and MA-PPO (n = 10), by difficulty and over all problems.
PUBLISHED = {
    "PPO, CodeGemma-2B": {
        1: {"interview": 2.82, "introductory": 15.26, "competition": 0.92, "all": 4.92},
        5: {"interview": 4.10, "introductory": 17.30, "competition": 1.70, "all": 6.26},
    },
    "MA-PPO, CodeGemma-2B": {
        1: {"interview": 3.25, "introductory": 16.56, "competition": 0.94, "all": 5.45},
        5: {"interview": 4.37, "introductory": 18.30, "competition": 1.60, "all": 6.60},
    },
    "PPO, CodeGemma-7B": {
        1: {"interview": 4.26, "introductory": 20.90, "competition": 1.21, "all": 6.98},
        5: {"interview": 6.57, "introductory": 23.30, "competition": 2.30, "all": 9.06},
    },
    "MA-PPO, CodeGemma-7B": {
        1: {"interview": 6.22, "introductory": 26.74, "competition": 2.00, "all": 9.48},
        5: {"interview": 8.37, "introductory": 30.30, "competition": 3.30, "all": 11.74},
    },
}


def pass_table(found: Sequence[PassRates]) -> str:
    """The rates in per cent with 95 % intervals; below them, where all are on APPS, what is published."""
    ks = list(found[0].rates)
    rows = []
    for each in found:
        rates = ["–" if rate is None else rate.text() for rate in each.rates.values()]
        rows.append([each.model, each.difficulty, str(each.problems), *rates])
    table = text_table(["model", "difficulty", "problems", *(f"pass@{k}, %" for k in ks)], rows)
    if any(each.dataset != APPS for each in found):
        return table
    numbers = NUMBERS | {"all": sum(NUMBERS.values())}
    published = [
        [model, difficulty, str(numbers[difficulty]), *(f"{rates[k][difficulty]:.2f}" for k in (1, 5))]
        for model, rates in PUBLISHED.items()
        for difficulty in numbers
    ]
    head = ["published by the paper, not measured here", "difficulty", "problems", "pass@1, %", "pass@5, %"]
    return f"{table}\n\n{text_table(head, published)}"


def write_pass_report(files: Sequence[Path], output_dir: Path, dataset: str = "") -> str:
    """Writes `report.json` with pass@1 and pass@5; returns the table. Raises UserError where that is not possible.

    `dataset` is that of rows that name none.
    """
    known = find_known(dataset)
    found = pass_rates(files, (1, 5), known.name if known else "")
    rows = [
        asdict(each) | {"rates": {f"pass@{k}": rate and asdict(rate) for k, rate in each.rates.items()}}
        for each in found
    ]
    content = {"files": [str(file) for file in files], "programs": rows}
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        (output_dir / "report.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--output {output_dir}: cannot be written: {error}") from error
    return pass_table(found)
