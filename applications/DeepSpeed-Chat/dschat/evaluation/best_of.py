# SPDX-License-Identifier: Apache-2.0
"""Best of N: mean reward of the best of a model's responses, by N and temperature; estimators, files and charts."""

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd

from dschat.base.errors import UserError
from dschat.base.jsonl import iterate_rows
from dschat.base.pictures import legend_labels, short
from dschat.base.statistics import mean_interval
from dschat.evaluation.chart import Chart, Curve, draw_charts, look_of, offset_of
from dschat.evaluation.generate_options import PUBLISHED_NUMBERS
from dschat.evaluation.page import REPORT_NAME, Report, Table, write_report
from dschat.evaluation.responses import (
    FILE_FLAG,
    model_names,
    number_of,
    numbers_of,
    require_same_scorer,
    scorer_of,
    shown_prompt,
)

REMARK = (
    "Mean over the prompts of the reward model's score, with a 95 % interval (Student's t over prompts). All subsets: "
    "the mean over all choices of N of the sampled responses; first N: the best of the first N responses, as "
    "published. Both estimate the same without bias; the curves show the former, which uses every response for every "
    "N and so varies less between samples."
)
REWARD = "mean reward, 95 % interval over prompts"
# Offsets of neighbouring lines along the axes: factors of 2, and temperature.
DOUBLINGS_APART = 0.05
TEMPERATURE_APART = 0.012


def best_of_first(rewards: Sequence[float], n: int) -> float:
    """Highest reward of the first n of M responses: rewards (M,) in the order of sampling, 1 ≤ n ≤ M."""
    return max(rewards[:n])


def expected_best(rewards: Sequence[float], n: int) -> float:
    """Mean, over all subsets of n responses, of a subset's highest reward: unbiased, as `best_of_first` is.

    E[max of n] = Σ_i C(i − 1, n − 1) / C(M, n) · r_(i), where r_(1) ≤ … ≤ r_(M): the i-th smallest reward is the
    highest of those subsets whose other n − 1 members are among the i − 1 below it.

    Args:
        rewards: (M,).
        n: 1 to M.
    """
    subsets = math.comb(len(rewards), n)
    weights = [math.comb(below, n - 1) / subsets for below in range(len(rewards))]
    return math.fsum(map(operator.mul, weights, sorted(rewards)))


@dataclass(frozen=True)
class Sweep:
    """Rewards of one model's responses at one or more temperatures, for the same prompts at each."""

    model: str
    rewards: dict[float, list[list[float]]]  # ascending temperature → for each prompt (M,) in the order of sampling
    prompts: list[str]  # without the marks of a chat template
    scorer: str = ""  # what gave the rewards; empty if the file does not say

    @property
    def most_responses(self) -> int:
        """Largest number of responses to a prompt at any temperature."""
        return max(len(rewards[0]) for rewards in self.rewards.values())


def sweep_of(model: str, rows: Iterable[tuple[str, dict[str, Any]]]) -> Sweep:
    """Sweep of a model from its rows, each with its origin "file:line".

    Raises:
        UserError: a row is malformed, or the temperatures have different prompts.
    """
    rewards: dict[float, list[list[float]]] = {}
    prompts: dict[float, list[str]] = {}
    scorers: dict[str, str] = {}
    for origin, row in rows:
        scorers[origin] = scorer_of(row)
        temperature = number_of(row, "temperature", origin)
        if temperature is None:
            raise UserError(f"{origin}: no column 'temperature'; give files of `dschat best-of-n`.")
        row_rewards = numbers_of(row, "rewards", origin, "numbers; correct the row.")
        earlier = rewards.setdefault(temperature, [])
        if earlier and len(earlier[0]) != len(row_rewards):
            sizes = f"{len(row_rewards)} rewards, and {len(earlier[0])} in the rows before it"
            raise UserError(f"{origin}: {sizes}, at the same temperature; correct the file.")
        earlier.append(row_rewards)
        prompts.setdefault(temperature, []).append(shown_prompt(row, origin))
    require_same_scorer(scorers)
    first, *others = prompts
    for temperature in others:
        if prompts[temperature] != prompts[first]:
            temperatures = f"the prompts at temperature {temperature:g} are not those at {first:g}"
            raise UserError(f"{model}: {temperatures}; give the file of one finished run.")
    by_temperature = dict(sorted(rewards.items()))
    scorer = next(filter(None, scorers.values()), "")
    return Sweep(model, by_temperature, prompts[first], scorer)


def published_numbers(sweeps: Sequence[Sweep]) -> list[int]:
    """Numbers of responses to choose from: the published ones that were sampled, and all."""
    most = max(sweep.most_responses for sweep in sweeps)
    numbers = [n for n in PUBLISHED_NUMBERS if n < most]
    numbers.append(most)
    return numbers


def best_of_n(sweeps: Sequence[Sweep], numbers: Sequence[int]) -> pd.DataFrame:
    """Mean reward of a single response and of the best of each number, by model and temperature.

    Returns:
        Rows with `model`, `temperature`, `n`, `responses` (per prompt), `prompts` (their number), `expected`
        (interval of the mean over all subsets of n) and `first` (of the best of the first n).
    """
    rows = []
    for sweep in sweeps:
        for temperature, rewards in sweep.rewards.items():
            for n in sorted({1, *numbers}):
                if n <= len(rewards[0]):
                    row = {"model": sweep.model, "temperature": temperature}
                    rows.append(row | _estimates(n, rewards))
    return pd.DataFrame(rows, dtype=object)  # estimates and None stay Python objects


