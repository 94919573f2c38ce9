# SPDX-License-Identifier: Apache-2.0
"""`dschat report RUN RUN …`: runs of one step side by side: settings, evaluations, curves and sample responses.

`labels` maps the scores that runs of step 3 are compared by to their names in the report, see `labels_of`.
"""

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dschat.base.atomic import write_file
from dschat.base.errors import UserError
from dschat.base.glossary import HEAD, HEADLINES
from dschat.base.pictures import legend_label
from dschat.base.statistics import Estimate, paired_difference
from dschat.base.steps import STEPS
from dschat.evaluation.chart import Chart, Curve, Look, draw_charts, look_of
from dschat.evaluation.page import (
    NAME,
    NONE,
    OUTPUT,
    Details,
    Example,
    Figure,
    MacroPanel,
    Report,
    Section,
    Table,
    drawn,
    write_report,
)
from dschat.evaluation.responses import model_names
from dschat.evaluation.run_data import METRICS, RunData, column_of, read_log
from dschat.settings.rewards import SCORE_SOURCES, SIMULATED_USER

Runs = Sequence[RunData]  # not empty
Labels = Mapping[str, str]  # of the metrics of which higher is better: the metric function if there is one, scores

SHOWN_PROMPTS = 3  # held-out prompts whose responses the page shows
START_LOOK: Look = {"label": "before training", "color": "#444444", "linestyle": "--", "linewidth": 1.2}
# Title, y axis with the unit, and keys of metrics.jsonl for training and held-out rows. Drawn where a run has them.
CHARTS = (
    ("Loss", "loss", "loss/<step>", "eval/loss"),
    ("Accuracy", "share of pairs", "train/accuracy", "eval/accuracy"),
    ("Score", "score", "objective/scores", "eval/scores"),
    ("KL to SFT per sequence", "KL (nats per response)", "objective/kl", "eval/kl"),
    ("Response length", "length (tokens)", "response/length", "eval/length"),
    ("Critic's explained variance", "part of variance (1 = all)", "val/explained_variance", ""),
)
CHART_INCHES = (5.2, 3.6)
READING = "Markers: evaluations on held-out rows. Lines: training rows, bold where averaged over a tenth of the run."
EVALUATED = (*HEADLINES, "length", "eos_rate")  # metrics of the table of evaluations
# Columns of the table of results: metric, header, decimals, factor.
RESULTS = (
    ("loss", "loss", 3, 1),
    ("perplexity", "perplexity", 2, 1),
    ("accuracy", "accuracy", 3, 1),
    ("scores", "score", 3, 1),
    ("kl", "KL to SFT (nats)", 2, 1),
    ("length", "length (tokens)", 1, 1),
    ("eos_rate", "ended by EOS (%)", 1, 100),
)
NO_EXAMPLE = "There is no held-out prompt whose responses were written token by token for every model."
RESULTS_REMARK = "± is the standard error over held-out rows, not over seeds: runs of other seeds may differ by more."
BEST_REMARK = "The best evaluation is the one by which a checkpoint is the best."
WINDOW_PART = 0.1  # part of a run's updates that curves and final values are averaged over
TRAINING_HEADERS = [
    "run",
    "updates",
    "responses",
    "seconds",
    "macro length (tokens)",
    "λ_eff per token",
    "explained variance",
]
TRAINING_REMARK = (
    "SFT is the model before the first update; the runs are compared at their last evaluation. Macro length"
    " and λ_eff = λ^(1/macro length) are means over the run; explained variance is the mean of its last tenth."
)


