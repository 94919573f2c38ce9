# SPDX-License-Identifier: Apache-2.0
"""Pages and pictures about runs of step 3 that start from the same models, and about learners side by side."""

import json
import logging
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd

from dschat.base.atomic import write_file
from dschat.base.display import markdown_table, text_table
from dschat.base.errors import UserError
from dschat.base.pictures import COLOURS, GREY, MARKERS, legend_label
from dschat.base.statistics import mean_interval
from dschat.lab.chart import Chart, Curve, Look, draw_charts, look_of
from dschat.lab.page import NONE, Example, Figure, Key, MacroPanel, Report, Section, Table
from dschat.lab.run_data import Numbers, RunData, column_of, read_run
from dschat.lab.run_summary import Labels, Runs, compare_runs, labels_of, levels_of, score_labels

logger = logging.getLogger(__name__)

# Flags that choose what scores a run.
SOURCES = (
    *("reward_function", "reward_weights", "reward_source", "program_reward", "program_block"),
    *("reward_judge", "judge_model", "environment"),
)
SHOWN_PROMPTS = 4  # held-out prompts whose responses the page shows
SYMBOLS = "●■▲◆▼✚"  # symbols of the page, for the markers of matplotlib
SFT_LOOK: Look = {"color": "#444444", "linestyle": "--", "linewidth": 1.2}
GOAL_LOOK: Look = {"color": COLOURS[0], "linestyle": ":", "linewidth": 1.6}
READING = (
    "Faint line: each update, on training prompts. Bold line: the same, smoothed over a tenth of the run. Markers: "
    "evaluation on held-out prompts."
)
NO_EXAMPLE = "There is no held-out prompt whose responses were written token by token for every model."
FLAGS = "All flags of the runs, those that differ first"
SMOOTHED_PART = 0.1  # a smoothed line is the centred mean over this part of the run
HEADERS = ("learner", "gold score", "reward-model score", "KL to SFT", "length", "seconds")


def build_report(
    runs: Mapping[str, Path],
    output_dir: Path,
    title: str = "PPO with macro actions",
    notes: Sequence[str] = (),
) -> Report:
    """Write `report.html` and `report.png` about runs of step 3; `.text()` of the returned report is for the terminal.

    Args:
        runs: the name to show → output folder of step 3. All start from the same SFT model.
        output_dir: folder of the two files; made where it is missing.
        title: heading of the page and the picture.
        notes: remarks of the caller, one paragraph each.

    Raises:
        UserError: there is no run, or a file of a run is missing or malformed; names the file.
    """
    data, labels = read_runs(runs)
    report = compare_runs(data, labels, title, notes)
    picture = draw_all(data, labels, title)
    sections = [_curves(data, labels), _examples(data, labels), _settings(data)]
    report = replace(report, sections=sections)
    write_file(output_dir / "report.png", picture)
    write_file(output_dir / "report.html", report.html())
    return report


def read_runs(runs: Mapping[str, Path]) -> tuple[list[RunData], dict[str, str]]:
    """Read the output folders, and find labels of what the runs are compared by. Raises as `build_report`."""
    if not runs:
        raise UserError("A report needs the output_dir of at least one run of step 3.")
    data: list[RunData] = []
    for name, folder in runs.items():
        data.append(read_run(name, Path(folder)))

    first, *others = data
    same_sources = True
    same_metric = True
    for other in others:
        if other.metric != first.metric:
            same_metric = False
        for flag in SOURCES:
            if other.config.get(flag) != first.config.get(flag):
                same_sources = False
    if not same_sources:
        logger.warning("The runs differ in what scores them: their scores may be numbers of different things.")
    if not same_metric:
        logger.warning("The runs differ in --metric_function: the report leaves it out and compares their scores.")
    return data, labels_of(data, first.metric if same_metric else None)


def _curves(runs: Runs, labels: Labels) -> Section:
    symbols = dict(zip(MARKERS, SYMBOLS, strict=True))
    keys = []
    for number, run in enumerate(runs):
        look = look_of(number, run.name)
        symbol = symbols[look["marker"]]
        keys.append(Key(f"━{symbol}━", run.name, look["color"]))
    keys.append(Key("╌╌", "SFT, before the first update"))
    if len(runs) > 1:
        keys.append(Key("┈┈", f"final score of {runs[0].name}", COLOURS[0]))
    figures = []
    for chart in run_charts(runs, labels):
        title = f"{chart.title} over optimiser updates, all runs"
        picture = draw_charts([chart], (5, 3.5), dpi=200)
        figures.append(Figure(title, picture))
    return Section("Learning curves", keys=keys, remark=READING, figures=figures)


