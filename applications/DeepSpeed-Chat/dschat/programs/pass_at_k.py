# SPDX-License-Identifier: Apache-2.0
"""pass@k: the chance that one of k programs for a problem passes its tests, estimated from n ≥ k of them."""

import logging
import math
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from dschat.base.errors import UserError
from dschat.base.jsonl import read_rows, text_of
from dschat.base.statistics import Rate, bootstrap_ratio
from dschat.data.known_sets import find_known
from dschat.evaluation.page import OUTPUT, REPORT_NAME, Report, Table, write_report
from dschat.evaluation.responses import FILE_FLAG, model_names
from dschat.programs.options import PassOptions

logger = logging.getLogger(__name__)

ALL = "all"
INVALID = "invalid"  # status of a program that could not be run; it does not count as a sample
APPS = "apps"  # its name in `dschat.data.formats.registry`
PUBLISHED = tomllib.loads(Path(__file__).with_name("published.toml").read_text(encoding="utf-8"))


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Unbiased pass@k of n ≥ k samples, c of them passed: 1 − C(n − c, k) / C(n, k) (Chen et al. 2021, equation 1)."""
    return 1 - math.comb(samples - passed, k) / math.comb(samples, k)


def pass_rates(files: Sequence[Path], ks: Sequence[int], dataset: str = "") -> pd.DataFrame:
    """Rates of files of programs that were run, by difficulty and over all problems.

    Args:
        files: one per model, whose name it has.
        ks: the numbers of programs to look at.
        dataset: data set of rows that name none.

    Returns:
        Rows with `model`, `dataset` (empty if the problems are not all of one published set), `difficulty`,
        `problems` (their number) and pass@k for each k: a rate with a bootstrap interval over the problems that have
        at least k samples, None if none has. A warning says how many have not.

    Raises:
        UserError: a file is missing or malformed.
    """
    rows = []
    for name, file in zip(model_names(files), files, strict=True):
        problems = _read_problems(file, dataset)
        for k in ks:
            few = (problems["samples"] < k).sum()
            if few:
                logger.warning("%s: pass@%d leaves out %d of %d problems", file, k, few, len(problems))
        datasets = problems["dataset"].unique()
        groups = dict(list(problems.groupby("difficulty", sort=False)))
        groups.pop("", None)
        groups[ALL] = problems
        for difficulty, group in groups.items():
            row: dict[str, Any] = {"model": name}
            row["dataset"] = datasets[0] if len(datasets) == 1 else ""
            row["difficulty"] = difficulty
            row["problems"] = len(group)
            for k in ks:
                row[f"pass@{k}"] = _mean_pass_rate(group, k)
            rows.append(row)
    return pd.DataFrame(rows, dtype=object)  # rates and None stay Python objects


def _read_problems(file: Path, dataset: str) -> pd.DataFrame:
    """Table with a row for each problem of a file; see `_problem` for its columns."""
    problems = []
    for origin, row in read_rows(file, FILE_FLAG):
        problems.append(_problem(row, dataset, origin))
    return pd.DataFrame(problems)


def _problem(row: dict[str, Any], dataset: str, origin: str) -> dict[str, Any]:
    """A problem's data set and difficulty (either may be empty), the number of samples run and of those passed."""
    samples = row.get("samples")
    if not isinstance(samples, list) or not all(map(_has_status, samples)):
        raise UserError(f"{origin}: column 'samples' must be a list of objects with a status; correct the row.")
    statuses = []
    for sample in samples:
        if sample["status"] != INVALID:
            statuses.append(sample["status"])
    return {
        "dataset": text_of({"dataset": ""} | row, "dataset", origin) or dataset,
        "difficulty": text_of(row, "difficulty", origin),
        "samples": len(statuses),
        "passed": statuses.count("passed"),
    }


def _has_status(sample: object) -> bool:
    return isinstance(sample, dict) and "status" in sample


def _mean_pass_rate(problems: pd.DataFrame, k: int) -> Rate | None:
    """Mean pass@k over the problems with at least k samples; None if there is none."""
    problems = problems[problems["samples"] >= k]
    if problems.empty:
        return None
    rates = []
    for problem in problems.itertuples():
        rates.append(pass_at_k(int(problem.samples), int(problem.passed), k))
    return bootstrap_ratio(rates, [1] * len(rates))


def run_pass_at_k(options: PassOptions) -> str:
    """Table of `dschat pass-at-k`."""
    return pass_table(pass_rates(options.files, options.k))


def write_pass_report(files: Sequence[Path], output_dir: Path, dataset: str = "") -> str:
    """Write `report.json` with pass@1 and pass@5; returns the table.

    Args:
        files: see `pass_rates`.
        output_dir: folder of the report.
        dataset: published data set, under any of its names, of rows that name none.

    Raises:
        UserError: a file is malformed, or the report cannot be written.
    """
    published_set = find_known(dataset)
    rates = pass_rates(files, (1, 5), published_set.name if published_set else "")
    programs = []
    for row in rates.to_dict("records"):
        pass_1 = row.pop("pass@1")
        pass_5 = row.pop("pass@5")
        programs.append(row | {"rates": {"pass@1": pass_1, "pass@5": pass_5}})
    content = {"files": list(map(str, files)), "programs": programs}
    write_report(output_dir, REPORT_NAME, content, flag=OUTPUT)
    return pass_table(rates)


def pass_table(rates: pd.DataFrame) -> str:
    """Table of `pass_rates` in per cent; below it, where all problems are of APPS, the published rates."""
    columns = ["model", "difficulty", "problems"]
    headers = ["model", "difficulty", "problems"]
    for name in rates.columns:
        if name.startswith("pass@"):
            columns.append(name)
            headers.append(f"{name}, %")
    cells = rates[columns].to_numpy().tolist()
    tables = [Table(headers, cells)]
    if (rates["dataset"] == APPS).all():
        tables.append(_published_table())
    return Report("", tables).text().rstrip("\n")


def _published_table() -> Table:
    rows = []
    for model, rates in PUBLISHED["rates"].items():
        for difficulty, (pass_1, pass_5) in rates.items():
            rows.append([model, difficulty, PUBLISHED["problems"][difficulty], f"{pass_1:.2f}", f"{pass_5:.2f}"])
    title = "published by the paper, not measured here"
    return Table([title, "difficulty", "problems", "pass@1, %", "pass@5, %"], rows)
