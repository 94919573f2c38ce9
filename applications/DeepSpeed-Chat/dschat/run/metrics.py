# SPDX-License-Identifier: Apache-2.0
"""Metrics: weighted means over batches and ranks, metrics.jsonl, and lines about evaluations on the terminal."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import torch
from torch import Tensor

from dschat.base.atomic import write_file
from dschat.base.errors import UserError
from dschat.base.glossary import HEAD, HEADLINES
from dschat.base.jsonl import json_value
from dschat.run.distributed import device, is_main, sum_over_ranks

if TYPE_CHECKING:
    from dschat.run.trackers import Sample, Tracker

logger = logging.getLogger(__name__)

EVALUATION = "eval/"
STANDARD_ERROR = "_stderr"  # suffix of a metric's name: its standard error
ROWS = "rows"  # number of held-out rows of an evaluation
SHOWN_SAMPLES = 64  # that trackers show of an evaluation; the file in samples/ has all of them
FEW_ROWS = 30  # fewer held-out rows than this cause a warning

Number = float | int | Tensor


def with_variances(metrics: Mapping[str, float]) -> dict[str, float]:
    """Replaces each mean of squares, x_squared, by x_variance: the mean of squares minus the square of the mean."""
    result: dict[str, float] = {}
    variances: dict[str, float] = {}
    for name, value in metrics.items():
        if name.endswith("_squared"):
            base = name.removesuffix("_squared")
            variances[f"{base}_variance"] = value - metrics[base] ** 2
        else:
            result[name] = value
    return result | variances


class Means:
    """Weighted means and sums that are accumulated on the device.

    Adding never waits for the device; ``reduce`` sums over ranks and synchronises once.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Number] = {}
        self._weights: dict[str, Number] = {}  # metrics without a weight are sums

    def add(self, name: str, total: Number, weight: Number = 1) -> None:
        """Adds ``total``, a sum over ``weight`` items, to the metric ``name``."""
        self.add_sum(name, total)
        self._weights[name] = self._weights.get(name, 0) + weight

    def add_sum(self, name: str, total: Number) -> None:
        """Adds ``total`` to the metric ``name``, a sum over all ranks."""
        total = total.detach() if isinstance(total, Tensor) else total
        self._sums[name] = self._sums.get(name, 0) + total

    def add_sums(self, totals: Mapping[str, Number]) -> None:
        for name, total in totals.items():
            self.add_sum(name, total)

    def weigh(self, names: Iterable[str], weight: float) -> None:
        """Makes sums means: adds a weight to each, as ``add`` does."""
        for name in names:
            self._weights[name] = self._weights.get(name, 0) + weight

    def copy(self) -> Means:
        """An independent copy of the sums."""
        other = Means()
        other._sums = dict(self._sums)
        other._weights = dict(self._weights)
        return other

    def state(self) -> tuple[dict[str, float], dict[str, Tensor]]:
        """This rank's sums as plain numbers and tensors, for `from_state`."""
        numbers: dict[str, float] = {}
        tensors: dict[str, Tensor] = {}
        for kind, values in (("sums", self._sums), ("weights", self._weights)):
            for name, value in values.items():
                if isinstance(value, Tensor):
                    tensors[f"{kind}.{name}"] = value
                else:
                    numbers[f"{kind}.{name}"] = value
        return numbers, tensors

    @classmethod
    def from_state(cls, numbers: Mapping[str, float], tensors: Mapping[str, Tensor]) -> Means:
        """Restores the sums of `state`, with tensors on this process's device."""
        means = cls()
        state: dict[str, Number] = {**numbers, **tensors}
        for key, value in state.items():
            kind, _, name = key.partition(".")
            values = means._sums if kind == "sums" else means._weights
            values[name] = value.to(device()) if isinstance(value, Tensor) else value
        return means

    def reduce(self) -> dict[str, float]:
        """The value of each metric over all ranks: its sum, or its mean, which is 0 if the weight is 0."""
        if not self._sums:
            return {}
        scalars: list[Tensor] = []
        for value in (*self._sums.values(), *self._weights.values()):
            scalars.append(torch.as_tensor(value, dtype=torch.float64, device=device()).reshape(()))
        totals = sum_over_ranks(torch.stack(scalars)).tolist()
        metrics = dict(zip(self._sums, totals, strict=False))
        weights = totals[len(metrics) :]
        for name, weight in zip(self._weights, weights, strict=True):
            metrics[name] = metrics[name] / weight if weight else 0.0
        return metrics


