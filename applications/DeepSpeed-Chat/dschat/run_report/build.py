# SPDX-License-Identifier: Apache-2.0
"""A report on runs of step 3 that start from the same models: one HTML page, one PNG, one table for the terminal."""

import base64
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from dschat.errors import UserError
from dschat.macro_view.html import STYLE, MacroPanel, legend_html, panels_html
from dschat.run_report.data import RunData, Sample, read_run
from dschat.run_report.outcome import Outcome, compare_runs, judges_of, labels_of
from dschat.run_report.plots import draw_all, draw_chart, run_charts, run_styles

logger = logging.getLogger(__name__)

TEMPLATES = Path(__file__).parent
SHOWN_PROMPTS = 4  # held-out prompts whose responses the page shows


def build_report(
    runs: Mapping[str, Path], output_dir: Path, title: str = "PPO with macro actions", notes: Sequence[str] = ()
) -> Outcome:
    """Write `report.html` and `report.png` about runs of step 3.

    Args:
        runs: the name to show → output folder of step 3. All start from the same SFT model.
        output_dir: folder of the two files; made where it is missing.
        title: heading of the page and the picture.
        notes: remarks of the caller, one paragraph each.

    Returns:
        The numbers; `.text()` is the table for the terminal.

    Raises:
        UserError: when there is no run, or a file of a run is missing or malformed; the message names the file.
    """
    data, labels = read_runs(runs)
    outcome = compare_runs(data, labels, title, notes)
    picture = draw_all(data, labels, title)
    page = _page(data, labels, outcome)
    output_dir.mkdir(parents=True, exist_ok=True)
    (output_dir / "report.png").write_bytes(picture)
    (output_dir / "report.html").write_text(page, encoding="utf-8", errors="replace")
    return outcome


def read_runs(runs: Mapping[str, Path]) -> tuple[list[RunData], dict[str, str]]:
    """Read the output folders; also what the runs are compared by, see `labels_of`.

    Raises:
        UserError: as `build_report`.
    """
    if not runs:
        raise UserError("A report needs the output_dir of at least one run of step 3.")
    data = [read_run(name, Path(folder)) for name, folder in runs.items()]
    metrics = {run.metric for run in data}
    if len(metrics) > 1:
        logger.warning("The runs differ in --metric_function: the report leaves it out and compares their scores.")
    return data, labels_of(data, metrics.pop() if len(metrics) == 1 else None)


def _page(runs: Sequence[RunData], labels: Mapping[str, str], outcome: Outcome) -> str:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    charts = [
        {"title": chart.title, "png": base64.b64encode(draw_chart(runs, labels, chart)).decode("ascii")}
        for chart in run_charts(runs, labels)
    ]
    return environment.get_template("report.html").render(
        outcome=outcome,
        style=Markup(STYLE),
        legend=Markup(legend_html()),
        charts=charts,
        lines=run_styles(runs),
        examples=_examples(runs, labels),
        names=[run.name for run in runs],
        settings=_settings(runs),
    )


def _examples(runs: Sequence[RunData], labels: Mapping[str, str]) -> list[dict[str, Any]]:
    """The first held-out prompts that every model answered token by token, with the responses side by side."""
    answers = [{sample.prompt: sample for sample in run.last.samples if sample.tokens} for run in runs]
    # The SFT model has no macro actions of its own: show those of the condition with the longest. The length of a run
    # without training rows is NaN, in place of which max() returns 0.
    longest = max(runs, key=lambda run: (max(0.0, run.train_mean("macro/length")), run.name))
    common = [
        start
        for start in longest.first.samples
        if start.tokens and all(start.prompt in by_prompt for by_prompt in answers)
    ]
    examples = []
    for start in common[:SHOWN_PROMPTS]:
        panels = [_panel("SFT", start, labels, f"macro actions as in {longest.name}")]
        panels += [_panel(run.name, answer[start.prompt], labels) for run, answer in zip(runs, answers, strict=True)]
        examples.append({"prompt": start.prompt, "panels": Markup(panels_html(panels))})
    return examples


def _panel(title: str, sample: Sample, labels: Mapping[str, str], *remarks: str) -> MacroPanel:
    values = sample.values
    parts = [f"{label} {values[name]:.3f}" for name, label in judges_of(labels).items() if name in values]
    parts.append(f"{len(sample.tokens)} tokens")
    parts.append("ended by EOS" if values["eos_rate"] else "cut at the longest length")
    return MacroPanel(title, sample.tokens, " · ".join([*parts, *remarks]))


def _settings(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """Flags with their value in each run: those that differ between the runs first."""
    rows = []
    for flag in sorted({flag for run in runs for flag in run.config}):
        values = [json.dumps(run.config[flag], ensure_ascii=False) if flag in run.config else "–" for run in runs]
        rows.append({"flag": f"--{flag}", "values": values, "differs": len(set(values)) > 1})
    return sorted(rows, key=lambda row: not row["differs"])
