# SPDX-License-Identifier: Apache-2.0
"""What a report reads: the output folders of step 3, checked, as one RunData each."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dschat.base.errors import UserError
from dschat.base.glossary import HEAD, names_under
from dschat.base.jsonl import CutLine, json_lines, parse_json
from dschat.lab.macro_actions import MacroToken, macro_tokens

logger = logging.getLogger(__name__)

# Evaluation metrics that every run has. Another name under eval/ is the metric function's.
EVAL_NAMES = frozenset(names_under("eval/", "ppo", always=True))
# A samples file covers an evaluation when its mean is the evaluation's, up to rounding in the files.
SAME_MEAN = 1e-3


@dataclass(frozen=True)
class Sample:
    """One held-out prompt with the response to it.

    `values` are scores, the metric function where there is one, eos_rate (1 or 0), kl (nats, summed over the response)
    and length (tokens), by their names in metrics.jsonl; those that are finite numbers.
    """

    prompt: str
    values: dict[str, float]
    tokens: list[MacroToken]  # of the response; none where the samples file gives none


@dataclass(frozen=True)
class HeldOut:
    """An evaluation on held-out prompts."""

    model: str  # what was evaluated: SFT, or the run's name
    row: Mapping[str, float]  # of metrics.jsonl with its means
    samples: Sequence[Sample]  # of its samples file, which may hold only some of the responses

    def mean(self, name: str) -> float:
        """Mean over the held-out prompts; NaN where it was not logged."""
        return self.row.get(f"eval/{name}", math.nan)

    def values(self, name: str) -> list[float] | None:
        """The single values behind a mean; None when the samples are not all of them or fewer than two."""
        values = [sample.values[name] for sample in self.samples if name in sample.values]
        if len(values) < max(2, len(self.samples)):
            return None
        mean = self.mean(name)
        close = abs(sum(values) / len(values) - mean) <= SAME_MEAN * max(1.0, abs(mean))
        return values if close else None

    def matches(self, other: HeldOut) -> list[int] | None:
        """Per sample the number of the other's sample of the same prompt; None when the prompts differ."""
        prompts, others = ([sample.prompt for sample in side.samples] for side in (self, other))
        if prompts == others:
            return list(range(len(prompts)))
        if len(set(prompts)) < len(prompts) or sorted(prompts) != sorted(others):
            return None
        number = {prompt: i for i, prompt in enumerate(others)}
        return [number[prompt] for prompt in prompts]


@dataclass(frozen=True)
class RunData:
    """One run of step 3."""

    name: str  # what the report calls it
    config: dict[str, Any]  # its flags
    metric: str | None  # name of the metric function, None without one
    train: list[dict[str, float]]  # rows of metrics.jsonl with rollout metrics, by update
    evals: list[dict[str, float]]  # rows with evaluation metrics, by update
    first: HeldOut  # the first evaluation, of the SFT model
    last: HeldOut  # the last evaluation, of the result

    def largest(self, key: str) -> float:
        """Of a number that all rows have: update, samples (responses) or seconds so far."""
        return max(row[key] for row in [*self.train, *self.evals])

    def train_mean(self, key: str, last: float = 1.0) -> float:
        """Mean of a rollout metric over the last part of the run (1.0 = all of it); NaN when it was never logged."""
        numbers = [row[key] for row in self.train if math.isfinite(row.get(key, math.nan))]
        tail = numbers[-math.ceil(len(numbers) * last) :]
        return sum(tail) / len(tail) if tail else math.nan


def read_run(name: str, folder: Path) -> RunData:
    """Read a step-3 output folder; raises UserError for bad files, and without an evaluation after the first."""
    config = _read_object(folder / "train_config.json")
    path = folder / "metrics.jsonl"
    rows = [_metrics_row(row, origin) for origin, row in _read_lines(path)]
    train = _by_update(row for row in rows if "objective/scores" in row)
    evals = _by_update(row for row in rows if "eval/scores" in row)
    if not evals or evals[0]["update"] != 0:
        raise UserError(f"{path} has no evaluation of update 0, the SFT model: run step 3 again to its first update.")
    if len(evals) < 2:
        raise UserError(f"{path} has no evaluation after update 0: let the run finish, or lower --eval_interval.")
    metric = _metric_name(evals, config)
    first = HeldOut("SFT", evals[0], _read_samples(folder, evals[0]["update"], metric))
    last = HeldOut(name, evals[-1], _read_samples(folder, evals[-1]["update"], metric))
    return RunData(name, config, metric, train, evals, first, last)


def _by_update(rows: Iterable[dict[str, float]]) -> list[dict[str, float]]:
    """Rows in the order of their updates; of two rows of one update the later one."""
    found = {row["update"]: row for row in rows}
    return [found[update] for update in sorted(found)]


def _metric_name(evals: list[dict[str, float]], config: Mapping[str, Any]) -> str | None:
    names = {key.removeprefix("eval/") for row in evals for key in row if key.startswith("eval/")} - EVAL_NAMES
    names = set(filter(str.isidentifier, names))  # what scoring measured is called programs/passed and so on
    given = str(config.get("metric_function") or "").rpartition(":")[2]
    return given if given in names else None


def _metrics_row(row: Mapping[str, Any], origin: str) -> dict[str, float]:
    numbers = {key: math.nan if value is None else value for key, value in row.items()}
    for key in HEAD:
        if key not in numbers:
            raise UserError(f"{origin}: no {key}; this is not a metrics file of step 3.")
    for key, value in numbers.items():
        if not isinstance(value, int | float):
            raise UserError(f"{origin}: {key} is {value!r}, not a number.")
    return numbers


def _read_samples(folder: Path, update: float, metric: str | None) -> list[Sample]:
    path = folder / "samples" / f"update-{int(update):06d}.jsonl"
    return [_sample(row, origin, metric) for origin, row in _read_lines(path)]


def _sample(row: Mapping[str, Any], origin: str, metric: str | None) -> Sample:
    keys = {"scores": "score", "eos_rate": "finished", "kl": "kl", "length": "length"}
    keys |= {metric: metric} if metric else {}
    try:
        values = {name: float(row[key]) for name, key in keys.items() if row[key] is not None}
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        return Sample(str(row["prompt"]), finite, macro_tokens(row.get("tokens", [])))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{origin}: not a sample of step 3: {error!r} is wrong or missing.") from error


def _read_object(path: Path) -> dict[str, Any]:
    with _readable(path):
        content = parse_json(path.read_bytes(), str(path))
    if not isinstance(content, dict):
        raise UserError(f"{path} does not hold a JSON object.")
    return content


def _read_lines(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Objects of a JSON Lines file, each with its place; a last line that a running job has cut short is skipped."""
    rows = []
    try:
        with _readable(path):
            for origin, row in json_lines(path):
                if not isinstance(row, dict):
                    raise UserError(f"{origin} does not hold a JSON object.")
                rows.append((origin, row))
    except CutLine as error:
        logger.warning("%s The line is skipped: the run may still be writing.", error)
    if not rows:
        raise UserError(f"{path} holds no complete row yet: wait for the run, or start it again.")
    return rows


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
        raise UserError(f"{path} {reason}: give the output_dir of a run of step 3.") from error
