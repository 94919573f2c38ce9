# SPDX-License-Identifier: Apache-2.0
"""Output folders of training runs as a report reads them, and the samples of runs of step 3."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from dschat.base.errors import UserError
from dschat.base.glossary import HEAD, names_under
from dschat.base.jsonl import CutLine, iterate_rows, read_object
from dschat.base.steps import STEPS
from dschat.evaluation.macro_actions import macro_tokens

METRICS = "metrics.jsonl"
RUN = "RUN"  # how messages name an output folder
logger = logging.getLogger(__name__)

# Evaluation metrics that every run has. Another name under eval/ is the metric function's.
EVAL_NAMES = frozenset(names_under("eval/", "ppo", always=True))
# Evaluation metric → column of a samples file.
SAMPLE_COLUMNS = {"scores": "score", "eos_rate": "finished"}
# A samples file covers an evaluation when its mean is the evaluation's, up to rounding in the files.
SAME_MEAN = 1e-3

WINDOW_PART = 0.1  # part of a run's updates that curves and final values are averaged over

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class HeldOut:
    """An evaluation on held-out prompts.

    Samples have the columns `prompt`, `tokens` (of the response; empty if the file gives none) and, by their names
    in metrics.jsonl: scores, the metric function where there is one, and eos_rate (1 or 0); NaN if a number is not
    finite.
    """

    model: str  # SFT, or the run's name
    row: Mapping[str, float]  # row of metrics.jsonl with the means
    samples: pd.DataFrame  # one row per response; possibly only some of the evaluation's

    def mean(self, name: str) -> float:
        """Mean over the held-out prompts; NaN if it was not logged."""
        return self.row.get(f"eval/{name}", math.nan)

    def values(self, name: str) -> list[float] | None:
        """Values behind a mean, (N,); None when the samples are not all of them or fewer than two."""
        if name not in self.samples or len(self.samples) < 2:
            return None
        values: list[float] = self.samples[name].tolist()
        mean = self.mean(name)
        difference = abs(sum(values) / len(values) - mean)
        # A NaN among the values is close to nothing.
        return values if difference <= SAME_MEAN * max(1.0, abs(mean)) else None


@dataclass(frozen=True)
class RunData:
    """One run of any step. The tables have a row per logged update and the metrics' names as columns.

    `first` and `last` are evaluations of step 3 with their samples, read when they are asked for; see `lack`.
    """

    name: str  # as the report shows it
    folder: Path
    step: str  # its name in run.json
    finished: bool
    config: dict[str, Any]  # its flags
    train: pd.DataFrame  # rows of metrics.jsonl about training
    evals: pd.DataFrame  # rows with evaluation metrics

    @property
    def best(self) -> int | None:
        """Index of the evaluation by which a checkpoint is the best; None without one."""
        step = STEPS[self.step]
        numbers = column_of(self.evals, step.best)
        if not np.isfinite(numbers).any():
            return None
        return int(np.nanargmax(numbers) if step.larger_is_better else np.nanargmin(numbers))

    @property
    def metric(self) -> str | None:
        """Name of the metric function, where the evaluations have its mean."""
        names = set()
        for key in self.evals.columns:
            if key.startswith("eval/"):
                names.add(key.removeprefix("eval/"))
        name = str(self.config.get("metric_function") or "").rpartition(":")[2]
        # Measurements of scoring have names such as programs/passed, which are no identifiers.
        return name if name.isidentifier() and name in names - EVAL_NAMES else None

    @property
    def lack(self) -> str:
        """Why a run of step 3 has no responses before and after training to compare; empty if it has."""
        updates = self.evals["update"].tolist()
        if updates[:1] != [0]:
            return f"{METRICS} has no evaluation of update 0, the SFT model"
        if len(updates) < 2:
            return f"{METRICS} has no evaluation after update 0: let the run finish, or lower --eval_interval"
        for update in (0, updates[-1]):
            file = samples_file(self.folder, update)
            if not file.exists():
                return f"samples/{file.name} is missing"
        return ""

    @cached_property
    def first(self) -> HeldOut:
        """The first evaluation, of the SFT model."""
        return self._held_out("SFT", 0)

    @cached_property
    def last(self) -> HeldOut:
        """The last evaluation, of the trained model."""
        return self._held_out(self.name, -1)

    def _held_out(self, model: str, index: int) -> HeldOut:
        row = self.evals.iloc[index].to_dict()
        return HeldOut(model, row, _read_samples(self.folder, row["update"], self.metric))

    def largest(self, key: str) -> float:
        """Largest value of a number in every row: update, samples (responses) or seconds so far."""
        rows = pd.concat([self.train, self.evals])
        return float(rows[key].max())

    def train_mean(self, key: str, last: float = 1.0) -> float:
        """Mean of a rollout metric over the last part of the run (1.0 = all of it); NaN when it was never logged."""
        numbers = column_of(self.train, key)
        numbers = numbers[np.isfinite(numbers)]
        tail = numbers[-math.ceil(len(numbers) * last) :]
        return float(tail.mean()) if len(tail) else math.nan


def column_of(rows: pd.DataFrame, key: str) -> Numbers:
    """Column of a table of metrics, (N,) float64; NaN if it was not logged."""
    if key not in rows:
        return np.full(len(rows), math.nan)
    return rows[key].to_numpy(dtype=np.float64)


def read_log(name: str, folder: Path) -> RunData:
    """Read the output folder of a run of any step. Raises UserError if a file is missing or malformed."""
    record = read_object(folder / "run.json")
    step = record.get("step")
    if step not in STEPS:
        raise UserError(f"{folder / 'run.json'}: step is {step!r}: give the output folder of a training run.")
    config = read_object(folder / "train_config.json")
    train_rows: list[dict[str, Any]] = []
    eval_rows: list[dict[str, Any]] = []
    for _, row in _complete_rows(folder / METRICS):
        is_evaluation = any(key.startswith("eval/") for key in row)
        (eval_rows if is_evaluation else train_rows).append(row)
    finished = record.get("finished") is True
    return RunData(name, folder, step, finished, config, _by_update(train_rows), _by_update(eval_rows))


def read_run(name: str, folder: Path) -> RunData:
    """Read the output folder of a run of step 3 that has samples before and after training.

    Raises:
        UserError: a file is missing or malformed, or there is no evaluation after the first.
    """
    run = read_log(name, folder)
    if run.lack:
        raise UserError(f"{folder}: {run.lack}.")
    return run


def samples_file(folder: Path, update: float) -> Path:
    """The file of an evaluation's responses."""
    return folder / "samples" / f"update-{int(update):06d}.jsonl"


