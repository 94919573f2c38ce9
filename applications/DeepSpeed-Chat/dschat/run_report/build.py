# SPDX-License-Identifier: Apache-2.0
"""A report on runs of step 3 that start from the same models: one HTML page, one PNG, one table for the terminal."""

from __future__ import annotations

import base64
import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from dschat.errors import UserError
from dschat.macro_view.html import STYLE, MacroPanel, legend_html, macro_tokens, panels_html
from dschat.run_report.data import RunData, Sample, read_run
from dschat.run_report.plots import COLOURS, MARKERS, draw_all, draw_panel, panels
from dschat.run_report.summary import Summary, metric_label, score_label, summarise

logger = logging.getLogger(__name__)

TEMPLATES = Path(__file__).parent
SHOWN_PROMPTS = 4  # held-out prompts whose responses the page shows

_SYMBOLS = {"o": "●", "s": "■", "^": "▲", "D": "◆", "v": "▼", "P": "✚"}


def build_report(
    runs: Mapping[str, Path],
    output_dir: Path,
    title: str = "PPO with macro actions",
    notes: Sequence[str] = (),
) -> Summary:
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
    data, metric = read_runs(runs)
    summary = summarise(data, metric, title, notes)
    picture = draw_all(data, metric, title)
    page = _page(data, metric, summary)
    output_dir.mkdir(parents=True, exist_ok=True)
    (output_dir / "report.png").write_bytes(picture)
    (output_dir / "report.html").write_text(page, encoding="utf-8", errors="replace")
    return summary


def read_runs(runs: Mapping[str, Path]) -> tuple[list[RunData], str | None]:
    """Read the output folders; also the metric function that all have in common, None without one.

    Raises:
        UserError: as `build_report`.
    """
    if not runs:
        raise UserError("A report needs the output_dir of at least one run of step 3.")
    data = [read_run(name, Path(folder)) for name, folder in runs.items()]
    if any(run.metric != data[0].metric for run in data):
        logger.warning("The runs differ in --metric_function: the report leaves it out and compares their scores.")
        return data, None
    return data, data[0].metric


def _page(runs: Sequence[RunData], metric: str | None, summary: Summary) -> str:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    charts = [
        {"title": panel.title, "png": base64.b64encode(draw_panel(runs, panel)).decode("ascii")}
        for panel in panels(runs, metric)
    ]
    return environment.get_template("report.html").render(
        summary=summary,
        style=Markup(STYLE),
        legend=Markup(legend_html()),
        charts=charts,
        lines=[
            {"name": run.name, "colour": COLOURS[i % len(COLOURS)], "symbol": _SYMBOLS[MARKERS[i % len(MARKERS)]]}
            for i, run in enumerate(runs)
        ],
        examples=_examples(runs, metric),
        names=[run.name for run in runs],
        settings=_settings(runs),
    )


def _examples(runs: Sequence[RunData], metric: str | None) -> list[dict[str, Any]]:
    """The first held-out prompts that every model answered token by token, with the responses side by side."""
    by_prompt = [{sample.prompt: sample for sample in run.last if sample.tokens} for run in runs]
    # The SFT model has no macro actions of its own: show those of the condition with the longest.
    longest = max(runs, key=lambda run: (_macro_length(run), run.name))
    examples: list[dict[str, Any]] = []
    for start in longest.first:
        common = bool(start.tokens) and all(start.prompt in samples for samples in by_prompt)
        if common and len(examples) < SHOWN_PROMPTS:
            ends = [samples[start.prompt] for samples in by_prompt]
            sft = _panel("SFT", start, runs, metric, f"macro actions as in {longest.name}")
            cells = [sft, *[_panel(run.name, end, runs, metric) for run, end in zip(runs, ends, strict=True)]]
            examples.append({"prompt": start.prompt, "panels": Markup(panels_html(cells))})
    return examples


def _macro_length(run: RunData) -> float:
    length = run.train_mean("macro/length")
    return length if math.isfinite(length) else 0.0


def _panel(title: str, sample: Sample, runs: Sequence[RunData], metric: str | None, remark: str = "") -> MacroPanel:
    values = sample.values
    labels = {"scores": score_label(runs)} | ({metric: metric_label(metric)} if metric else {})
    parts = [f"{labels[name]} {values[name]:.3f}" for name in (metric, "scores") if name in labels and name in values]
    parts.append(f"{len(sample.tokens)} tokens")
    parts.append("ended by EOS" if values["eos_rate"] else "cut at the longest length")
    return MacroPanel(title, macro_tokens(sample.tokens), " · ".join([*parts, *([remark] if remark else [])]))


def _settings(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """Flags with their value in each run: those that differ between the runs first."""
    flags = sorted({flag for run in runs for flag in run.config})
    rows = []
    for flag in flags:
        values = [json.dumps(run.config[flag], ensure_ascii=False) if flag in run.config else "–" for run in runs]
        rows.append({"flag": f"--{flag}", "values": values, "differs": len(set(values)) > 1})
    return sorted(rows, key=lambda row: not row["differs"])