def _examples(runs: Runs, labels: Labels) -> Section:
    """Responses side by side to the first held-out prompts that every model answered token by token."""
    samples_by_prompt: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for run in runs:
        last_by_prompt = {sample["prompt"]: sample for sample in _with_tokens(run.last.samples)}
        for prompt, sample in last_by_prompt.items():
            samples_by_prompt[prompt].append(sample)

    examples: list[Example] = []
    longest = max(runs, key=_macro_length)
    for start in _with_tokens(longest.first.samples):
        prompt = start["prompt"]
        samples = samples_by_prompt[prompt]
        if len(samples) == len(runs) and len(examples) < SHOWN_PROMPTS:
            panels = [_panel("SFT", start, labels, f"macro actions as in {longest.name}")]
            for run, sample in zip(runs, samples, strict=True):
                panels.append(_panel(run.name, sample, labels))
            examples.append(Example(f"Prompt {len(examples) + 1}", prompt, panels))
    intro = f"The first {len(examples)} held-out prompts, with the responses of each model as they were sampled."
    return Section("Sample responses", intro if examples else NO_EXAMPLE, examples=examples)


def _macro_length(run: RunData) -> tuple[float, str]:
    """Key of the run whose macro actions are shown on the SFT model's responses: the longest, then the last name."""
    # The length of a run without training rows is NaN, for which max() returns 0.
    return max(0.0, run.train_mean("macro/length")), run.name


def _with_tokens(samples: pd.DataFrame) -> list[dict[str, Any]]:
    """Samples whose responses were written token by token, as rows."""
    return list(samples[samples["tokens"].map(len) > 0].to_dict("records"))


def _panel(
    title: str,
    sample: Mapping[str, Any],
    labels: Labels,
    remark: str = "",
) -> MacroPanel:
    parts = []
    for name, label in score_labels(labels).items():
        if not math.isnan(sample.get(name, math.nan)):
            parts.append(f"{label} {sample[name]:.3f}")
    parts.append(f"{len(sample['tokens'])} tokens")
    parts.append("ended by EOS" if sample["eos_rate"] else "cut at the longest length")
    if remark:
        parts.append(remark)
    return MacroPanel(title, sample["tokens"], " · ".join(parts))


def _settings(runs: Runs) -> Section:
    """Flags with their value in each run, those that differ between the runs first."""
    headers = ["flag"]
    flags: set[str] = set()
    for run in runs:
        headers.append(run.name)
        flags.update(run.config)
    different: list[list[str]] = []
    equal: list[list[str]] = []
    for flag in sorted(flags):
        values = [_flag_text(run, flag) for run in runs]
        rows = different if len(set(values)) > 1 else equal
        rows.append([f"--{flag}", *values])
    table = Table(headers, different + equal, "settings", caption=FLAGS)
    marked = frozenset(range(len(different)))
    return Section("Settings", folded=table, marked=marked)


def _flag_text(run: RunData, flag: str) -> str:
    if flag not in run.config:
        return NONE
    return json.dumps(run.config[flag], ensure_ascii=False)


def run_charts(runs: Runs, labels: Labels) -> list[Chart]:
    """Charts in reading order; the metric function's and the critic's only where there is one. See `labels_of`."""
    goals = goal_levels(runs, labels)
    # Title, y axis with the unit, and the keys of metrics.jsonl for training and held-out prompts.
    charts = [
        (labels["scores"].capitalize(), "score", "objective/scores", "eval/scores"),
        ("KL to SFT per sequence", "KL (nats per response)", "objective/kl", "eval/kl"),
        ("Response length", "length (tokens)", "response/length", "eval/length"),
    ]
    if any("val/explained_variance" in run.train for run in runs):
        charts.append(("Critic's explained variance", "part of variance (1 = all)", "val/explained_variance", ""))
    name, label = next(iter(labels.items()))
    if name != "scores":
        charts.insert(0, (label.capitalize(), label, f"objective/{name}", f"eval/{name}"))
    return [_chart(runs, *chart, goals) for chart in charts]


def _chart(
    runs: Runs,
    title: str,
    axis: str,
    train_key: str,
    eval_key: str,
    goals: Mapping[str, float],
) -> Chart:
    lines = []
    starts = set()
    for number, run in enumerate(runs):
        look = look_of(number, run.name)
        colour = look["color"]
        updates = run.train["update"].tolist()
        numbers = column_of(run.train, train_key)
        lines.append(
            Curve(
                updates,
                numbers.tolist(),
                {"color": colour, "alpha": 0.22, "linewidth": 0.8},
            )
        )
        lines.append(
            Curve(
                updates,
                smooth(numbers).tolist(),
                {"color": colour, "linewidth": 2},
            )
        )
        if eval_key:
            marks = {
                "color": colour,
                "linestyle": "none",
                "marker": look["marker"],
                "markersize": 7,
            }
            marks |= {"markeredgecolor": "white", "zorder": 3}
            lines.append(
                Curve(
                    run.evals["update"].tolist(),
                    column_of(run.evals, eval_key).tolist(),
                    marks,
                )
            )
            starts.add(run.first.row.get(eval_key, math.nan))
    levels = [(level, SFT_LOOK) for level in sorted(filter(math.isfinite, starts))]
    if train_key in goals:
        levels.append((goals[train_key], GOAL_LOOK))
    return Chart(title, "optimiser updates", axis, lines, levels, scale="whole")


