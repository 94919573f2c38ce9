# SPDX-License-Identifier: Apache-2.0
"""`dschat report RUN RUN …`: runs of one step side by side; and pictures of learners."""

import json
import logging
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd

from dschat.base.atomic import write_file
from dschat.base.display import markdown_table, text_table
from dschat.base.errors import UserError
from dschat.base.glossary import HEADLINES, RUNS
from dschat.base.pictures import GREY, MARKERS
from dschat.base.statistics import Estimate, mean_interval
from dschat.evaluation.chart import Chart, Curve, Look, draw_charts, look_of
from dschat.evaluation.page import (
    NAME,
    NONE,
    OUTPUT,
    Example,
    Figure,
    Key,
    MacroPanel,
    Report,
    Section,
    Table,
    drawn,
    write_report,
)
from dschat.evaluation.responses import model_names
from dschat.evaluation.run_data import METRICS, Numbers, RunData, RunLog, column_of, read_log, with_samples
from dschat.evaluation.run_summary import Labels, Runs, compare_runs, labels_of
from dschat.settings.rewards import SOURCE_FLAGS

logger = logging.getLogger(__name__)

# Flags that choose what scores a run.
SOURCES = (*SOURCE_FLAGS, "reward_weights", "program_reward", "program_block", "judge_model")
SHOWN_PROMPTS = 4  # held-out prompts whose responses the page shows
SYMBOLS = "●■▲◆▼✚"  # symbols of the page, for the markers of matplotlib
SFT_LOOK: Look = {"color": "#444444", "linestyle": "--", "linewidth": 1.2}
# Title, y axis with the unit, and keys of metrics.jsonl for training and held-out rows. Drawn where a run has them.
CHARTS = (
    ("Loss", "loss", "loss/<step>", "eval/loss"),
    ("Accuracy", "share of pairs", "train/accuracy", "eval/accuracy"),
    ("Score", "score", "objective/scores", "eval/scores"),
    ("KL to SFT per sequence", "KL (nats per response)", "objective/kl", "eval/kl"),
    ("Response length", "length (tokens)", "response/length", "eval/length"),
    ("Critic's explained variance", "part of variance (1 = all)", "val/explained_variance", ""),
)
READING = (
    "Faint line: each update, on training rows. Bold line: the same, smoothed over a tenth of the run. Markers: "
    "evaluations on held-out rows."
)
EVALUATED = (*HEADLINES, "length", "eos_rate")  # metrics of the table of evaluations
NO_EXAMPLE = "There is no held-out prompt whose responses were written token by token for every model."
FLAGS = "All flags of the runs, those that differ first"
EVALUATIONS_REMARK = (
    "± is the standard error over held-out rows, not over seeds: runs of other seeds may differ by more. The best"
    " evaluation is the one by which a checkpoint is the best."
)
OUTPUT_FLAGS = ("output_dir", "tensorboard_path")  # flags that always differ and change nothing
SMOOTHED_PART = 0.1  # a smoothed line is the centred mean over this part of the run
HEADERS = ("learner", "gold score", "reward-model score", "KL to SFT", "length", "seconds")


def build_report(
    runs: Mapping[str, Path], output_dir: Path, title: str = "PPO with macro actions", notes: Sequence[str] = ()
) -> Report:
    """Write `report.json`, `report.md` and `report.html` about runs of one step; `.text()` is for the terminal.

    Runs of step 3 that were evaluated before and after training are also compared by their responses.

    Args:
        runs: the name to show → output folder. Runs of step 3 start from the same SFT model.
        output_dir: folder of the files; made where it is missing.
        title: heading of the page.
        notes: remarks of the caller, one paragraph each.

    Raises:
        UserError: there is no run, runs are of different steps, or a file of a run is missing or malformed; names it.
    """
    if not runs:
        raise UserError("A report needs the output folder of at least one run.")
    logs = [read_log(name, Path(folder)) for name, folder in runs.items()]
    step = _step_of(logs)
    lacks = [f"{log.name}: {log.lack}." for log in logs if log.lack] if step == "ppo" else []
    data: list[RunData] = []
    labels: Labels = {}
    report = Report(title, notes=notes)
    if step == "ppo" and not lacks:
        data = list(map(with_samples, logs))
        labels = labels_of_runs(data)
        report = compare_runs(data, labels, title, notes)

    remarks = [*report.remarks, EVALUATIONS_REMARK]
    if lacks:
        remarks.append(f"Responses are not compared. {' '.join(lacks)}")
    for log in logs:
        if not log.finished:
            remarks.append(f"{log.name} has not finished: update {log.largest('update'):.0f} is its last so far.")
    tables = [*_difference_table(logs), evaluation_table(logs), *report.tables]
    report = replace(report, tables=tables, remarks=remarks)
    write_report(output_dir, NAME, _numbers(logs), report, flag=OUTPUT)

    sections = [_curves(logs, labels), _settings(logs)]
    if data:
        sections.insert(1, _examples(data, labels))
    report = replace(report, sections=sections)
    write_file(output_dir / f"{NAME}.html", report.html())
    return report


