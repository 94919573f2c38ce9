# SPDX-License-Identifier: Apache-2.0
"""The rewards of the best of N as tables, JSON and curves."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dschat.common.display import markdown_table
from dschat.common.statistics import MeanInterval, mean_interval
from dschat.errors import UserError
from dschat.evaluation.best_of.estimator import PUBLISHED, best_of_first, expected_best
from dschat.evaluation.best_of.read import Sweep, read_sweep
from dschat.evaluation.pairs.responses import model_names

NOTE = (
    "Mean over the prompts of the reward model's score, with a 95 % interval (Student's t over prompts). All subsets: "
    "the mean over all choices of N of the responses drawn; first N: the best of the first N drawn, as published. "
    "Both estimate the same without bias; the curves show the former, which uses every response for every N and so "
    "varies less from draw to draw."
)


@dataclass(frozen=True)
class BestOf:
    """What the best of n responses of a model is worth at one temperature."""

    model: str
    temperature: float
    n: int
    draws: int  # responses to each prompt that the means are made from
    prompts: int
    expected: MeanInterval  # the mean over all subsets
    first: MeanInterval  # the best of the first n


def best_of_n(sweep: Sweep, numbers: Sequence[int]) -> list[BestOf]:
    """The means of a sweep, for each temperature those of a single response and of the best of each number."""
    found = []
    for temperature, rewards in sweep.rewards.items():
        draws = sweep.draws(temperature)
        for n in sorted({1, *numbers}):
            if n <= draws:
                expected = mean_interval([expected_best(row, n) for row in rewards])
                first = mean_interval([best_of_first(row, n) for row in rewards])
                found.append(BestOf(sweep.model, temperature, n, draws, len(rewards), expected, first))
    return found


def best_of_report(files: Sequence[Path], numbers: Sequence[int] | None, output_dir: Path) -> str:
    """Writes `report.json`, `report.md` and `report.png` on finished sweeps, one file per model; returns the tables.

    Args:
        files: of the sweeps.
        numbers: how many responses to choose from; None for the published ones that were drawn, and all.
        output_dir: where to write.

    Raises:
        UserError: a file holds something else, other prompts than the first, or fewer responses than `numbers` say.
    """
    sweeps = [read_sweep(file, name) for file, name in zip(files, model_names(files), strict=True)]
    for file, sweep in zip(files, sweeps, strict=True):
        if sweep.prompts != sweeps[0].prompts:
            raise UserError(
                f"{file} holds other prompts than {files[0]}: compare sweeps of the same prompts (--dataset, "
                "--data-path, --num-samples of inference/best_of_n.py)."
            )
    if numbers is None:
        most = max(sweep.most_draws for sweep in sweeps)
        numbers = sorted({*(n for n in PUBLISHED if n < most), most})
        return write_best_of(sweeps, numbers, output_dir, "report")
    for file, sweep in zip(files, sweeps, strict=True):
        if 1 < sweep.most_draws < max(numbers):
            problem = f"{file} holds {sweep.most_draws} responses to a prompt"
            raise UserError(f"--best-of {max(numbers)}: {problem}; give at most that number.")
    return write_best_of(sweeps, numbers, output_dir, "report")


def write_best_of(sweeps: Sequence[Sweep], numbers: Sequence[int], folder: Path, name: str) -> str:
    """Writes name.json, name.md and name.png into a folder; returns the tables. Raises UserError where it cannot."""
    from dschat.evaluation.best_of.plot import draw_best_of

    found = [each for sweep in sweeps for each in best_of_n(sweep, numbers)]
    text = best_of_tables(found)
    content = {"intervals": {"level": 0.95, "method": "Student's t over prompts"}, "rows": list(map(asdict, found))}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        (folder / f"{name}.md").write_text(text, encoding="utf-8")
        (folder / f"{name}.png").write_bytes(draw_best_of(found))
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error}") from error
    return text


def best_of_tables(found: Sequence[BestOf]) -> str:
    """Both estimators as Markdown: a row for each model and temperature, a column for each N."""
    numbers = sorted({each.n for each in found})
    head = ["model", "temperature", "prompts", "drawn", *(f"N = {n}" for n in numbers)]
    rows: dict[tuple[str, float], list[BestOf]] = {}
    for each in found:
        rows.setdefault((each.model, each.temperature), []).append(each)
    parts = []
    for title, name in (("Best of N, all subsets", "expected"), ("Best of the first N", "first")):
        table = []
        for (model, temperature), cells in rows.items():
            means = {each.n: getattr(each, name).text() for each in cells}
            start = [model, f"{temperature:g}", str(cells[0].prompts), str(cells[0].draws)]
            table.append([*start, *(means.get(n, "–") for n in numbers)])
        parts.append(f"{title}\n\n{markdown_table(head, table)}")
    return "\n\n".join([*parts, NOTE]) + "\n"