class RowMeans:
    """Weighted means over the held-out rows of all ranks, with standard errors."""

    def __init__(self) -> None:
        self._means = Means()
        self._names: list[str] = []  # names of metrics with a standard error

    def add(self, name: str, totals: Tensor, weights: Tensor) -> None:
        """Adds rows to the metric ``name``, which is Σ totals / Σ weights.

        Args:
            name: name of the metric.
            totals: (n,), each row's sum, over its tokens say.
            weights: (n,), each row's weight, its number of tokens say. A row with weight 0 is ignored; its total is 0.
        """
        if name not in self._names:
            self._names.append(name)
        x = totals.double()
        w = weights.double()
        self._means.add(name, x.sum(), w.sum())
        self._means.add_sum(f"{name} xx", (x * x).sum())
        self._means.add_sum(f"{name} xw", (x * w).sum())
        self._means.add_sum(f"{name} ww", (w * w).sum())
        self._means.add_sum(f"{name} w", w.sum())
        self._means.add_sum(f"{name} n", (w > 0).sum())

    def add_mean(self, name: str, total: Number, weight: Number = 1) -> None:
        """Adds to a mean without a standard error."""
        self._means.add(name, total, weight)

    def reduce(self) -> dict[str, float]:
        """The means, and their standard errors as <name>_stderr if at least two rows count.

        A mean over no row at all is left out. The standard error is that of a ratio of two sums over rows. With
        r = Σx / Σw it is √(n / (n − 1) · Σ(x − r w)²) / Σw, which is s / √n if every weight is 1 (Cochran, Sampling
        Techniques, 1977, section 6.4).
        """
        sums = self._means.reduce()
        metrics = {name: value for name, value in sums.items() if " " not in name}
        for name in self._names:
            ratio = metrics[name]
            xx = sums[f"{name} xx"]
            xw = sums[f"{name} xw"]
            ww = sums[f"{name} ww"]
            w = sums[f"{name} w"]
            n = sums[f"{name} n"]
            if n == 0:
                del metrics[name]
                continue
            squares = max(xx - 2 * ratio * xw + ratio**2 * ww, 0.0)
            if n > 1 and math.isfinite(squares):
                metrics[name + STANDARD_ERROR] = math.sqrt(n / (n - 1) * squares) / w
        return metrics


class MetricsLog:
    """``metrics.jsonl``, one object per line, and trackers. Only the main process writes.

    If a tracker fails, a warning is logged once and the run continues without it.
    """

    def __init__(self, folder: Path, trackers: Sequence[Tracker] = (), keep: bool = False) -> None:
        """Opens the file in a folder, and trackers.

        Args:
            folder: created if it does not exist.
            trackers: which also show the rows.
            keep: keep the rows of an earlier run until `cut` is called.
        """
        self._start = time.perf_counter()
        self._file: TextIO | None = None
        self._trackers = list(trackers)
        self._written: list[str] = []  # expected content of the file
        if not is_main():
            return
        folder.mkdir(parents=True, exist_ok=True)
        self._file = open(folder / "metrics.jsonl", "a+" if keep else "w+", encoding="utf-8", errors="replace")
        if not keep:
            self._each(lambda tracker: tracker.open([], None))

    def seconds(self) -> float:
        """Seconds since the beginning of the run."""
        return time.perf_counter() - self._start

    def text(self) -> str:
        """The content of the file; on the main process. Raises UserError if anything else has changed it."""
        assert self._file is not None
        self._file.seek(0)
        text = self._file.read()
        self._file.seek(0, 2)
        if text != "".join(self._written):
            remedy = "Earlier checkpoints are intact: resume from one with --resume_from_checkpoint."
            raise UserError(f"{self._file.name} is not what this run wrote: something else changed it. {remedy}")
        return text

    def rows(self) -> list[dict[str, float | None]]:
        """All rows so far, on the main process."""
        return [json.loads(line) for line in self.text().splitlines()]

    def cut(self, text: str, seconds: float, update: int) -> None:
        """Resumes from a checkpoint: replaces the rows by those of the checkpoint, also in trackers.

        Args:
            text: content of the checkpoint's metrics.jsonl.
            seconds: duration of the run until the checkpoint.
            update: number of optimiser updates until the checkpoint.
        """
        self._start = time.perf_counter() - seconds
        self._written = [text]
        if self._file is None:
            return
        file = Path(self._file.name)
        self._file.close()
        write_file(file, text)  # a new file: a run that has lost the folder continues writing into the old one
        self._file = open(file, "a+", encoding="utf-8")
        # An evaluation may follow the checkpoint of its update, so trackers show the rows of that update again.
        rows = self.rows()
        self._each(lambda tracker: tracker.open(rows, update))

    def log(self, update: int, samples: int, metrics: Mapping[str, float]) -> None:
        """Writes one row; a number that is not finite is written as null.

        Args:
            update: optimiser updates so far.
            samples: samples (prompts, pairs) of all ranks so far.
            metrics: metrics by name.
        """
        if self._file is None:
            return
        seconds = round(self.seconds(), 3)
        row: dict[str, float | None] = dict(zip(HEAD, (update, samples, seconds), strict=True))
        row |= json_value(metrics)
        self._written.append(json.dumps(row) + "\n")
        try:
            self._file.write(self._written[-1])
            self._file.flush()
        except OSError as error:  # the original names no file
            raise OSError(error.errno, error.strerror, self._file.name) from error
        self._each(lambda tracker: tracker.log(row))

    def show_samples(self, update: int, samples: Sequence[Sample]) -> None:
        """Shows samples as tables in the trackers."""
        if self._file is not None and samples:
            self._each(lambda tracker: tracker.show(update, samples[:SHOWN_SAMPLES]))

    def tracked_runs(self) -> list[str]:
        """Names of the trackers that have all rows so far."""
        return [tracker.name for tracker in self._trackers]

    def close(self) -> None:
        """Closes the trackers, and the file, whose rest a full disk may have no room for."""
        if self._file is not None:
            self._each(lambda tracker: tracker.close())
            self._file.close()

    def _each(self, act: Callable[[Tracker], None]) -> None:
        for tracker in list(self._trackers):
            try:
                act(tracker)
            except Exception as error:
                self._trackers.remove(tracker)
                logger.warning(
                    "--report_to %s: %s: %s; the run continues without it, metrics.jsonl is complete",
                    tracker.name,
                    type(error).__name__,
                    error,
                )