def runs_report(paths: Sequence[Path], output_dir: Path) -> str:
    """`build_report` of output folders, named after them; returns its tables. A metrics.jsonl is its folder."""
    folders = [(path.parent if path.name == METRICS else path).resolve() for path in paths]
    names = model_names(folders)
    runs = dict(zip(names, folders, strict=True))
    if len(runs) < len(folders):
        raise UserError("A run is given twice: give each output folder once.")
    for folder in folders:
        if not (folder / METRICS).exists():
            runs_inside = sorted(file.parent.name for file in folder.glob(f"*/{METRICS}"))
            remedy = f" Give the runs in it: {', '.join(runs_inside[:5])}." if runs_inside else ""
            raise UserError(f"{folder} holds no {METRICS}, so it is no output folder of a run.{remedy}")
    return build_report(runs, output_dir, title=f"Runs: {', '.join(names)}").text().rstrip("\n")


def _step_of(logs: Sequence[RunLog]) -> str:
    """The step of all runs. Raises UserError if they differ."""
    first = logs[0]
    for log in logs:
        if log.step != first.step:
            raise UserError(
                f"{first.name} ({RUNS[first.step]}) and {log.name} ({RUNS[log.step]}) are runs of different steps:"
                " their numbers cannot be compared. Give the runs of each step in a report of their own."
            )
    return first.step


def labels_of_runs(data: Runs) -> dict[str, str]:
    """Labels of the scores that runs of step 3 are compared by; warns where they are scored by different things."""
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
    return labels_of(data, first.metric if same_metric else None)


def _difference_table(logs: Sequence[RunLog]) -> list[Table]:
    """A table of the flags that differ between runs, if any do."""
    different, _ = flag_rows(logs)
    rows = [row for row in different if row[0].removeprefix("--") not in OUTPUT_FLAGS]
    return [Table(["flags that differ", *(log.name for log in logs)], rows, "settings")] if rows else []


def evaluation_table(logs: Sequence[RunLog]) -> Table:
    """The first, the best and the last evaluation of each run, each number with its standard error."""
    names = _evaluated_names(logs)
    rows: list[list[object]] = []
    for log in logs:
        evaluations = _evaluations(log)
        for label, row in evaluations.items():
            rows.append([log.name, label, f"{row['update']:.0f}", *(_estimate(row, name) for name in names)])
        if not evaluations:
            rows.append([log.name, "none", *[None] * (1 + len(names))])
    return Table(["run", "evaluation", "update", *names], rows, "evaluations")


def _evaluated_names(logs: Sequence[RunLog]) -> list[str]:
    """Names of the metrics EVALUATED that any run was evaluated by, the metric function's first."""
    names = [log.metric for log in logs if log.metric is not None]
    names += [name for name in EVALUATED if any(f"eval/{name}" in log.evals for log in logs)]
    return list(dict.fromkeys(names))


def _evaluations(log: RunLog) -> dict[str, dict[str, float]]:
    """The rows of a run's first, best and last evaluation; one that is two of them counts as the last of these."""
    indices = {"first": 0, "best": log.best, "last": len(log.evals) - 1}
    rows: dict[str, dict[str, float]] = {}
    for label, index in indices.items():
        is_later = label != "last" and index == indices["last"]
        if index is not None and index >= 0 and len(log.evals) and not is_later:
            rows[label] = log.evals.iloc[index].to_dict()
    if "last" in rows and log.best == indices["last"]:
        rows["last, best"] = rows.pop("last")
    return rows


def _estimate(row: Mapping[str, float], name: str) -> Estimate:
    error = row.get(f"eval/{name}_stderr", math.nan)
    return Estimate(row.get(f"eval/{name}", math.nan), error if math.isfinite(error) else None)


def _numbers(logs: Sequence[RunLog]) -> dict[str, Any]:
    """Content of report.json."""
    runs = []
    for log in logs:
        runs.append(
            {
                "name": log.name,
                "folder": str(log.folder),
                "finished": log.finished,
                "flags": log.config,
                "evaluations": _evaluations(log),
            }
        )
    return {"step": logs[0].step, "runs": runs}


