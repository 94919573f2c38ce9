# SPDX-License-Identifier: Apache-2.0
"""The table, the numbers as JSON and the picture."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dschat.common.display import markdown_table
from dschat.errors import UserError
from dschat.evaluation.text.plot import draw_results
from dschat.evaluation.text.results import PolicyResult, RewardResult

NAME = "report"
INTERVALS = "[ ] holds 95 %, over texts: a percentile bootstrap; of accuracies, Wilson's interval."
Result = PolicyResult | RewardResult


def write_text_report(policies: Sequence[PolicyResult], rewards: Sequence[RewardResult], folder: Path) -> str:
    """Writes report.md, report.json and report.png; returns the tables.

    Args:
        policies, rewards: in the order of the table; at least one of the two is not empty.
        folder: is there.

    Raises:
        UserError: they cannot be written.
    """
    tables = [*([_policy_table(policies)] if policies else []), *([_reward_table(rewards)] if rewards else [])]
    text = "\n\n".join([*tables, INTERVALS])
    content = {
        "policies": [asdict(each) | {"perplexity": asdict(each.perplexity)} for each in policies],
        "reward_models": [asdict(each) for each in rewards],
    }
    try:
        (folder / f"{NAME}.md").write_text(text + "\n", encoding="utf-8")
        (folder / f"{NAME}.json").write_text(
            json.dumps(without_nan(content), indent=1, allow_nan=False) + "\n", encoding="utf-8"
        )
        (folder / f"{NAME}.png").write_bytes(draw_results(policies, rewards))
    except OSError as error:
        raise UserError(f"--output {folder}: cannot be written: {error}") from error
    return text


def without_nan(value: Any) -> Any:
    """What JSON can hold: numbers that are not finite are None."""
    if isinstance(value, Mapping):
        return {name: without_nan(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _policy_table(results: Sequence[PolicyResult]) -> str:
    drawn = any(each.rouge for each in results)
    head = ["policy", *_updates(results), "texts", "tokens", "loss", "perplexity"]
    head += ["ROUGE-1", "ROUGE-2", "ROUGE-L", "length"] if drawn else []
    rows = []
    for each in results:
        cells = _first_cells(each, results) + [str(each.rows), str(each.tokens)]
        cells += [each.loss.text(4), each.perplexity.text(2)]
        if drawn:
            cells += [*(score.text() for score in each.rouge.values()), f"{each.length:.1f}"]
        rows.append(cells)
    return markdown_table(head, rows)


def _reward_table(results: Sequence[RewardResult]) -> str:
    rows = [
        _first_cells(each, results) + [str(each.rows), each.loss.text(4), each.accuracy.text()] for each in results
    ]
    return markdown_table(["reward model", *_updates(results), "pairs", "loss", "accuracy, %"], rows)


def _updates(results: Sequence[Result]) -> list[str]:
    """The head of the column of updates, where they are known of a model."""
    return ["updates"] if any(each.update is not None for each in results) else []


def _first_cells(each: Result, results: Sequence[Result]) -> list[str]:
    return [each.model, *(["–" if each.update is None else str(each.update)] if _updates(results) else [])]