def evaluation_line(
    update: int, metrics: Mapping[str, float], before: Mapping[str, float], first: Mapping[str, float]
) -> str:
    """An evaluation in one line: number of rows, and metrics with standard errors and changes.

    Args:
        update: number of updates when it was made.
        metrics: metrics as in metrics.jsonl.
        before: metrics of the previous evaluation; empty at the first.
        first: metrics of the first evaluation; empty at the first.
    """
    earlier = [before] if before == first else [before, first]
    names = []
    for name in metrics:
        if not name.endswith(STANDARD_ERROR) and name != EVALUATION + ROWS:
            names.append(name)
    parts: list[str] = []
    for name in sorted(names, key=_headline_order):
        part = f"{name.removeprefix(EVALUATION).replace('_', ' ')} {_shown(metrics[name])}"
        if name + STANDARD_ERROR in metrics:
            part += f" ± {metrics[name + STANDARD_ERROR]:.2g}"
        changes = [metrics[name] - evaluation.get(name, math.nan) for evaluation in earlier]
        if all(math.isfinite(change) for change in changes):
            part += f" ({', '.join(_signed(change) for change in changes)})"
        parts.append(part)
    row_count = metrics.get(EVALUATION + ROWS)
    on_rows = "" if row_count is None else f", {row_count:.0f} held-out rows"
    meaning = "" if len(earlier) == 1 else " (changes since the previous and the first evaluation)"
    return f"{after(update)}{on_rows}{meaning}: {', '.join(parts)}"


def few_rows_warning(metrics: Mapping[str, float]) -> str | None:
    """A warning about an evaluation on few rows; None if there are enough."""
    row_count = metrics.get(EVALUATION + ROWS, math.inf)
    if row_count >= FEW_ROWS:
        return None
    return (
        f"evaluations are on {row_count:.0f} held-out rows: differences within two standard errors (±) mean nothing."
        f" Give at least {FEW_ROWS} held-out rows: more data, a larger --eval_share, or valid* files in the folder of"
        " --data_path; where --eval_iters or --eval_prompts limits them, a larger one."
    )


def after(updates: int) -> str:
    """The words "after 1 update" or "after 12 updates"."""
    return f"after {updates} update{'' if updates == 1 else 's'}"


def _headline_order(name: str) -> int:
    headline = name.removeprefix(EVALUATION)
    return HEADLINES.index(headline) if headline in HEADLINES else len(HEADLINES)


def _shown(number: float) -> str:
    """Four significant digits; no decimals for large numbers."""
    return f"{number:.0f}" if 1000 <= abs(number) < 1e6 else f"{number:#.4g}"


def _signed(number: float) -> str:
    sign = "+" if number >= 0 else "−"
    size = abs(number)
    return sign + (f"{size:.2g}" if size < 100 else _shown(size))