def _curves(runs: Sequence[RunLog], labels: Labels) -> Section:
    symbols = dict(zip(MARKERS, SYMBOLS, strict=True))
    keys = []
    for number, run in enumerate(runs):
        look = look_of(number, run.name)
        symbol = symbols[look["marker"]]
        keys.append(Key(f"━{symbol}━", run.name, look["color"]))
    keys.append(Key("╌╌", "before the first update"))
    figures = []
    for chart in run_charts(runs, labels):
        title = f"{chart.title} over optimiser updates, all runs"
        picture = drawn(partial(draw_charts, [chart], (5, 3.5), dpi=200), title)
        if picture:
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


def _panel(title: str, sample: Mapping[str, Any], labels: Labels, remark: str = "") -> MacroPanel:
    parts = []
    for name, label in labels.items():
        if not math.isnan(sample.get(name, math.nan)):
            parts.append(f"{label} {sample[name]:.3f}")
    parts.append(f"{len(sample['tokens'])} tokens")
    parts.append("ended by EOS" if sample["eos_rate"] else "cut at the longest length")
    if remark:
        parts.append(remark)
    return MacroPanel(title, sample["tokens"], " · ".join(parts))


def _settings(runs: Sequence[RunLog]) -> Section:
    """Flags with their value in each run, those that differ between the runs first."""
    different, equal = flag_rows(runs)
    headers = ["flag", *(run.name for run in runs)]
    return Section("Settings", folded=Table(headers, different + equal, "settings", caption=FLAGS))


def flag_rows(runs: Sequence[RunLog]) -> tuple[list[list[str]], list[list[str]]]:
    """Flags with their value in each run: those that differ, and those that are equal."""
    flags: set[str] = set()
    for run in runs:
        flags.update(run.config)
    different: list[list[str]] = []
    equal: list[list[str]] = []
    for flag in sorted(flags):
        values = [_flag_text(run, flag) for run in runs]
        rows = different if len(set(values)) > 1 else equal
        rows.append([f"--{flag}", *values])
    return different, equal


def _flag_text(run: RunLog, flag: str) -> str:
    if flag not in run.config:
        return NONE
    return json.dumps(run.config[flag], ensure_ascii=False)


def run_charts(runs: Sequence[RunLog], labels: Labels) -> list[Chart]:
    """Charts in reading order of what any run has logged; the metric function's first, if `labels` name it."""
    charts = []
    for title, axis, train_key, eval_key in CHARTS:
        is_score = train_key == "objective/scores" and "scores" in labels
        train_key = train_key.replace("<step>", runs[0].step)
        charts.append((labels["scores"].capitalize() if is_score else title, axis, train_key, eval_key))
    for name, label in labels.items():
        if name != "scores":
            charts.insert(0, (label.capitalize(), label, f"objective/{name}", f"eval/{name}"))
    drawable = []
    for title, axis, train_key, eval_key in charts:
        if any(train_key in run.train or eval_key in run.evals for run in runs):
            drawable.append(_chart(runs, title, axis, train_key, eval_key))
    return drawable


def _chart(runs: Sequence[RunLog], title: str, axis: str, train_key: str, eval_key: str) -> Chart:
    lines = []
    starts = set()
    for number, run in enumerate(runs):
        look = look_of(number, run.name)
        colour = look["color"]
        updates = run.train["update"].tolist()
        numbers = column_of(run.train, train_key)
        lines.append(Curve(updates, numbers.tolist(), {"color": colour, "alpha": 0.22, "linewidth": 0.8}))
        lines.append(Curve(updates, smooth(numbers).tolist(), {"color": colour, "linewidth": 2}))
        if eval_key:
            marks = {"color": colour, "linestyle": "none", "marker": look["marker"], "markersize": 7}
            marks |= {"markeredgecolor": "white", "zorder": 3}
            lines.append(Curve(run.evals["update"].tolist(), column_of(run.evals, eval_key).tolist(), marks))
            starts.update(column_of(run.evals[run.evals["update"] == 0], eval_key).tolist())
    levels = [(level, SFT_LOOK) for level in sorted(filter(math.isfinite, starts))]
    return Chart(title, "optimiser updates", axis, lines, levels, scale="whole")


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
    level: Look = {"color": GREY, "linestyle": "--", "linewidth": 1, "label": learners[0].name}
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


def write_page(folder: Path, title: str, parts: Mapping[str, str]) -> Path:
    """Write README.md of a folder: a title, and a heading with its text for each part."""
    content = f"# {title}\n"
    for heading, text in parts.items():
        content += f"\n## {heading}\n\n{text.rstrip()}\n"
    page = folder / "README.md"
    write_file(page, content)
    return page