def goal_levels(runs: Runs, labels: Labels) -> dict[str, float]:
    """Levels at which the first run ends, by key of metrics.jsonl, for the others to reach; empty for a single run."""
    if len(runs) < 2:
        return {}
    levels = levels_of(runs[0], list(score_labels(labels)))
    return {f"objective/{name}": level for name, level in levels.items()}


def smooth(values: Sequence[float] | Numbers) -> Numbers:
    """(N,): centred moving mean over SMOOTHED_PART of the values (N,), cut off at both ends.

    NaN values are left out; NaN if the window holds no number.
    """
    numbers = np.asarray(values, dtype=np.float64)
    half = max(1, round(len(numbers) * SMOOTHED_PART / 2))
    means = np.full(len(numbers), math.nan)
    for index in range(len(numbers)):
        start = max(0, index - half)
        window = numbers[start : index + half + 1]
        finite = window[np.isfinite(window)]
        if finite.size:
            means[index] = finite.mean()
    return means


def draw_all(
    runs: Runs,
    labels: Labels,
    title: str,
) -> bytes:
    """Draw all charts and one legend, as PNG of 1800 × 1080 pixels."""
    legend: list[Look] = []
    for number, run in enumerate(runs):
        legend.append(
            {
                **look_of(number, legend_label(run.name)),
                "linewidth": 2,
                "markeredgecolor": "white",
            }
        )
    if len(runs) > 1:
        legend.append({**GOAL_LOOK, "label": f"final score of {runs[0].name}"})
    grey = {"color": "#888888", "linewidth": 2}
    legend += [
        {**SFT_LOOK, "label": "SFT, before the first update"},
        {**grey, "label": "each update, training prompts", "linewidth": 0.8, "alpha": 0.5},
        {**grey, "label": "the same, smoothed"},
        {**grey, "label": "evaluation, held-out prompts", "linestyle": "none", "marker": "o"},
    ]
    return draw_charts(
        run_charts(runs, labels),
        (15, 9),
        columns=3,
        title=title,
        legend=legend,
    )


@dataclass(frozen=True)
class PolicyPoint:
    """Measurements of a policy on the held-out prompts; one number per prompt in each list."""

    gold: list[float]
    score: list[float]
    kl: list[float]
    tokens: list[float]


@dataclass(frozen=True)
class Learner:
    """A learning method and its results."""

    name: str
    points: list[PolicyPoint]  # points of its policies in the order of training; the last one is the result
    seconds: float | None = None  # seconds of training; None if there was none
    bound: bool = False  # the KL is an upper bound, not measured


def learner_table(learners: Sequence[Learner], as_page: bool = False) -> str:
    """Results of each learner: a table for a terminal, or as Markdown for a page."""
    rows = []
    for learner in learners:
        end = learner.points[-1]
        if learner.bound:
            kl = f"≤ {end.kl[0]:.1f}"
        else:
            kl = mean_interval(end.kl).text(1) if any(end.kl) else "0"
        gold = mean_interval(end.gold).text()
        score = mean_interval(end.score).text(2)
        length = mean_interval(end.tokens).text(1)
        seconds = NONE if learner.seconds is None else f"{learner.seconds:.0f}"
        rows.append([learner.name, gold, score, kl, length, seconds])
    return (markdown_table if as_page else text_table)(HEADERS, rows)


def draw_learners(learners: Sequence[Learner], file: Path) -> None:
    """Draw gold score against KL, each learner a line through its points with 95 % intervals of the gold score."""
    start = mean_interval(learners[0].points[0].gold)
    lines = []
    for number, learner in enumerate(learners[1:]):
        kl = [0.0]
        gold = [start]
        for point in learner.points:
            kl.append(fmean(point.kl))
            gold.append(mean_interval(point.gold))
        label = f"{learner.name} (its KL: an upper bound)" if learner.bound else learner.name
        lines.append(Curve(kl, gold, look_of(number, label)))
    level: Look = {
        "color": GREY,
        "linestyle": "--",
        "linewidth": 1,
        "label": learners[0].name,
    }
    chart = Chart(
        "What the gold score costs in KL",
        "KL to SFT (nats per response)",
        "gold score (mean, 95 %)",
        lines,
        levels=[(start.value, level)],
        legend="below",
    )
    picture = draw_charts([chart], (8, 6), dpi=150)
    write_file(file, picture)


def write_page(
    folder: Path,
    title: str,
    parts: Mapping[str, str],
) -> Path:
    """Write README.md of a folder: a title, and a heading with its text for each part."""
    content = f"# {title}\n"
    for heading, text in parts.items():
        content += f"\n## {heading}\n\n{text.rstrip()}\n"
    page = folder / "README.md"
    write_file(page, content)
    return page