def _estimates(n: int, rewards: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Columns of `best_of_n` for one number of responses, from the rewards (M,) of each prompt."""
    expected = []
    first = []
    for rewards_of_prompt in rewards:
        expected.append(expected_best(rewards_of_prompt, n))
        first.append(best_of_first(rewards_of_prompt, n))
    return {
        "n": n,
        "responses": len(rewards[0]),
        "prompts": len(rewards),
        "expected": mean_interval(expected),
        "first": mean_interval(first),
    }


def best_of_report(files: Sequence[Path], numbers: Sequence[int] | None, output_dir: Path) -> str:
    """Write `report.json`, `report.md` and `report.png` on finished sweeps, a file per model; returns the tables.

    Args:
        files: at least one.
        numbers: numbers of responses to choose from; None: the published ones that were sampled, and all.
        output_dir: folder of the report.

    Raises:
        UserError: a file is malformed, has other prompts than the first, rewards of another reward model, or fewer
            responses than the numbers.
    """
    sweeps = []
    for file, name in zip(files, model_names(files), strict=True):
        sweeps.append(sweep_of(name, iterate_rows(file, FILE_FLAG)))
    scorers = [sweep.scorer for sweep in sweeps]
    require_same_scorer(dict(zip(map(str, files), scorers, strict=True)))
    reference = sweeps[0].prompts
    for file, sweep in zip(files, sweeps, strict=True):
        if sweep.prompts != reference:
            shared = len(set(sweep.prompts) & set(reference))
            raise UserError(
                f"{file} holds other prompts than {files[0]}: {shared} of its {len(sweep.prompts)} are among the "
                f"{len(reference)} of that file. Compare sweeps of the same prompts (--dataset, --data_path, "
                "--num_samples of dschat best-of-n)."
            )
        if numbers is not None and 1 < sweep.most_responses < max(numbers):
            problem = f"{file} holds {sweep.most_responses} responses to a prompt"
            raise UserError(f"--best_of {max(numbers)}: {problem}; give at most that number.")
    return write_best_of(sweeps, numbers or published_numbers(sweeps), output_dir, REPORT_NAME)


def write_best_of(sweeps: Sequence[Sweep], numbers: Sequence[int], folder: Path, name: str) -> str:
    """Write name.json, name.md and name.png into a folder; returns the tables. Raises UserError if it cannot."""
    means = best_of_n(sweeps, numbers)
    intervals = {"level": 0.95, "method": "Student's t over prompts"}
    content = {"intervals": intervals, "rows": means.to_dict("records")}
    tables = [
        _table_by_n(means, "expected", "Best of N, all subsets"),
        _table_by_n(means, "first", "Best of the first N"),
    ]
    report = Report("", tables, remarks=[REMARK])
    return write_report(folder, name, content, report, lambda: draw_best_of(means))


def _table_by_n(means: pd.DataFrame, estimator: str, caption: str) -> Table:
    """Table of an estimator, a column of `best_of_n`: a row per model and temperature, a column per N."""
    headers = ["model", "temperature", "prompts", "responses"]
    numbers = sorted(set(means["n"]))
    for n in numbers:
        headers.append(f"N = {n}")
    rows = []
    for (model, temperature), group in means.groupby(["model", "temperature"], sort=False):
        by_n = dict(zip(group["n"], group[estimator], strict=True))
        first = group.iloc[0]
        row = [model, f"{temperature:g}", first["prompts"], first["responses"]]
        row += map(by_n.get, numbers)
        rows.append(row)
    return Table(headers, rows, caption=caption)


def draw_best_of(means: pd.DataFrame) -> bytes:
    """Draw the means of `best_of_n` as PNG: a chart by N per model with several responses, and one of single ones."""
    several = means[means["responses"] > 1]
    temperatures = sorted(set(several["temperature"]))
    charts = []
    for model, group in several.groupby("model", sort=False):
        charts.append(_chart_by_n(str(model), group, temperatures))
    level_with_first = len(charts)

    lines = []
    models = list(means["model"].drop_duplicates())
    labels = legend_labels(models)
    for number, model in enumerate(models):
        single = means[(means["n"] == 1) & (means["model"] == model)]
        x = single["temperature"] + TEMPERATURE_APART * offset_of(number, len(models))
        look = look_of(number, labels[number])
        lines.append(Curve(x.tolist(), single["expected"].tolist(), look))
    charts.append(Chart("A single response", "temperature (0 = greedy)", REWARD, lines, legend="inside"))
    return draw_charts(charts, (5.6 * len(charts), 4.6), level_with_first=level_with_first)


def _chart_by_n(model: str, means: pd.DataFrame, temperatures: Sequence[float]) -> Chart:
    """Chart with a line for each temperature, from dark for the lowest to bright for the highest."""
    lines = []
    for number, temperature in enumerate(temperatures):
        line = means[means["temperature"] == temperature]
        if len(line):
            brightness = 0.85 * number / max(1, len(temperatures) - 1)
            colour = matplotlib.colormaps["plasma"](brightness)
            x = line["n"] * 2 ** (DOUBLINGS_APART * offset_of(number, len(temperatures)))
            look = {**look_of(number, f"temperature {temperature:g}"), "color": colour}
            lines.append(Curve(x.tolist(), line["expected"].tolist(), look))
    return Chart(
        f"{short(model)}: best of N",
        "N, responses to choose from",
        REWARD,
        lines,
        ticks={n: str(n) for n in sorted(set(means["n"]))},
        scale="doubling",
        legend="inside",
    )