def _by_update(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Rows in the order of their updates, null as NaN; if an update has two rows, the later one counts."""
    if not rows:
        return pd.DataFrame(columns=HEAD)
    table = pd.DataFrame(rows).astype(np.float64).drop_duplicates("update", keep="last")
    return table.sort_values("update", ignore_index=True)


def _read_samples(folder: Path, update: float, metric: str | None) -> pd.DataFrame:
    columns = SAMPLE_COLUMNS | ({metric: metric} if metric else {})
    samples = []
    for origin, row in _complete_rows(samples_file(folder, update)):
        if not row.keys() >= {"prompt", *columns.values()}:
            raise UserError(f"{origin}: not a sample of step 3; its columns are {', '.join(row)}.")
        tokens = macro_tokens(row.get("tokens", []))
        sample: dict[str, Any] = {"prompt": row["prompt"], "tokens": tokens}
        for name, column in columns.items():
            sample[name] = math.nan if row[column] is None else float(row[column])
        samples.append(sample)
    return pd.DataFrame(samples)


def _complete_rows(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Rows of a file, each with its origin "file:line"; a last line that is cut short is skipped."""
    rows = []
    try:
        for origin, row in iterate_rows(path, RUN):
            rows.append((origin, row))
    except CutLine as error:
        if not rows:
            raise
        logger.warning("%s The line is skipped: the run may still be writing.", error)
    return rows