def build_report(
    runs: Mapping[str, Path],
    output_dir: Path,
    title: str = "PPO with macro actions",
    about: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> Report:
    """Write `report.json`, `report.md` and `report.html` about runs of one step; `.text()` is for the terminal.

    Runs of step 3 that were evaluated before and after training are also compared by their responses.

    Args:
        runs: the name to show → output folder; at least one. Runs of step 3 start from the same SFT model.
        output_dir: folder of the files; made where it is missing.
        title: heading of the page.
        about: what was done, one paragraph each.
        notes: remarks of the caller for those who read on.

    Raises:
        UserError: runs are of different steps, or a file of a run is missing or malformed; names it.
    """
    logs = [read_log(name, Path(folder)) for name, folder in runs.items()]
    step = _step_of(logs)
    lacks = [f"{log.name}: {log.lack}." for log in logs if log.lack] if step == "ppo" else []
    remarks = [RESULTS_REMARK]
    if lacks:
        remarks.append(f"Responses are not compared. {' '.join(lacks)}")
    for log in logs:
        if not log.finished:
            remarks.append(f"{log.name} has not finished: update {log.largest('update'):.0f} is its last so far.")
    labels: Labels = {}
    lead = ""
    details: list[Details] = []
    sample_sections: list[Section] = []
    if step == "ppo" and not lacks:
        labels = labels_of(logs)
        lead = headline(logs, labels)
        sample_sections.append(_examples(logs, labels))
        details = _comparisons(logs, labels)
    details.append(Details("All evaluations", [evaluation_table(logs)], [BEST_REMARK]))
    if notes:
        details.append(Details("Notes", sentences=notes))
    different, equal = flag_rows(logs)

    # The numbers are in their files before anything is drawn.
    text_details = [*details, Details("Flags that differ", [_flag_table(logs, different)])] if different else details
    text = Report(title, [results_table(logs, labels)], remarks, lead, about, details=text_details)
    write_report(output_dir, NAME, _numbers(logs), text, flag=OUTPUT)
    all_flags = Details("All flags, those that differ first", [_flag_table(logs, different + equal)])
    sections = [_curves(logs, labels), *sample_sections]
    page = replace(text, sections=sections, details=[*details, all_flags])
    write_file(output_dir / f"{NAME}.html", page.html())
    return text


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


def _step_of(logs: Runs) -> str:
    """The step of all runs. Raises UserError if they differ."""
    first = logs[0]
    for log in logs:
        if log.step != first.step:
            labels = [STEPS[run.step].label for run in (first, log)]
            raise UserError(
                f"{first.name} ({labels[0]}) and {log.name} ({labels[1]}) are runs of different steps:"
                " their numbers cannot be compared. Give the runs of each step in a report of their own."
            )
    return first.step


def labels_of(runs: Runs) -> dict[str, str]:
    """Labels of the scores that runs are compared by: of the metric function if it is the same in all, and of scores.

    The label of `scores` names their source; it is "score" where runs differ in it or add up several.
    """
    labels: dict[str, str] = {}
    metric = runs[0].metric
    if metric is not None and all(run.metric == metric for run in runs):
        labels[metric] = metric.replace("_", " ").replace("scores", "score").strip()
    score_labels = set(map(_score_label, runs))
    labels["scores"] = score_labels.pop() if len(score_labels) == 1 else "score"
    return labels


def _score_label(run: RunData) -> str:
    """The source of a run's scores; the reward model if no flag names another."""
    if run.config.get("advantage_estimator") == "distillation":
        return "log-ratio of the teacher (nats)"
    labels: list[str] = []
    for source in SCORE_SOURCES:
        value = run.config.get(source.flag)
        if value and value != SIMULATED_USER:
            labels += [source.label] * (len(value) if isinstance(value, list) else 1)
    if len(labels) > 1:
        return "score"
    return labels[0] if labels else "reward-model score"


# -- tables


def results_table(logs: Runs, labels: Labels) -> Table:
    """The first evaluation, once if it is the same in every run, and the last one of each run.

    The score is the first one of `labels`, if there are any.
    """
    columns = [column for column in RESULTS if any(f"eval/{column[0]}" in log.evals for log in logs)]
    if labels:
        score, label = next(iter(labels.items()))
        columns = [(score, label, *column[2:]) if column[0] == "scores" else column for column in columns]

    def cells(row: Mapping[str, float]) -> list[str]:
        return [_estimate(row, name).text(digits, factor) for name, _, digits, factor in columns]

    start_name = "SFT" if logs[0].step == "ppo" else "before training"
    starts: list[list[object]] = []
    ends: list[list[object]] = []
    for log in logs:
        if not log.evals.empty:
            starts.append([f"{log.name}, {start_name}", *cells(log.evals.iloc[0])])
        if len(log.evals) > 1:
            ends.append([log.name, *cells(log.evals.iloc[-1])])
    if starts and all(start[1:] == starts[0][1:] for start in starts):
        starts = [[start_name, *starts[0][1:]]]
    return Table(["model", *(header for _, header, _, _ in columns)], starts + ends, "results")


def _flag_table(logs: Runs, rows: Sequence[Sequence[str]]) -> Table:
    return Table(["flag", *(log.name for log in logs)], rows, "settings")


def flag_rows(runs: Runs) -> tuple[list[list[str]], list[list[str]]]:
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


def _flag_text(run: RunData, flag: str) -> str:
    if flag not in run.config:
        return NONE
    return json.dumps(run.config[flag], ensure_ascii=False)


def evaluation_table(logs: Runs) -> Table:
    """The first, the best and the last evaluation of each run, each number with its standard error."""
    metrics = [log.metric for log in logs if log.metric is not None]
    logged = [name for name in EVALUATED if any(f"eval/{name}" in log.evals for log in logs)]
    names = list(dict.fromkeys([*metrics, *logged]))
    rows: list[list[object]] = []
    for log in logs:
        evaluations = _evaluations(log)
        for label, row in evaluations.items():
            estimates = [_estimate(row, name) for name in names]
            rows.append([log.name, label, f"{row['update']:.0f}", *estimates])
        if not evaluations:
            rows.append([log.name, "none", *[None] * (1 + len(names))])
    return Table(["run", "evaluation", "update", *names], rows, "evaluations")


def _evaluations(log: RunData) -> dict[str, dict[str, float]]:
    """The rows of a run's first, best and last evaluation; one that is two of them counts as the last of these."""
    last = len(log.evals) - 1
    if last < 0:
        return {}
    indices = {"first": 0, "best": log.best, "last": last}
    if log.best == last:
        indices = {"first": 0, "last, best": last}
    rows: dict[str, dict[str, float]] = {}
    for label, index in indices.items():
        if index is not None and (index < last or label.startswith("last")):
            rows[label] = log.evals.iloc[index].to_dict()
    return rows


def _estimate(row: Mapping[str, float], name: str) -> Estimate:
    error = row.get(f"eval/{name}_stderr", math.nan)
    return Estimate(row.get(f"eval/{name}", math.nan), error if math.isfinite(error) else None)


def _training_table(runs: Runs) -> Table:
    rows: list[list[object]] = []
    for run in runs:
        counts = [f"{run.largest(key):.0f}" for key in HEAD]
        macro_length = Estimate(run.train_mean("macro/length")).text(2)
        lam = Estimate(run.train_mean("macro/lambda_eff")).text(3)
        explained_variance = Estimate(run.train_mean("val/explained_variance", last=0.1)).text(2)
        rows.append([run.name, *counts, macro_length, lam, explained_variance])
    return Table(TRAINING_HEADERS, rows, "training")


def _numbers(logs: Runs) -> dict[str, Any]:
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


# -- sentences


def headline(runs: Runs, labels: Labels) -> str:
    """The result in one sentence: the first of the scores before and after training, and whether two runs differ."""
    name, label = next(iter(labels.items()))
    held_out = f"the {label} of {len(runs[0].last.samples)} held-out prompts"
    clauses: list[str] = []
    for run in runs:
        start = run.first.mean(name)
        end = run.last.mean(name)
        verb = "lowered" if end < start else "raised"
        clauses.append(f"{run.name} {verb} {'it' if clauses else held_out} from {start:.3f} to {end:.3f}")
    if len(runs) == 2:
        difference = _difference(runs[0], runs[1], name)
        if difference is not None:
            is_clear = abs(difference.mean) > 2 * (difference.error or 0)
            apart = Estimate(abs(difference.mean), difference.error).text()
            clauses.append(f"the difference of {apart} is {'more than' if is_clear else 'within'} two standard errors")
    return f"{'; '.join(clauses)}."


def _difference(run: RunData, other: RunData, name: str) -> Estimate | None:
    """How much higher a run ended, paired by prompt; None if the samples are not those of all of the same prompts."""
    values = run.last.values(name)
    other_values = other.last.values(name)
    same_prompts = run.last.samples["prompt"].equals(other.last.samples["prompt"])
    return paired_difference(values, other_values) if values and other_values and same_prompts else None


def _comparisons(runs: Runs, labels: Labels) -> list[Details]:
    """Differences between the runs, and how they were trained."""
    details = []
    differences = compare_runs(runs, labels)
    if differences:
        details.append(Details("Differences between the runs", sentences=differences))
    return [*details, Details("Training", [_training_table(runs)], [TRAINING_REMARK])]


def compare_runs(runs: Runs, labels: Labels) -> list[str]:
    """Sentences about the first of the scores: the best run against each other one."""
    name, label = next(iter(labels.items()))
    finite = [run for run in runs if math.isfinite(run.last.mean(name))]
    ranked = sorted(finite, key=lambda run: -run.last.mean(name))
    return [_comparison(ranked[0], other, name, label) for other in ranked[1:]]


def _comparison(best: RunData, other: RunData, name: str, label: str) -> str:
    """How much higher one run ended; with the standard error of the differences if they answered the same prompts."""
    highest = best.last.mean(name)
    mean = other.last.mean(name)
    if highest == mean:
        return f"{best.name} and {other.name} ended with the same {label}, {highest:.3f}."
    difference = f"{highest - mean:.3f} (no standard error: the samples are not of the same prompts, or not of all)"
    paired = _difference(best, other, name)
    if paired is not None:
        prompts = len(best.last.samples)
        difference = f"{paired.text()} (± one standard error, {prompts} held-out prompts, paired)"
    return (
        f"{best.name} ended higher than {other.name} in {label}: {highest:.3f} against {mean:.3f}, a difference of"
        f" {difference}."
    )


# -- parts of the page


def _curves(runs: Runs, labels: Labels) -> Section:
    title = "Learning curves"
    charts = run_charts(runs, labels)
    if not charts:
        return Section(title, "No run has logged a metric that is drawn.")
    figures = []
    for chart in charts:
        picture = drawn(partial(draw_charts, [chart], CHART_INCHES), chart.title)
        if picture:
            figures.append(Figure(f"{chart.title} over optimiser updates", picture))
    return Section(title, remark=READING, figures=figures)


def run_charts(runs: Runs, labels: Labels) -> list[Chart]:
    """Charts in reading order of what any run has logged; the metric function's first, if `labels` name it."""
    rows = []
    for name, label in labels.items():
        if name != "scores":
            rows.append((label.capitalize(), label, f"objective/{name}", f"eval/{name}"))
    for title, axis, train_key, eval_key in CHARTS:
        if train_key == "objective/scores":
            title = labels.get("scores", title).capitalize()
        rows.append((title, axis, train_key.replace("<step>", runs[0].step), eval_key))
    charts: list[Chart] = []
    for title, axis, train_key, eval_key in rows:
        if any(train_key in run.train or eval_key in run.evals for run in runs):
            charts.append(_chart(runs, title, axis, train_key, eval_key, legend=not charts))
    return charts


def _chart(runs: Runs, title: str, axis: str, train_key: str, eval_key: str, legend: bool) -> Chart:
    lines = []
    starts = set()
    for number, run in enumerate(runs):
        look = look_of(number, legend_label(run.name))
        lines.append(Curve([], [], look))  # for the legend
        colour = look["color"]
        updates = run.train["update"].tolist()
        numbers = pd.Series(column_of(run.train, train_key))
        faint: Look = {"color": colour, "alpha": 0.22, "linewidth": 0.8}
        bold: Look = {"color": colour, "linewidth": 2}
        lines.append(Curve(updates, numbers.tolist(), faint))
        lines.append(Curve(updates, smooth(numbers).tolist(), bold))
        marks = {"color": colour, "linestyle": "none", "marker": look["marker"], "markersize": 7}
        marks |= {"markeredgecolor": "white", "zorder": 3}
        evaluated = column_of(run.evals, eval_key)
        evaluated_at = run.evals["update"]
        lines.append(Curve(evaluated_at.tolist(), evaluated.tolist(), marks))
        starts.update(evaluated[evaluated_at == 0].tolist())
    levels = [(level, START_LOOK) for level in sorted(filter(math.isfinite, starts))]
    return Chart(title, "updates", axis, lines, levels, scale="whole", legend="inside" if legend else "")


def smooth(numbers: "pd.Series[float]") -> "pd.Series[float]":
    """Centred moving mean over a tenth of the values, which is shorter at both ends; NaN values are left out."""
    half = max(1, round(len(numbers) * WINDOW_PART / 2))
    return numbers.rolling(2 * half + 1, center=True, min_periods=1).mean()


def _examples(runs: Runs, labels: Labels) -> Section:
    """Responses side by side to the first held-out prompts that every model answered token by token."""
    samples_by_prompt: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for run in runs:
        last_by_prompt = {sample["prompt"]: sample for sample in _with_tokens(run.last.samples)}
        for prompt, sample in last_by_prompt.items():
            samples_by_prompt[prompt].append(sample)

    # The SFT model's responses have the macro actions of the run whose macro actions are longest.
    longest = max(runs, key=lambda run: np.nan_to_num(run.train_mean("macro/length")))
    examples: list[Example] = []
    for start in _with_tokens(longest.first.samples):
        prompt = start["prompt"]
        samples = samples_by_prompt[prompt]
        if len(samples) == len(runs) and len(examples) < SHOWN_PROMPTS:
            panels = [_panel("SFT", start, labels, f"macro actions as in {longest.name}")]
            for run, sample in zip(runs, samples, strict=True):
                panels.append(_panel(run.name, sample, labels))
            examples.append(Example(f"Prompt {len(examples) + 1}", prompt, panels))
    intro = f"The first {len(examples)} held-out prompts, with the responses of each model as they were sampled."
    return Section("Responses before and after", intro if examples else NO_EXAMPLE, examples=examples)


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
