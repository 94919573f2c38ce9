# SPDX-License-Identifier: Apache-2.0
"""Evaluations on a terminal: a table that grows by a row with each of them.

update            score      KL  length     EOS  explained  sampled/s  trained/s
     0  -0.226 ± 0.036   0.000    60.7    10 %          –          –          –
    20   0.154 ± 0.041    3.10    44.2    81 %      0.310       2684       7721
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dschat.base.glossary import names_under
from dschat.run.metrics import EVALUATION, ROWS, STANDARD_ERROR

ROWS_UNDER_A_HEADING = 20
EMPTY_CELL = "–"


@dataclass(frozen=True)
class Column:
    """A column of the table: its heading, the name of its metric, and how its numbers are written."""

    label: str
    metric: str
    with_error: bool = False  # with the standard error
    is_share: bool = False  # in per cent

    def cell(self, metrics: Mapping[str, float]) -> str:
        """The number in this column, padded to its width."""
        number = metrics.get(self.metric, math.nan)
        error = metrics.get(self.metric + STANDARD_ERROR)
        if not math.isfinite(number):
            text = EMPTY_CELL
        elif self.is_share:
            text = f"{100 * number:.0f} %"
        elif self.with_error and error:
            text = _with_error(number, error)
        else:
            text = _short(number)
        return self.padded(text)

    def padded(self, text: str) -> str:
        """A text, padded on the left to the column's width."""
        return text.rjust(max(len(self.label), 15 if self.with_error else 6))


# What the evaluation of some step measures, in the order of the columns.
HELD_OUT = (
    Column("loss", "eval/loss", with_error=True),
    Column("accuracy", "eval/accuracy", with_error=True),
    Column("margin", "eval/margin"),
    Column("score", "eval/scores", with_error=True),
    Column("KL", "eval/kl"),
    Column("length", "eval/length"),
    Column("EOS", "eval/eos_rate", is_share=True),
)


class EvaluationTable:
    """Turns evaluations into rows; between them it collects the metrics of the updates."""

    def __init__(self, step: str, training: Mapping[str, str]) -> None:
        """Prepares a table without rows.

        Args:
            step: the step's name in run.json.
            training: columns that show the mean over the updates since the row above: heading → metric.
        """
        self._known = frozenset(names_under(EVALUATION, step))
        self._training = [Column(label, metric) for label, metric in training.items()]
        self._held_out: Sequence[Column] = ()  # known with the first evaluation
        self._rows = 0
        self._updates: list[Mapping[str, float]] = []  # metrics since the row above

    def add_updates(self, metrics: Mapping[str, float]) -> None:
        """Takes the metrics of an iteration, for the means in the next row."""
        self._updates.append(metrics)

    def row(self, update: int, metrics: Mapping[str, float]) -> str:
        """The row of an evaluation, below the heading if it is the first or many rows above.

        Args:
            update: number of updates when it was made.
            metrics: metrics as in metrics.jsonl.
        """
        if self._rows == 0:
            self._held_out = held_out_columns(metrics, self._known)
        columns = [*self._held_out, *self._training]
        numbers = {**metrics, **self._training_means()}
        line = "  ".join([f"{update:>6}", *(column.cell(numbers) for column in columns)])
        if self._rows % ROWS_UNDER_A_HEADING == 0:
            heading = "  ".join(["update", *(column.padded(column.label) for column in columns)])
            row_count = metrics.get(EVALUATION + ROWS)
            title = "" if row_count is None else f"evaluations on {row_count:.0f} held-out rows\n"
            line = f"{title}{heading}\n{line}"
        self._rows += 1
        self._updates.clear()
        return line

    def _training_means(self) -> dict[str, float]:
        """Mean of each column over the updates since the row above; without updates there is none."""
        means = {}
        for column in self._training:
            numbers = [metrics[column.metric] for metrics in self._updates if column.metric in metrics]
            if numbers:
                means[column.metric] = sum(numbers) / len(numbers)
        return means


def held_out_columns(metrics: Mapping[str, float], known: frozenset[str]) -> list[Column]:
    """The columns of an evaluation: those of HELD_OUT that it has, then the user's own metrics.

    Args:
        metrics: metrics of the evaluation.
        known: names without `eval/` that this package itself gives; other names are the user's.
    """
    columns = [column for column in HELD_OUT if column.metric in metrics]
    shown = {column.metric for column in columns}
    for name in metrics:
        metric = name.removeprefix(EVALUATION)
        if name not in shown and metric not in known and not metric.endswith(STANDARD_ERROR) and "/" not in metric:
            columns.append(Column(metric.replace("_", " "), name, with_error=True))
    return columns


def _with_error(number: float, error: float) -> str:
    """A number and its standard error, both to the second digit of the error: 0.154 ± 0.041."""
    decimals = max(0, 1 - math.floor(math.log10(error)))
    return f"{number:.{decimals}f} ± {error:.{decimals}f}"


def _short(number: float) -> str:
    """About three digits: 0.312, 3.10, 44.2, 2684, 1.2e+06. What is below 0.0005 is 0.000."""
    if abs(number) >= 1e6:
        return f"{number:.1e}"
    decimals = 3 - len(f"{abs(number):.0f}") if abs(number) >= 1 else 3
    return f"{round(number, 3) + 0.0:.{max(decimals, 0)}f}"
