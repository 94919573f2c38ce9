# SPDX-License-Identifier: Apache-2.0
"""Metrics: weighted means over batches and ranks, the files they go to, and evaluations as lines on the terminal."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor

from dschat.base.atomic import write_file
from dschat.base.errors import UserError
from dschat.base.glossary import HEAD, HEADLINES
from dschat.run.distributed import device, is_main, sum_over_ranks
from dschat.run.trackers import Sample, Trackers

EVALUATION = "eval/"
STANDARD_ERROR = "_stderr"  # behind the name of a metric: its standard error
ROWS = "rows"  # held-out rows of an evaluation
FEW_ROWS = 30  # held-out rows below which an evaluation comes with a warning

Number = float | int | Tensor


def with_variances(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics with x_variance, the mean of squares less the square of the mean, in the place of each x_squared."""
    found = dict(metrics)
    for name in [name for name in metrics if name.endswith("_squared")]:
        base = name.removesuffix("_squared")
        found[f"{base}_variance"] = found.pop(name) - metrics[base] ** 2
    return found


def rows_problem(file: Path, update: int, per_rollout: int) -> str | None:
    """What is wrong with a checkpoint's file of rows; None where each update, or each rollout's last one, has its row.

    Rows of evaluations are passed over. `per_rollout` are the updates of a rollout in step 3; 0 in other steps.
    """
    *lines, rest = file.read_bytes().split(b"\n")
    try:
        rows = [json.loads(line) for line in lines]
        trained = [row["update"] for row in rows if not any(name.startswith(EVALUATION) for name in row)]
        step = per_rollout or 1
        whole = trained == list(range(step, update + 1, step)) and not rest
    except (ValueError, TypeError, KeyError, AttributeError):
        return "a line is no row of metrics"
    return None if whole else f"it does not have each row until update {update} once"


class Means:
    """Weighted means, and sums, that are added up on the device and read once.

    Adding never waits for the device; ``reduce`` adds up over ranks and reads, one synchronisation.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Number] = {}
        self._weights: dict[str, Number] = {}  # a metric without a weight is a sum

    def add(self, name: str, total: Number, weight: Number = 1) -> None:
        """Adds ``total``, a sum over ``weight`` items, to the metric ``name``."""
        self.add_sum(name, total)
        self._weights[name] = self._weights.get(name, 0) + weight

    def add_sum(self, name: str, total: Number) -> None:
        """Adds to a metric that is a sum over everything added on all ranks."""
        total = total.detach() if isinstance(total, Tensor) else total
        self._sums[name] = self._sums.get(name, 0) + total

    def add_sums(self, totals: Mapping[str, Number]) -> None:
        for name, total in totals.items():
            self.add_sum(name, total)

    def copy(self) -> Means:
        """The same sums; adding to one leaves the other as it is."""
        other = Means()
        other._sums, other._weights = dict(self._sums), dict(self._weights)
        return other

    def state(self) -> tuple[dict[str, float], dict[str, Tensor]]:
        """Plain numbers and tensors from which `from_state` makes the same sums on this rank."""
        every = {f"{kind}.{name}": x for kind in ("sums", "weights") for name, x in getattr(self, f"_{kind}").items()}
        tensors = {name: x for name, x in every.items() if isinstance(x, Tensor)}
        return {name: x for name, x in every.items() if name not in tensors}, tensors

    @classmethod
    def from_state(cls, numbers: Mapping[str, float], tensors: Mapping[str, Tensor]) -> Means:
        means = cls()
        given: dict[str, Number] = {**numbers, **tensors}
        for name, x in given.items():
            kind, _, metric = name.partition(".")
            own: dict[str, Number] = getattr(means, f"_{kind}")
            own[metric] = x.to(device()) if isinstance(x, Tensor) else x
        return means

    def reduce(self) -> dict[str, float]:
        """Each metric over everything added on all ranks: its mean, 0 where the weight is 0; or its sum."""
        if not self._sums:
            return {}
        flat = [*self._sums.values(), *self._weights.values()]
        stacked = torch.stack([torch.as_tensor(x, dtype=torch.float64, device=device()).reshape(()) for x in flat])
        numbers = sum_over_ranks(stacked).tolist()
        metrics = dict(zip(self._sums, numbers, strict=False))
        for name, weight in zip(self._weights, numbers[len(metrics) :], strict=True):
            metrics[name] = metrics[name] / weight if weight else 0.0
        return metrics


class RowMeans:
    """Weighted means over held-out rows of all ranks, each with its standard error."""

    def __init__(self) -> None:
        self._means = Means()
        self._with_error: list[str] = []

    def add(self, name: str, totals: Tensor, weights: Tensor) -> None:
        """Adds rows to the metric ``name``, which is Σ totals / Σ weights.

        Args:
            name: of the metric.
            totals: (n,), each row's sum over what it counts, such as its tokens.
            weights: (n,), how much each row counts; a row of weight 0 is left out, and its total is 0.
        """
        if name not in self._with_error:
            self._with_error.append(name)
        x, w = totals.double(), weights.double()
        self._means.add(name, x.sum(), w.sum())
        for moment, products in (("xx", x * x), ("xw", x * w), ("ww", w * w), ("w", w), ("n", w > 0)):
            self._means.add_sum(f"{name} {moment}", products.sum())

    def add_mean(self, name: str, total: Number, weight: Number = 1) -> None:
        """Adds to a mean without a standard error."""
        self._means.add(name, total, weight)

    def reduce(self) -> dict[str, float]:
        """The means, and the standard error of each as <name>_stderr where at least two rows count.

        The error is that of a ratio of two sums over rows: with r = Σx / Σw it is √(n / (n − 1) · Σ(x − r w)²) / Σw,
        which is s / √n where every weight is 1 (Cochran, Sampling Techniques, 1977, section 6.4).
        """
        sums = self._means.reduce()
        metrics = {name: value for name, value in sums.items() if " " not in name}
        for name in self._with_error:
            ratio = metrics[name]
            xx, xw, ww, w, n = (sums[f"{name} {moment}"] for moment in ("xx", "xw", "ww", "w", "n"))
            squares = max(xx - 2 * ratio * xw + ratio**2 * ww, 0.0)
            if n > 1 and math.isfinite(squares):
                metrics[name + STANDARD_ERROR] = math.sqrt(n / (n - 1) * squares) / w
        return metrics


class MetricsLog:
    """``metrics.jsonl``, one object per line, and trackers. Only the main process writes."""

    def __init__(self, folder: Path, trackers: Trackers | None = None, keep: bool = False) -> None:
        """Opens the file in a folder, and trackers, that show its rows as well. With `keep`, the rows of an earlier
        run stay until `cut` says which of them do.
        """
        self._start = time.perf_counter()
        self._file: TextIO | None = None
        self._trackers = trackers or Trackers()
        self._written: list[str] = []  # what the file should hold
        if not is_main():
            return
        folder.mkdir(parents=True, exist_ok=True)
        self._file = open(folder / "metrics.jsonl", "a+" if keep else "w+", encoding="utf-8", errors="replace")
        if not keep:
            self._trackers.open([], None)

    def seconds(self) -> float:
        """Since the beginning of the run."""
        return time.perf_counter() - self._start

    def text(self) -> str:
        """Every row so far, as the file holds them; on the main process. UserError if it holds anything else."""
        assert self._file is not None
        self._file.seek(0)
        text = self._file.read()
        self._file.seek(0, 2)
        if text != "".join(self._written):
            remedy = "What was saved before is whole: go on from there with --resume_from_checkpoint."
            raise UserError(f"{self._file.name} is not what this run wrote: something else changed it. {remedy}")
        return text

    def rows(self) -> list[dict[str, float | None]]:
        """Every row so far; on the main process."""
        return [json.loads(line) for line in self.text().splitlines()]

    def cut(self, text: str, seconds: float, update: int) -> None:
        """Goes on from a checkpoint: its rows, from `text`, stay, all others go, and trackers are told so.

        `seconds` since the beginning of the run, and optimiser updates, are those until then.
        """
        self._start = time.perf_counter() - seconds
        self._written = [text]
        if self._file is None:
            return
        file = Path(self._file.name)
        self._file.close()
        write_file(file, text)  # a run that has lost the folder goes on writing into the old file, which is nobody's
        self._file = open(file, "a+", encoding="utf-8")
        # An evaluation may follow its update's checkpoint: trackers show that update anew, with the rows that stay.
        self._trackers.open(self.rows(), update)

    def log(self, update: int, samples: int, metrics: Mapping[str, float]) -> None:
        """Writes one row: so far optimiser updates and samples (prompts, pairs) of all ranks, and metrics by name.

        A number that is not finite is written as null.
        """
        if self._file is None:
            return
        seconds = round(self.seconds(), 3)
        row: dict[str, float | None] = dict(zip(HEAD, (update, samples, seconds), strict=True))
        row.update({k: (v if math.isfinite(v) else None) for k, v in metrics.items()})
        self._written.append(json.dumps(row) + "\n")
        try:
            self._file.write(self._written[-1])
            self._file.flush()
        except OSError as error:  # it does not say which file
            raise OSError(error.errno, error.strerror, self._file.name) from error
        self._trackers.log(row)

    def show_samples(self, update: int, samples: Sequence[Sample]) -> None:
        """Shows samples in the trackers, in tables."""
        if self._file is not None:
            self._trackers.show(update, samples)

    def close(self) -> None:
        """Closes the files."""
        if self._file is not None:
            self._file.close()
            self._trackers.close()


def evaluation_line(update: int, metrics: Mapping[str, float], before: Mapping[str, float]) -> str:
    """An evaluation after so many updates in one line: its number of rows, and its metrics, as in metrics.jsonl, with
    their standard errors and how far they have moved since the evaluation before, which is empty at the first.
    """
    named = [name for name in metrics if not name.endswith(STANDARD_ERROR) and name != EVALUATION + ROWS]
    names = sorted(named, key=lambda name: _place(name.removeprefix(EVALUATION)))
    parts = []
    for name in names:
        finite = name in before and math.isfinite(metrics[name] - before[name])
        moved = f" ({_signed(metrics[name] - before[name])})" if finite else ""
        error = metrics.get(name + STANDARD_ERROR)
        with_error = "" if error is None else f" ± {error:.2g}"
        parts.append(f"{name.removeprefix(EVALUATION).replace('_', ' ')} {_shown(metrics[name])}{with_error}{moved}")
    rows = metrics.get(EVALUATION + ROWS)
    on_rows = "" if rows is None else f", {rows:.0f} held-out rows"
    return f"{after(update)}{on_rows}: {', '.join(parts)}"


def few_rows_warning(metrics: Mapping[str, float]) -> str | None:
    """What to say of an evaluation on few rows; None where they are enough."""
    rows = metrics.get(EVALUATION + ROWS, math.inf)
    if rows >= FEW_ROWS:
        return None
    return (
        f"evaluations are on {rows:.0f} held-out rows: differences within two standard errors (±) mean nothing."
        f" Give at least {FEW_ROWS} held-out rows: more data, or valid* files in the folder of --data_path."
    )


def after(updates: int) -> str:
    """When something was: "after 1 update", "after 12 updates"."""
    return f"after {updates} update{'' if updates == 1 else 's'}"


def _place(name: str) -> int:
    return HEADLINES.index(name) if name in HEADLINES else len(HEADLINES)


def _shown(number: float) -> str:
    """Four digits that count; none behind the point of large numbers."""
    return f"{number:.0f}" if 1000 <= abs(number) < 1e6 else f"{number:#.4g}"


def _signed(number: float) -> str:
    return ("+" if number >= 0 else "−") + (f"{abs(number):.2g}" if abs(number) < 100 else _shown(abs(number)))
